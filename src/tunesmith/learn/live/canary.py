"""Trial of a version on a share of the API's requests: what the feedback so far says of it.

Answers of both versions to conversations that began since are compared; a conversation counts once, and its version
is drawn by chance, so sides are alike whoever rates. See `collect/statistics/sequential.py` for the test.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tunesmith.base.config.algorithms.live import LiveCanarySection
from tunesmith.collect.statistics.sequential import Tally, evidence_against
from tunesmith.collect.store.runs import TRIED
from tunesmith.learn.live.feedback import LabelledAnswer

Verdict = Literal["serve", "take_back", "wait"]


@dataclass(frozen=True, slots=True)
class Trial:
    """Thumbs that the tried version and the served one got, and when the last one came (or the trial began)."""

    tried: Tally
    served: Tally
    begun_at: float
    last_at: float


def trial_of(labels: Iterable[LabelledAnswer], tried: int, served: int, begun_at: float) -> Trial:
    """The thumbs of answers asked for since `begun_at`; of each conversation the first."""
    firsts: dict[str, LabelledAnswer] = {}
    for label in sorted(labels, key=lambda one: one.feedback_id):
        if label.asked_at >= begun_at and label.version in (tried, served):
            firsts.setdefault(label.conversation, label)
    thumbs = {
        version: [float(one.is_wanted) for one in firsts.values() if one.version == version]
        for version in (tried, served)
    }
    last_at = max((one.created_at for one in firsts.values()), default=begun_at)
    first, second = (Tally(len(found), sum(found)) for found in (thumbs[tried], thumbs[served]))
    return Trial(first, second, begun_at, last_at)


def decide(trial: Trial, section: LiveCanarySection, now: float) -> tuple[Verdict, str]:
    """The decision on the tried version at `now`, and its reason, with the figures.

    It is taken back once the hypothesis that it is not worse is rejected, and served once the one that it is worse by
    `margin` or more is. A probability of at most `p_value` of either error holds for the whole trial. Without feedback
    for `wait_s` the checks on held-out votes decide, which it has passed, unless the thumbs so far are fewer; after
    `most_s` it is taken back.
    """
    tried, served = trial.tried, trial.served
    limit = math.log(1 / section.p_value)
    worse = evidence_against(tried, served, 0.0, is_lower=False)
    good = evidence_against(tried, served, -section.margin, is_lower=True)
    figures = (
        f"{_share(tried)} thumbs up, the served version {_share(served)}; evidence that it is worse {_shown(worse)}, "
        f"that it is not worse by {section.margin:g} or more {_shown(good)}, each decides at {1 / section.p_value:g}"
    )
    if section.share == 0:
        return "serve", f"trials were switched off: {figures}"
    if worse >= limit:
        return "take_back", f"worse: {figures}"
    if good >= limit:
        return "serve", f"not worse: {figures}"
    if now - trial.last_at >= section.wait_s:
        wait = f"no feedback for {section.wait_s:g} s"
        if tried.num and served.num and tried.mean < served.mean:
            return "take_back", f"{wait}, and fewer thumbs up: {figures}"
        return "serve", f"{wait}, so the held-out votes decide: {figures}"
    if now - trial.begun_at >= section.most_s:
        return "take_back", f"not decided after {section.most_s:g} s: {figures}"
    return "wait", f"{TRIED}{section.share:.0%} of the conversations: {figures}"


def _share(tally: Tally) -> str:
    return f"{tally.sum:g} of {tally.num}"


def _shown(log_e: float) -> str:
    return f"{math.exp(min(log_e, 20.0)):.2g}"
