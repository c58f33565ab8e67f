"""Strength of each policy version from votes between answers of two versions (Bradley and Terry 1952).

The chance that version i wins against version j is sigmoid(strength i - strength j); a tie is half a win for each. Uses
numpy only, so that the web server need not load torch. Shape suffixes: N contests, K versions, S resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tunesmith.core.errors import InputError
from tunesmith.evaluation.statistics import check_confidence

MAX_VERSIONS = 100
"""Versions that are fitted together: the base and the newest ones. Each fit solves equations of this size."""

PRIOR_STD = 2.0
"""Standard deviation of the normal prior on each strength: weak (two versions a priori win 0.4 to 99.6 % against each
other in 95 % of cases), but it keeps a version that never lost finite."""

NOT_COMPARABLE = "no chain of votes leads to the base"
"""The note of a version without a win rate."""

_MAX_STEPS = 200
_TOLERANCE = 1e-9
# Numbers of resampled win tables held at a time: 32 MB.
_MAX_NUMBERS = 4_000_000


@dataclass(frozen=True, slots=True)
class Contest:
    """One vote between answers of two versions. `score` is the share of the win that `first` gets: 1, 0, or 0.5 for a
    tie. Votes on one `prompt` depend on each other and are resampled together.
    """

    first: int
    second: int
    score: float
    prompt: int


@dataclass(frozen=True, slots=True)
class Standing:
    """A version against the base: `strength` in nats above it, the chance to win against it, and the ends of its
    interval. All four are None, and `note` says why, where no chain of votes connects the two. `num_votes` counts
    the votes between this version and any other.
    """

    version: int
    strength: float | None
    win_rate: float | None
    low: float | None
    high: float | None
    num_votes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Table:
    """Contests as arrays: places of the two versions, score of the first, place of the prompt."""

    first_N: np.ndarray
    second_N: np.ndarray
    score_N: np.ndarray
    prompt_N: np.ndarray
    num_versions: int
    num_prompts: int


def standings(
    contests: Sequence[Contest], base: int = 0, *, confidence: float = 0.95, num_resamples: int = 200, seed: int = 0
) -> tuple[Standing, ...]:
    """Each version that has votes against another one, and the base, in the order of their numbers.

    Strengths are the mode under a normal prior. Each end of an interval is the outer one of two: the percentile
    bootstrap over prompts, which sees that votes on one prompt go together, and the normal approximation at the mode,
    which stays wide where all of a few votes agree. Contests within one version say nothing and are left out; of many
    versions the base and the newest are kept (`MAX_VERSIONS`).

    Raises:
        InputError: for a score outside of [0, 1], or a confidence outside of (0, 1).
    """
    check_confidence(confidence)
    seen = {version for one in contests if one.first != one.second for version in (one.first, one.second)} - {base}
    versions = sorted({base, *sorted(seen)[-(MAX_VERSIONS - 1) :]})
    table = _table(contests, versions)
    weight_N = np.ones(len(table.score_N))
    wins_KK = _wins(table, weight_N[None])[0]
    games_KK = wins_KK + wins_KK.T
    origin = versions.index(base)
    linked_K = _linked(games_KK, origin)
    strength_K = _fit(wins_KK[None])[0]
    difference_K = strength_K - strength_K[origin]
    low_K, high_K = _interval(table, wins_KK, strength_K, origin, confidence, num_resamples, seed)
    found: list[Standing] = []
    for place, version in enumerate(versions):
        num_votes = round(float(games_KK[place].sum()))
        if not linked_K[place]:
            found.append(Standing(version, None, None, None, None, num_votes, NOT_COMPARABLE))
            continue
        win_rate, low, high = (float(_sigmoid(one_K[place])) for one_K in (difference_K, low_K, high_K))
        found.append(Standing(version, float(difference_K[place]), win_rate, low, high, num_votes))
    return tuple(found)


def _table(contests: Sequence[Contest], versions: Sequence[int]) -> _Table:
    place = {version: index for index, version in enumerate(versions)}
    kept = [one for one in contests if one.first != one.second and one.first in place and one.second in place]
    wrong = next((one for one in kept if not 0 <= one.score <= 1), None)
    if wrong is not None:
        raise InputError(
            f"a contest has score {wrong.score}; give 1 for a win of the first, 0 for a loss, 0.5 for a tie"
        )
    prompts, prompt_N = np.unique(np.array([one.prompt for one in kept], dtype=np.int64), return_inverse=True)
    return _Table(
        first_N=np.array([place[one.first] for one in kept], dtype=np.int64),
        second_N=np.array([place[one.second] for one in kept], dtype=np.int64),
        score_N=np.array([one.score for one in kept], dtype=np.float64),
        prompt_N=prompt_N.astype(np.int64),
        num_versions=len(versions),
        num_prompts=len(prompts),
    )


def _wins(table: _Table, weight_SN: np.ndarray) -> np.ndarray:
    """wins_SKK: how often, ties half, the row's version won against the column's; contests count by their weight."""
    size = table.num_versions
    forward_N, backward_N = table.first_N * size + table.second_N, table.second_N * size + table.first_N
    wins_SKK = np.empty((len(weight_SN), size, size))
    for index, weight_N in enumerate(weight_SN):
        won = np.bincount(forward_N, weight_N * table.score_N, size * size)
        lost = np.bincount(backward_N, weight_N * (1 - table.score_N), size * size)
        wins_SKK[index] = (won + lost).reshape(size, size)
    return wins_SKK


def _fit(wins_SKK: np.ndarray) -> np.ndarray:
    """strength_SK: the mode for each table of wins, by Newton steps of at most 1 nat, which cannot run away."""
    games_SKK = wins_SKK + wins_SKK.transpose(0, 2, 1)
    strength_SK = np.zeros(wins_SKK.shape[:2])
    for _ in range(_MAX_STEPS):
        chance_SKK = _sigmoid(strength_SK[:, :, None] - strength_SK[:, None, :])
        slope_SK = (wins_SKK - games_SKK * chance_SKK).sum(axis=2) - strength_SK / PRIOR_STD**2
        step_SK = np.linalg.solve(_curvature(games_SKK, chance_SKK), slope_SK[:, :, None])[:, :, 0]
        longest_S = np.abs(step_SK).max(axis=1, keepdims=True)
        strength_SK += step_SK / np.maximum(1.0, longest_S)
        if longest_S.max() < _TOLERANCE:
            break
    return strength_SK


def _curvature(games_SKK: np.ndarray, chance_SKK: np.ndarray) -> np.ndarray:
    """The negative second derivative of the log posterior, positive definite because of the prior."""
    weight_SKK = games_SKK * chance_SKK * (1 - chance_SKK)
    places = np.arange(weight_SKK.shape[1])
    curvature_SKK = -weight_SKK
    curvature_SKK[:, places, places] += weight_SKK.sum(axis=2) + 1 / PRIOR_STD**2
    return curvature_SKK


def _interval(
    table: _Table,
    wins_KK: np.ndarray,
    strength_K: np.ndarray,
    origin: int,
    confidence: float,
    num_resamples: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """low_K and high_K of the strength above the one at `origin`, see `standings`."""
    difference_K = strength_K - strength_K[origin]
    chance_KK = _sigmoid(strength_K[:, None] - strength_K[None, :])
    covariance_KK = np.linalg.inv(_curvature((wins_KK + wins_KK.T)[None], chance_KK[None])[0])
    own_K = np.diag(covariance_KK)
    variance_K = np.maximum(0.0, own_K + own_K[origin] - 2 * covariance_KK[origin])
    half_K = NormalDist().inv_cdf((1 + confidence) / 2) * np.sqrt(variance_K)
    low_K, high_K = difference_K - half_K, difference_K + half_K
    if table.num_prompts < 2 or num_resamples < 1:
        return low_K, high_K
    resampled_SK = _resampled(table, num_resamples, seed)
    tail = (1 - confidence) / 2
    drawn_low_K, drawn_high_K = np.quantile(resampled_SK - resampled_SK[:, [origin]], [tail, 1 - tail], axis=0)
    return np.minimum(low_K, drawn_low_K), np.maximum(high_K, drawn_high_K)


def _resampled(table: _Table, num_resamples: int, seed: int) -> np.ndarray:
    """strength_SK of resamples: prompts drawn with replacement, all votes of a drawn prompt with it."""
    random = np.random.default_rng(seed)
    portion = max(1, _MAX_NUMBERS // max(len(table.score_N), table.num_versions**2))
    fitted: list[np.ndarray] = []
    for start in range(0, num_resamples, portion):
        num = min(portion, num_resamples - start)
        drawn_SP = random.multinomial(table.num_prompts, np.full(table.num_prompts, 1 / table.num_prompts), size=num)
        fitted.append(_fit(_wins(table, drawn_SP[:, table.prompt_N].astype(np.float64))))
    return np.concatenate(fitted)


def _linked(games_KK: np.ndarray, origin: int) -> np.ndarray:
    """linked_K: True where a chain of contests leads from the version at `origin`."""
    linked_K = np.arange(len(games_KK)) == origin
    for _ in games_KK:  # no chain is longer than the number of versions
        linked_K |= (games_KK[linked_K] > 0).any(axis=0)
    return linked_K


def _sigmoid(value: np.ndarray) -> np.ndarray:
    # tanh cannot overflow.
    return 0.5 + 0.5 * np.tanh(0.5 * value)
