"""Figures of a reward model on each of several sources of pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunesmith.collect.data.collate import EncodedPreference
from tunesmith.collect.data.sets import PreferenceSets
from tunesmith.learn.algorithms.preference_loss import HeadsStats, PreferenceStats, RankingStats
from tunesmith.learn.algorithms.sums import Beside, merged
from tunesmith.learn.evaluation.reward_quality import DecidedPair, decided_pairs

Stats = PreferenceStats | RankingStats | HeadsStats | Beside


def decided_by_source(data: PreferenceSets) -> list[tuple[str, list[EncodedPreference], bool]]:
    """(Name, decided items, whether other items are trained on) of each source to evaluate on, if it has such items."""
    rows = [(name, items, True) for name, items in data.heldout_by_source.items()]
    rows += [(name, items, False) for name, items in data.elsewhere_by_source.items()]
    decided = [(name, [item for item in items if item.decided], is_trained) for name, items, is_trained in rows]
    return [row for row in decided if row[1]]


@dataclass(slots=True)
class EvaluationFigures:
    """Collects what a reward model is like on each source, and gives it as metrics.

    Those of all held-out pairs together have the names `eval/accuracy` and so on; those of a source, if it has a name,
    `eval/<source>/accuracy`, `eval/<source>/longer_wins` and `eval/<source>/num_pairs`.
    """

    stats: list[Stats] = field(default_factory=list[Stats])
    items: list[EncodedPreference] = field(default_factory=list[EncodedPreference])
    of_sources: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, name: str, items: Sequence[EncodedPreference], stats: Stats, *, is_trained: bool) -> None:
        """Add the decided `items` of a source, one at least, and their statistics; only those of sources that are
        trained on count among all.
        """
        if is_trained:
            self.stats.append(stats)
            self.items += items
        if name:
            self.of_sources[f"eval/{name}/accuracy"] = stats.metrics()["accuracy"]
            self.of_sources |= _baseline(f"eval/{name}", items)

    def metrics(self) -> dict[str, float]:
        """All figures, first those of all held-out pairs; empty without any pairs."""
        if not self.items:
            return self.of_sources
        figures = merged(self.stats).metrics()
        metrics = {f"eval/{name}": value for name, value in figures.items() if name != "tie_fraction"}
        return {**metrics, **_baseline("eval", self.items), **self.of_sources}


def _baseline(prefix: str, items: Sequence[EncodedPreference]) -> dict[str, float]:
    """The number of decided pairs, and the accuracy of preferring the longer side."""
    decided = [pair for item in items for pair in item.decided]
    longer = sum((len(better) > len(worse)) + 0.5 * (len(better) == len(worse)) for better, worse in decided)
    return {f"{prefix}/num_pairs": float(len(decided)), f"{prefix}/longer_wins": longer / len(decided)}


def pairs_to_judge(data: PreferenceSets) -> tuple[list[DecidedPair], list[DecidedPair]]:
    """(The decided held-out pairs, those of sources that are only evaluated on), each with the name of its source."""

    def decided(groups: Mapping[str, Sequence[EncodedPreference]], prompts: Mapping[str, str]) -> list[DecidedPair]:
        return [pair for name, items in groups.items() for pair in decided_pairs(items, prompts, name)]

    own = decided(data.heldout_by_source, data.heldout_prompts)
    return own, decided(data.elsewhere_by_source, data.elsewhere.prompts)
