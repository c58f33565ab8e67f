"""Arguments, results and the definition of the sampler, in torch alone.

Order and meaning are those of transformers' processors: logit bias, repetition penalty, temperature, top-k, top-p,
min-p. Tokens of equal logit share their fate: a filter keeps all of them or none (transformers' top-p splits them by
the order of its sort).

Shape legend: B rows, V vocabulary, N biased tokens of all rows, S slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch

from tunesmith.base.core.errors import InputError, TrainingError

NOT_FINITE = "a logit of the model is not finite"
NOTHING_LEFT = "the logit bias forbids every token"
INFINITE = "logit bias or repetition penalty make a logit infinite"

_WORD = 0xFFFFFFFF

SMALLEST_TEMPERATURE = 1e-6
"""Below it float32 logits divided by the temperature overflow; 0 itself is greedy."""

TEMPERATURE_RULE = f"0 (greedy) or at least {SMALLEST_TEMPERATURE}, and finite"


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
        offsets = [0, *accumulate(len(bias) for bias in biases)]
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
        is_temperature_B = (temperature_B == 0) | ((temperature_B >= SMALLEST_TEMPERATURE) & temperature_B.isfinite())
        for name, value_B, is_valid_B, allowed in (
            ("temperature", temperature_B, is_temperature_B, TEMPERATURE_RULE),
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
            if not bool(is_valid_B.all()):
                row = int((~is_valid_B).nonzero()[0])
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
        numbers = torch.tensor([temperature, top_p, min_p, repetition_penalty], dtype=torch.float64)
        temperature_B, top_p_B, min_p_B, penalty_B = numbers[:, None].repeat(1, num_rows)
        top_k_B = torch.full((num_rows,), top_k)
        biases = LogitBias.of([bias] * num_rows) if bias else None
        return cls(temperature_B, top_k_B, top_p_B, min_p_B, penalty_B, biases)


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
            for row, number in enumerate(value_B.tolist()):  # of few rows faster than in torch
                if not 0 <= number <= limit:
                    raise InputError(f"row {row}: {name} is {number}; it must lie in [0, {limit}]")


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


def sample(
    logits_BV: torch.Tensor,
    settings: SampleSettings,
    keys: NoiseKeys,
    *,
    seen: Seen | None = None,
    dtype: torch.dtype = torch.float64,
) -> Sampled:
    """One token for each row: the first whose running sum of probabilities, in the order of the vocabulary, passes the
    row's `uniform` number; greedy rows take the largest logit, the lowest id on a tie.

    `dtype` is that of the arithmetic.

    Raises:
        TrainingError: a logit is not finite, or bias and penalty leave no token or overflow; the message names the row.
    """
    logp_BV = distribution(logits_BV, settings, seen=seen, dtype=dtype)
    sum_BV = logp_BV.double().exp().cumsum(-1)
    target_B1 = uniform(keys).to(logits_BV.device)[:, None] * sum_BV[:, -1:]
    drawn_B = torch.searchsorted(sum_BV, target_B1, right=True)[:, 0]
    num_tokens = logits_BV.shape[1]
    index_V = torch.arange(num_tokens, device=logits_BV.device)
    last_B = torch.where(logp_BV > float("-inf"), index_V, -1).amax(-1)
    greedy_B = torch.where(logp_BV == logp_BV.amax(-1, keepdim=True), index_V, num_tokens).amin(-1)
    is_greedy_B = (settings.temperature_B == 0).to(logits_BV.device)
    token_B = torch.where(is_greedy_B, greedy_B, torch.minimum(drawn_B, last_B))
    raw_logp_BV = (logits_BV.to(dtype) / _divisor(settings.temperature_B, dtype, logits_BV.device)).log_softmax(-1)
    return Sampled(token_B, *(x_BV.gather(-1, token_B[:, None])[:, 0].float() for x_BV in (logp_BV, raw_logp_BV)))


def distribution(
    logits_BV: torch.Tensor, settings: SampleSettings, *, seen: Seen | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Log-probs [B, V] of what a row draws from, -inf where a token cannot be drawn. A greedy row has those at
    temperature 1, without filters.

    Raises:
        TrainingError: as `sample`.
    """
    require_rows(logits_BV.isfinite().all(-1), NOT_FINITE)
    x_BV = logits_BV.to(dtype)
    if settings.bias is not None:
        x_BV = biased(x_BV, settings.bias)
    if seen is not None:
        x_BV = _penalised(x_BV, settings.repetition_penalty_B, seen)
    require_rows(x_BV.amax(-1) > float("-inf"), NOTHING_LEFT)
    require_rows(x_BV.amax(-1) < float("inf"), INFINITE)
    x_BV = x_BV / _divisor(settings.temperature_B, dtype, x_BV.device)
    filtered_BV = _min_p(_top_p(_top_k(x_BV, settings.top_k_B), settings.top_p_B), settings.min_p_B)
    is_greedy_B1 = (settings.temperature_B == 0).to(x_BV.device)[:, None]
    return torch.where(is_greedy_B1, x_BV, filtered_BV).log_softmax(-1)


