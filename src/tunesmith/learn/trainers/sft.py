"""Supervised fine-tuning: a language model learns the completions of demonstrations, token by token.

The first stage of Ouyang et al. 2022 (arXiv 2203.02155). The output layer is computed only for tokens that are
learnt, and models with a flat decoder are trained without padding. Shape legend: N learnt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch

from tunesmith.base.config.algorithms.sft import SFTRecipe, SFTSection
from tunesmith.base.core.seeds import steps_of_epochs
from tunesmith.base.core.trace import span
from tunesmith.collect.data.sets import demonstration_sets
from tunesmith.engine.batch.targets import LearntSequence, by_token_budget, items_of_step, pack_targets
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.models.division import divide
from tunesmith.engine.models.language_model import LanguageModel, model_of_recipe
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase, context_length, freeze_lower_layers
from tunesmith.engine.models.logprob import next_token_scores
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.models.tokenizer import decode, decode_after
from tunesmith.learn.algorithms.sums import merged
from tunesmith.learn.algorithms.token_loss import TokenStats, negative_log_likelihood
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs, Metrics, PolicyParts, StepResult
from tunesmith.learn.trainers.estimate import Estimate, training_estimate
from tunesmith.learn.trainers.metrics import update_metrics
from tunesmith.learn.trainers.passes import accumulate
from tunesmith.learn.trainers.restart import fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.learn.trainers.session import Session
from tunesmith.learn.trainers.work import Rows, RunWork, Work


@dataclass(slots=True)
class SFT(PolicyParts):
    """The learner: `step` changes the policy and the optimizer."""

    cfg: SFTSection
    policy: LanguageModel
    optimizer: MasterAdamW
    tokenizer: PreTrainedTokenizerBase

    def step(self, sequences: Sequence[LearntSequence], index: int) -> StepResult:
        """One step: the mean loss of all learnt tokens of `sequences`, in micro-batches, and an update."""
        num_learnt = sum(sequence.num_learnt for sequence in sequences)
        loss_of = partial(self.micro_batch_loss, num_tokens=num_learnt)
        with span("update"):
            report, stats = accumulate(self.optimizer, self.micro_batches(sequences), loss_of)
        with span("metrics"):
            num_ids = sum(len(one.ids) for one in sequences)
            sizes = {"num_tokens": float(num_ids), "num_learnt_tokens": float(num_learnt)}
            metrics = {**merged(stats).metrics(), **sizes, **update_metrics([report])}
        return StepResult(metrics, report, partial(batch_rows, self.tokenizer, sequences))

    def micro_batches(self, sequences: Sequence[LearntSequence]) -> list[list[LearntSequence]]:
        """Groups of at most `sft.micro_batch_tokens`; where the model pads, sequences of equal length are together."""
        lengths = [sequence.num_used for sequence in sequences]
        groups = by_token_budget(lengths, self.cfg.micro_batch_tokens, padded=self.policy.decoder is None)
        return [[sequences[index] for index in group] for group in groups]

    def micro_batch_loss(
        self, sequences: Sequence[LearntSequence], num_tokens: float
    ) -> tuple[torch.Tensor, TokenStats]:
        """The loss of one micro-batch, divided by `num_tokens`, and its statistics."""
        scores = next_token_scores(self.policy, setup.sent(pack_targets(sequences), self.uploader))
        return negative_log_likelihood(scores.logp_N, scores.entropy_N, scores.is_top_N, num_tokens=num_tokens)


class SFTTask:
    """Demonstrations, and how a fine-tuned model is evaluated."""

    def __init__(self, cfg: SFTRecipe, inputs: Inputs, device: torch.device) -> None:
        self.cfg = cfg
        self.loaded = load_policy(cfg.model, device=device)
        self.data = demonstration_sets(
            cfg.demonstrations,
            self.loaded.tokenizer,
            cfg.run.seed,
            inputs.demonstrations,
            inputs.heldout_demonstrations,
            max_length=context_length(self.loaded.model),
        )
        freeze_lower_layers(self.loaded.model, cfg.model.num_trainable_layers)
        self.num_steps = cfg.run.steps or steps_of_epochs(
            cfg.sft.num_epochs, len(self.data.train), cfg.sft.demonstrations_per_step
        )

    def build(self) -> SFT:
        """The learner before its first step."""
        policy = model_of_recipe(self.loaded.model, self.cfg.model)
        divide(policy)
        optimizer = setup.optimizer_of(self.cfg, self.loaded.model, policy.kernels, self.num_steps)
        return SFT(self.cfg.sft, policy, optimizer, self.loaded.tokenizer)

    def prepare(self, learner: SFT, progress: bool) -> dict[str, str]:
        """Hashes of the model and of the demonstrations."""
        return {
            "the model": fingerprint_of_tensors(learner.policy.module),
            "the demonstrations": fingerprint_of_rows([*self.data.train, *self.data.heldout]),
        }

    def estimate(self) -> Estimate:
        """Memory and work of a run."""
        train, heldout = self.data.train, self.data.heldout
        num_used, num_learnt = (fmean(getattr(one, name) for one in train) for name in ("num_used", "num_learnt"))
        step_tokens = min(self.cfg.sft.demonstrations_per_step, len(train)) * num_used
        micro_tokens = max(min(step_tokens, self.cfg.sft.micro_batch_tokens), num_used)
        evaluation = Work(scored=sum(one.num_used for one in heldout))
        rows = Rows(num_used - num_learnt, num_learnt)
        work = RunWork(rows, Work(trained=step_tokens, updates=1), evaluation, once=evaluation)
        return training_estimate(
            self.loaded.model, self.cfg, work, micro_tokens=micro_tokens, logit_tokens=micro_tokens
        )

    def batch(self, index: int) -> list[LearntSequence]:
        """The demonstrations of step `index` (from 0)."""
        section = self.cfg.sft
        size = min(section.demonstrations_per_step, len(self.data.train))
        lengths = [sequence.num_used for sequence in self.data.train]
        chosen = items_of_step(self.cfg.run.seed, index, size, lengths, window=section.bucket_steps)
        return [self.data.train[i] for i in chosen]

    @torch.no_grad()
    def evaluate(self, learner: SFT) -> Metrics:
        """Loss, accuracy and entropy of the learnt tokens of all held-out demonstrations; empty without any."""
        if not self.data.heldout:
            return {}
        with span("evaluate"):
            micros = share_of(learner.micro_batches(self.data.heldout))
            stats = merged(gathered([learner.micro_batch_loss(micro, 1)[1] for micro in micros]))
        metrics = {f"eval/{name}": value for name, value in stats.metrics().items()}
        return {**metrics, "eval/num_learnt_tokens": stats.floats()["tokens"]}

    def measure(self, learner: SFT, when: str) -> dict[str, object]:
        """The evaluation before the first step."""
        return {f"{name}_before": value for name, value in self.evaluate(learner).items()} if when == "before" else {}

    def summary(self, learner: SFT, session: Session) -> dict[str, object]:
        """The last training loss, and the figures on held-out demonstrations before and after."""
        last = session.metrics[-1]
        names = ("loss", "mean_token_accuracy", "eval/loss", "eval/mean_token_accuracy", "eval/num_learnt_tokens")
        before = {name: session.facts[name] for name in ("eval/loss_before",) if name in session.facts}
        sizes = {"steps": len(session.metrics), "num_demonstrations": len(self.data.train)}
        figures = {name: last[name] for name in names if name in last}
        return {**sizes, "refused_steps": session.num_refused, **before, **figures}


def batch_rows(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[LearntSequence]) -> list[dict[str, object]]:
    """The demonstrations of a step as text, to find out why an update was refused."""
    return [
        {
            "id": sequence.id,
            "text": decode(tokenizer, sequence.ids),
            "learnt": [
                decode_after(tokenizer, sequence.ids[: span.start], sequence.ids[span.start : span.stop])
                for span in sequence.spans
            ],
        }
        for sequence in sequences
    ]
