"""The trend of a reward model's rewards over the length of an answer, to be subtracted once the model is trained.

Huang et al. 2024, "Post-hoc Reward Calibration: A Case Study on Length Bias", arXiv 2409.17407. Shape legend: M
answers, J columns of the basis.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, cast

import numpy as np
from transformers import PreTrainedModel

from tunesmith.base.core.errors import ModelError

TREND = "tunesmith_length_trend"
"""The key in a config of a reward model whose rewards are corrected: the fields of its `LengthTrend`."""

_PARTS = ((400, 4), (100, 2), (0, 1))
"""(Answers at least, straight parts of the trend): one part takes a hundred answers, or there is one alone."""


@dataclass(frozen=True, slots=True)
class LengthTrend:
    """The part of a reward that the length of an answer explains, as a function of x = ln(1 + tokens): straight between
    the points (`log_tokens`, `rewards`), of which there are two or more, and beyond them as in the nearest part.

    Its mean over the `num_answers` that it was fitted to is 0, so that the mean reward stays what it is.
    """

    log_tokens: tuple[float, ...]
    rewards: tuple[float, ...]
    num_answers: int

    @classmethod
    def fitted(cls, reward_M: np.ndarray, tokens_M: Sequence[int], prompts: Sequence[Hashable]) -> Self | None:
        """The trend of the rewards of M answers over their tokens, by least squares in float64; None if the answers of
        each prompt are equally long.

        Only answers of one of the `prompts` are compared, since votes say nothing of what a prompt adds to all of its
        answers: a constant for each prompt is fitted beside the trend (the within estimator; the paper fits all answers
        together). Points are quantiles of x, five for 400 answers or more, three for 100, else two.
        """
        x_M = np.log1p(np.asarray(tokens_M, dtype=np.float64))
        number_of = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        group_M = np.array([number_of[prompt] for prompt in prompts])
        is_varied_M = ~np.isclose(_within(x_M[:, None], group_M)[:, 0], 0)
        if not is_varied_M.any():
            return None
        num_parts = next(parts for least, parts in _PARTS if is_varied_M.sum() >= least)
        knots = np.unique(np.quantile(x_M[is_varied_M], np.linspace(0, 1, num_parts + 1)))

        def basis(values: np.ndarray) -> np.ndarray:
            hinges = [np.maximum(values - knot, 0) for knot in knots[1:-1]]
            return np.stack([values, *hinges], axis=1)

        basis_MJ = basis(x_M)
        reward_M = np.asarray(reward_M, dtype=np.float64)
        slope_J = np.linalg.lstsq(_within(basis_MJ, group_M), _within(reward_M[:, None], group_M)[:, 0], rcond=None)[0]
        heights = (basis(knots) - basis_MJ.mean(0)) @ slope_J
        return cls(tuple(knots.tolist()), tuple(heights.tolist()), len(x_M))

    @classmethod
    def of_config(cls, stored: object) -> Self | None:
        """The trend in a model's config; None if there is none.

        Raises:
            ModelError: it is damaged.
        """
        if stored is None:
            return None
        facts = cast(Mapping[str, Any], stored) if isinstance(stored, Mapping) else {}
        x, height, count = (facts.get(field.name) for field in fields(cls))
        if not (
            isinstance(x, list | tuple)
            and isinstance(height, list | tuple)
            and isinstance(count, int)
            and len(cast(list[Any], x)) == len(cast(list[Any], height)) >= 2
            and all(isinstance(one, int | float) and math.isfinite(one) for one in cast(list[Any], [*x, *height]))
            and all(np.diff(cast(list[float], x)) > 0)
        ):
            raise ModelError(f"{TREND} in config.json is damaged; get the model again")
        return cls(tuple(cast(list[float], x)), tuple(cast(list[float], height)), count)

    def at(self, tokens_M: Sequence[int]) -> np.ndarray:
        """The trend at answers of so many tokens, float64 of shape [M]: what is subtracted from their rewards."""
        x_M = np.log1p(np.asarray(tokens_M, dtype=np.float64))
        x, height = np.array(self.log_tokens), np.array(self.rewards)
        part_M = np.clip(np.searchsorted(x, x_M, side="right") - 1, 0, len(x) - 2)
        slope_M = (np.diff(height) / np.diff(x))[part_M]
        return np.asarray(height[part_M] + slope_M * (x_M - x[part_M]))

    @property
    def slope(self) -> float:
        """The reward that an answer of twice the tokens has more, on average from the first point to the last."""
        return math.log(2) * (self.rewards[-1] - self.rewards[0]) / (self.log_tokens[-1] - self.log_tokens[0])

    def to_json(self) -> dict[str, object]:
        """All fields as JSON types."""
        return {**asdict(self), "log_tokens": list(self.log_tokens), "rewards": list(self.rewards)}


def describe_trend(model: PreTrainedModel, trend: LengthTrend | None) -> None:
    """Write `trend` into the config of `model`, or take out what is there."""
    if trend is not None:
        setattr(model.config, TREND, trend.to_json())
    elif hasattr(model.config, TREND):
        delattr(model.config, TREND)


def _within(values_MJ: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """The values less the mean of their group."""
    count = np.bincount(group_M)
    means = np.stack([np.bincount(group_M, column) / count for column in values_MJ.T], axis=1)
    return values_MJ - means[group_M]
