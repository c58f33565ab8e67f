"""What is known of a rater in plain sentences: for the rater alone, and in short for admins."""

from collections.abc import Mapping

from tunesmith.collect.statistics.habits import HabitName
from tunesmith.collect.statistics.rater_report import RaterReport
from tunesmith.collect.statistics.raters import Estimate

_CHANCE = 0.65
"""Where the interval of a reliability ends below, it is hardly more than chance."""

_ADVICE: Mapping[HabitName, str] = {
    "one_side": "Sides are drawn by chance, so please look at both answers before you choose.",
    "too_fast": "There is no hurry: please read both answers to the end, and skip a pair that is too long.",
    "even_pace": "Pairs differ in length and difficulty, so please take for each the time that it needs.",
    "regular_sides": "Sides are drawn by chance, so please judge each pair by itself.",
}


def own_words(report: RaterReport | None) -> list[str]:
    """What the page of a rater's own votes says of them. It names no other rater."""
    if report is None or report.num_votes == 0:
        return [
            "You have not preferred an answer of a pair yet. When you have, this says how your votes are understood."
        ]
    said = [f"You have preferred an answer in {_count(report.num_votes, 'vote')}."]
    said += _agreement(report)
    said.append(_sides(report.left_share))
    said += [f"We noticed {one.figures}. {_ADVICE[one.name]}" for one in report.habits]
    return said


def _agreement(report: RaterReport) -> list[str]:
    if not report.is_known:
        return [
            f"{_count(report.num_compared, 'of them can', 'of them can')} be compared, because others have judged the "
            "same pair or its better answer is known: too few to say how often you agree."
        ]
    right = report.reliability
    said = [
        f"{report.num_compared} of them can be compared with what others say of the same pair, or with a known answer. "
        f"By all that is known you name the better answer in {_share(right)} of the pairs."
    ]
    if right.high < 0.5:
        said.append(
            "So you mostly say the opposite of the others. Perhaps the two answers are mixed up somewhere: please read "
            "the guidelines once more, and ask if something is not clear."
        )
    elif right.high < _CHANCE:
        said.append(
            "That is little more than chance. Much is a matter of taste, and the guidelines say what to look for; a "
            "pair that you cannot judge is better skipped."
        )
    effective = f"{report.effective:.0f}" if report.effective >= 1 else "less than one"
    said.append(f"Where votes are weighed, yours say as much as {effective} without an error.")
    return said


def _sides(left: Estimate) -> str:
    said = f"You take the left answer in {_share(left)} of the pairs."
    if left.low <= 0.5 <= left.high:
        return f"{said} Half is what chance makes of it, so there is no sign of a favourite side."
    return f"{said} Sides are drawn by chance, so it would be about half if the side made no difference."


def notes(report: RaterReport) -> list[str]:
    """What admins see beside the figures, in short."""
    said: list[str] = []
    if report.is_known and report.reliability.high < 0.5:
        said.append("contradicts the others: votes count the other way where they are weighed")
    elif report.is_known and report.reliability.high < _CHANCE:
        said.append("little more than chance")
    elif not report.is_known:
        said.append(f"only {report.num_compared} votes can be compared")
    return [*said, *(one.figures for one in report.habits)]


def _share(one: Estimate) -> str:
    return f"about {100 * one.value:.0f} % ({100 * one.low:.0f} to {100 * one.high:.0f} %)"


def _count(num: int, noun: str, nouns: str = "") -> str:
    return f"{num} {noun if num == 1 else nouns or noun + 's'}"
