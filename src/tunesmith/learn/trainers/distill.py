"""On-policy distillation: the student draws completions, and learns the teachers' distribution of each of their tokens.

Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD, arXiv 2306.13649). No rewards: the loss compares
whole next-token distributions, in chunks that never hold all logits. Shape legend: B sequences, N completion tokens,
H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tunesmith.base.config.algorithms.distill import DistillRecipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.seeds import derive
from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data import sets
from tunesmith.engine.batch.pack import Sequences, pack, select, units_of
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.models.division import divide
from tunesmith.engine.models.language_model import LanguageModel, model_of_recipe
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase, freeze_lower_layers, room_for_prompts
from tunesmith.engine.models.logprob import completion_states
from tunesmith.engine.models.optimizer import MasterAdamW, StepReport
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import engine_for
from tunesmith.engine.rollout.workers.ahead import Ahead, Arguments, drawn_ahead
from tunesmith.learn.algorithms.divergence import Divergence, DivergenceStats, Predictions, divergence_loss
from tunesmith.learn.algorithms.sums import merged
from tunesmith.learn.trainers import metrics, passes, rollouts, setup
from tunesmith.learn.trainers.api import Counter, Inputs, Metrics, PolicyParts, StepResult
from tunesmith.learn.trainers.estimate import Estimate, policy_estimate
from tunesmith.learn.trainers.policy_step import minibatch_rows
from tunesmith.learn.trainers.restart import fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.learn.trainers.session import Session


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model to follow, and its weight relative to the other teachers."""

    name: str
    model: LanguageModel
    weight: float


@dataclass(slots=True)
class Distill(PolicyParts):
    """The learner: `step` changes the policy and the optimizer."""

    cfg: DistillRecipe
    policy: LanguageModel
    teachers: Sequence[Teacher]
    engine: Engine
    optimizer: MasterAdamW
    tokenizer: PreTrainedTokenizerBase

    @property
    def counters(self) -> Mapping[str, Counter]:
        """The completions that were drawn ahead."""
        return drawn_ahead(self.engine)

    def step(self, prompts: Sequence[Prompt], index: int) -> StepResult:
        """Step `index` (from 0): draw completions of `prompts`, learn the teachers' distributions of their tokens."""
        groups = self.draw(prompts, self.cfg.rollout.completions_per_prompt, "rollout", index)
        with span("pack"):
            sequences = setup.sent(pack(groups, pad_id=0), self.uploader)
        with span("update"):
            stats, reports = self.update(sequences, index)
        with span("metrics"):
            figures = {
                **merged(stats).metrics(),
                **metrics.completion_metrics(groups),
                **metrics.update_metrics(reports),
                "num_tokens": float(sequences.num_tokens),
                "updates": float(len(reports)),
            }
        batch_rows = (partial(metrics.batch_rows, groups, None), partial(metrics.sample_rows, groups, None))
        return StepResult(figures, metrics.worst_report(reports), *batch_rows)

    def update(self, sequences: Sequences, index: int) -> tuple[list[DivergenceStats], list[StepReport]]:
        """Optimizer steps on the minibatches of each epoch over `sequences`."""
        cfg = self.cfg.distill
        stats: list[DivergenceStats] = []
        reports: list[StepReport] = []
        seed = derive(self.cfg.run.seed, "minibatches", index)
        for rows in minibatch_rows(units_of(sequences), cfg, seed):
            minibatch = select(sequences, rows)
            micros = passes.micro_batches(minibatch, cfg.micro_batch_size)
            loss_of = partial(self.micro_batch_loss, num_tokens=minibatch.num_tokens)
            report, found = passes.accumulate(self.optimizer, micros, loss_of, has_stages=True)
            reports.append(report)
            stats += found
        return stats, reports

    def draw(self, prompts: Sequence[Prompt], num: int, stream: str, index: int) -> list[Group]:
        """`num` completions of each prompt; the noise is a pure function of the run's seed, `stream` and `index`."""
        with span("rollout"):
            sampling = rollouts.sampling_params(self.cfg.rollout, derive(self.cfg.run.seed, stream, index))
            groups = self.engine.generate(prompts, num, sampling)
            if self.cfg.rollout.unload_during_update:
                self.engine.unload()
        return groups

    def micro_batch_loss(self, micro: Sequences, num_tokens: float) -> tuple[torch.Tensor, DivergenceStats]:
        """(Sum of the divergences of all completion tokens, divided by `num_tokens`, a scalar; its statistics)."""
        with torch.no_grad(), span("teachers"):
            teachers = [_predictions(one.model, micro, one.weight) for one in self.teachers]
        with span("forward"):
            student = _predictions(self.policy, micro)
            section, size = self.cfg.distill, len(self.tokenizer)
            beta = {"forward_kl": 0.0, "jensen_shannon": section.beta, "reverse_kl": 1.0}[section.divergence]
            divergence = Divergence(beta, section.temperature)
            return divergence_loss(student, teachers, divergence, num_tokens=num_tokens, vocabulary=size)


