"""Online direct preference optimisation: the policy learns from votes on completions that it drew itself.

Guo et al. 2024, arXiv 2402.04792; Qi et al. 2024, arXiv 2406.05534. The loss is one of `algorithms.direct_loss` plus a
penalty on the KL to the base model, which is the reference. Thumbs on single answers are learnt by KTO in the same
steps, and reasons of votes by self-distillation. Shape legend: N votes or thumbs, S sides (0 chosen, 1 rejected),
A distinct answers of a micro-batch, B the same answers as rows of the batch, T completion tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch
from torch.nn.utils.rnn import pad_sequence

from tunesmith.base.config.algorithms.dpo import DPOSection
from tunesmith.base.config.algorithms.live import LiveDPOSection, LiveFeedbackSection
from tunesmith.base.config.sections import OptimizerSection
from tunesmith.base.core.trace import span
from tunesmith.collect.data.answers import (
    Answer,
    AnswerBatch,
    AnswerLabel,
    AnswerTable,
    collate_answers,
    with_mismatched,
)
from tunesmith.collect.data.collate import pad_right, weights_of
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.logprob import TokenScores, token_logps
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.learn.algorithms import direct_loss, kl
from tunesmith.learn.algorithms.direct_loss import DirectStats, PairLogps
from tunesmith.learn.algorithms.divergence import Divergence, DivergenceStats, divergence_loss
from tunesmith.learn.algorithms.kl import Controller
from tunesmith.learn.algorithms.sums import merged
from tunesmith.learn.live.feedback import LabelledAnswer
from tunesmith.learn.live.votes import VotedPair
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import PolicyWithKL, StepResult
from tunesmith.learn.trainers.dpo import TokenSums, token_metrics
from tunesmith.learn.trainers.passes import accumulate, predictions

NUM_STEPS = 10**9
"""Total steps of optimizers and schedules: the live loop has no end."""


@dataclass(frozen=True, slots=True)
class VoteBatch:
    """The answers of some votes, their log-probs under the reference, and the two answers of each vote. `weight_N` is
    None where all weigh 1.
    """

    answers: AnswerBatch
    reference_logp_BT: torch.Tensor
    answer_SN: torch.Tensor
    tie_N: torch.Tensor
    weight_N: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LabelBatch:
    """The answers of some thumbs, their log-probs under the reference, and the answer, side and weight of each."""

    answers: AnswerBatch
    reference_logp_BT: torch.Tensor
    answer_N: torch.Tensor
    wanted_N: torch.Tensor
    weight_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReasonBatch:
    """The answers of some votes behind their prompts, the same answers behind what the teacher reads, and the weight of
    each token, with which those of a vote sum to 1.
    """

    ids_BS: torch.Tensor
    lengths_B: torch.Tensor
    prompt_lengths_B: torch.Tensor
    read_ids_BS: torch.Tensor
    read_lengths_B: torch.Tensor
    read_prompt_lengths_B: torch.Tensor
    weight_N: torch.Tensor

    @classmethod
    def of_votes(cls, votes: Sequence[VotedPair]) -> "ReasonBatch":
        """Those of `votes`, on the CPU."""
        sides = [side for vote in votes for side in vote.taught]
        shares = [1.0 / len(vote.taught) for vote in votes for _ in vote.taught]
        own, read = _padded([side[0] for side in sides]), _padded([side[1] for side in sides])
        weights: list[float] = []
        for (answer, _), share in zip(sides, shares, strict=True):
            others = {place for part in answer.between for place in part}
            places = range(len(answer.completion_ids))
            weights += [0.0 if place in others else share / answer.num_said for place in places]
        return cls(*own, *read, torch.tensor(weights))


def _padded(answers: Sequence[Answer]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids_BS, lengths_B, prompt_lengths_B) of `answers`, in their order."""
    ids_BS, lengths_B = pad_right([(*one.prompt_ids, *one.completion_ids) for one in answers], 0)
    return ids_BS, lengths_B, torch.tensor([len(one.prompt_ids) for one in answers])