def uniform(keys: NoiseKeys) -> torch.Tensor:
    """A number in [0, 1) for each row, float64 with 53 random bits: the first two words of Philox4x32-10."""
    zero_B = torch.zeros_like(keys.seed_B)
    counter = (keys.prompt_B, keys.sample_B, keys.position_B, zero_B)
    first_B, second_B, _, _ = philox(counter, (keys.seed_B & _WORD, keys.seed_B >> 32))
    return ((first_B << 21) | (second_B >> 11)).double() * 2.0**-53


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four random words for each entry, from four words of counter and two of key: Philox4x32-10.

    Words are int64 tensors of values in [0, 2^32). Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(10):
        # Both factors have 32 bits, so the wrapped int64 product has all 64 bits of the unsigned one.
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            ((second >> 32) & _WORD) ^ b ^ low_key,
            second & _WORD,
            ((first >> 32) & _WORD) ^ d ^ high_key,
            first & _WORD,
        )
        low_key, high_key = (low_key + 0x9E3779B9) & _WORD, (high_key + 0xBB67AE85) & _WORD
    return a, b, c, d


def require_rows(fine_B: torch.Tensor, complaint: str) -> None:
    """Raise TrainingError with the rows that are not fine."""
    if not bool(fine_B.all()):
        rows = (~fine_B).nonzero()[:, 0].tolist()
        named = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        raise TrainingError(f"no token can be drawn for row {named} of {len(fine_B)}: {complaint}")


def biased(x_BV: torch.Tensor, bias: LogitBias) -> torch.Tensor:
    """The logits with the bias added to them; biased tokens are in the vocabulary."""
    rows_N = torch.repeat_interleave(torch.arange(len(x_BV)), bias.offset_B1.diff())
    place = (rows_N.to(x_BV.device), bias.token_N.to(x_BV.device))
    return x_BV.index_put(place, bias.value_N.to(x_BV), accumulate=True)


def _divisor(temperature_B: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    temperature_B = temperature_B.to(device, dtype)
    return torch.where(temperature_B == 0, torch.ones_like(temperature_B), temperature_B)[:, None]


def _penalised(x_BV: torch.Tensor, penalty_B: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Keskar et al., CTRL (2019): positive logits are divided by the penalty, negative ones multiplied."""
    penalty_B1 = penalty_B.to(x_BV)[:, None]
    mask_BV = seen.mask_SV[seen.slot_B].to(x_BV.device)
    return torch.where(mask_BV, torch.where(x_BV < 0, x_BV * penalty_B1, x_BV / penalty_B1), x_BV)


def _top_k(x_BV: torch.Tensor, top_k_B: torch.Tensor) -> torch.Tensor:
    """Keeps the k largest, and what equals the smallest of them."""
    num_tokens = x_BV.shape[1]
    top_k_B = torch.where(top_k_B == 0, num_tokens, top_k_B.clamp(max=num_tokens)).to(x_BV.device)
    if bool((top_k_B == num_tokens).all()):
        return x_BV
    sorted_BV = x_BV.sort(-1, descending=True).values
    return x_BV.masked_fill(x_BV < sorted_BV.gather(-1, top_k_B[:, None] - 1), float("-inf"))


def _top_p(x_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Keeps what has less than p above it: the smallest set with at least p, and what equals its smallest.

    Holtzman et al., The curious case of neural text degeneration (2020).
    """
    top_p_B1 = top_p_B.to(x_BV.device)[:, None]
    if bool((top_p_B1 == 1).all()):
        return x_BV
    sorted_BV = x_BV.sort(-1, descending=True).values
    p_BV = sorted_BV.double().softmax(-1)
    is_kept_BV = (p_BV.cumsum(-1) - p_BV < top_p_B1) | (top_p_B1 == 1)
    is_kept_BV[:, 0] = True
    smallest_B1 = torch.where(is_kept_BV, sorted_BV, float("inf")).amin(-1, keepdim=True)
    return x_BV.masked_fill(x_BV < smallest_B1, float("-inf"))


def _min_p(x_BV: torch.Tensor, min_p_B: torch.Tensor) -> torch.Tensor:
    """Keeps what is at least min_p times as probable as the most probable. Nguyen et al., min-p sampling (2024)."""
    weight_BV = (x_BV - x_BV.amax(-1, keepdim=True)).exp()
    return x_BV.masked_fill(weight_BV < min_p_B.to(x_BV)[:, None], float("-inf"))
