"""A judge as a reward: grades, or the share of its comparisons that a completion wins, in its group or against a
reference.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from tunesmith.base.config.judge import judge_file, judge_settings
from tunesmith.base.config.sections import RewardSource
from tunesmith.base.core.errors import RewardError
from tunesmith.base.core.log import get_logger
from tunesmith.learn.judges.judge import AnswerText, Grade, Judge, PairText, PairVerdict, Unjudged, open_judge
from tunesmith.learn.rewards.calling import CalledReward
from tunesmith.learn.rewards.outcome import Logged, Outcome, Policy, Sample, SampleError, Scored
from tunesmith.observe.reports.text import answer_text

_log = get_logger(__name__)

_ENDED = ("limit", "away", "fatal")
"""Kinds of failures after which nothing more is asked, so that what was answered depends on the order of answers."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Places of two completions in a call; `second` is None for a reference answer."""

    first: int
    second: int | None
    text: PairText


class JudgeReward(CalledReward):
    """The verdicts of `judge` as rewards from 0 to 1.

    Of a graded judge the grade. Of a pairwise one the share of its comparisons that a completion wins, a tie counting
    half: with the others of its group, with the next `opponents` of them, or with the column `reference`.
    """

    def __init__(self, judge: Judge, name: str = "judge", policy: Policy | None = None) -> None:
        super().__init__(name, _never, policy, is_async=False)
        self.judge = judge
        self._warned = False

    @property
    def is_relative(self) -> bool:
        """True if completions are compared with each other, so that a mean over a group says nothing."""
        return self.judge.settings.mode == "pairwise" and not self.judge.settings.reference

    def begin(self, samples: Sequence[Sample], extras: Mapping[str, object]) -> "Future[Scored]":
        """The outcomes of a call that waits in a thread of its own, while completions are drawn."""
        return self._worker.submit(partial(self.outcomes, samples, extras))

    def outcomes(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> Scored:
        """The reward of each sample, or why it has none. `samples` are whole groups.

        Raises RewardError for a group of one completion without a reference, and for a missing column.
        """
        logged = Logged(len(samples))
        if self.judge.settings.mode == "graded":
            given = [AnswerText(one.prompt.content, _text(one), str(one)) for one in samples]
            grades = self.judge.grades(given)
            outcomes: list[Outcome] = [
                one.value if isinstance(one, Grade) else self._failure(one, sample)
                for one, sample in zip(grades, samples, strict=True)
            ]
            if self.judge.settings.explain:
                logged.extra(f"{self.name}_reasons", [one.reasons if isinstance(one, Grade) else "" for one in grades])
        else:
            outcomes = self._compared(samples, logged)
        self._log_agreement(logged)
        return Scored(outcomes, logged)

    def _log_agreement(self, logged: Logged) -> None:
        found = self.judge.agreement
        if found is not None:
            for name, value in (("", found.share), ("_low", found.low), ("_high", found.high)):
                logged.metric(f"rewards/{self.name}/agreement{name}", value)
        elif not self._warned:
            self._warned = True
            _log.warning(
                "the judge of the reward `%s` was not compared with people's votes; `tunesmith eval judge` does that",
                self.name,
            )

    def check_columns(self, columns: Sequence[str]) -> None:
        """See `CalledReward.check_columns`."""
        reference = self.judge.settings.reference
        if self.judge.settings.mode == "pairwise" and reference and reference not in columns:
            raise RewardError(
                f"reward `{self.name}` compares with the column `{reference}`, but the prompts have no such column; "
                f"they have {', '.join(f'`{name}`' for name in columns) or 'none'}"
            )

    def _arguments(
        self, samples: Sequence[Sample], columns: Sequence[str], extras: Mapping[str, object]
    ) -> dict[str, object]:
        raise AssertionError("a judge is asked by `outcomes`")

    def _compared(self, samples: Sequence[Sample], logged: Logged) -> list[Outcome]:
        comparisons = self._comparisons(samples)
        verdicts = self.judge.pairs([one.text for one in comparisons])
        scores: list[list[float]] = [[] for _ in samples]
        unjudged: list[list[Unjudged]] = [[] for _ in samples]
        for comparison, verdict in zip(comparisons, verdicts, strict=True):
            sides = [(comparison.first, False)] + ([] if comparison.second is None else [(comparison.second, True)])
            for place, is_second in sides:
                if isinstance(verdict, Unjudged):
                    unjudged[place].append(verdict)
                else:
                    scores[place].append(1 - verdict.score_a if is_second else verdict.score_a)
        decided = [one.order_decided for one in verdicts if isinstance(one, PairVerdict)]
        if decided:
            logged.metric(f"rewards/{self.name}/order_decided", fmean(decided))
        outcomes: list[Outcome] = []
        for place, sample in enumerate(samples):
            ended = [one for one in unjudged[place] if one.kind in _ENDED]
            if ended or not scores[place]:
                outcomes.append(self._failure((ended or unjudged[place])[0], sample))
            else:
                outcomes.append(fmean(scores[place]))
        return outcomes

    def _comparisons(self, samples: Sequence[Sample]) -> list[_Comparison]:
        settings = self.judge.settings
        if settings.reference:
            return [
                _Comparison(place, None, self._pair(one, _text(one), self._reference(one)))
                for place, one in enumerate(samples)
            ]
        starts = [place for place, sample in enumerate(samples) if sample.index == 0 or place == 0]
        found: list[_Comparison] = []
        for start, end in pairwise([*starts, len(samples)]):
            size = end - start
            if size < 2:
                raise RewardError(
                    f"reward `{self.name}` compares completions of one prompt, but {samples[start]} is alone; draw two "
                    "or more of each, give the judge `mode: graded`, or a `reference` column"
                )
            most = size - 1 if settings.opponents is None else min(settings.opponents, size - 1)
            places = {(a, (a + ahead) % size) for a in range(size) for ahead in range(1, most + 1)}
            for a, b in sorted({(min(pair), max(pair)) for pair in places}):
                first, second = samples[start + a], samples[start + b]
                found.append(_Comparison(start + a, start + b, self._pair(first, _text(first), _text(second))))
        return found

    def _reference(self, sample: Sample) -> str:
        given = sample.prompt.columns.get(self.judge.settings.reference)
        if not isinstance(given, str):
            raise RewardError(
                f"reward `{self.name}` compares with the column `{self.judge.settings.reference}`, which is "
                f"{given!r} in {sample}; give a text"
            )
        return given

    @staticmethod
    def _pair(sample: Sample, a: str, b: str) -> PairText:
        return PairText(sample.prompt.content, a, b, str(sample))

    def _failure(self, why: Unjudged, sample: Sample) -> SampleError:
        return SampleError(f"reward `{self.name}` has no verdict on {sample}: {why.message}", why.kind)


def judge_reward(section: RewardSource, policy: Policy) -> JudgeReward:
    """The reward that the judge of `section.source` is. Raises RewardError for a key that belongs to other rewards."""
    source = section.source
    others = {
        "arguments": bool(section.arguments),
        "label": section.label is not None,
        "transform": section.transform != "raw",
        "pessimism": section.pessimism != 0,
        "weights": section.weights != "model",
        "timeout_s": section.timeout_s is not None,
        "workers": bool(section.workers),
    }
    if given := [name for name, is_given in others.items() if is_given]:
        raise RewardError(
            f"reward {source!r} is a judge, which takes no {' and no '.join(given)}: remove it; a judge's settings are "
            "in its own file"
        )
    file = judge_file(source)
    return JudgeReward(open_judge(judge_settings(source)), "judge" if file is None else Path(file).stem, policy)


def _text(sample: Sample) -> str:
    """The text of a completion; of a trajectory that of all turns, calls and replies."""
    trajectory = sample.completion.trajectory
    if trajectory is None:
        return sample.completion.text
    return answer_text({"messages": list(trajectory.messages), "stop_reason": trajectory.stop_reason})


def _never() -> object:
    raise AssertionError("a judge is asked by `outcomes`")
