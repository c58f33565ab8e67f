"""What a trained reward model is worth, in a sentence, and what to change where it is worth little."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tunesmith.learn.evaluation.reward_quality import RewardQuality

_FEWEST_JUDGED = 20
"""Held-out pairs from which on there is a verdict."""

_ALIKE = 0.02
"""Rewards of held-out answers with a smaller standard deviation are those of a model that has hardly been trained: one
that is surely right on 55 % of pairs, and knows it, has some 0.14."""

_SURE = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """`text` is the verdict in a few words. One on a model that no policy should follow has a `name` for the finding,
    and a `warning` with what to change; both are empty otherwise.
    """

    text: str
    name: str = ""
    warning: str = ""


def verdict(row: Mapping[str, float], num_steps: int, quality: RewardQuality | None = None) -> Verdict | None:
    """The verdict on a model after `num_steps` steps, by the metrics of its last evaluation, and by TF-IDF if its
    `quality` has that; the worst that applies. None with fewer than 20 held-out pairs.
    """
    if row.get("eval/num_pairs", 0.0) < _FEWEST_JUDGED:
        return None
    if found := _hardly_learnt(row, num_steps) or _chance(row) or _length(row) or _words(quality):
        return found
    beaten = '"longer wins"' if quality is None or quality.tfidf is None else '"longer wins" and TF-IDF'
    shown = f"right on {row['eval/accuracy']:.0%} of {row['eval/num_pairs']:.0f} held-out pairs"
    return Verdict(f"{shown}, {'more than' if _is_above(row, quality) else 'about as many as'} {beaten}")


def _is_above(row: Mapping[str, float], quality: RewardQuality | None) -> bool:
    return row["eval/accuracy"] > max(row["eval/longer_wins"], (quality.tfidf or 0.0) if quality else 0.0)


def _hardly_learnt(row: Mapping[str, float], num_steps: int) -> Verdict | None:
    """The rewards of held-out answers are all alike."""
    deviation, spread = row.get("eval/std_reward"), row.get("eval/margin_spread")
    if deviation is None or deviation >= _ALIKE:
        return None
    warning = (
        f"the rewards of held-out answers are all alike (standard deviation {deviation:.2g}): the reward model has "
        f"hardly learnt in {num_steps} steps. Raise optimizer.learning_rate and optimizer.head_learning_rate (1e-4 and "
        "1e-3 in the recipe reward_mix), or train for more steps"
    )
    if spread is not None:
        warning += (
            f". Its heads differ by {spread:.2g} all the same, by the random parts that they began with, and "
            "`pessimism` would follow these"
        )
    return Verdict("has hardly learnt: all rewards are alike", "hardly_learnt", warning)


def _chance(row: Mapping[str, float]) -> Verdict | None:
    """The model is right on no more of the pairs than chance often is: at most a standard error above a half."""
    share, num_pairs = row["eval/accuracy"], row["eval/num_pairs"]
    if share - 0.5 > 0.5 / math.sqrt(num_pairs):
        return None
    warning = (
        f"the reward model is right on {share:.0%} of {num_pairs:.0f} held-out pairs, no better than chance: a "
        "policy that follows it learns what nobody prefers. Collect more votes, take pairs that differ in what you ask "
        "about, or train on further sources (recipe reward_mix)"
    )
    return Verdict("no better than chance", "chance", warning)


def _length(row: Mapping[str, float]) -> Verdict | None:
    """The model is right on fewer of all pairs, or of those of a source, than the rule that the longer one wins."""
    worse: dict[str, tuple[float, float]] = {}
    for name, longer in row.items():
        prefix = name.removesuffix("/longer_wins")
        if prefix == name or row[f"{prefix}/num_pairs"] < _FEWEST_JUDGED:
            continue
        if (share := row[f"{prefix}/accuracy"]) < longer:
            worse["all held-out pairs" if prefix == "eval" else prefix.removeprefix("eval/")] = share, longer
    if not worse:
        return None
    shares = ", ".join(f"{pairs}: {share:.0%} against {longer:.0%}" for pairs, (share, longer) in worse.items())
    warning = (
        f"the reward model is right on fewer pairs than the rule that the longer answer wins ({shares}), so on such "
        "pairs it is no guide for a policy. Collect more votes, or train on pairs of the kind that it will judge; "
        "reward_model.length: balanced keeps it from length, and the report shows what else it knows (evaluation.judge)"
    )
    return Verdict(f'worse than "longer wins" on {", ".join(worse)}', "length", warning)


def _words(quality: RewardQuality | None) -> Verdict | None:
    """A model of single words is right on more pairs, and not by chance."""
    if quality is None or quality.tfidf is None or quality.p_value_tfidf is None:
        return None
    if quality.accuracy >= quality.tfidf or quality.p_value_tfidf >= _SURE:
        return None
    warning = (
        f"the reward model is right on {quality.accuracy:.0%} of the held-out pairs, TF-IDF, which knows single words "
        f"alone, on {quality.tfidf:.0%} (p = {quality.p_value_tfidf:.2g}): it has learnt less than the pairs hold. "
        "Train for more steps, with a higher optimizer.learning_rate, or with more layers (reward_model.num_layers)"
    )
    return Verdict("worse than TF-IDF", "words", warning)
