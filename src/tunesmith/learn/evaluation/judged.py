"""A judge in comparisons of two models, and its agreement with people in words."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, final

import numpy as np

from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.records import Text
from tunesmith.learn.judges.answers import PeopleAgreement
from tunesmith.learn.judges.judge import Judge, PairText, PairVerdict, Unjudged, check_answered, said_of

_log = get_logger(__name__)


@final
class JudgedPairs:
    """Compares each completion of one model with that of the other of the same prompt and number."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self._order_decided: list[bool] = []
        self._said = ""

    def score(
        self, prompts: Sequence[Text], before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The scores of both models' completions, of shape [P, G]: 1 for the better, 0 for the worse, 0.5 for a tie,
        NaN for a pair without a verdict. Raises InputError if the judge answers nothing at all.
        """
        pairs = [
            PairText(prompt, b, a, f"prompt {p}, completion {g}")
            for p, (prompt, old, new) in enumerate(zip(prompts, before, after, strict=True))
            for g, (a, b) in enumerate(zip(old, new, strict=True))
        ]
        verdicts = self.judge.pairs(pairs)
        unjudged = [one for one in verdicts if isinstance(one, Unjudged)]
        check_answered(verdicts)
        self._said = said_of(unjudged, len(pairs))
        if self._said:
            _log.warning("%s", self._said)
        self._order_decided = [one.order_decided for one in verdicts if isinstance(one, PairVerdict)]
        scores = [one.score_a if isinstance(one, PairVerdict) else math.nan for one in verdicts]
        after_PG = np.array(scores, dtype=np.float64).reshape(len(prompts), -1)
        return 1 - after_PG, after_PG

    def facts(self) -> dict[str, Any]:
        """The judge as JSON values, with the share of pairs that the order decided, and what was not judged."""
        decided = self._order_decided
        return {
            **self.judge.facts(),
            "order_decided": fmean(decided) if decided else None,
            "unjudged": self._said,
        }


def agreement_text(found: PeopleAgreement | Mapping[str, Any] | None) -> str:
    """The agreement as a phrase, which stands beside every figure that the judge makes."""
    if found is None:
        return "agreement with people's votes not measured (tunesmith eval judge)"
    get = found.get if isinstance(found, Mapping) else lambda name: getattr(found, name)
    return (
        f"agrees with people on {get('share'):.0%} of their votes, 95 % interval {get('low'):.0%} to {get('high'):.0%} "
        f"({get('num_votes')} votes, {get('num_prompts')} prompts: {get('source')})"
    )
