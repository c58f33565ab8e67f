"""Share of right answers on held-out prompts, for rewards that can be verified: sampled and greedy, before and after.

Shape legend: P prompts, G completions per prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.batch.rollout import SamplingParams
from tunesmith.core.errors import DataError
from tunesmith.core.trace import span
from tunesmith.evaluation.statistics import mcnemar
from tunesmith.rewards.scorer import Scorer
from tunesmith.rollout.engine import Engine
from tunesmith.schema.records import Prompt


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`sampled` is the share of right completions among all that were drawn, `greedy_P` whether the greedy one was."""

    sampled: float
    greedy_P: tuple[bool, ...]

    @property
    def greedy(self) -> float:
        """Share of prompts whose greedy completion is right."""
        return sum(self.greedy_P) / len(self.greedy_P)

    def facts(self, when: str) -> dict[str, object]:
        """The figures as JSON values, `when` behind each name; `greedy_hits_<when>` is one bit for each prompt."""
        return {
            f"accuracy_{when}": self.sampled,
            f"greedy_{when}": self.greedy,
            f"greedy_hits_{when}": [int(hit) for hit in self.greedy_P],
        }


def measure(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    num_completions: int,
    correct_at: float,
) -> Accuracy:
    """The accuracy of the engine's policy on `prompts`: a completion is right if its reward reaches `correct_at`.

    Raises:
        DataError: if there are no prompts.
    """
    if not prompts:
        raise DataError(
            "evaluation.correct_at is set, but no prompts are held out; give prompts.heldout_fraction a share above 0"
        )
    with span("accuracy"):
        drawn = scorer.score(engine.generate(prompts, num_completions, sampling))
        best = scorer.score(engine.generate(prompts, 1, replace(sampling, temperature=0.0)))
    # A completion whose reward failed has a total of 0, which may reach the bound.
    drawn_PG = drawn.valid_PG & (drawn.total_PG >= correct_at)
    best_PG = best.valid_PG & (best.total_PG >= correct_at)
    return Accuracy(drawn_PG.float().mean().item(), tuple(best_PG[:, 0].tolist()))


def figures(facts: Mapping[str, Any]) -> dict[str, object]:
    """Accuracies before and after, and McNemar's exact p-value of the greedy answers; empty if none was measured."""
    if "accuracy_after" not in facts:
        return {}
    before, after = facts["greedy_hits_before"], facts["greedy_hits_after"]
    lost = sum(was and not now for was, now in zip(before, after, strict=True))
    won = sum(now and not was for was, now in zip(before, after, strict=True))
    names = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after")
    return {**{name: facts[name] for name in names}, "p_value": mcnemar(lost, won), "num_heldout": len(before)}
