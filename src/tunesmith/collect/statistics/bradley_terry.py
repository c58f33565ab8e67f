"""Strengths of policy versions and other models from votes between answers of two of them (Bradley and Terry 1952).

The chance that i wins against j is sigmoid(strength i - strength j); a tie is half a win for each. A version is named
`v` and its number, and differs little from the versions before and after it: their strengths are a random walk, so
each is estimated from the votes on its neighbours too. Without torch, which the web server need not load.
Shape suffixes: N contests, K versions and models, S resamples.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist

import numpy as np
from scipy.special import expit

from tunesmith.base.core.errors import InputError
from tunesmith.collect.statistics.intervals import CONFIDENCE
from tunesmith.collect.store.vote_watch import Contest

MAX_VERSIONS = 100
"""Names that are fitted together: the base, the newest versions, then models. Each fit solves equations of this size.
"""

PRIOR_STD = 2.0
"""Standard deviation of the normal prior on each strength: weak (two versions a priori win 0.4 to 99.6 % against each
other in 95 % of cases), but it keeps a version that never lost finite."""

WALK_STDS = (0.15, 0.3, 0.6, 1.2, 2.4)
"""Standard deviations of the step from one version to the next, in nats; the votes say how likely each is."""

NOT_COMPARABLE = "not yet compared with the base by votes"
"""The note of a version or model without a win rate."""

_VERSION = re.compile(r"v(0|[1-9]\d{0,8})")
_MAX_STEPS = 200
_TOLERANCE = 1e-9
# Numbers of resampled win tables held at a time: 32 MB.
_MAX_NUMBERS = 4_000_000


@dataclass(frozen=True, slots=True)
class Standing:
    """A version or model against the base: `strength` in nats above it, the chance to win against it, and the ends of
    its interval. All four are None, and `note` says why, where no chain of votes connects the two. `num_votes` counts
    the votes between this one and any other. `weighed` is the chance to win if votes count by what is known of their
    raters, None where that is not known.
    """

    name: str
    strength: float | None
    win_rate: float | None
    low: float | None
    high: float | None
    num_votes: int
    note: str = ""
    weighed: float | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    """Contests as arrays: places of the two names, score of the first, place of the prompt."""

    first_N: np.ndarray
    second_N: np.ndarray
    score_N: np.ndarray
    prompt_N: np.ndarray
    vote_N: np.ndarray
    num_names: int
    num_prompts: int


def standings(
    contests: Sequence[Contest],
    base: str = "v0",
    *,
    num_resamples: int = 200,
    weight_of: Mapping[int, float] | None = None,
) -> tuple[Standing, ...]:
    """Each name that has votes against another one, and the base: models by name, then versions by number.

    Strengths are the mode under a normal prior on each, and on each step from a version to the next: the mean over the
    `WALK_STDS` of these steps, each weighted by the marginal likelihood of the votes (by Laplace's method).

    Each end of an interval is the outer one of two: the percentile bootstrap over prompts, which sees that votes on
    one prompt go together, and the normal approximation at the mode, which stays wide where all of a few votes agree.
    Contests within one version say nothing and are left out; of many names the base and the newest versions are kept
    (`MAX_VERSIONS`).

    `weight_of` has weights of votes by their ids, from -1 to 1; `Standing.weighed` is then the win rate for votes that
    count by their sizes, whose mean is taken for 1, and the other way if they are negative. A tie weighs 1.

    Raises:
        InputError: for a score outside of [0, 1].
    """
    seen = {name for one in contests if one.first != one.second for name in (one.first, one.second)} - {base}
    names = sorted({base, *sorted(seen, key=_place)[-(MAX_VERSIONS - 1) :]}, key=_place)
    table = _table(contests, names)
    wins_KK = _wins(table, np.ones((1, len(table.score_N))))[0]
    games_KK = wins_KK + wins_KK.T
    origin = names.index(base)
    linked_K = _linked(games_KK, origin)
    fits = [_Fit.of(wins_KK, prior_KK, origin) for prior_KK in _priors(names)]
    best = max(fits, key=lambda fit: fit.evidence)
    difference_K, variance_K = _mixed(fits, best.evidence)
    half_K = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * np.sqrt(variance_K)
    low_K, high_K = difference_K - half_K, difference_K + half_K
    if table.num_prompts > 1 and num_resamples > 0:
        resampled_SK = _resampled(table, best.prior_KK, num_resamples)
        tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
        drawn_low_K, drawn_high_K = np.quantile(resampled_SK - resampled_SK[:, [origin]], tails, axis=0)
        low_K, high_K = np.minimum(low_K, drawn_low_K), np.maximum(high_K, drawn_high_K)
    weighed_K = None if not weight_of else _weighed(table, weight_of, best.prior_KK, origin)
    found: list[Standing] = []
    for place, name in enumerate(names):
        num_votes = round(float(games_KK[place].sum()))
        if not linked_K[place]:
            found.append(Standing(name, None, None, None, None, num_votes, NOT_COMPARABLE))
            continue
        win_rate, low, high = (float(expit(one_K[place])) for one_K in (difference_K, low_K, high_K))
        weighed = None if weighed_K is None else float(weighed_K[place])
        found.append(Standing(name, float(difference_K[place]), win_rate, low, high, num_votes, weighed=weighed))
    return tuple(found)


def _weighed(table: _Table, weight_of: Mapping[int, float], prior_KK: np.ndarray, origin: int) -> np.ndarray:
    """win_rate_K against the base, by weighed votes."""
    is_decided_N = table.score_N != 0.5
    weight_N = np.array([weight_of.get(vote, 1.0) for vote in table.vote_N.tolist()])
    size = float(np.abs(weight_N[is_decided_N]).mean()) if is_decided_N.any() else 0.0
    weight_N = np.where(is_decided_N, weight_N / size if size > 0 else 1.0, 1.0)
    score_N = np.where(weight_N < 0, 1 - table.score_N, table.score_N)
    wins_KK = _wins(replace(table, score_N=score_N), np.abs(weight_N)[None])[0]
    strength_K = _fit(wins_KK[None], prior_KK)[0]
    return expit(strength_K - strength_K[origin])


def leaderboard(contests: Sequence[Contest], weight_of: Mapping[int, float] | None = None) -> list[Standing]:
    """Standings against `v0`, or else against the name with the most votes: the strongest first, then those that cannot
    be compared. Empty without contests. `weight_of` as in `standings`.
    """
    games = Counter(name for one in contests for name in (one.first, one.second))
    if not games:
        return []
    base = "v0" if "v0" in games else min(games, key=lambda name: (-games[name], name))
    found = standings(contests, base, weight_of=weight_of)
    return sorted(found, key=lambda one: math.inf if one.strength is None else -one.strength)


def _number(name: str) -> int | None:
    """The number of a version; None for another model."""
    found = _VERSION.fullmatch(name)
    return None if found is None else int(found[1])


def _place(name: str) -> tuple[int, str]:
    number = _number(name)
    return (-1, name) if number is None else (number, "")


def _priors(names: Sequence[str]) -> list[np.ndarray]:
    """prior_KK: the precision of the strengths for each standard deviation of a step; one without versions."""
    versions = [(place, number) for place, name in enumerate(names) if (number := _number(name)) is not None]
    alone_KK = np.eye(len(names)) / PRIOR_STD**2
    walk_KK = np.zeros_like(alone_KK)
    for (place, number), (after, later) in pairwise(versions):
        # Versions in between without votes are steps too.
        walk_KK[[place, after], [place, after]] += 1 / (later - number)
        walk_KK[[place, after], [after, place]] -= 1 / (later - number)
    return [alone_KK + walk_KK / std**2 for std in (WALK_STDS if len(versions) > 1 else WALK_STDS[:1])]


def _table(contests: Sequence[Contest], names: Sequence[str]) -> _Table:
    place = {name: index for index, name in enumerate(names)}
    kept = [one for one in contests if one.first != one.second and one.first in place and one.second in place]
    wrong = next((one for one in kept if not 0 <= one.score <= 1), None)
    if wrong is not None:
        raise InputError(
            f"a contest has score {wrong.score}; give 1 for a win of the first, 0 for a loss, 0.5 for a tie"
        )
    prompts, prompt_N = np.unique(np.array([one.prompt_id for one in kept], dtype=np.int64), return_inverse=True)
    return _Table(
        first_N=np.array([place[one.first] for one in kept], dtype=np.int64),
        second_N=np.array([place[one.second] for one in kept], dtype=np.int64),
        score_N=np.array([one.score for one in kept], dtype=np.float64),
        prompt_N=prompt_N.astype(np.int64),
        vote_N=np.array([one.vote_id for one in kept], dtype=np.int64),
        num_names=len(names),
        num_prompts=len(prompts),
    )


def _wins(table: _Table, weight_SN: np.ndarray) -> np.ndarray:
    """wins_SKK: how often, ties half, the row's name won against the column's; contests count by their weight."""
    size = table.num_names
    forward_N, backward_N = table.first_N * size + table.second_N, table.second_N * size + table.first_N
    wins_SKK = np.empty((len(weight_SN), size, size))
    for index, weight_N in enumerate(weight_SN):
        won = np.bincount(forward_N, weight_N * table.score_N, size * size)
        lost = np.bincount(backward_N, weight_N * (1 - table.score_N), size * size)
        wins_SKK[index] = (won + lost).reshape(size, size)
    return wins_SKK


def _fit(wins_SKK: np.ndarray, prior_KK: np.ndarray) -> np.ndarray:
    """strength_SK: the mode for each table of wins, by Newton steps of at most 1 nat, which cannot run away."""
    games_SKK = wins_SKK + wins_SKK.transpose(0, 2, 1)
    strength_SK = np.zeros(wins_SKK.shape[:2])
    for _ in range(_MAX_STEPS):
        chance_SKK = expit(strength_SK[:, :, None] - strength_SK[:, None, :])
        slope_SK = (wins_SKK - games_SKK * chance_SKK).sum(axis=2) - strength_SK @ prior_KK
        step_SK = np.linalg.solve(_curvature(games_SKK, chance_SKK, prior_KK), slope_SK[:, :, None])[:, :, 0]
        longest_S = np.abs(step_SK).max(axis=1, keepdims=True)
        strength_SK += step_SK / np.maximum(1.0, longest_S)
        if longest_S.max() < _TOLERANCE:
            break
    return strength_SK


def _curvature(games_SKK: np.ndarray, chance_SKK: np.ndarray, prior_KK: np.ndarray) -> np.ndarray:
    """The negative second derivative of the log posterior, positive definite because of the prior."""
    weight_SKK = games_SKK * chance_SKK * (1 - chance_SKK)
    places = np.arange(weight_SKK.shape[1])
    curvature_SKK = prior_KK - weight_SKK
    curvature_SKK[:, places, places] += weight_SKK.sum(axis=2)
    return curvature_SKK


@dataclass(frozen=True, slots=True)
class _Fit:
    """The mode under one prior: strengths above the one at the origin, their variances, and the log marginal likelihood
    of the votes up to a constant, by Laplace's method: a normal density at the mode.
    """

    prior_KK: np.ndarray
    difference_K: np.ndarray
    variance_K: np.ndarray
    evidence: float

    @classmethod
    def of(cls, wins_KK: np.ndarray, prior_KK: np.ndarray, origin: int) -> "_Fit":
        strength_K = _fit(wins_KK[None], prior_KK)[0]
        gap_KK = strength_K[:, None] - strength_K[None, :]
        curvature_KK = _curvature((wins_KK + wins_KK.T)[None], expit(gap_KK)[None], prior_KK)[0]
        covariance_KK = np.linalg.inv(curvature_KK)
        own_K = np.diag(covariance_KK)
        variance_K = np.maximum(0.0, own_K + own_K[origin] - 2 * covariance_KK[origin])
        height = -(wins_KK * np.logaddexp(0.0, -gap_KK)).sum() - strength_K @ prior_KK @ strength_K / 2
        volume = np.linalg.slogdet(prior_KK)[1] - np.linalg.slogdet(curvature_KK)[1]
        return cls(prior_KK, strength_K - strength_K[origin], variance_K, float(height + volume / 2))


def _mixed(fits: Sequence[_Fit], highest: float) -> tuple[np.ndarray, np.ndarray]:
    """difference_K and variance_K over all fits, each as likely as its evidence says, of which `highest` is the most.

    The votes rarely tell the step between versions: the best fit alone would be too sure.
    """
    weight_F = np.exp([fit.evidence - highest for fit in fits])
    weight_F /= weight_F.sum()
    difference_FK = np.array([fit.difference_K for fit in fits])
    mean_K = weight_F @ difference_FK
    return mean_K, weight_F @ (np.array([fit.variance_K for fit in fits]) + (difference_FK - mean_K) ** 2)


def _resampled(table: _Table, prior_KK: np.ndarray, num_resamples: int) -> np.ndarray:
    """strength_SK of resamples: prompts drawn with replacement, all votes of a drawn prompt with it."""
    random = np.random.default_rng(0)
    portion = max(1, _MAX_NUMBERS // max(len(table.score_N), table.num_names**2))
    fitted: list[np.ndarray] = []
    for start in range(0, num_resamples, portion):
        num = min(portion, num_resamples - start)
        drawn_SP = random.multinomial(table.num_prompts, np.full(table.num_prompts, 1 / table.num_prompts), size=num)
        fitted.append(_fit(_wins(table, drawn_SP[:, table.prompt_N].astype(np.float64)), prior_KK))
    return np.concatenate(fitted)


def _linked(games_KK: np.ndarray, origin: int) -> np.ndarray:
    """linked_K: True where a chain of contests leads from the name at `origin`."""
    linked_K = np.arange(len(games_KK)) == origin
    for _ in games_KK:  # no chain is longer than the number of names
        linked_K |= (games_KK[linked_K] > 0).any(axis=0)
    return linked_K
