"""On-policy distillation: the student draws completions, and learns the teachers' distribution of each of their tokens.

Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD, arXiv 2306.13649). No rewards: the loss compares
whole next-token distributions, in chunks that never hold all logits. Teachers may read more than the student does, and
with that in its context the student may be its own teacher (`self_teacher.py`). Shape legend: B sequences,
N completion tokens, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from tunesmith.base.config.algorithms.distill import DistillRecipe
from tunesmith.base.config.sections import SELF, ModelSection
from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.seeds import derive
from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data import sets
from tunesmith.collect.data.contexts import Context
from tunesmith.engine.batch.pack import Sequences, chunks, pack, select, units_of
from tunesmith.engine.batch.rollout import Group
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.models.division import divide
from tunesmith.engine.models.language_model import LanguageModel, model_of_recipe
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase, freeze_lower_layers, room_for_prompts
from tunesmith.engine.models.lora import has_adapters
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
from tunesmith.learn.trainers.self_teacher import Average, as_taught, self_teacher
from tunesmith.learn.trainers.session import Session

_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "sampled_reverse_kl": 1.0}


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model to follow, and its weight relative to the other teachers."""

    name: str
    model: LanguageModel
    weight: float


@dataclass(frozen=True, slots=True)
class Taught:
    """Completions behind the student's prompts, and the same behind what teachers read: row for row, token for token.
    Where teachers read the prompts alone they are one object.
    """

    own: Sequences
    read: Sequences

    def select(self, rows: Sequence[int]) -> "Taught":
        """The rows `rows` of both."""
        own = select(self.own, rows)
        return Taught(own, own if self.read is self.own else select(self.read, rows))

    def micro_batches(self, size: int) -> "list[Taught]":
        """Consecutive rows, `size` at a time."""
        return [self.select(rows) for rows in chunks(range(len(self.own.lengths_B)), size)]


@dataclass(slots=True)
class Distill(PolicyParts):
    """The learner: `step` changes the policy, the optimizer, and the `average` of the policy that teaches, if any.

    `context` says what teachers read beside the prompt; None: nothing.
    """

    cfg: DistillRecipe
    policy: LanguageModel
    teachers: Sequence[Teacher]
    engine: Engine
    optimizer: MasterAdamW
    tokenizer: PreTrainedTokenizerBase
    context: Context | None = None
    average: Average | None = None

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The policy, and the average of it that teaches, if any."""
        average = {} if self.average is None else {"average": self.average}
        return {"policy": self.policy.module, **average}

    @property
    def counters(self) -> Mapping[str, Counter]:
        """The completions that were drawn ahead."""
        return drawn_ahead(self.engine)

    def step(self, prompts: Sequence[Prompt], index: int) -> StepResult:
        """Step `index` (from 0): draw completions of `prompts`, learn the teachers' distributions of their tokens."""
        groups = self.draw(prompts, self.cfg.rollout.completions_per_prompt, "rollout", index)
        with span("pack"):
            taught = self.packed(groups)
        with span("update"):
            stats, reports = self.update(taught, index)
        with span("metrics"):
            figures = {
                **merged(stats).metrics(),
                **metrics.completion_metrics(groups),
                **metrics.update_metrics(reports),
                "num_tokens": float(taught.own.num_tokens),
                "updates": float(len(reports)),
            }
        batch_rows = (partial(metrics.batch_rows, groups, None), partial(metrics.sample_rows, groups, None))
        return StepResult(figures, metrics.worst_report(reports), *batch_rows)

    def packed(self, groups: Sequence[Group]) -> Taught:
        """The completions of `groups` as tensors, and what teachers read of them."""
        own = setup.sent(pack(groups, pad_id=0), self.uploader)
        if self.context is None:
            return Taught(own, own)
        read = pack(as_taught(groups, self.context, self.tokenizer), pad_id=0)
        return Taught(own, setup.sent(read, self.uploader))

    def update(self, taught: Taught, index: int) -> tuple[list[DivergenceStats], list[StepReport]]:
        """Optimizer steps on the minibatches of each epoch over `taught`."""
        cfg = self.cfg.distill
        stats: list[DivergenceStats] = []
        reports: list[StepReport] = []
        seed = derive(self.cfg.run.seed, "minibatches", index)
        if self.average is not None:
            self.average.refresh()  # of a checkpoint, the averages alone were loaded
        for rows in minibatch_rows(units_of(taught.own), cfg, seed):
            minibatch = taught.select(rows)
            micros = minibatch.micro_batches(cfg.micro_batch_size)
            of_tokens = cfg.loss_normalization == "token"
            size = minibatch.own.num_tokens if of_tokens else len(minibatch.own.lengths_B)
            loss_of = partial(self.micro_batch_loss, size=size)
            report, found = passes.accumulate(self.optimizer, micros, loss_of, has_stages=True)
            if self.average is not None:
                self.average.follow()
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

    def micro_batch_loss(self, micro: Taught, size: float) -> tuple[torch.Tensor, DivergenceStats]:
        """(Sum over completion tokens of the divergences divided by `size`, or over completions of their means, a
        scalar; its statistics).
        """
        with torch.no_grad(), span("teachers"):
            teachers = [_predictions(one.model, micro.read, one.weight) for one in self.teachers]
        with span("forward"):
            student = _predictions(self.policy, micro.own)
            section = self.cfg.distill
            is_sampled = section.divergence == "sampled_reverse_kl"
            beta = _BETA.get(section.divergence, section.beta)
            return divergence_loss(
                student,
                teachers,
                Divergence(beta, section.temperature, is_sampled),
                num_tokens=size,
                vocabulary=len(self.tokenizer),
                sampled_N=_completion_ids(micro.own) if is_sampled else None,
                weight_N=_mean_weights(micro.own) if section.loss_normalization == "sequence" else None,
            )


