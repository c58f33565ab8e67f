"""Several score heads on one trunk: their random beginning, and what they say of answers that people voted on.

Shape legend: N answers, K heads, H hidden.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.seeds import derive

HEADS = "tunesmith_reward_heads"
"""The key in a config of a reward model with several heads: the fields of its `Known`, none before it is trained."""

_COMMON = 0.95


@dataclass(frozen=True, slots=True)
class Known:
    """What the heads say of answers that people voted on.

    `offsets` are the mean reward of each head there, less the mean of all heads: votes compare answers of one prompt,
    so they say nothing of what a head adds to all of them. The others are of the spread, the standard deviation of the
    heads' rewards of an answer without these offsets: its mean and median, and what 95 % of the answers have at most.
    """

    offsets: tuple[float, ...]
    mean: float
    median: float
    common: float
    num_answers: int

    @classmethod
    def of_rewards(cls, reward_NK: torch.Tensor) -> Self:
        """The facts of N answers, one at least, from the reward that each head gives them."""
        reward_NK = reward_NK.double()
        of_head_K = reward_NK.mean(0)
        offset_K = of_head_K - of_head_K.mean()
        spread_N = (reward_NK - offset_K).std(-1)
        median, common = spread_N.quantile(spread_N.new_tensor([0.5, _COMMON])).tolist()
        return cls(tuple(offset_K.tolist()), float(spread_N.mean()), median, common, len(spread_N))

    @classmethod
    def of_config(cls, stored: object, num_heads: int) -> Self | None:
        """The facts in a model's config; None if there are none yet.

        Raises:
            ModelError: they are damaged, or those of another number of heads.
        """
        if not stored:
            return None
        facts = cast(Mapping[str, Any], stored) if isinstance(stored, Mapping) else {}
        values: dict[str, Any] = {field.name: facts.get(field.name) for field in fields(cls)}
        offsets = values.pop("offsets")
        numbers = [*(cast(list[Any], offsets) if isinstance(offsets, list) else ()), *values.values()]
        if len(numbers) != num_heads + len(values) or not all(
            isinstance(one, int | float) and math.isfinite(one) for one in numbers
        ):
            raise ModelError(f"{HEADS} in config.json is damaged or that of another model; get the model again")
        return cls(tuple(numbers[:num_heads]), **values)

    def to_json(self) -> dict[str, object]:
        """All fields as JSON types."""
        return {**asdict(self), "offsets": list(self.offsets)}


def num_heads_of(model: PreTrainedModel) -> int:
    """Heads of a reward model: 1 but for those that Tunesmith trains with more."""
    return int(cast(Any, model.config).num_labels) if getattr(model.config, HEADS, None) is not None else 1


def add_heads(model: PreTrainedModel, count: int, prior_scale: float, seed: int) -> None:
    """Give `model`, a classifier with one float score, `count` heads: its own, plus a random part for each.

    Random parts are normal with standard deviation `prior_scale` / sqrt(H), less their mean over the heads, so that the
    mean of the heads is the score as it was.

    Raises:
        ModelError: it has several heads already, and not as many.
    """
    have = num_heads_of(model)
    if have == count:
        return
    if have > 1:
        raise ModelError(f"the reward model has {have} heads, and {count} were asked for; set their count to {have}")
    one: nn.Linear = model.score  # type: ignore[assignment]
    prior_KH = torch.randn(count, one.in_features, generator=torch.Generator().manual_seed(derive(seed, "heads")))
    prior_KH = (prior_KH - prior_KH.mean(0)) * (prior_scale / math.sqrt(one.in_features))
    device = one.weight.device
    with torch.no_grad():
        score: nn.Linear = cast(Any, nn.utils).skip_init(
            nn.Linear, one.in_features, count, bias=one.bias is not None, device=device
        )
        score.weight.copy_(one.weight.float() + prior_KH.to(device))
        if one.bias is not None:
            score.bias.copy_(one.bias.float().expand(count))
    describe_heads(model, count, {})
    model.score = score


def describe_heads(model: PreTrainedModel, count: int, facts: Mapping[str, object]) -> None:
    """Write the number of heads, and what is known of them, into the config of `model`."""
    model.config.num_labels = count
    setattr(model, "num_labels", count)  # noqa: B010 - an attribute of classifiers alone
    setattr(model.config, HEADS, dict(facts))