@dataclass(slots=True)
class VoteDPO(PolicyWithKL):
    """The learner: `step` changes the policy, the optimizer and `reference_logps`.

    `temperature` is that of the rollouts. `reference_logps` caches log-probs under the reference, `[T]` on the CPU, by
    answer. It is part of a checkpoint: in float32 the last bits depend on the batch that an answer was computed in.
    """

    cfg: LiveDPOSection
    policy: LanguageModel
    reference: LanguageModel
    optimizer: MasterAdamW
    kl: Controller
    tokenizer: PreTrainedTokenizerBase
    temperature: float
    feedback: LiveFeedbackSection = field(default_factory=LiveFeedbackSection)
    reasons_weight: float = 0.0
    reference_logps: dict[Answer, torch.Tensor] = field(default_factory=dict[Answer, torch.Tensor])

    def step(self, votes: Sequence[VotedPair], index: int, labels: Sequence[LabelledAnswer] = ()) -> StepResult:
        """One step: the losses of `votes`, of `labels`, of what raters said and the KL penalty, accumulated over
        micro-batches, and an update.
        """
        size, num_units = self.cfg.micro_batch_size, len(votes) + len(labels)
        answers = [*(answer for vote in votes for answer in vote.answers), *(label.answer for label in labels)]
        with span("reference"):
            self.reference_logp(answers)
        with span("kl"):
            mismatched_kl = self.mismatched_kl(labels, index)
        loss_of = partial(self.micro_batch_loss, num_votes=num_units)
        of_labels = partial(self.label_loss, mismatched_kl=mismatched_kl, num_units=num_units)
        pairs, beside = chunks(votes, size), [partial(of_labels, part) for part in chunks(labels, 2 * size)]
        said = chunks([vote for vote in votes if vote.taught_ids], size) if self.reasons_weight > 0 else []
        of_said = [partial(self.reason_loss, part, num_units) for part in said]
        with span("update"):
            report, stats = accumulate(self.optimizer, pairs, loss_of, beside=[*beside, *of_said])
        with span("metrics"):
            taught = [one for one in stats if isinstance(one, DivergenceStats)]
            judged = [one for one in stats if not isinstance(one, DivergenceStats)]
            metrics = token_metrics([sums for _, sums in judged])
            sides = [one for one, _ in judged]
            metrics |= merged(sides[: len(pairs)]).metrics() if pairs else {}
            if beside:
                found = {**merged(sides[len(pairs) :]).metrics(), "kl": mismatched_kl}
                metrics |= {f"feedback/{name}": value for name, value in found.items()}
            if taught:
                metrics |= {f"reasons/{name}": value for name, value in merged(taught).metrics().items()}
        rows = [*(asdict(vote.as_pair()) for vote in votes), *(label.as_row() for label in labels)]
        return StepResult(metrics, report, lambda: rows)

    def micro_batch_loss(
        self, votes: Sequence[VotedPair], num_votes: float
    ) -> tuple[torch.Tensor, tuple[DirectStats, TokenSums]]:
        """The loss of `votes`, divided by `num_votes`, with its statistics.

        An answer of several votes is computed once, and counts once for each. The KL penalty is the coefficient times
        the nats per answer, with the gradient of KL(policy, reference), since the answers are the policy's own samples.
        """
        sent = setup.sent(self.collate(votes), self.uploader)
        batch = sent.answers
        scores = self.scores(self.policy, batch)
        reference_logp_BT = sent.reference_logp_BT.to(scores.logp_BT)
        length_B = batch.lengths_B - batch.prompt_lengths_B

        row_A = torch.argsort(batch.answer_B)
        logp_A, reference_logp_A = scores.logp_BT.sum(dim=1)[row_A], reference_logp_BT.sum(dim=1)[row_A]
        answer_SN = sent.answer_SN
        logps = PairLogps(
            logp_A[answer_SN], length_B[row_A][answer_SN], reference_logp_A[answer_SN], sent.tie_N, sent.weight_N
        )
        loss, stats = direct_loss.paired(logps, self.cfg, num_pairs=num_votes)
        if self.kl.value > 0:
            nats_A = kl.penalty("k1", scores.logp_BT, reference_logp_BT, batch.mask_BT).sum(dim=1)[row_A]
            loss = loss + self.kl.value * nats_A[answer_SN].sum() / (2 * num_votes)
        return loss, (stats, TokenSums.of_batch(batch.mask_BT, scores.entropy_BT))

    def label_loss(
        self, labels: Sequence[LabelledAnswer], mismatched_kl: float, num_units: float
    ) -> tuple[torch.Tensor, tuple[DirectStats, TokenSums]]:
        """KTO's loss of `labels`, each times its weight, and the KL penalty, over `num_units`, with statistics."""
        table = AnswerTable()
        places = torch.tensor([table.place(label.answer) for label in labels])
        wanted = torch.tensor([label.is_wanted for label in labels])
        weights = torch.tensor([self.feedback.thumbs_weight * label.weight for label in labels])
        sent = setup.sent(LabelBatch(*self.batch_of(table), places, wanted, weights), self.uploader)
        batch, answer_N = sent.answers, sent.answer_N
        scores = self.scores(self.policy, batch)
        reference_logp_BT = sent.reference_logp_BT.to(scores.logp_BT)
        row_A = torch.argsort(batch.answer_B)
        logp_A, reference_logp_A = scores.logp_BT.sum(dim=1)[row_A], reference_logp_BT.sum(dim=1)[row_A]
        loss, stats = direct_loss.kto(
            logp_A[answer_N],
            reference_logp_A[answer_N],
            sent.wanted_N,
            self.kto_settings,
            kl=mismatched_kl,
            num_completions=num_units,
            weight_B=sent.weight_N,
        )
        if self.kl.value > 0:
            nats_A = kl.penalty("k1", scores.logp_BT, reference_logp_BT, batch.mask_BT).sum(dim=1)[row_A]
            loss = loss + self.kl.value * nats_A[answer_N].sum() / num_units
        return loss, (stats, TokenSums.of_batch(batch.mask_BT, scores.entropy_BT))

    def reason_loss(self, votes: Sequence[VotedPair], num_units: float) -> tuple[torch.Tensor, DivergenceStats]:
        """The divergence of the policy from itself with what the raters of `votes` said in its context, over
        `num_units`, with statistics: the reverse KL in nats per token, of each vote the mean over its answers of the
        mean over their tokens, times the weight of reasons. The answers are those that were judged.
        """
        sent = setup.sent(ReasonBatch.of_votes(votes), self.uploader)
        with torch.no_grad(), span("teachers"):
            teacher = predictions(self.policy, sent.read_ids_BS, sent.read_lengths_B, sent.read_prompt_lengths_B)
        student = predictions(self.policy, sent.ids_BS, sent.lengths_B, sent.prompt_lengths_B)
        loss, stats = divergence_loss(
            student,
            [teacher],
            Divergence(temperature=self.temperature),
            num_tokens=num_units,
            vocabulary=len(self.tokenizer),
            weight_N=sent.weight_N,
        )
        return self.reasons_weight * loss, stats

    @property
    def kto_settings(self) -> DPOSection:
        """The settings of the loss of thumbs, with the `beta` of the pairs."""
        sides = self.feedback.desirable_weight, self.feedback.undesirable_weight
        return DPOSection(loss="kto", beta=self.cfg.beta, desirable_weight=sides[0], undesirable_weight=sides[1])

    def mismatched_kl(self, labels: Sequence[LabelledAnswer], seed: int) -> float:
        """KTO's estimate of the KL to the reference in nats, from answers to the prompts of others; 0 of one prompt."""
        table = AnswerTable()
        longest = max((len(one.answer.prompt_ids) + len(one.answer.completion_ids) for one in labels), default=0)
        units = [AnswerLabel(str(one.feedback_id), table.place(one.answer), one.is_wanted) for one in labels]
        mixed = [one.mismatched for one in with_mismatched(units, table, longest, seed) if one.mismatched >= 0]
        answers = [table.answers[place] for place in mixed]
        if not answers:
            return 0.0
        reference = torch.stack([logp_T.sum() for logp_T in self.reference_logp(answers)])
        return direct_loss.mismatched_kl(self.sums(answers), reference)

    def weighed(self, labels: Sequence[LabelledAnswer]) -> list[LabelledAnswer]:
        """The labels with truncated importance weights under the current policy; as they are where that is off."""
        limit = self.feedback.importance_limit
        if limit is None or not labels:
            return list(labels)
        drawn = torch.tensor([label.drawn_logp for label in labels], dtype=torch.float64)
        logp = self.sums([label.answer for label in labels]).double()
        weights = direct_loss.importance(logp, drawn, limit).tolist()
        return [replace(label, weight=weight) for label, weight in zip(labels, weights, strict=True)]

    def sums(self, answers: Sequence[Answer]) -> torch.Tensor:
        """The log-prob of each answer under the policy, summed over its tokens, on the CPU."""
        order = sorted(set(answers), key=lambda one: (one.prompt_ids, one.completion_ids))
        parts = self.answer_logps(self.policy, order)
        found = {one: logp for part, logp_BT in parts for one, logp in zip(part, logp_BT.sum(dim=1).cpu(), strict=True)}
        return torch.stack([found[one] for one in answers])

    def collate(self, votes: Sequence[VotedPair]) -> VoteBatch:
        """The votes as CPU tensors, each distinct answer once."""
        table = AnswerTable()
        pairs = [(table.place(vote.chosen), table.place(vote.rejected)) for vote in votes]
        tie_N = torch.tensor([vote.tie for vote in votes])
        return VoteBatch(*self.batch_of(table), torch.tensor(pairs).T, tie_N, weights_of(votes))

    def batch_of(self, table: AnswerTable) -> tuple[AnswerBatch, torch.Tensor]:
        """The answers as CPU tensors, and their log-probs under the reference."""
        batch = collate_answers(table.answers, range(len(table.answers)))
        reference = self.reference_logp(table.answers[index] for index in batch.answer_B.tolist())
        return batch, pad_sequence(reference, batch_first=True)

    def scores(self, model: LanguageModel, batch: AnswerBatch) -> TokenScores:
        """Log-probs and entropies of the completion tokens under `model`."""
        ids_BS, lengths_B, prompt_lengths_B = batch.ids_BS, batch.lengths_B, batch.prompt_lengths_B
        return token_logps(model, ids_BS, lengths_B, prompt_lengths_B=prompt_lengths_B, temperature=self.temperature)

    def reference_logp(self, answers: Iterable[Answer]) -> list[torch.Tensor]:
        """Log-probs of each answer under the reference, `[T]` in float32 on the CPU, computed once per answer."""
        requested = list(answers)
        missing = set(requested) - self.reference_logps.keys()
        order = sorted(missing, key=lambda answer: (answer.prompt_ids, answer.completion_ids))
        for part, logp_BT in self.answer_logps(self.reference, order):
            for answer, logp_T in zip(part, logp_BT.cpu(), strict=True):
                self.reference_logps[answer] = logp_T[: len(answer.completion_ids)].clone()
        return [self.reference_logps[answer] for answer in requested]

    @torch.no_grad()
    def answer_logps(
        self, model: LanguageModel, answers: Sequence[Answer]
    ) -> Iterator[tuple[list[Answer], torch.Tensor]]:
        """Batches of the distinct `answers` with their log-probs under `model`, `[B, T]`, zeros behind each answer."""
        for part in chunks(answers, 2 * self.cfg.micro_batch_size):
            made = collate_answers(part, range(len(part)))
            scores = self.scores(model, setup.sent(made, self.uploader))
            yield [part[index] for index in made.answer_B.tolist()], scores.logp_BT

    def correct(self, votes: Sequence[VotedPair], known: Mapping[int, bool] = MappingProxyType({})) -> list[bool]:
        """For each vote, whether the reward, log policy - log reference, is higher for the chosen answer.

        `known` are results for the current weights by vote id, which are not computed again.
        """
        with span("check"):
            distinct = dict.fromkeys(a for vote in votes if vote.vote_id not in known for a in vote.answers)
            reference = [logp_T.sum().item() for logp_T in self.reference_logp(distinct)]
            reward = dict(zip(distinct, reference, strict=True))
            for part, logp_BT in self.answer_logps(self.policy, sorted(distinct, key=lambda one: one.prompt_ids)):
                for answer, logp in zip(part, logp_BT.sum(dim=1).tolist(), strict=True):
                    reward[answer] = logp - reward[answer]
        return [
            known[vote.vote_id] if vote.vote_id in known else reward[vote.chosen] > reward[vote.rejected]
            for vote in votes
        ]

    def keep_reference_logps(self, answers: Iterable[Answer]) -> None:
        """Drop cached log-probs of all other answers."""
        kept = set(answers)
        self.reference_logps = {one: logp_T for one, logp_T in self.reference_logps.items() if one in kept}

    def cache_tensors(self) -> dict[str, torch.Tensor]:
        """The cached log-probs as flat tensors: `sizes` are the tokens of each prompt and each completion."""
        answers = list(self.reference_logps)
        ids = [token for one in answers for token in (*one.prompt_ids, *one.completion_ids)]
        sizes = [(len(one.prompt_ids), len(one.completion_ids)) for one in answers]
        return {
            "ids": torch.tensor(ids, dtype=torch.int32),
            "sizes": torch.tensor(sizes, dtype=torch.int32).reshape(-1, 2),
            "logps": torch.cat([*self.reference_logps.values(), torch.zeros(0)]),
        }

    def load_cache(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the cached log-probs by those of `cache_tensors()`."""
        sizes = tensors["sizes"].tolist()
        ids = iter(tensors["ids"].split([size for pair in sizes for size in pair]))
        logps = tensors["logps"].split([completion for _, completion in sizes])
        self.reference_logps = {
            Answer(tuple(next(ids).tolist()), tuple(next(ids).tolist())): logp_T.clone() for logp_T in logps
        }

    def reset_optimizer(self, section: OptimizerSection) -> None:
        """Replace the optimizer by a new one on the current weights."""
        old, kernels = self.optimizer, self.policy.kernels
        self.optimizer = MasterAdamW(self.policy.module, section, total_steps=NUM_STEPS, kernels=kernels)
        old.close()
        self.optimizer.weight_version = old.weight_version + 1