def _predictions(model: LanguageModel, sequences: Sequences, weight: float = 1.0) -> Predictions:
    hidden_NH, layer = completion_states(
        model, sequences.ids_BS, sequences.lengths_B, prompt_lengths_B=sequences.prompt_lengths_B
    )
    return Predictions(hidden_NH, layer, weight)


class DistillTask:
    """Prompts and teachers, and how a student is evaluated."""

    def __init__(self, cfg: DistillRecipe, inputs: Inputs, device: torch.device) -> None:
        self.cfg = cfg
        self.num_steps = cfg.run.steps or 100
        self.loaded = load_policy(cfg.model, device=device)
        free = room_for_prompts(self.loaded.model, cfg.rollout.max_new_tokens)
        self.data = sets.prompt_sets(cfg.prompts, self.loaded.tokenizer, cfg.run.seed, inputs.prompts, max_length=free)
        freeze_lower_layers(self.loaded.model, cfg.model.num_trainable_layers)
        self.teachers = [self._teacher(source.model, source.weight, device) for source in cfg.distill.teachers]

    def _teacher(self, name: str, weight: float, device: torch.device) -> Teacher:
        own = self.cfg.model
        computed = own.model_dump(include={"dtype", "forward", "kernels", "share_prefixes", "trust_remote_code"})
        section = ModelSection(name=name, **computed)
        loaded = load_policy(section, device=device)
        if loaded.tokenizer.get_vocab() != self.loaded.tokenizer.get_vocab():
            raise ModelError(
                f"the teacher {name!r} has another vocabulary than {own.name!r}, so their distributions cannot be "
                "compared; take a teacher with the student's tokenizer"
            )
        return Teacher(name, model_of_recipe(loaded.model.requires_grad_(False), section), weight)

    def build(self) -> Distill:
        """The learner before its first step."""
        policy = model_of_recipe(self.loaded.model, self.cfg.model)
        section = self.cfg.distill
        total_steps = self.num_steps * section.num_epochs * section.num_minibatches
        divide(policy, draws=True)
        optimizer = setup.optimizer_of(self.cfg, self.loaded.model, policy.kernels, total_steps)
        scale, tokenizer = self.cfg.scale, self.loaded.tokenizer
        ahead = Ahead(scale.staleness, self.num_steps, self.arguments_of, scale.swap_tokens)
        engine = engine_for(self.cfg.rollout, policy, tokenizer, lambda: optimizer, scale=scale, ahead=ahead)
        return Distill(self.cfg, policy, self.teachers, engine, optimizer, self.loaded.tokenizer)

    def prepare(self, learner: Distill, progress: bool) -> dict[str, str]:
        """Hashes of the model, the teachers and the prompts."""
        rows = [(prompt.id, prompt.content) for prompt in (*self.data.train, *self.data.heldout)]
        return {
            "the model": fingerprint_of_tensors(learner.policy.module),
            "the prompts": fingerprint_of_rows(rows),
            **{f"the teacher {one.name}": fingerprint_of_tensors(one.model.module) for one in self.teachers},
        }

    def estimate(self) -> Estimate:
        """Memory and work of a run."""
        return policy_estimate(
            self.loaded.model,
            self.cfg,
            prompt_tokens=self.data.mean_tokens,
            num_heldout=len(self.data.heldout),
            teacher_parameters=[one.model.module.num_parameters() for one in self.teachers],
        )

    def batch(self, index: int) -> list[Prompt]:
        """The prompts of step `index` (from 0)."""
        return rollouts.prompts_of_step(self.data.train, self.cfg.rollout.prompts_per_step, self.cfg.run.seed, index)

    def arguments_of(self, index: int) -> Arguments:
        """The arguments of the engine in step `index` (from 0)."""
        sampling = rollouts.sampling_params(self.cfg.rollout, derive(self.cfg.run.seed, "rollout", index))
        return self.batch(index), self.cfg.rollout.completions_per_prompt, sampling

    @torch.no_grad()
    def evaluate(self, learner: Distill) -> Metrics:
        """The divergence of one completion of each held-out prompt, by the same noise each time; empty without any."""
        if not self.data.heldout:
            return {}
        with span("evaluate"):
            groups = learner.draw(self.data.heldout, 1, "evaluate", 0)
            sequences = setup.sent(pack(groups, pad_id=0), learner.uploader)
            micros = share_of(passes.micro_batches(sequences, self.cfg.distill.micro_batch_size))
            stats = merged(gathered([learner.micro_batch_loss(micro, 1)[1] for micro in micros]))
        return {f"eval/{name}": value for name, value in stats.metrics().items()}

    def measure(self, learner: Distill, when: str) -> dict[str, object]:
        """The evaluation before the first step."""
        return {f"{name}_before": value for name, value in self.evaluate(learner).items()} if when == "before" else {}

    def summary(self, learner: Distill, session: Session) -> dict[str, object]:
        """Loss and agreement with the teachers at the first and the last step, and on held-out prompts."""
        before = {name: value for name, value in session.facts.items() if name.endswith("_before")}
        figures = ("loss", "teacher_agreement", "entropy")
        names = (*figures, "completions/mean_length", *(f"eval/{name}" for name in figures))
        return {**metrics.summary(session.metrics, names), **before}
