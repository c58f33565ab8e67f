"""Arguments and results of the sampler.

Shape legend: B rows, V vocabulary, N biased tokens of all rows, S slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from tunesmith.core.errors import InputError

SMALLEST_TEMPERATURE = 1e-6
"""Below it float32 logits divided by the temperature overflow; 0 itself is greedy."""

TEMPERATURE_RULE = f"0 (greedy) or at least {SMALLEST_TEMPERATURE}, and finite"


def is_temperature(value_B: torch.Tensor) -> torch.Tensor:
    """True where a number is allowed as a temperature: `TEMPERATURE_RULE`."""
    return (value_B == 0) | ((value_B >= SMALLEST_TEMPERATURE) & value_B.isfinite())


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Numbers that are added to the logits; -inf forbids a token. Row b has the entries from `offset_B1[b]` on.

    `offset_B1` has B + 1 entries. Example: `LogitBias.of([{7: -1.0}, {}, {2: float("-inf"), 9: 3.0}])` has the offsets
    `[0, 1, 1, 3]`, the tokens `[7, 2, 9]` and the values `[-1.0, -inf, 3.0]`.
    """

    offset_B1: torch.Tensor
    token_N: torch.Tensor
    value_N: torch.Tensor

    @classmethod
    def of(cls, biases: Sequence[Mapping[int, float]]) -> Self:
        """From one mapping of token id to number for each row.

        Raises:
            InputError: a number is NaN or +inf, or an id is negative; the message names the row.
        """
        for row, bias in enumerate(biases):
            for token, value in bias.items():
                if not value < float("inf") or token < 0:
                    raise InputError(
                        f"row {row}: logit bias {value} of token {token}; ids must be 0 or more, numbers finite or -inf"
                    )
        offsets = [0]
        for bias in biases:
            offsets.append(offsets[-1] + len(bias))
        tokens = [token for bias in biases for token in bias]
        values = [value for bias in biases for value in bias.values()]
        return cls(torch.tensor(offsets), torch.tensor(tokens, dtype=torch.int64), torch.tensor(values).float())


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """Sampling parameters of each row; float64, `top_k_B` int64, on the CPU.

    `temperature_B`: 0 is greedy, which no filter applies to. `top_k_B = 0`, `top_p_B = 1`, `min_p_B = 0` and
    `repetition_penalty_B = 1` are off.

    Raises:
        InputError: a value is out of range; the message names the row.
    """

    temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor
    repetition_penalty_B: torch.Tensor
    bias: LogitBias | None = None

    def __post_init__(self) -> None:
        num_rows = len(self.temperature_B)
        temperature_B, penalty_B = self.temperature_B, self.repetition_penalty_B
        for name, value_B, fine_B, allowed in (
            (
                "temperature",
                temperature_B,
                is_temperature(temperature_B),
                TEMPERATURE_RULE,
            ),
            ("top_k", self.top_k_B, self.top_k_B >= 0, "0 (off) or more"),
            ("top_p", self.top_p_B, (self.top_p_B > 0) & (self.top_p_B <= 1), "in (0, 1], where 1 is off"),
            ("min_p", self.min_p_B, (self.min_p_B >= 0) & (self.min_p_B < 1), "in [0, 1), where 0 is off"),
            ("repetition_penalty", penalty_B, (penalty_B > 0) & penalty_B.isfinite(), "positive, where 1 is off"),
        ):
            dtype = torch.int64 if name == "top_k" else torch.float64
            if value_B.dtype != dtype or value_B.shape != (num_rows,):
                raise InputError(
                    f"{name}_B is {value_B.dtype} of shape {tuple(value_B.shape)}; give {dtype} [{num_rows}]"
                )
            if not bool(fine_B.all()):
                row = int((~fine_B).nonzero()[0])
                raise InputError(f"row {row}: {name} is {value_B[row].item()}; it must be {allowed}")
        if self.bias is not None and len(self.bias.offset_B1) != num_rows + 1:
            raise InputError(f"logit bias is for {len(self.bias.offset_B1) - 1} rows; the settings are for {num_rows}")

    @classmethod
    def same(
        cls,
        num_rows: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        bias: Mapping[int, float] | None = None,
    ) -> Self:
        """The same settings for each of `num_rows` rows."""

        def filled(value: float) -> torch.Tensor:
            return torch.full((num_rows,), value, dtype=torch.float64)

        return cls(
            filled(temperature),
            torch.full((num_rows,), top_k, dtype=torch.int64),
            filled(top_p),
            filled(min_p),
            filled(repetition_penalty),
            LogitBias.of([bias] * num_rows) if bias else None,
        )


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """Keys of the noise of each row, which depends on nothing else: int64, on the CPU.

    Token `position_B` of completion `sample_B` of prompt `prompt_B` (each in [0, 2^32)) under `seed_B` (from 0 on).
    """

    seed_B: torch.Tensor
    prompt_B: torch.Tensor
    sample_B: torch.Tensor
    position_B: torch.Tensor

    def __post_init__(self) -> None:
        for name, limit in (("seed", 2**63 - 1), ("prompt", 2**32 - 1), ("sample", 2**32 - 1), ("position", 2**32 - 1)):
            value_B = getattr(self, f"{name}_B")
            if value_B.dtype != torch.int64 or value_B.shape != self.seed_B.shape or value_B.dim() != 1:
                raise InputError(
                    f"{name}_B is {value_B.dtype} of shape {tuple(value_B.shape)}; give int64, one number for each row"
                )
            bad_B = (value_B < 0) | (value_B > limit)
            if bool(bad_B.any()):
                row = int(bad_B.nonzero()[0])
                raise InputError(f"row {row}: {name} is {int(value_B[row])}; it must lie in [0, {limit}]")


@dataclass(frozen=True, slots=True)
class Seen:
    """Tokens that the repetition penalty applies to: row b of the logits reads `mask_SV[slot_B[b]]`, bool.

    A slot's mask is made once and gets one entry for each token that is drawn, so no step costs more than its rows.
    """

    mask_SV: torch.Tensor
    slot_B: torch.Tensor

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], vocabulary_size: int) -> Self:
        """From the ids of each row, in which an id may be repeated."""
        mask_SV = torch.zeros(len(ids), vocabulary_size, dtype=torch.bool)
        for row, seen in enumerate(ids):
            mask_SV[row, list(seen)] = True
        return cls(mask_SV, torch.arange(len(ids)))


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each row, int64, and two log-probs of it in nats, float32.

    `logp_B`: under the distribution that it was drawn from, after bias, penalty, temperature and filters.
    `raw_logp_B`: under the model at that temperature, which is what a trainer computes.
    A greedy row has both at temperature 1.
    """

    token_B: torch.Tensor
    logp_B: torch.Tensor
    raw_logp_B: torch.Tensor
