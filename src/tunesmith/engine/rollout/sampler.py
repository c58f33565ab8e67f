"""Samples the tokens of one step: maps settings, noise and seen tokens to the rows of the logits.

Shape legend: R rows that tokens are sampled from, V vocabulary, S rows of the mask of seen tokens.
"""

import hashlib
from array import array
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


class Sampler:
    """Samples for one call of `generate`. `keys[i]` belongs to the prompt with index i."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        seed: int,
        stop_ids: frozenset[int],
        keys: Sequence[NoiseKey],
        vocabulary_size: int,
        kernels: Kernels,
    ) -> None:
        self._sampling = sampling
        self._seed = seed
        self._stop_ids = stop_ids
        self._keys = keys
        self._kernels = kernels
        self._seen = (
            SeenTokens(torch.zeros(0, vocabulary_size, dtype=torch.bool)) if sampling.repetition_penalty != 1 else None
        )
        self._settings: SampleSettings | None = None

    def draw(self, plan: Plan, logits_RV: torch.Tensor) -> Sampled:
        """One token for each of `plan.drawn`.

        Raises:
            TrainingError: a logit is not finite, or no token is allowed.
        """
        drawn = plan.drawn
        seen = None if self._seen is None else self._seen.lookup(plan)
        sampled = sample(logits_RV, self._settings_of(drawn), self._noise_of(drawn), seen=seen, kernels=self._kernels)
        if self._seen is not None:
            self._seen.add(plan.sequences, sampled.token_B)
        return sampled

    def release(self, ended: Sequence[DrawnSequence]) -> None:
        """Free what is held for completions that have ended."""
        if self._seen is not None:
            self._seen.release(ended)

    def _noise_of(self, drawn: Sequence[DrawnSequence]) -> NoiseKeys:
        keys = [self._keys[sequence.request] for sequence in drawn]
        return NoiseKeys(
            torch.full((len(drawn),), self._seed, dtype=torch.int64),
            torch.tensor([key.prompt for key in keys]),
            torch.tensor([key.first_sample + sequence.sample for key, sequence in zip(keys, drawn, strict=True)]),
            torch.tensor([sequence.position for sequence in drawn]),
        )

    def _settings_of(self, drawn: Sequence[DrawnSequence]) -> SampleSettings:
        given = self._sampling
        masked = [bool(self._stop_ids) and sequence.masks_stop_ids for sequence in drawn]
        is_plain = not any(masked) and not given.logit_bias
        if is_plain and self._settings is not None and len(self._settings.temperature_B) == len(drawn):
            return self._settings
        settings = SampleSettings.same(
            len(drawn),
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
            repetition_penalty=given.repetition_penalty,
        )
        if is_plain:
            self._settings = settings
            return settings
        forbidden = {token: float("-inf") for token in self._stop_ids}
        always: Mapping[int, float] = given.logit_bias
        bias = LogitBias.of([{**always, **forbidden} if is_masked else always for is_masked in masked])
        return replace(settings, bias=bias)


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
