"""Statistics of votes against independent libraries, on simulated crowds of raters."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import choix
import krippendorff
import numpy as np
import pytest
import statsmodels.api
from scipy.stats import binomtest
from statsmodels.stats.inter_rater import cohens_kappa, to_table

from tunesmith.collect.statistics.bradley_terry import PRIOR_STD, standings
from tunesmith.collect.store.records import CampaignSettings, Candidate, GivenVote, NewItem, PreferenceName
from tunesmith.collect.store.vote_stats import Agreement, BiasTest, VoteStats
from tunesmith.collect.store.vote_watch import Contest
from tunesmith.collect.store.votes import VoteStore

CODES = {"first": 0, "second": 1, "tie": 2, "both_bad": 3}
"""Judgements of an item as numbers: which of its answers was preferred, else the verdict."""

MIRRORED = {0: 1, 1: 0, 2: 2, 3: 3}

Judge = Callable[[random.Random, int, int], str | None]
"""What rater `number` says of item `item`; None if they were never asked."""


def coin(dice: random.Random, item: int, number: int) -> str:
    return dice.choice(("first", "second"))


def opposite(dice: random.Random, item: int, number: int) -> str:
    return ("first", "second")[(random.Random(item).randrange(2) + number) % 2]


def mostly_equal(dice: random.Random, item: int, number: int) -> str:
    best = random.Random(item).randrange(2)
    return ("first", "second")[best if number == 0 or dice.random() < 0.9 else 1 - best]


def always_first(dice: random.Random, item: int, number: int) -> str:
    return "first"


def with_ties(dice: random.Random, item: int, number: int) -> str:
    return dice.choice(("first", "first", "second", "tie", "both_bad"))


def with_gaps(dice: random.Random, item: int, number: int) -> str | None:
    return None if dice.random() < 0.4 else mostly_equal(dice, item, number)


KINDS: Sequence[tuple[Judge, int]] = (
    (coin, 2),
    (coin, 3),
    (opposite, 2),
    (mostly_equal, 2),
    (mostly_equal, 3),
    (always_first, 3),
    (with_ties, 2),
    (with_ties, 4),
    (with_gaps, 3),
    (with_gaps, 5),
)
"""Crowds: how they judge, and how many they are."""


@dataclass(frozen=True)
class Crowd:
    """Judgements of simulated raters, `table[rater][item]`, and what the store says of them."""

    table: Sequence[Sequence[str | None]]
    votes: Sequence[GivenVote]
    stats: VoteStats

    @property
    def codes(self) -> np.ndarray:
        """Each item in both orders of its answers, as the definition has it; NaN for gaps."""
        once = [[math.nan if said is None else CODES[said] for said in row] for row in self.table]
        exchanged = [[one if math.isnan(one) else MIRRORED[int(one)] for one in row] for row in once]
        return np.concatenate([np.array(once, dtype=float), np.array(exchanged, dtype=float)], axis=1)


def rater_name(number: int) -> str:
    return f"rater {number}"


def given(item: int, number: int, said: str, dice: random.Random) -> GivenVote:
    """A vote as files bring it: the preferred answer is often, but not always, the first of its row."""
    texts = [f"answer {item}", f"another answer {item}"]
    places = [0, 1] if dice.random() < 0.5 else [1, 0]
    pair = NewItem(f"prompt {item}", tuple(Candidate(texts[place]) for place in places))
    verdict: PreferenceName = "tie" if said == "tie" else "both_bad" if said == "both_bad" else "better"
    better = places.index(1 if said == "second" else 0)
    left = dice.choice((0, 1, None))
    return GivenVote(pair, verdict, better, rater_name(number), dwell_ms=dice.randrange(1, 5000), left=left)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VoteStore]:
    with VoteStore.open(tmp_path_factory.mktemp("crowds") / "votes.db", seed=1) as store:
        yield store


def crowd(store: VoteStore, judge: Judge, num_raters: int, num_items: int, seed: int) -> Crowd:
    dice = random.Random(seed)
    table = [[judge(dice, item, number) for item in range(num_items)] for number in range(num_raters)]
    votes = [
        given(item, number, said, dice)
        for number, row in enumerate(table)
        for item, said in enumerate(row)
        if said is not None
    ]
    campaign = store.set_campaign(CampaignSettings(name=f"crowd {judge.__name__} {num_raters} {seed}", overlap=10)).id
    store.import_votes(campaign, votes)
    return Crowd(table, votes, store.reader.stats(campaign))


def check_agreement(found: Crowd) -> None:
    """Alpha and every kappa equal those of krippendorff and statsmodels."""
    codes = found.codes
    shared = (~np.isnan(codes)).sum(axis=0) > 1
    if not shared.any() or len(np.unique(codes[:, shared][~np.isnan(codes[:, shared])])) < 2:
        assert found.stats.alpha.value is None
    else:
        expected = krippendorff.alpha(reliability_data=codes, level_of_measurement="nominal")
        assert found.stats.alpha.value == pytest.approx(expected, abs=1e-9)
    assert found.stats.alpha.num == shared.sum() / 2
    kappas: dict[tuple[str, str], Agreement] = {(one.a, one.b): one.kappa for one in found.stats.kappas}
    for a, b in combinations(range(len(codes)), 2):
        both = codes[[a, b]][:, ~np.isnan(codes[[a, b]]).any(axis=0)].T.astype(int)
        if len(both) == 0:
            assert (rater_name(a), rater_name(b)) not in kappas
            continue
        table, _ = to_table(both, bins=np.arange(5) - 0.5)
        kappa = kappas[rater_name(a), rater_name(b)]
        assert kappa.value == pytest.approx(cohens_kappa(table, return_results=False), abs=1e-9)
        assert kappa.num == len(both) / 2


def check_bias(found: BiasTest, hits: Sequence[bool]) -> None:
    """Share and p-value equal those of scipy."""
    assert (found.num_hits, found.num) == (sum(hits), len(hits))
    if hits:
        assert found.share == pytest.approx(np.mean(hits), abs=1e-12)
        assert found.p_value == pytest.approx(binomtest(sum(hits), len(hits)).pvalue, abs=1e-9)


def check_raters(found: Crowd) -> None:
    """Counts, biases and times of all and of each rater equal those of the simulated votes."""
    of_all = [(found.stats, found.votes)]
    of_each = [(one, [vote for vote in found.votes if vote.rater == one.name]) for one in found.stats.raters]
    for stats, votes in (*of_all, *of_each):
        assert (stats.num_votes, stats.num_ties) == (len(votes), sum(vote.verdict == "tie" for vote in votes))
        assert stats.num_both_bad == sum(vote.verdict == "both_bad" for vote in votes)
        decided = [vote for vote in votes if vote.verdict == "better"]
        check_bias(stats.left, [vote.left == vote.better for vote in decided if vote.left is not None])
        lengths = [[len(one.text) for one in vote.item.candidates] for vote in decided]
        longer = [of_both[vote.better] == max(of_both) for vote, of_both in zip(decided, lengths, strict=True)]
        check_bias(stats.longer, longer)
    for stats, votes in of_each:
        assert stats.median_dwell_ms == np.median([vote.dwell_ms for vote in votes if vote.dwell_ms is not None])


def test_figures_of_200_crowds_are_those_of_the_libraries(store: VoteStore) -> None:
    """People judge raters by alpha, kappa, sides, lengths and times: coins, opposites, three raters, ties, gaps.
    Reported: issue 45.10."""
    for seed in range(200):
        judge, num_raters = KINDS[seed % len(KINDS)]
        found = crowd(store, judge, num_raters, 3 + seed % 37, seed)
        check_agreement(found)
        check_raters(found)


def test_accuracy_on_known_answers_is_the_share_of_right_ones(store: VoteStore) -> None:
    """People mix in pairs of which they know the better answer; a tie is wrong, a skip is none.
    Reported: issue 45.10."""
    asked = store.set_campaign(CampaignSettings(name="gold", overlap=10)).id
    pairs = [NewItem(f"gold {item}", (Candidate("good"), Candidate("poor")), gold=0) for item in range(8)]
    store.import_items(asked, pairs)
    said: list[tuple[PreferenceName, int]] = [
        ("better", 0),
        ("much_better", 0),
        ("better", 1),
        ("tie", 0),
        ("both_bad", 0),
    ]
    store.import_votes(asked, [GivenVote(one, *what, rater="ann") for one, what in zip(pairs, said, strict=False)])
    found = store.reader.stats(asked)
    assert (found.raters[0].num_gold, found.raters[0].gold_accuracy) == (5, 2 / 5)
    assert (found.alpha.num, found.num_votes) == (0, 5)


def test_agreement_is_corrected_for_chance(store: VoteStore) -> None:
    """People take 0 for chance, -1 for opposites, 1 for raters who always agree. Reported: issue 45.10."""
    value = {
        judge.__name__: crowd(store, judge, 2, 400, 1000).stats.alpha.value or math.nan
        for judge in (coin, opposite, mostly_equal, always_first)
    }
    assert value["coin"] == pytest.approx(0.0, abs=0.15)
    assert value["opposite"] == pytest.approx(-1.0, abs=0.01)
    assert value["mostly_equal"] == pytest.approx(0.8, abs=0.1)
    assert value["always_first"] == 1.0


def test_agreement_does_not_depend_on_which_answer_a_file_lists_first(store: VoteStore) -> None:
    """People import files whose rows list the preferred answer first. Reported: issue 45.10."""
    votes = [
        given(item, number, "first" if item % 3 else "second", random.Random(item))
        for item in range(9)
        for number in (0, 1)
    ]
    found: list[float | None] = []
    for name in ("as given", "best first"):
        campaign = store.set_campaign(CampaignSettings(name=name, overlap=10)).id
        if name == "best first":
            votes = [
                GivenVote(
                    NewItem(one.item.prompt, (one.item.candidates[one.better], one.item.candidates[1 - one.better])),
                    one.verdict,
                    0,
                    one.rater,
                )
                for one in votes
            ]
        store.import_votes(campaign, votes)
        found.append(store.reader.stats(campaign).alpha.value)
    assert found == [1.0, 1.0]


def test_times_of_raters_are_those_of_numpy(store: VoteStore) -> None:
    """People look for raters who are too quick. Reported: issue 45.10."""
    dice = random.Random(3)
    times = {number: [dice.randrange(10_000) for _ in range(5 + number)] for number in range(4)}
    campaign = store.set_campaign(CampaignSettings(name="times", overlap=10)).id
    store.import_votes(
        campaign,
        [
            GivenVote(given(item, 0, "first", dice).item, "better", 0, rater_name(number), dwell_ms=time)
            for number, row in times.items()
            for item, time in enumerate(row)
        ],
    )
    for one in store.reader.stats(campaign).raters:
        assert one.median_dwell_ms == np.median(times[int(one.name.split()[1])])


@pytest.mark.parametrize("seed", range(5))
def test_strengths_and_their_errors_are_those_of_the_libraries(seed: int) -> None:
    """People compare models by votes: strengths as choix has them, errors as statsmodels. Reported: issue 45.10."""
    dice = random.Random(seed)
    truth = [0.0, 0.5, -0.7, 1.2]
    names = [f"model {number}" for number in range(4)]
    contests: list[Contest] = []
    for number in range(120):
        a, b = dice.sample(range(4), 2)
        chance = 1 / (1 + math.exp(truth[b] - truth[a]))
        contests.append(
            Contest(names[a], names[b], 0.5 if dice.random() < 0.1 else float(dice.random() < chance), number)
        )
    # choix knows no ties: every vote counts twice, once for either answer where it is a tie, and the prior as well.
    places = [(names.index(one.first), names.index(one.second), one.score) for one in contests]
    won = [(a, b) if score > half else (b, a) for a, b, score in places for half in (0.25, 0.75)]
    strength = choix.opt_pairwise(4, won, alpha=1 / PRIOR_STD**2, tol=1e-12)
    rows = np.array([np.eye(4)[a] - np.eye(4)[b] for a, b, _ in places])
    curvature = np.eye(4) / PRIOR_STD**2 - statsmodels.api.Logit([float(s > 0.5) for _, _, s in places], rows).hessian(
        strength
    )
    covariance = np.linalg.inv(curvature)
    for one in standings(contests, base=names[0], num_resamples=0):
        if one.num_votes == 0 or one.name == names[0]:
            continue
        place = names.index(one.name)
        gap = strength[place] - strength[0]
        error = math.sqrt(covariance[place, place] + covariance[0, 0] - 2 * covariance[place, 0])
        low, high = (1 / (1 + math.exp(-(gap + side * 1.959963984540054 * error))) for side in (-1, 1))
        assert one.strength == pytest.approx(gap, abs=1e-6)
        assert (one.low, one.high) == (pytest.approx(low, abs=1e-6), pytest.approx(high, abs=1e-6))
