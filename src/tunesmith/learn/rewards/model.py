"""Reward models as rewards: the sampled token ids are scored as they are where the vocabularies agree.

Shape legend: B sequences, T positions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tunesmith.base.config.sections import Pessimism
from tunesmith.base.core.errors import RewardError
from tunesmith.base.schema.records import plain_text
from tunesmith.collect.data.collate import completion_lengths
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.models.conversation import is_continued
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.tokenizer import (
    PreTrainedTokenizerBase,
    encode_marked,
    end_token_id,
    ending_ids,
    same_vocabulary,
    special_token_ids,
)
from tunesmith.learn.rewards.outcome import LARGEST, Logged, Outcome, Policy, Sample, SampleError, Scored

# Spaces, line breaks, digits, accents and an emoji: what tokenizers with one vocabulary may still split differently.
_PROBES = (
    "The movie was",
    "  two  spaces\nand\ttabs\r\n",
    "Na\u00efve caf\u00e9, 12345 3.14!",
    "\U0001f600 <|endoftext|>",
)
_MAX_SANE_LENGTH = 10**9  # tokenizers without a limit say 10**30


@dataclass(frozen=True, slots=True)
class _Judged:
    """The reward of a sequence; with several heads also their mean and standard deviation."""

    reward: float
    mean: float = 0.0
    spread: float = 0.0

    def less(self, of_length: float) -> "_Judged":
        """The same of rewards that are less by `of_length`."""
        return _Judged(self.reward - of_length, self.mean - of_length, self.spread)


class ModelReward:
    """A reward model as a reward. With several heads it is their mean less `pessimism` times their standard deviation,
    or the `worst` of them; all without what a head adds to every answer (`ensemble.Known`). If the model has a
    `length_trend`, that is subtracted.

    Sequences are scored in micro-batches of `micro_batch_size` without gradients, sorted by length if they are padded
    (see `RewardModel.packs_rows`). With the policy's own tokenizer the ids of the rollout are scored; a completion that
    its length limit cut off is closed with the end-of-sequence token that ended every training sequence. With another
    tokenizer, or for a classifier that does not read the last token, the text is encoded again: by the chat template if
    there is one, else as plain text.
    """

    def __init__(
        self,
        model: RewardModel,
        name: str | None = None,
        *,
        policy_tokenizer: PreTrainedTokenizerBase | None = None,
        micro_batch_size: int = 32,
        policy: Policy | None = None,
        pessimism: Pessimism = 0.0,
    ) -> None:
        if pessimism != "worst" and not 0 <= pessimism < math.inf:
            raise RewardError(f"pessimism is {pessimism!r}; give a number from 0 on, or worst")
        if pessimism != 0 and model.num_heads == 1:
            raise RewardError(
                f"pessimism is {pessimism}, but the reward model {model.source or name or ''!r} has one head, so "
                "nothing says how sure it is; train one with reward_model.heads, for example 8, or leave pessimism out"
            )
        if micro_batch_size < 1:
            raise RewardError(f"micro_batch_size is {micro_batch_size}; give 1 or more")
        self.name = name or model_name(model.source)
        self.policy = policy or Policy()
        self.is_async = False
        self.model = model
        self.pessimism = pessimism
        self._micro_batch_size = micro_batch_size
        self.scores_token_ids = (
            policy_tokenizer is not None
            and model.pools_last_token
            and same_tokenizer(policy_tokenizer, model.tokenizer)
        )
        self._same_template = (
            policy_tokenizer is not None and policy_tokenizer.chat_template == model.tokenizer.chat_template
        )
        self._special = special_token_ids(model.tokenizer)
        self._endings = [_ending(model, is_conversational=is_turn) for is_turn in (False, True)]
        self._max_tokens = _max_tokens(model)
        self.begin: Callable[[Sequence[Sample], Mapping[str, object]], Future[Scored] | None] = _here
        """Begins a call that is made elsewhere, and returns its outcomes; None if this process must make it."""

    def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """One reward per sample. Raises RewardError for a sequence that is too long, or a reward that is not finite."""
        return self.outcomes(samples).numbers()

    def outcomes(self, samples: Sequence[Sample], extras: Mapping[str, object] | None = None) -> Scored:
        """The reward of each sample, or why it has none: its sequence is too long, or its reward not finite."""
        sequences = [self.encode(sample) for sample in samples]
        outcomes: list[Outcome] = [None] * len(samples)
        fitting = [place for place, ids in enumerate(sequences) if len(ids) <= self._max_tokens]
        for place in set(range(len(samples))).difference(fitting):
            outcomes[place] = SampleError(
                f"reward model `{self.name}` takes {self._max_tokens} tokens, but {samples[place]} has "
                f"{len(sequences[place])} with its prompt; lower max_new_tokens or shorten the prompts",
                "too long",
            )
        judged = self._judged([sequences[place] for place in fitting])
        logged = Logged(len(samples))
        if (trend := self.model.length_trend) is not None:
            lengths = [self._answer_length(samples[place], sequences[place]) for place in fitting]
            of_length = trend.at(lengths).tolist()
            judged = [one.less(value) for one, value in zip(judged, of_length, strict=True)]
            for value in of_length:
                logged.metric(f"rewards/{self.name}/of_length", value)
        for place, one in zip(fitting, judged, strict=True):
            is_number = abs(one.reward) <= LARGEST  # false for NaN too
            message = f"reward model `{self.name}` gave {one.reward} to {samples[place]}; its weights may be damaged"
            outcomes[place] = one.reward if is_number else SampleError(message, "not finite")
        if self.model.num_heads > 1:
            self._log_heads(logged, dict(zip(fitting, judged, strict=True)))
        return Scored(outcomes, logged)

    def _log_heads(self, logged: Logged, judged: "Mapping[int, _Judged]") -> None:
        """Log where the heads differ about the samples at the places of `judged`: metrics, and a column of samples."""
        known, name = self.model.known, f"rewards/{self.name}"
        spread_of = {place: one.spread for place, one in judged.items() if math.isfinite(one.spread)}
        for place, spread in spread_of.items():
            logged.metric(f"{name}/spread", spread)
            logged.metric(f"{name}/mean_of_heads", judged[place].mean)
            if known is not None:
                logged.metric(f"{name}/unfamiliar", float(spread > known.common))
        logged.extra(f"{self.name} spread", [spread_of.get(place) for place in range(logged.num_samples)])

    def _judged(self, sequences: Sequence[Sequence[int]]) -> "list[_Judged]":
        order = list(range(len(sequences)))
        if not self.model.packs_rows:  # else there is no padding, and the rows of one prompt stay together
            order.sort(key=lambda index: len(sequences[index]))
        found = [_Judged(0.0)] * len(sequences)
        device = next(self.model.parameters()).device
        with _evaluating(self.model), torch.no_grad():
            for indices in chunks(order, self._micro_batch_size):
                lengths = [len(sequences[index]) for index in indices]
                rows = [[*sequences[index], *[0] * (max(lengths) - len(sequences[index]))] for index in indices]
                ids_BT, lengths_B = torch.tensor(rows, device=device), torch.tensor(lengths, device=device)
                for index, one in zip(indices, self._judged_rows(ids_BT, lengths_B), strict=True):
                    found[index] = one
        return found

    def _judged_rows(self, ids_BT: torch.Tensor, lengths_B: torch.Tensor) -> "list[_Judged]":
        if self.model.num_heads == 1:
            return [_Judged(reward) for reward in self.model(ids_BT, lengths_B).tolist()]
        reward_BK = self.model.heads(ids_BT, lengths_B).double()
        if (known := self.model.known) is not None:
            reward_BK = reward_BK - reward_BK.new_tensor(known.offsets)
        mean_B, spread_B = reward_BK.mean(-1), reward_BK.std(-1)
        times = self.pessimism
        # Of a damaged head that gives infinity the lowest head would say nothing.
        lowest_B = reward_BK.amin(-1).where(mean_B.isfinite(), mean_B)
        reward_B = lowest_B if isinstance(times, str) else mean_B - times * spread_B
        columns = (reward_B.tolist(), mean_B.tolist(), spread_B.tolist())
        return [_Judged(*one) for one in zip(*columns, strict=True)]

    def encode(self, sample: Sample) -> tuple[int, ...]:
        """The token ids that are scored of `sample`: those of the rollout, or of its text encoded again.

        Raises:
            InputError: the chat template refuses it.
        """
        if self._reads_rollout(sample):
            return self._closed(sample)
        tokenizer = self.model.tokenizer
        if self.model.pools_last_token and (tokenizer.chat_template or not sample.prompt.is_conversational):
            prompt = replace(sample.prompt, token_ids=None)  # which may be another tokenizer's
            return self.model.encode(prompt, sample.completion.text)
        content = sample.prompt.content
        separator = "" if isinstance(content, str) or is_continued(content) else "\n"
        text = plain_text(content) + separator + sample.completion.text
        return encode_marked(tokenizer, text)

    def _reads_rollout(self, sample: Sample) -> bool:
        """True if the ids of the rollout are scored."""
        return self.scores_token_ids and (self._same_template or not sample.prompt.is_conversational)

    def _answer_length(self, sample: Sample, ids: tuple[int, ...]) -> int:
        """Tokens of the completion in the ids that `encode` gives for `sample`."""
        if self._reads_rollout(sample):
            return len(ids) - len(sample.prompt_token_ids)
        prompt, tokenizer = replace(sample.prompt, token_ids=None), self.model.tokenizer
        if prompt.is_conversational and not tokenizer.chat_template:
            prompt = replace(prompt, content=plain_text(prompt.content))
        return completion_lengths(tokenizer, prompt, [ids])[0]

    def _closed(self, sample: Sample) -> tuple[int, ...]:
        ids = sample.prompt_token_ids + sample.completion.token_ids
        end_id, tail = self._endings[sample.prompt.is_conversational]
        was_stopped = sample.completion.finish_reason == "stop" and ids[-1] in self._special
        if end_id is None or ids[-1] == end_id or was_stopped:
            return ids + tail
        return (*ids, end_id, *tail)


def _ending(model: RewardModel, *, is_conversational: bool) -> tuple[int | None, tuple[int, ...]]:
    """The token that closes a completion where the model was trained, and the ids that it reads behind that."""
    if is_conversational and not model.is_made_here:
        return ending_ids(model.tokenizer)
    is_closed = is_conversational or model.ends_text
    return end_token_id(model.tokenizer, is_conversational=is_conversational) if is_closed else None, ()


@contextmanager
def _evaluating(model: RewardModel) -> Iterator[None]:
    """A block without dropout. A model that has none switched on is left alone: other threads may be using it."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


def _here(samples: Sequence[Sample], extras: Mapping[str, object]) -> "Future[Scored] | None":
    return None


def same_tokenizer(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """True if both have one vocabulary and split a set of probe texts alike, so that ids of one suit the other."""
    return first is second or (
        same_vocabulary(first, second)
        and all(first(probe)["input_ids"] == second(probe)["input_ids"] for probe in _PROBES)
    )


def model_name(source: str) -> str:
    """The last part of a hub id or folder, for metrics; `final` gives way to the run that it belongs to."""
    parts = [part for part in source.split("/") if part not in ("", ".", "final")]
    return parts[-1] if parts else "reward_model"


def _max_tokens(model: RewardModel) -> int:
    limits = (model.tokenizer.model_max_length, getattr(model.model.config, "max_position_embeddings", None))
    return min(int(limit) for limit in (*limits, _MAX_SANE_LENGTH) if limit)
