"""The token ids that are sampled, scored and trained: shown by `--dry-run` and `doctor MODEL`, checked before a run.

One rule makes these ids (`models.tokenizer`). What it cannot mend is found here with the model's own chat template: an
answer that the template writes otherwise, a turn that ends where generation does not stop, a reward model that does not
see the answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

from tunesmith.base.core.errors import DataError, InputError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Completion
from tunesmith.engine.batch.targets import LearntSequence
from tunesmith.engine.models.tokenizer import (
    Completed,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    decode_after,
    decode_marked,
    encode_completed,
    encode_prompt,
    end_token_id,
    special_token_ids,
    stop_token_ids,
    text_after,
)
from tunesmith.learn.rewards.model import ModelReward
from tunesmith.learn.rewards.outcome import Sample

_NUM_SHOWN = 2
_NUM_SHOWN_IDS = 24
_SHOWN_CHARACTERS = 400

_ANSWERS = {False: " yes, it is.", True: "Yes, it is."}
"""A plain answer to a text, and to a conversation."""

_CHANGES = (
    (" Yes, it is. ", "white space around an answer is dropped"),
    ("Yes.\n\n\nIt is.", "empty lines in an answer are dropped"),
    ("<think>\na\n</think>\n\nYes.", "reasoning in `<think>` is left out or written otherwise"),
)
"""Answers that templates are known to change, and what it means if one does."""

_EXAMPLES = (
    Prompt("a text", "The weather today is"),
    Prompt("a conversation", ({"role": "user", "content": "Is it raining?"},)),
)
"""Prompts to look at a model with, where there is no data."""


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """Facts as (name, text), and `problems`: where sampling, scoring and training would not see the same tokens."""

    facts: Sequence[tuple[str, str]]
    problems: Sequence[str]

    def check(self) -> None:
        """Raise DataError with all problems."""
        if self.problems:
            raise DataError("\n".join(self.problems))


def token_facts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None = None,
    learnt: Iterable[LearntSequence] = (),
    rewards: Mapping[str, ModelReward] | None = None,
    *,
    draws: bool = True,
) -> TokenFacts:
    """Facts of a model, of `prompts` (by default a text and a conversation), of `learnt` examples and of reward models;
    all prompts and examples are checked, and the first of them shown.

    `draws` says that the model writes text; a classifier does not, so it need not stop.
    """
    if prompts is None:
        prompts = _EXAMPLES if tokenizer.chat_template else _EXAMPLES[:1]
    rewards, stops = rewards or {}, stop_token_ids(model, tokenizer)
    learnt = iter(learnt)
    first_learnt = list(islice(learnt, _NUM_SHOWN))
    is_trained_on_text = bool(first_learnt) or not all(one.scores_token_ids for one in rewards.values())
    facts = list(_special(tokenizer, stops if draws else ()))
    facts += [fact for one in prompts[:_NUM_SHOWN] if one.content for fact in _shown_prompt(tokenizer, one)]
    what = "loss on" if draws else "reward at"
    facts += [fact for one in first_learnt for fact in _shown_learnt(tokenizer, one, what)]
    problems: list[str] = []
    conversation = next((one for one in prompts if one.is_conversational and one.content), None)
    if conversation is not None or tokenizer.chat_template:
        facts += _template(tokenizer, conversation or _EXAMPLES[1])
    if draws:
        kinds = {one.is_conversational for one in prompts}
        problems += _endless(tokenizer, stops, kinds)
        problems += _endless_rows(tokenizer, stops, chain(first_learnt, learnt))
    for prompt in (one for one in prompts if one.content):
        answer, problem = _answered(tokenizer, prompt)
        if problem and is_trained_on_text:
            problems.append(problem)
        if answer is None:
            continue
        for name, reward in rewards.items():
            text, problem = _read_by(reward, tokenizer, prompt, answer)
            if problem:
                problems.append(f"reward model `{name}`: {problem}")
            elif prompt is prompts[0]:
                facts.append((f"read by {name}", text))
    return TokenFacts(facts, list(dict.fromkeys(problems)))


def _special(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> Iterator[tuple[str, str]]:
    """The tokens that begin and end texts and turns, stop generation, and pad."""
    bos_id = tokenizer.bos_token_id
    begun = [one.id for one in _EXAMPLES if _ids_of(tokenizer, one)[:1] == (bos_id,)]
    where = f"begins {' and '.join(begun)}" if begun else "added to nothing"
    yield "begin", f"{_token(tokenizer, bos_id)}, {where}"
    ends = [end_token_id(tokenizer, is_conversational=is_turn) for is_turn in (False, True)]
    turn = f"; a turn with {_token(tokenizer, ends[1])}" if tokenizer.chat_template else ""
    yield "end", f"a text ends with {_token(tokenizer, ends[0])}{turn}"
    if stops:
        yield "stop", f"generation stops at {', '.join(_named(tokenizer, index) for index in stops)}"
    yield "padding", f"{_token(tokenizer, tokenizer.pad_token_id)}, left out by the lengths of rows"


def _shown_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Iterator[tuple[str, str]]:
    ids = encode_prompt(tokenizer, prompt)
    yield f"prompt {prompt.id}", _shown_ids(ids)
    yield "", repr(_cut(decode_marked(tokenizer, ids)))


def _shown_learnt(tokenizer: PreTrainedTokenizerBase, sequence: LearntSequence, what: str) -> Iterator[tuple[str, str]]:
    """The ids of a training example, its text, and the part of it that is learnt, named `what`."""
    yield f"row {sequence.id}", _shown_ids(sequence.ids)
    yield "", repr(_cut(decode_marked(tokenizer, sequence.ids)))
    for span in sequence.spans:
        before, whole = (decode_marked(tokenizer, sequence.ids[:end]) for end in (span.start, span.stop))
        text = text_after(before, whole)
        yield what, f"{len(span)} of {len(sequence.ids)} ids, from {span.start} on: {_cut(text)!r}"


def _template(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Iterator[tuple[str, str]]:
    """The lines on what the chat template makes of answers to a conversation."""
    if not tokenizer.chat_template:
        yield "template", "none"
        return
    changed: list[str] = []
    for answer, change in _CHANGES:
        try:
            is_same = encode_completed(tokenizer, prompt, answer).is_verbatim
        except InputError:
            is_same = False
        if not is_same:
            changed.append(change)
    yield "template", "; ".join(changed) or "writes answers as they are"
    with suppress(InputError):
        answer = encode_completed(tokenizer, prompt, _ANSWERS[True])
        drawn = decode_after(tokenizer, answer.prompt_ids, answer.completion_ids)
        again = encode_completed(tokenizer, prompt, drawn).completion_ids
        if again != answer.completion_ids:
            yield (
                "",
                (
                    f"an answer that was sampled as {drawn!r} is read as "
                    f"{decode_after(tokenizer, answer.prompt_ids, again)!r} by what has its text alone"
                ),
            )


def _endless(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], kinds: Iterable[bool]) -> Iterator[str]:
    """Trained completions that end with a token at which generation does not stop."""
    for is_turn in sorted(kinds):
        end_id = end_token_id(tokenizer, is_conversational=is_turn)
        if end_id is not None and end_id not in stops:
            what = "the chat template closes a turn" if is_turn else "a trained completion ends"
            yield _does_not_stop(tokenizer, what, end_id)


def _endless_rows(
    tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], learnt: Iterable[LearntSequence]
) -> Iterator[str]:
    """The first row of each special token that ends what is learnt and at which generation does not stop."""
    special, found = special_token_ids(tokenizer).difference(stops), set[int]()
    for sequence in learnt:
        ends = sequence.spans and not sequence.is_cut
        last = sequence.ids[sequence.spans[-1].stop - 1] if ends else None
        if last in special and last not in found:
            found.add(last)
            yield _does_not_stop(tokenizer, f"row {sequence.id} ends", last)


def _does_not_stop(tokenizer: PreTrainedTokenizerBase, what: str, token_id: int) -> str:
    return (
        f"{what} with {_named(tokenizer, token_id)}, at which generation does not stop: what the model learns as the "
        "end would be sampled past; add it to `eos_token_id` in the model's generation_config.json"
    )


def _answered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[Completed | None, str]:
    """A plain answer to `prompt` as token ids, None if there is none; and why it would be trained otherwise than it is
    sampled, else empty.
    """
    text = _ANSWERS[prompt.is_conversational]
    try:
        answer = encode_completed(tokenizer, prompt, text)
    except DataError as error:
        return None, f"prompt {prompt.id}: no answer can be written behind it: {error}"
    ids = answer.completion_ids
    if tokenizer.unk_token_id in ids:  # a vocabulary that has no such words
        return None, ""
    if prompt.token_ids is None and answer.prompt_ids != encode_prompt(tokenizer, prompt):
        return answer, f"prompt {prompt.id} is sampled as other tokens than it is trained as; change the chat template"
    if not answer.is_verbatim:
        written = decode_after(tokenizer, answer.prompt_ids, ids)
        return answer, (
            f"prompt {prompt.id}: the answer {text!r} is trained as {_cut(written)!r}, so that what is sampled and "
            "what is trained differ; change the chat template"
        )
    return answer, ""


def _read_by(
    reward: ModelReward, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: Completed
) -> tuple[str, str]:
    """The text that a reward model reads of a prompt and a plain answer, and what is wrong with it, else empty."""
    text = decode_after(tokenizer, answer.prompt_ids, answer.completion_ids)
    zeros = (0.0,) * len(answer.completion_ids)
    completion = Completion(answer.completion_ids, zeros, zeros, text, "stop")
    try:
        ids = reward.encode(Sample(prompt, answer.prompt_ids, completion, 0))
    except InputError as error:
        return "", f"it cannot read prompt {prompt.id} with an answer: {error}"
    own = reward.model.tokenizer
    read = decode_marked(own, ids)
    if own.unk_token_id not in ids and "".join(text.split()).lower() not in "".join(read.split()).lower():
        return "", (
            f"it reads prompt {prompt.id} with the answer {text!r} as {_cut(read)!r}, without the answer; "
            "its chat template or tokenizer does not fit this data"
        )
    how = "the sampled ids" if reward.scores_token_ids else "the text, encoded again"
    return f"{how}, {_shown_ids(ids)}: {_cut(read)!r}", ""


def _ids_of(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    try:
        return encode_prompt(tokenizer, prompt)
    except InputError:
        return ()


def _token(tokenizer: PreTrainedTokenizerBase, token_id: object) -> str:
    return _named(tokenizer, token_id) if isinstance(token_id, int) else "no token"


def _named(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    return f"{tokenizer.convert_ids_to_tokens(token_id)} ({token_id})"


def _shown_ids(ids: Sequence[int]) -> str:
    numbers = " ".join(map(str, ids[:_NUM_SHOWN_IDS]))
    return f"{len(ids)} ids: {numbers}{' ...' if len(ids) > _NUM_SHOWN_IDS else ''}"


def _cut(text: str) -> str:
    """`text`, without its middle if it is long."""
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"
