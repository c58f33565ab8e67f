"""Samples the tokens of one step: maps settings, noise and seen tokens to the rows of the logits.

Shape legend: R rows that tokens are sampled from, V vocabulary, S rows of the mask of seen tokens.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample.api import sample
from tunesmith.engine.kernels.sample.torch_impl import LogitBias, NoiseKeys, Sampled, SampleSettings, Seen
from tunesmith.engine.rollout.scheduler import Plan
from tunesmith.engine.rollout.sequence import Sequence as DrawnSequence


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The prompt's part of the key of the noise; the rest are the seed, the sample and the position.

    `prompt` is a hash of the prompt's ids, not its index, so a prompt's completions do not depend on the other prompts.
    If a request holds a prompt twice, the samples of the second are numbered after those of the first.
    """

    prompt: int
    first_sample: int


def noise_keys(prompts: Sequence[Sequence[int]], n: int) -> list[NoiseKey]:
    """One key for each prompt with `n` completions."""
    counts: dict[tuple[int, ...], int] = {}
    keys: list[NoiseKey] = []
    for ids in prompts:
        earlier = counts.get(tuple(ids), 0)
        counts[tuple(ids)] = earlier + 1
        digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=4).digest()
        keys.append(NoiseKey(int.from_bytes(digest, "little"), earlier * n))
    return keys


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """Settings of one request, and the key of its noise.

    `presence_penalty` is taken once from the logit of each token that was drawn before, `frequency_penalty` as often
    as it was (OpenAI's penalties; negative ones favour repetition).
    """

    sampling: SamplingParams
    seed: int
    key: NoiseKey
    stop_ids: frozenset[int] = frozenset()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def bias_is_fixed(self) -> bool:
        """True if the bias depends on the drawn tokens only as far as stop ids are masked."""
        return not (self.presence_penalty or self.frequency_penalty)

    def bias(self, sequence: DrawnSequence) -> Mapping[int, float]:
        """Numbers to add to the logits of the next token of `sequence`."""
        bias = dict(self.sampling.logit_bias)
        if self.presence_penalty or self.frequency_penalty:
            for token, count in Counter(sequence.token_ids).items():
                bias[token] = bias.get(token, 0.0) - self.presence_penalty - self.frequency_penalty * count
        if sequence.masks_stop_ids:
            bias |= dict.fromkeys(self.stop_ids, float("-inf"))
        return bias


class Sampler:
    """Samples for requests that are drawn together; `requests[i]` is of those with index i."""

    def __init__(
        self,
        requests: Sequence[RequestSampling] | Mapping[int, RequestSampling],
        vocabulary_size: int,
        kernels: Kernels,
    ) -> None:
        self._requests = requests
        self._kernels = kernels
        self._seen = SeenTokens(torch.zeros(0, vocabulary_size, dtype=torch.bool))
        self._settings: SampleSettings | None = None
        self._settings_of: list[tuple[int, bool]] = []  # request of each row of `_settings`, and if stop ids are masked

    def draw(self, plan: Plan, logits_RV: torch.Tensor) -> Sampled:
        """One token for each of `plan.drawn`.

        Raises:
            TrainingError: a logit is not finite, or no token is allowed.
        """
        drawn = plan.drawn
        requests = [self._requests[sequence.request] for sequence in drawn]
        has_penalty = any(one.sampling.repetition_penalty != 1 for one in requests)
        seen = self._seen.lookup(plan) if has_penalty else None
        settings = self._settings_for(drawn, requests)
        sampled = sample(logits_RV, settings, _noise(drawn, requests), seen=seen, kernels=self._kernels)
        if has_penalty:
            self._seen.add(plan.sequences, sampled.token_B)
        return sampled

    def release(self, ended: Sequence[DrawnSequence]) -> None:
        """Free what is held for completions that have ended."""
        self._seen.release(ended)

    def _settings_for(self, drawn: Sequence[DrawnSequence], requests: Sequence[RequestSampling]) -> SampleSettings:
        """The settings of each row, which are made again only when others are needed."""
        rows = [(sequence.request, sequence.masks_stop_ids) for sequence in drawn]
        is_fixed = all(one.bias_is_fixed for one in requests)
        if self._settings is None or rows != self._settings_of:
            given = [one.sampling for one in requests]
            numbers = [(one.temperature, one.top_p, one.min_p, one.repetition_penalty) for one in given]
            temperature_B, top_p_B, min_p_B, penalty_B = torch.tensor(numbers, dtype=torch.float64).T.contiguous()
            top_k_B = torch.tensor([one.top_k for one in given])
            self._settings = SampleSettings(temperature_B, top_k_B, top_p_B, min_p_B, penalty_B)
            self._settings_of = rows
            if is_fixed:
                self._settings = self._biased(self._settings, drawn, requests)
        return self._settings if is_fixed else self._biased(self._settings, drawn, requests)

    def _biased(
        self, settings: SampleSettings, drawn: Sequence[DrawnSequence], requests: Sequence[RequestSampling]
    ) -> SampleSettings:
        biases = [one.bias(sequence) for one, sequence in zip(requests, drawn, strict=True)]
        return replace(settings, bias=LogitBias.of(biases)) if any(biases) else settings


