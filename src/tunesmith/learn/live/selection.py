"""Pairs worth asking: a Bayesian model of the votes so far says which pairs of answers teach the most.

Each answer has features, the mean of the base model's last hidden states over its tokens. P(a is preferred to b) is
sigmoid(theta . (x_a - x_b)) (Bradley and Terry 1952), theta has a normal prior, and its posterior given the votes is
approximated by a normal distribution at its mode (Laplace; MacKay 1992), which gives each pair an expected gap and a
standard deviation. The heads of a reward model can stand in its place. Shape legend: N votes, M candidate pairs, A
answers, F features. All numbers are float64.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from tunesmith.base.config.algorithms.live import LiveSelectionSection
from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.seeds import derive
from tunesmith.base.core.trace import span
from tunesmith.collect.data.answers import Answer, collate_answers
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.logprob import completion_layout, trunk_states
from tunesmith.learn.live.votes import VotedPair

T = TypeVar("T")

_MAX_FEATURES = 1024
"""Hidden states of more coordinates are projected to so many, at random: the posterior costs their third power."""

_NEWTON_STEPS = 30
_TOLERANCE = 1e-9

_ANSWERS_PER_PASS = 32


@dataclass(frozen=True, slots=True)
class Chosen:
    """Two answers, by their places among those of a prompt, why they were paired, and what the method expects of them.

    `value` is what the method maximizes: a gap in logits, a share of probability, or nats.
    """

    prompt: int
    pair: tuple[int, int]
    method: str
    value: float

    @property
    def reason(self) -> str:
        """The method and its value."""
        return f"{self.method} {self.value:.3g}"


class Beliefs(Protocol):
    """What is believed of theta, by which an answer with the features x_F is worth theta . x."""

    @property
    def mode_F(self) -> torch.Tensor:
        """The expected theta."""
        ...

    def whitened(self, difference_MF: torch.Tensor) -> torch.Tensor:
        """z_MZ of differences of features, whose inner products are the covariances of the gaps."""
        ...

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """theta_F drawn from the beliefs."""
        ...


class Preferences:
    """The posterior over theta, given the differences of features `difference_NF`, those of the chosen answer first.

    `tie_N`: the vote was a tie, half a vote for each side. The prior is a normal distribution under which two unlike
    answers, whose features differ by about one standard deviation in each coordinate, have a gap of about one logit.
    """

    def __init__(self, difference_NF: torch.Tensor, tie_N: torch.Tensor) -> None:
        num_votes, num_features = difference_NF.shape
        precision = torch.eye(num_features, dtype=torch.float64) * num_features
        target_N = torch.where(tie_N, 0.5, 1.0).to(torch.float64)
        theta_F = torch.zeros(num_features, dtype=torch.float64)
        factor_FF = precision
        for _ in range(_NEWTON_STEPS):
            p_N = torch.sigmoid(difference_NF @ theta_F)
            hessian_FF = precision + difference_NF.T @ ((p_N * (1 - p_N))[:, None] * difference_NF)
            gradient_F = difference_NF.T @ (target_N - p_N) - precision @ theta_F
            factor_FF = torch.linalg.cholesky(hessian_FF)
            step_F = torch.cholesky_solve(gradient_F[:, None], factor_FF)[:, 0]
            # Far from the mode, Newton's step of a logistic likelihood may overshoot: no gap moves by over 2 logits.
            largest = float((difference_NF @ step_F).abs().max()) if num_votes else 0.0
            theta_F = theta_F + step_F * min(1.0, 2.0 / max(largest, 1e-12))
            if largest < _TOLERANCE:
                break
        self.mode_F = theta_F
        self.factor_FF = factor_FF

    def whitened(self, difference_MF: torch.Tensor) -> torch.Tensor:
        """z_MF, whose inner products are the posterior covariances of the gaps."""
        return torch.linalg.solve_triangular(self.factor_FF, difference_MF.T, upper=False).T

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """theta_F drawn from the posterior."""
        noise_F = torch.randn(len(self.mode_F), generator=generator, dtype=torch.float64)
        shift_F = torch.linalg.solve_triangular(self.factor_FF.T, noise_F[:, None], upper=True)[:, 0]
        return self.mode_F + shift_F


class HeadBeliefs:
    """The heads of a reward model, two at least, as draws from what the votes leave possible (Osband et al. 2016, arXiv
    1602.04621): the features of an answer are the rewards that the heads give it, and theta names one of them.
    """

    def __init__(self, num_heads: int) -> None:
        self.mode_F = torch.full((num_heads,), 1 / num_heads, dtype=torch.float64)

    def whitened(self, difference_MF: torch.Tensor) -> torch.Tensor:
        """z_MF, whose inner products are the covariances of the gaps over the heads."""
        return (difference_MF - difference_MF.mean(1, keepdim=True)) / math.sqrt(len(self.mode_F) - 1)

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """theta_F that names a head drawn at random."""
        theta_F = torch.zeros_like(self.mode_F)
        theta_F[torch.randint(len(theta_F), (), generator=generator)] = 1
        return theta_F


@dataclass(slots=True)
class Selection:
    """Chooses pairs among drawn answers by a section's method.

    `features` caches the features of answers, `[H]` in float32 on the CPU.
    """

    section: LiveSelectionSection
    model: LanguageModel
    features: dict[Answer, torch.Tensor] = field(default_factory=dict[Answer, torch.Tensor])

    def choose(
        self,
        groups: Sequence[Sequence[Answer]],
        allowed: Sequence[set[tuple[int, int]]],
        votes: Iterable[VotedPair],
        seed: int,
    ) -> list[Chosen]:
        """Pairs of the answers to each prompt, the best first; each answer is in at most one of them.

        `groups[p]` are the answers to prompt p and `allowed[p]` the pairs (i, j), i < j, that can be asked. `votes` are
        what is known. A pure function of all these and `seed`.
        """
        if not any(allowed):
            return []
        with span("selection"):
            features, beliefs = self.known([one for group in groups for one in group], votes)
            groups_AF = [torch.stack([features[one] for one in group]) for group in groups]
            return choose_pairs(groups_AF, allowed, beliefs, self.section, seed)

    def known(
        self, answers: Iterable[Answer], votes: Iterable[VotedPair]
    ) -> tuple[dict[Answer, torch.Tensor], Preferences]:
        """(x_F of each of `answers` and of those that were voted on, what the votes say)."""
        cast = list(votes)
        distinct = list(dict.fromkeys([*answers, *(one for vote in cast for one in vote.answers)]))
        features = dict(zip(distinct, self.table(distinct), strict=True))
        difference = [features[vote.chosen] - features[vote.rejected] for vote in cast]
        width = len(next(iter(features.values())))
        difference_NF = torch.stack(difference) if cast else torch.zeros(0, width, dtype=torch.float64)
        return features, Preferences(difference_NF, torch.tensor([vote.tie for vote in cast], dtype=torch.bool))

    def keep(self, answers: Iterable[Answer]) -> None:
        """Drop the cached features of all other answers."""
        kept = set(answers)
        self.features = {one: states_H for one, states_H in self.features.items() if one in kept}

    def table(self, answers: Sequence[Answer]) -> torch.Tensor:
        """x_AF: the features, each coordinate with mean 0 and standard deviation 1 over the answers."""
        self.compute([one for one in answers if one not in self.features])
        table_AF = torch.stack([self.features[one] for one in answers]).double()
        if table_AF.shape[1] > _MAX_FEATURES:
            # The same projection at every call: distances stay about equal (Johnson and Lindenstrauss 1984).
            generator = torch.Generator().manual_seed(0)
            shape = table_AF.shape[1], _MAX_FEATURES
            table_AF = _standard(table_AF) @ torch.randn(*shape, generator=generator, dtype=torch.float64)
        return _standard(table_AF)

    @torch.no_grad()
    def compute(self, answers: Sequence[Answer]) -> None:
        """Compute the features of `answers`, which are not in the cache. Raises ModelError if they are not finite."""
        order = sorted(answers, key=lambda one: (one.prompt_ids, one.completion_ids))
        for part in chunks(order, _ANSWERS_PER_PASS):
            batch = collate_answers(part, range(len(part)))
            lengths_B, prompt_lengths_B = batch.lengths_B, batch.prompt_lengths_B
            row_N, before_N, _ = completion_layout(batch.ids_BS, lengths_B, prompt_lengths_B).indices()
            module, device = self.model.module, self.model.module.device
            ids_BS, places_N = batch.ids_BS.to(device), (row_N.to(device), (before_N + 1).to(device))
            states_NH = trunk_states(module, self.model.decoder, ids_BS, lengths_B.to(device), *places_N).float().cpu()
            sums_BH = torch.zeros(len(part), states_NH.shape[1]).index_add_(0, row_N, states_NH)
            mean_BH = sums_BH / (lengths_B - prompt_lengths_B).clamp(min=1)[:, None]
            if not mean_BH.isfinite().all():
                raise ModelError(
                    "the language model that pairs are chosen by has hidden states that are not finite, so its weights "
                    "may be damaged; get it again, or choose at random"
                )
            for index, states_H in zip(batch.answer_B.tolist(), mean_BH, strict=True):
                self.features[part[index]] = states_H.clone()


def _standard(table_AF: torch.Tensor) -> torch.Tensor:
    centred_AF = table_AF - table_AF.mean(0)
    return centred_AF / centred_AF.square().mean(0).sqrt().clamp(min=1e-12)


def choose_pairs(
    groups: Sequence[torch.Tensor],
    allowed: Sequence[set[tuple[int, int]]],
    beliefs: Beliefs,
    section: LiveSelectionSection,
    seed: int,
    most: int | None = None,
) -> list[Chosen]:
    """Disjoint pairs of the answers to each prompt by the section's method, the best first; at most `most`.

    `groups[p]` are the features x_AF of the answers to prompt p, `allowed[p]` the pairs (i, j), i < j, of them.
    """
    if section.method == "drts":
        return _by_sampling(groups, allowed, beliefs, seed)[:most]
    pairs = [(prompt, pair) for prompt, found in enumerate(allowed) for pair in sorted(found)]
    if not pairs:
        return []
    difference_MF = torch.stack([groups[prompt][i] - groups[prompt][j] for prompt, (i, j) in pairs])
    return _by_value(pairs, difference_MF, beliefs, section, len(pairs) if most is None else most)


def _by_sampling(
    groups: Sequence[torch.Tensor], allowed: Sequence[set[tuple[int, int]]], beliefs: Beliefs, seed: int
) -> list[Chosen]:
    """Double Thompson sampling of a best and a worst answer (DRTS; arXiv 2603.09692): the likely best one under one
    draw from the posterior, against the likely worst under another.
    """
    chosen: list[Chosen] = []
    for prompt, (x_AF, pairs) in enumerate(zip(groups, allowed, strict=True)):
        generator = torch.Generator().manual_seed(derive(seed, "selection", prompt))
        left = set(pairs)
        while left:
            high_A, low_A = x_AF @ beliefs.sample(generator), x_AF @ beliefs.sample(generator)
            gaps = {(i, j): max(high_A[i] - low_A[j], high_A[j] - low_A[i]).item() for i, j in left}
            best = max(sorted(left), key=gaps.__getitem__)
            chosen.append(Chosen(prompt, best, "drts", gaps[best]))
            left = {pair for pair in left if not set(pair) & set(best)}
    return sorted(chosen, key=lambda one: -one.value)


def _by_value(
    pairs: Sequence[tuple[int, tuple[int, int]]],
    difference_MF: torch.Tensor,
    beliefs: Beliefs,
    section: LiveSelectionSection,
    most: int,
) -> list[Chosen]:
    """The disjoint pairs, in the order of their values; at most `most`.

    infomax: the width of the interval of the probability; delta_ucb: the largest plausible gap (both arXiv 2603.09692);
    d_optimal: nats by which an answer shrinks the posterior, given those chosen before (arXiv 2502.04354).
    """
    z_MF = beliefs.whitened(difference_MF)
    mean_M = difference_MF @ beliefs.mode_F
    p_M = torch.sigmoid(mean_M)
    variance_M = z_MF.square().sum(1)
    margin_M = section.width * variance_M.sqrt()
    fisher_M = p_M * (1 - p_M)
    fixed = {
        "infomax": torch.sigmoid(mean_M + margin_M) - torch.sigmoid(mean_M - margin_M),
        "delta_ucb": mean_M.abs() + margin_M,
    }
    free_M = torch.ones(len(pairs), dtype=torch.bool)
    members: dict[tuple[int, int], list[int]] = {}
    for index, (prompt, pair) in enumerate(pairs):
        for answer in pair:
            members.setdefault((prompt, answer), []).append(index)
    chosen: list[Chosen] = []
    while len(chosen) < most and bool(free_M.any()):
        if section.method == "d_optimal":
            value_M = 0.5 * torch.log1p(fisher_M * variance_M)
        else:
            value_M = fixed[section.method]
        best = int(torch.where(free_M, value_M, -math.inf).argmax())
        prompt, pair = pairs[best]
        chosen.append(Chosen(prompt, pair, section.method, value_M[best].item()))
        for answer in pair:
            free_M[members[prompt, answer]] = False
        if section.method == "d_optimal":  # what a vote on this pair would leave of the others' covariances
            covariance_M = z_MF @ z_MF[best]
            weight = fisher_M[best] / (1 + fisher_M[best] * variance_M[best])
            # (I - share b b') (I - share b b')' = I - weight b b', with b = z_MF[best]: sizes of pairs alone are kept.
            share = weight / (1 + (1 - weight * variance_M[best]).sqrt())
            z_MF = z_MF - share * torch.outer(covariance_M, z_MF[best])
            variance_M = z_MF.square().sum(1)
    return chosen


def mixed(first: Sequence[T], second: Sequence[T]) -> list[T]:
    """Both in their orders, each spread evenly over the whole."""
    placed = [((index + 0.5) / len(part), one) for part in (first, second) for index, one in enumerate(part)]
    return [one for _, one in sorted(placed, key=lambda place: place[0])]
