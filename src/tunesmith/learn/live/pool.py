"""The order in which pairs that are there already are asked about: of a campaign, or of a file with labels.

Some pairs are asked at random, for figures without the bias of the choice. Which ones, and in which order, follows from
the seed and the pair alone: whatever was chosen before, those that were asked are a sample of the whole pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tunesmith.base.config.algorithms.live import LiveSelectionSection
from tunesmith.base.core.seeds import derive
from tunesmith.collect.store.asking import RANDOM
from tunesmith.learn.live.selection import Beliefs, choose_pairs, mixed


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pair that nobody was asked about. Pairs with one `prompt` are all asked at random, or all chosen.

    `features_2F` are those of its answers, float64; None for one that only chance may choose, such as a held-out one.
    """

    id: int
    prompt: int | str
    features_2F: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Placed:
    """A pair in the order, and why it is there: `random`, or the method and the value that it saw."""

    id: int
    reason: str


def asking_order(
    pool: Sequence[Waiting], beliefs: Beliefs | None, section: LiveSelectionSection, *, most: int, seed: int
) -> list[Placed]:
    """At most `most` pairs of the pool, those that are asked first at the front, by the section's method.

    Pairs that are asked at random are spread evenly among the chosen ones, as many as is their share of the pool: those
    without features, and of the others `random_share` of the prompts; with the method `random` all. `beliefs` may be
    None if nothing can be chosen. A pure function of all these.
    """
    at_random = [one for one in pool if _is_random(one, section, seed)]
    at_random.sort(key=lambda one: (derive(seed, "place", one.id), one.id))
    by_chance = {one.id for one in at_random}
    rest = [one for one in pool if one.id not in by_chance]
    num_random = len(at_random) if len(pool) <= most else round(most * len(at_random) / len(pool))
    chosen: list[Placed] = []
    if beliefs is not None and rest:
        groups = [one.features_2F for one in rest if one.features_2F is not None]
        # The rest shrinks from call to call, and so draws are new ones.
        draws = derive(seed, "choice", len(rest))
        found = choose_pairs(groups, [{(0, 1)}] * len(rest), beliefs, section, draws, most - num_random)
        chosen = [Placed(rest[one.prompt].id, one.reason) for one in found]
    return mixed(chosen, [Placed(one.id, RANDOM) for one in at_random[:num_random]])


def _is_random(one: Waiting, section: LiveSelectionSection, seed: int) -> bool:
    if one.features_2F is None or section.method == "random":
        return True
    return derive(seed, "random share", one.prompt) < section.random_share * 2**63