def _noise(drawn: Sequence[DrawnSequence], requests: Sequence[RequestSampling]) -> NoiseKeys:
    keys = [one.key for one in requests]
    numbers = (
        [one.seed for one in requests],
        [key.prompt for key in keys],
        [key.first_sample + sequence.sample for key, sequence in zip(keys, drawn, strict=True)],
        [sequence.position for sequence in drawn],
    )
    return NoiseKeys(*torch.tensor(numbers))


class SeenTokens:
    """The tokens of each running completion and its prompt, as rows of `mask_SV`, which are reused.

    A mask that is too small is replaced by one twice as large.
    """

    def __init__(self, mask_SV: torch.Tensor) -> None:
        self._mask_SV = mask_SV
        self._free = list(range(len(mask_SV) - 1, -1, -1))
        self._rows: dict[tuple[int, int], int] = {}  # by request and sample

    def lookup(self, plan: Plan) -> Seen:
        """The rows of `plan.drawn`. All first tokens of a prompt share the prompt's row."""
        rows = [self._row(sequence) for sequence in plan.sequences]
        borrowed: list[int] = []
        for chunk in plan.chunks:
            if chunk.sequences:
                borrowed.append(self._take(chunk.sequences[0].prompt_ids))
                rows += [borrowed[-1]] * len(chunk.sequences)
        self._free += borrowed  # free for the next step
        return Seen(self._mask_SV, torch.tensor(rows))

    def add(self, sequences: Sequence[DrawnSequence], token_B: torch.Tensor) -> None:
        """Record the first tokens of `token_B`, which were drawn for these running completions."""
        if sequences:
            rows = torch.tensor([self._rows[_name(sequence)] for sequence in sequences])
            self._mask_SV[rows, token_B[: len(sequences)]] = True

    def release(self, ended: Sequence[DrawnSequence]) -> None:
        """Free the rows of completions that have ended."""
        self._free += [self._rows.pop(_name(sequence)) for sequence in ended if _name(sequence) in self._rows]

    def _row(self, sequence: DrawnSequence) -> int:
        row = self._rows.get(_name(sequence))
        if row is None:
            row = self._rows[_name(sequence)] = self._take((*sequence.prompt_ids, *sequence.token_ids))
        return row

    def _take(self, ids: Sequence[int]) -> int:
        if not self._free:
            first, size = len(self._mask_SV), max(16, len(self._mask_SV))
            grown_SV = self._mask_SV.new_zeros(first + size, self._mask_SV.shape[1])
            grown_SV[:first] = self._mask_SV
            self._mask_SV = grown_SV
            self._free = list(range(first + size - 1, first - 1, -1))
        row = self._free.pop()
        self._mask_SV[row] = False
        self._mask_SV[row, list(ids)] = True
        return row


def _name(sequence: DrawnSequence) -> tuple[int, int]:
    return sequence.request, sequence.sample
