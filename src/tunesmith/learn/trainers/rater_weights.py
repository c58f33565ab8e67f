"""The weight that a vote has in training by what the votes say of its rater: `pairs.raters: estimated`.

A vote that is right with the probability q weighs 2 q - 1, which is the slope of its log-likelihood at equal rewards
(Chen et al. 2013, equation 4). If the rater is surely below 1/2, its answers are exchanged, and it weighs 1 - 2 q; one
who may be on either side weighs nothing where q is below 1/2. Weights have the mean 1, so that those of equally good
raters change nothing.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch

from tunesmith.base.config.sections import PairsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Judgement, Pair, Ranking, plain_text
from tunesmith.collect.data.split import prompt_key
from tunesmith.collect.statistics.raters import Guess, PairVotes, Reliabilities, reliabilities
from tunesmith.learn.evaluation.tfidf import TextPair, fit_logistic, pair_rows

PreferenceT = TypeVar("PreferenceT", bound=Judgement | Pair | Ranking)

MIN_PAIRS = 100
"""Fewer pairs are not enough for a model of texts."""

_FOLDS = 3
_L2 = 2.0
_SIDES = {"left": 1, "right": -1, None: 0, "": 0}

_log = get_logger(__name__)


@dataclass(slots=True)
class VotesOfRaters:
    """Weighs the votes of the rows to train on. `found` is what it found, once it was called."""

    found: Reliabilities | None = None
    names: list[Hashable] = field(default_factory=list[Hashable])

    def __call__(self, rows: list[PreferenceT]) -> list[PreferenceT]:
        """The rows in their order. Pairs that are decided have weights with the mean 1, and those that are more likely
        wrong than right have their answers exchanged; ties and other rows stay as they are.

        Raises:
            DataError: no pair names its rater.
        """
        places = [place for place, row in enumerate(rows) if isinstance(row, Pair) and not row.tie]
        pairs = [row for row in rows if isinstance(row, Pair) and not row.tie]
        if not pairs:  # ties alone
            return rows
        if not any(pair.prompt.columns.get("rater") for pair in pairs):
            raise DataError(
                "pairs.raters is estimated, but no row says who voted in a column `rater`, as the files of "
                "`tunesmith votes export` do; add it, or set pairs.raters: equal"
            )
        raters: dict[Hashable, int] = {}
        votes = _arrays(pairs, raters)
        self.found, self.names = reliabilities(votes, _guess(pairs, votes)), list(raters)
        weight_N = self.found.weight_N
        size = float(np.abs(weight_N).mean())
        if size == 0:
            raise DataError("the votes say nothing by what is known of their raters; set pairs.raters: equal")
        weighed = list(rows)
        for place, pair, weight in zip(places, pairs, (weight_N / size).tolist(), strict=True):
            sides = (pair.chosen, pair.rejected) if weight >= 0 else (pair.rejected, pair.chosen)
            weighed[place] = replace(pair, chosen=sides[0], rejected=sides[1], weight=abs(weight))
        _log.info("%s", self.said)
        return weighed

    @property
    def facts(self) -> dict[str, object]:
        """Figures for the summary of a run; none before the call."""
        if self.found is None:
            return {}
        return {"num_raters": len(self.names), "num_effective_votes": round(self.found.effective, 1)}

    @property
    def said(self) -> str:
        """What was found, in a sentence."""
        assert self.found is not None
        num_votes, num_raters = len(self.found.confidence_N), len(self.names)
        reversed_ = [one for one in self.found.raters if one.reliability.high < 0.5]
        return (
            f"the {num_votes} votes of {num_raters} raters say as much as {self.found.effective:.0f} without an error"
            + (
                f"; those of {len(reversed_)} count the other way, because they contradict the others"
                if reversed_
                else ""
            )
        )


def votes_of_raters(section: PairsSection) -> VotesOfRaters | None:
    """What weighs votes as `section` asks for; None if all count the same."""
    return VotesOfRaters() if section.raters == "estimated" else None


def _arrays(pairs: Sequence[Pair], raters: dict[Hashable, int]) -> PairVotes:
    """The votes as arrays. Two answers to a prompt are one item, in whichever order they come."""
    items: dict[Hashable, int] = {}
    item_N: list[int] = []
    first_N: list[bool] = []
    for pair in pairs:
        sides = repr(pair.chosen), repr(pair.rejected)
        item_N.append(items.setdefault((repr(pair.prompt.content), *sorted(sides)), len(items)))
        first_N.append(sides[0] < sides[1])
    # Rows without a rater are taken for those of one.
    rater_N = [raters.setdefault(pair.prompt.columns.get("rater") or "", len(raters)) for pair in pairs]
    side_N = [_side(pair.prompt.columns.get("chosen_side")) for pair in pairs]
    return PairVotes(
        np.array(item_N),
        np.array(rater_N),
        np.array(first_N),
        np.array(side_N),
        len(raters),
        np.full(len(items), np.nan),
    )


def _side(value: object) -> int:
    return _SIDES.get(value, 0) if isinstance(value, str) or value is None else 0


def _guess(pairs: Sequence[Pair], votes: PairVotes) -> Guess | None:
    """What a Bradley-Terry model of the texts says of each item, fitted to the items of other prompts; None of too few.

    It tells raters apart who have judged different pairs.
    """
    if votes.num_items < MIN_PAIRS:
        return None
    _, first_of_item = np.unique(votes.item_N, return_index=True)
    sides = [
        (pairs[vote].chosen, pairs[vote].rejected)
        if votes.first_N[vote]
        else (pairs[vote].rejected, pairs[vote].chosen)
        for vote in first_of_item
    ]
    rows_IF = pair_rows([TextPair(plain_text(first), plain_text(second)) for first, second in sides])
    fold_I = np.array([derive(0, "fold", prompt_key(pairs[vote])) % _FOLDS for vote in first_of_item])

    def guess(chance_I: np.ndarray) -> np.ndarray:
        odds_I = np.zeros(votes.num_items)
        for fold in range(_FOLDS):
            others, own = (torch.from_numpy(np.flatnonzero(one)) for one in (fold_I != fold, fold_I == fold))
            if len(others) == 0 or len(own) == 0:
                continue
            target_N = torch.from_numpy(2 * chance_I - 1)[others]
            weight_F = fit_logistic(
                rows_IF.index_select(0, others), target_N.sign(), l2=_L2, weight_N=target_N.abs(), max_iter=50
            )
            odds_I[own.numpy()] = (rows_IF.index_select(0, own) @ weight_F[:, None])[:, 0].numpy()
        return odds_I

    return guess
