"""Share of right answers on held-out prompts, for rewards that can be verified: sampled and greedy, before and after.

Shape legend: P prompts, G completions per prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.statistics.intervals import mcnemar
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.learn.rewards.scorer import Scorer


class Draws(Protocol):
    """Draws `n` completions of each prompt: an engine, or the rollouts of a trainer."""

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams) -> list[Group]:
        """One group for each prompt."""
        ...


def measure(
    drawing: Draws,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    num_completions: int,
    correct_at: float,
    when: str,
) -> dict[str, object]:
    """The accuracy of the engine's policy on `prompts` as JSON values, `when` behind each name: the share of right
    completions among all that were drawn, and among the greedy ones; `greedy_hits_<when>` is one bit for each prompt.

    A completion is right if its reward reaches `correct_at`.
    """
    with span("accuracy"):
        drawn = scorer.score(drawing.generate(prompts, num_completions, sampling))
        best = scorer.score(drawing.generate(prompts, 1, replace(sampling, temperature=0.0)))
    # A completion whose reward failed has a total of 0, which may reach the bound.
    drawn_PG = drawn.valid_PG & (drawn.total_PG >= correct_at)
    hits = (best.valid_PG & (best.total_PG >= correct_at))[:, 0].int().tolist()
    return {
        f"accuracy_{when}": drawn_PG.float().mean().item(),
        f"greedy_{when}": sum(hits) / len(hits),
        f"greedy_hits_{when}": hits,
    }


def figures(facts: Mapping[str, Any]) -> dict[str, object]:
    """Accuracies before and after, and McNemar's exact p-value of the greedy answers; empty if none was measured."""
    if "accuracy_after" not in facts:
        return {}
    before, after = facts["greedy_hits_before"], facts["greedy_hits_after"]
    lost = sum(was and not now for was, now in zip(before, after, strict=True))
    won = sum(now and not was for was, now in zip(before, after, strict=True))
    names = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after")
    return {**{name: facts[name] for name in names}, "p_value": mcnemar(lost, won), "num_heldout": len(before)}
