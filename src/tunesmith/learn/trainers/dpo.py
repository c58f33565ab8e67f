"""Direct preference optimisation: a policy learns from preferences without a reward model and without rollouts.

DPO (Rafailov et al. 2023, arXiv 2305.18290) and the losses of `algorithms.direct_loss`. Shape legend: A distinct
answers of the data, B answers of a micro-batch, S sides (0 chosen, 1 rejected), N pairs. A completion that is in
several pairs of a micro-batch is computed once, next to the others of its prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import fmean

import torch

from tunesmith.base.config.algorithms.dpo import DPORecipe, DPOSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import Groups, items_at, steps_of_epochs
from tunesmith.base.core.trace import span
from tunesmith.collect.data.answers import Answer, AnswerLabel, AnswerPair, collate_answers, in_order
from tunesmith.collect.data.collate import weights_of
from tunesmith.collect.data.sets import DirectSets, Unit, direct_sets
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.distributed.ranks import gathered, share_of
from tunesmith.engine.kernels.masking import total
from tunesmith.engine.models.division import divide
from tunesmith.engine.models.language_model import LanguageModel, model_of_recipe, reference_of
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase, context_length, freeze_lower_layers
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.models.tokenizer import decode, decode_after
from tunesmith.learn.algorithms import direct_loss
from tunesmith.learn.algorithms.direct_loss import DirectStats, PairLogps
from tunesmith.learn.algorithms.sums import Sums, merged
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs, Metrics, PolicyParts, StepResult
from tunesmith.learn.trainers.estimate import Estimate, training_estimate
from tunesmith.learn.trainers.metrics import update_metrics
from tunesmith.learn.trainers.passes import accumulate
from tunesmith.learn.trainers.rater_weights import votes_of_raters
from tunesmith.learn.trainers.restart import fingerprint_of_rows, fingerprint_of_tensors
from tunesmith.learn.trainers.session import Session
from tunesmith.learn.trainers.work import Rows, RunWork, Work

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenSums(Sums):
    """Completion tokens that a step computed, and the sum of their entropies in nats."""

    num_tokens: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def of_batch(cls, mask_BT: torch.Tensor, entropy_BT: torch.Tensor) -> "TokenSums":
        """The sums of one micro-batch."""
        return cls(total(mask_BT), total(entropy_BT * mask_BT))


def token_metrics(sums: Iterable[TokenSums]) -> Metrics:
    """Number of completion tokens of a step, and their mean entropy."""
    counted = merged(sums).floats()
    return {"num_tokens": counted["num_tokens"], "entropy": counted["entropy"] / counted["num_tokens"]}


@dataclass(slots=True)
class DPO(PolicyParts):
    """The learner: `step` changes the policy and the optimizer. Pairs and labels name answers by their index in
    `answers`.

    `reference` is the starting model where `dpo.reference` is "live", `reference_A` its precomputed log-probs of all
    answers otherwise; a loss without a reference has neither.
    """

    cfg: DPOSection
    policy: LanguageModel
    reference: LanguageModel | None
    optimizer: MasterAdamW
    tokenizer: PreTrainedTokenizerBase
    answers: Sequence[Answer]
    reference_A: torch.Tensor | None = None
    length_A: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.policy.module.device
        self.length_A = torch.tensor([answer.num_said for answer in self.answers], device=device)

    def step(self, units: Sequence[Unit], index: int) -> StepResult:
        """One step: the loss of the pairs (or labels) `units`, accumulated over micro-batches, and an update."""
        cfg = self.cfg
        num_units = len(units)
        with span("reference"):
            reference_A = self.reference_logps(units)
        with span("kl"):
            kl = self.mismatched_kl(units, reference_A)
        loss_of = partial(self.micro_batch_loss, reference_A=reference_A, num_units=num_units, kl=kl)
        with span("update"):
            report, stats = accumulate(self.optimizer, chunks(units, cfg.micro_batch_size), loss_of)
        with span("metrics"):
            own = {"kl": kl} if cfg.loss == "kto" else {}
            figures = {**merged([one for one, _ in stats]).metrics(), **token_metrics([sums for _, sums in stats])}
            metrics = {**figures, **own, **update_metrics([report])}
        return StepResult(metrics, report, lambda: self.batch_rows(units))

    def micro_batch_loss(
        self, micro: Sequence[Unit], reference_A: torch.Tensor | None, num_units: float, kl: float
    ) -> tuple[torch.Tensor, tuple[DirectStats, TokenSums]]:
        """The loss of one micro-batch, a scalar, with its statistics. An answer of several pairs is computed once."""
        batch = setup.sent(collate_answers(self.answers, indices_of(micro)), self.uploader)
        scores = token_logps(self.policy, batch.ids_BS, batch.lengths_B, prompt_lengths_B=batch.prompt_lengths_B)
        logp_B = (scores.logp_BT * batch.mask_BT).sum(dim=1)
        logp_A = torch.zeros_like(self.length_A, dtype=logp_B.dtype).index_put((batch.answer_B,), logp_B)
        loss, stats = self.loss_of(micro, logp_A, reference_A, num_units, kl)
        return loss, (stats, TokenSums.of_batch(batch.mask_BT, scores.entropy_BT))

    def loss_of(
        self,
        units: Sequence[Unit],
        logp_A: torch.Tensor,
        reference_A: torch.Tensor | None,
        num_units: float,
        kl: float,
    ) -> tuple[torch.Tensor, DirectStats]:
        """The loss of `units`, divided by `num_units`, and its statistics, from log-probs of their answers."""
        cfg = self.cfg
        labels = [unit for unit in units if isinstance(unit, AnswerLabel)]
        if labels:
            assert reference_A is not None
            answer_B = torch.tensor([label.answer for label in labels], device=self.length_A.device)
            wanted_B = torch.tensor([label.is_wanted for label in labels], device=self.length_A.device)
            return direct_loss.kto(
                logp_A[answer_B],
                reference_A[answer_B],
                wanted_B,
                cfg,
                kl=kl,
                num_completions=num_units,
                weight_B=self.weights_of(labels),
            )
        pairs = [unit for unit in units if isinstance(unit, AnswerPair)]
        answer_SN = torch.tensor([[p.chosen for p in pairs], [p.rejected for p in pairs]], device=self.length_A.device)
        reference_SN = None if reference_A is None else reference_A[answer_SN]
        has_ties = any(pair.tie for pair in pairs)
        tie_N = torch.tensor([pair.tie for pair in pairs], device=self.length_A.device) if has_ties else None
        weight_N = self.weights_of(pairs)
        logps = PairLogps(logp_A[answer_SN], self.length_A[answer_SN], reference_SN, tie_N, weight_N)
        return direct_loss.paired(logps, cfg, num_pairs=num_units)

    def weights_of(self, units: Sequence[Unit]) -> torch.Tensor | None:
        """weight_N on the device of the policy; None if all weigh 1."""
        weight_N = weights_of(units)
        return None if weight_N is None else weight_N.to(self.length_A.device)

    def reference_logps(self, units: Sequence[Unit]) -> torch.Tensor | None:
        """Log-probs of the answers of `units` under the reference, by index; None if the loss has no reference."""
        if self.reference is None:
            return self.reference_A
        return self.answer_logps(self.reference, chain(indices_of(units), mismatched_of(units)))

    def mismatched_kl(self, units: Sequence[Unit], reference_A: torch.Tensor | None) -> float:
        """KTO's estimate of the KL to the reference, from the step's mismatched completions; 0 for other losses."""
        mismatched = mismatched_of(units)
        if not mismatched or reference_A is None:
            return 0.0
        logp_A = self.answer_logps(self.policy, mismatched)
        return direct_loss.mismatched_kl(logp_A[mismatched], reference_A[mismatched])

    @torch.no_grad()
    def answer_logps(self, model: LanguageModel, indices: Iterable[int]) -> torch.Tensor:
        """logp_A: the log-prob of each answer in `indices` under `model`, summed over its tokens; NaN at all others."""
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for chunk in share_of(chunks(in_order(self.answers, indices), 2 * self.cfg.micro_batch_size)):
            batch = setup.sent(collate_answers(self.answers, chunk), self.uploader)
            scores = token_logps(model, batch.ids_BS, batch.lengths_B, prompt_lengths_B=batch.prompt_lengths_B)
            parts.append((batch.answer_B, (scores.logp_BT * batch.mask_BT).sum(dim=1)))
        found = gathered(parts, "log-probs")
        dtype = found[0][1].dtype if found else torch.float32
        logp_A = torch.full_like(self.length_A, torch.nan, dtype=dtype)
        for answer_B, logp_B in found:
            logp_A[answer_B] = logp_B
        return logp_A

    def batch_rows(self, units: Sequence[Unit]) -> list[dict[str, object]]:
        """The pairs or labels of a step as text, to find out why an update was refused."""
        rows: list[dict[str, object]] = []
        for unit in units:
            answers = [self.answers[index] for index in unit.answers]
            texts = [decode_after(self.tokenizer, one.prompt_ids, one.completion_ids) for one in answers]
            row: dict[str, object] = {"id": unit.prompt_id, "prompt": decode(self.tokenizer, answers[0].prompt_ids)}
            if isinstance(unit, AnswerPair):
                row |= {"chosen": texts[0], "rejected": texts[1], "tie": unit.tie}
            else:
                row |= {"completion": texts[0], "label": unit.is_wanted}
            rows.append(row)
        return rows


class DPOTask:
    """Preference pairs or labels, and how a policy is evaluated on them."""

    def __init__(self, cfg: DPORecipe, inputs: Inputs, device: torch.device) -> None:
        self.cfg = cfg
        self.loaded = load_policy(cfg.model, device=device)
        self.raters = votes_of_raters(cfg.pairs)
        self.data = direct_sets(
            cfg.pairs,
            self.loaded.tokenizer,
            cfg.dpo,
            cfg.run.seed,
            inputs.pairs,
            inputs.heldout_pairs,
            max_length=context_length(self.loaded.model),
            weigh=self.raters,
        )
        check_labels(self.data, cfg.dpo)
        self.prompts = Groups(self.data.answers[unit.answers[0]].prompt_ids for unit in self.data.train)
        freeze_lower_layers(self.loaded.model, cfg.model.num_trainable_layers)
        self.num_steps = cfg.run.steps or steps_of_epochs(
            cfg.dpo.num_epochs, len(self.data.train), cfg.dpo.pairs_per_step
        )

    @property
    def is_live(self) -> bool:
        """True if the reference model is evaluated at each step."""
        return self.cfg.dpo.needs_reference and self.cfg.dpo.reference == "live"

    def build(self) -> DPO:
        """The learner before its first step."""
        model, section = self.loaded.model, self.cfg.dpo
        policy = model_of_recipe(model, self.cfg.model)
        reference = reference_of(policy, self.cfg.model) if self.is_live else None
        divide(policy, reference)
        optimizer = setup.optimizer_of(self.cfg, model, policy.kernels, self.num_steps)
        return DPO(section, policy, reference, optimizer, self.loaded.tokenizer, self.data.answers)

    def prepare(self, learner: DPO, progress: bool) -> dict[str, str]:
        """Hashes of the model, the pairs, and the precomputed log-probs of the reference, if the recipe has them."""
        identity = {
            "the model": fingerprint_of_tensors(learner.policy.module),
            "the pairs": fingerprint_of_rows([*self.data.answers, *self.data.train, *self.data.heldout]),
        }
        if self.raters is not None:
            identity["the weights of the votes"] = fingerprint_of_rows(unit.weight for unit in self.data.train)
        if self.cfg.dpo.needs_reference and not self.is_live:
            units = [*self.data.train, *self.data.heldout]
            used = in_order(self.data.answers, chain(indices_of(units), mismatched_of(units)))
            setup.say(f"log-probs of {len(used)} completions under the starting model", enabled=progress)
            # Before its first step the policy is the reference: no second model is held in memory.
            learner.reference_A = learner.answer_logps(learner.policy, used)
            identity["the log-probs of the reference"] = fingerprint_of_rows(learner.reference_A.tolist())
        return identity

    def estimate(self) -> Estimate:
        """Memory and work of a run. Each distinct completion is computed once in an epoch."""
        section, train = self.cfg.dpo, self.data.train
        used, heldout = (
            [self.data.answers[i] for i in {i for unit in units for i in unit.answers}]
            for units in (train, self.data.heldout)
        )
        prompts = {answer.prompt_ids for answer in used}
        completion = fmean(len(answer.completion_ids) for answer in used)
        rows = Rows(fmean(len(a.prompt_ids) for a in used), completion, max(1, round(len(used) / len(prompts))))
        each, is_kto = rows.tokens(len(used)) / len(train), section.loss == "kto"
        num_scored = section.needs_reference * (2 if is_kto else 1)  # KTO also scores mismatched completions
        num_pairs = min(section.pairs_per_step, len(train))
        trained, micro = num_pairs * each, min(section.micro_batch_size, num_pairs)
        measured = rows.tokens(len(heldout))
        return training_estimate(
            self.loaded.model,
            self.cfg,
            RunWork(
                rows,
                Work(scored=trained * (num_scored * self.is_live + is_kto), trained=trained, updates=1),
                Work(scored=measured * (1 + num_scored * self.is_live + is_kto)),
                preparation=Work(scored=(rows.tokens(len(used)) + measured) * num_scored * (not self.is_live)),
            ),
            micro_tokens=micro * each,
            logit_tokens=2 * micro * completion * len(used) / len(train),
            holds_reference=self.is_live,
        )

    def batch(self, index: int) -> list[Unit]:
        """The pairs of step `index` (from 0), those of one prompt together: shared completions are computed once."""
        train = self.data.train
        size = min(self.cfg.dpo.pairs_per_step, len(train))
        return [train[i] for i in items_at(self.cfg.run.seed, index * size, size, len(train), self.prompts)]

    @torch.no_grad()
    def evaluate(self, learner: DPO) -> Metrics:
        """Loss, rewards and accuracy on the held-out rows, without ties; empty without any.

        For labels `eval/rewards/accuracies` is the probability that a wanted completion has a higher reward than an
        unwanted one, over all combinations; equal rewards count half.
        """
        units = [unit for unit in self.data.heldout if not (isinstance(unit, AnswerPair) and unit.tie)]
        if not units:
            return {}
        with span("evaluate"):
            reference_A = learner.reference_logps(units)
            logp_A = learner.answer_logps(learner.policy, indices_of(units))
            kl = learner.mismatched_kl(units, reference_A)
            metrics = learner.loss_of(units, logp_A, reference_A, len(units), kl)[1].metrics()
        labels = [unit for unit in units if isinstance(unit, AnswerLabel)]
        if labels and reference_A is not None:
            ratio_A = logp_A - reference_A
            wanted, unwanted = (
                ratio_A[[one.answer for one in labels if one.is_wanted is side]] for side in (True, False)
            )
            higher = torch.sign(wanted[:, None] - unwanted[None]) / 2 + 0.5
            metrics |= {"rewards/accuracies": higher.mean().item()} if higher.numel() else {}
        return {**{f"eval/{name}": value for name, value in metrics.items()}, "eval/num_pairs": float(len(units))}

    def measure(self, learner: DPO, when: str) -> dict[str, object]:
        """Nothing apart from `evaluate`."""
        return {}

    def summary(self, learner: DPO, session: Session) -> dict[str, object]:
        """The last training loss, and the figures on held-out pairs."""
        last = session.metrics[-1]
        names = ("loss", "rewards/accuracies", "rewards/margins")
        figures = {name: last[name] for name in (*names, *(f"eval/{n}" for n in (*names, "num_pairs"))) if name in last}
        sizes = {"steps": len(session.metrics), "num_pairs": len(self.data.train), "num_ties": self.data.num_ties}
        raters = {} if self.raters is None else self.raters.facts
        return {**sizes, **raters, "refused_steps": session.num_refused, **figures}


def check_labels(data: DirectSets, cfg: DPOSection) -> None:
    """Refuse labels that KTO cannot learn from, and warn of weights that make one side dominate.

    The weighted numbers of wanted and unwanted completions should be within a third of each other (Ethayarajh et al.
    2024, equation 8).

    Raises:
        DataError: if all prompts are equal.
    """
    labels = [unit for unit in data.train if isinstance(unit, AnswerLabel)]
    if any(label.mismatched < 0 for label in labels):
        held_out = {unit.prompt_id for unit in data.heldout}
        reason = (
            f"; {len(held_out)} rows of other prompts are held out: give more prompts, or set pairs.heldout_fraction: 0"
            if held_out
            else "; give rows of two prompts or more"
        )
        raise DataError(f"the loss kto compares with completions of other prompts, but all rows have one{reason}")
    wanted = cfg.desirable_weight * sum(label.is_wanted for label in labels)
    unwanted = cfg.undesirable_weight * sum(not label.is_wanted for label in labels)
    if labels and not 3 / 4 <= (wanted + 1e-9) / (unwanted + 1e-9) <= 4 / 3:
        _log.warning(
            "wanted and unwanted completions weigh %g and %g; bring them within a third of each other by "
            "dpo.desirable_weight or dpo.undesirable_weight",
            wanted,
            unwanted,
        )


def indices_of(units: Sequence[Unit]) -> list[int]:
    """Indices of the answers of `units`."""
    return [index for unit in units for index in unit.answers]


def mismatched_of(units: Sequence[Unit]) -> list[int]:
    """Indices of the mismatched answers, from which KTO estimates the KL; empty for pairs."""
    return [unit.mismatched for unit in units if isinstance(unit, AnswerLabel) and unit.mismatched >= 0]