def _predictions(model: LanguageModel, sequences: Sequences, weight: float = 1.0) -> Predictions:
    shape = sequences.ids_BS, sequences.lengths_B, sequences.prompt_lengths_B
    return passes.predictions(model, *shape, weight)


def _completion_ids(sequences: Sequences) -> torch.Tensor:
    """The ids of all completion tokens, `[N]`, in the order of their predictions."""
    place_S = torch.arange(sequences.ids_BS.shape[1], device=sequences.ids_BS.device)
    is_drawn_BS = (place_S >= sequences.prompt_lengths_B[:, None]) & (place_S < sequences.lengths_B[:, None])
    return sequences.ids_BS[is_drawn_BS]


def _mean_weights(sequences: Sequences) -> torch.Tensor:
    """For each completion token, `[N]`, one divided by the number of those of its completion."""
    length_B = sequences.lengths_B - sequences.prompt_lengths_B
    return (1.0 / length_B).repeat_interleave(length_B)


class DistillTask:
    """Prompts and teachers, and how a student is evaluated."""

    def __init__(self, cfg: DistillRecipe, inputs: Inputs, device: torch.device) -> None:
        self.cfg = cfg
        self.num_steps = cfg.run.steps or 100
        self.loaded = load_policy(cfg.model, device=device)
        free = room_for_prompts(self.loaded.model, cfg.rollout.max_new_tokens)
        column = cfg.distill.context_column
        self.context = None if column is None else Context(column, cfg.distill.context.template)
        self.data = sets.prompt_sets(
            cfg.prompts,
            self.loaded.tokenizer,
            cfg.run.seed,
            inputs.prompts,
            max_length=free,
            context=self.context,
        )
        freeze_lower_layers(self.loaded.model, cfg.model.num_trainable_layers)
        others = [source for source in cfg.distill.teachers if source.model != SELF]
        self.others = [self._teacher(source.model, source.weight, device) for source in others]

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
        teachers, average = list(self.others), None
        for source in section.teachers:
            if source.model == SELF:
                own, average = self_teacher(self.cfg, policy)
                teachers.append(Teacher(SELF, own, source.weight))
        divide(policy, draws=True)
        optimizer = setup.optimizer_of(self.cfg, self.loaded.model, policy.kernels, total_steps)
        scale, tokenizer = self.cfg.scale, self.loaded.tokenizer
        ahead = Ahead(scale.staleness, self.num_steps, self.arguments_of, scale.swap_tokens)
        engine = engine_for(self.cfg.rollout, policy, tokenizer, lambda: optimizer, scale=scale, ahead=ahead)
        return Distill(self.cfg, policy, teachers, engine, optimizer, tokenizer, self.context, average)

    def prepare(self, learner: Distill, progress: bool) -> dict[str, str]:
        """Hashes of the model, the teachers and the prompts."""
        context, prompts = self.context, (*self.data.train, *self.data.heldout)
        read = () if context is None else [context.added(prompt).content for prompt in prompts]
        rows = [*((prompt.id, prompt.content) for prompt in prompts), *read]
        return {
            "the model": fingerprint_of_tensors(learner.policy.module),
            "the prompts": fingerprint_of_rows(rows),
            **{f"the teacher {one.name}": fingerprint_of_tensors(one.model.module) for one in self.others},
        }

    def estimate(self) -> Estimate:
        """Memory and work of a run."""
        model, section = self.loaded.model, self.cfg.distill
        sizes = [one.model.module.num_parameters() for one in self.others]
        found = policy_estimate(
            model,
            self.cfg,
            prompt_tokens=self.data.mean_tokens,
            num_heldout=len(self.data.heldout),
            teacher_parameters=[*sizes, model.num_parameters()] if section.has_self else sizes,
        )
        if not section.has_self:
            return found
        width = model.dtype.itemsize
        copied = width * (found.num_trained if has_adapters(model) else found.num_parameters)
        averages = 4 * found.num_trained if width < 4 else 0
        own = {"current": 0, "initial": copied, "ema": copied + averages}[section.self_weights]
        return replace(found, memory_gb={**found.memory_gb, "teachers": (sum(sizes) * width + own) / 1e9})

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
            if learner.average is not None:
                learner.average.refresh()
            micros = share_of(learner.packed(groups).micro_batches(self.cfg.distill.micro_batch_size))
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
