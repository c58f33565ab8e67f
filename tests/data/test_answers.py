"""Answers as token ids: the prompt apart from the completion, each distinct one once, mismatched ones for KTO."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.config.sections import ModelSection, Truncate
from tunesmith.base.core.errors import DataError
from tunesmith.base.core.seeds import derive, permutation
from tunesmith.base.schema.records import Judgement, Pair, Prompt, Ranking
from tunesmith.collect.data.answers import (
    Answer,
    AnswerLabel,
    AnswerPair,
    AnswerTable,
    collate_answers,
    encode_answer,
    encode_labels,
    encode_pairs,
    fitting,
    with_mismatched,
)
from tunesmith.collect.data.collate import TokenLimit, encode_preferences, truncated
from tunesmith.collect.data.rows import BadRows, RowError
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.tiny import byte_tokenizer
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, decode, encode_pair_side, encode_prompt

ASK = ({"role": "user", "content": "Hi"},)
SAY = ({"role": "assistant", "content": "Yo"},)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_policy(ModelSection(name="tiny:llama")).tokenizer


@pytest.mark.parametrize(
    ("content", "completion"), [("The film", " was good."), (ASK, "Yo"), (ASK, SAY), ("", "alone"), ("", (*ASK, *SAY))]
)
def test_prompt_and_completion_together_are_what_a_reward_model_sees(
    tokenizer: PreTrainedTokenizerBase, content: object, completion: object
) -> None:
    prompt = Prompt("0", content)  # type: ignore[arg-type]
    answer = encode_answer(tokenizer, prompt, completion)  # type: ignore[arg-type]
    whole = encode_pair_side(tokenizer, prompt, completion)  # type: ignore[arg-type]
    assert answer.prompt_ids == encode_prompt(tokenizer, prompt)
    assert (*answer.prompt_ids, *answer.completion_ids)[-len(whole) :] == whole
    assert answer.completion_ids[-1] == tokenizer.eos_token_id


def test_the_completion_of_a_conversation_is_what_the_assistant_said(tokenizer: PreTrainedTokenizerBase) -> None:
    answer = encode_answer(tokenizer, Prompt("0", ASK), SAY)
    assert decode(tokenizer, answer.completion_ids).strip() == "Yo"


def test_too_long_answers_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RowError, match=r"prompt and `rejected` have \d+ tokens, the limit is 3"):
        fitting([encode_answer(tokenizer, Prompt("0", "The film"), " was good.")], ["rejected"], TokenLimit(3))


def test_where_a_template_writes_the_prompt_otherwise_an_answer_is_learnt_as_it_would_be_sampled() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    answer = encode_answer(tokenizer, Prompt("0", ASK), SAY)
    assert (decode(tokenizer, answer.prompt_ids), decode(tokenizer, answer.completion_ids)) == ("1Hi>", "Yo")
    with pytest.raises(DataError, match="writes what comes before turn 1 of 4 otherwise"):
        encode_answer(tokenizer, Prompt("0", ASK), (*SAY, *ASK, *SAY))


def test_pairs_share_answers_and_a_bad_side_takes_its_row_along(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt, table, bad = Prompt("0", "p"), AnswerTable(), BadRows(skip=True)
    bad.opened("pairs", 4)
    items = [
        Pair(prompt, "a", "b"),
        Pair(prompt, "a", "far too long" * 20),
        Ranking(prompt, ("c", "a", "b"), (1, 2, 2)),
        Ranking(prompt, ("c", "a", "far too long" * 20), (1, 2, 3)),
    ]
    pairs = encode_pairs(items, tokenizer, TokenLimit(30), table, bad)
    assert [(pair.chosen, pair.rejected, pair.tie) for pair in pairs] == [
        *((0, 1, False), (2, 0, False), (2, 1, False), (0, 1, True)),
    ]
    assert bad.finish().reasons == {"too long": 2}


def test_labels_of_a_pair_stand_or_fall_together(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt, table, bad = Prompt("same id", "p"), AnswerTable(), BadRows(skip=True)
    bad.opened("pairs", 3)
    items = [Pair(prompt, "a", "b"), Pair(prompt, "a", "far too long" * 20), Judgement(prompt, "b", True)]
    labels = encode_labels(items, tokenizer, TokenLimit(30), table, bad)
    assert [(label.answer, label.is_wanted) for label in labels] == [(0, True), (1, False), (1, True)]
    assert bad.finish().reasons == {"too long": 1}


def test_a_pair_is_two_labels_a_ranking_those_of_its_pairs_and_a_tie_none(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt, table, bad = Prompt("0", "p"), AnswerTable(), BadRows()
    bad.opened("pairs", 3)
    items = [
        Pair(prompt, "a", "b"),
        Pair(prompt, "far too long" * 20, "and this" * 20, tie=True),
        Ranking(prompt, ("a", "b", "c"), (2, 2, 1)),
    ]
    labels = encode_labels(items, tokenizer, TokenLimit(30), table, bad)
    said = [(decode(tokenizer, table.answers[one.answer].completion_ids), one.is_wanted) for one in labels]
    assert [(text[0], wanted) for text, wanted in said] == [
        *(("a", True), ("b", False)),
        *(("c", True), ("a", False), ("c", True), ("b", False)),
    ]


PAIR = Pair(Prompt("0", "abcdefgh"), "12345", "67")
RANKING = Ranking(Prompt("0", "abcdef"), ("1", "234", "56"), (1, 2, 3))


@pytest.mark.parametrize("truncate", ["left", "both"])
@pytest.mark.parametrize(("item", "max_tokens"), [(PAIR, 9), (RANKING, 6), (PAIR, 100)])
def test_what_is_too_long_is_cut_as_a_reward_model_s_trainer_cuts_it(
    tokenizer: PreTrainedTokenizerBase, item: Pair | Ranking, max_tokens: int, truncate: Truncate
) -> None:
    table, bad = AnswerTable(), BadRows()
    bad.opened("pairs", 1)
    pairs = encode_pairs([item], tokenizer, TokenLimit(max_tokens, truncate), table, bad)
    (encoded,) = encode_preferences([item], tokenizer, max_tokens, truncate=truncate)
    found = {(*answer.prompt_ids, *answer.completion_ids) for answer in table.answers}
    assert found == set(encoded.sequences)
    assert len({answer.prompt_ids for answer in table.answers}) == 1  # computed once
    assert len(pairs) == (3 if isinstance(item, Ranking) else 1)
    labels = encode_labels([item], tokenizer, TokenLimit(max_tokens, truncate), table, bad)
    assert {label.answer for label in labels} == set(range(len(table.answers)))  # the same answers


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@given(st.lists(IDS, min_size=1, max_size=4), IDS, st.integers(1, 16))
def test_a_cut_leaves_completions_whole_and_a_token_of_their_prompt(
    completions: list[tuple[int, ...]], prompt: tuple[int, ...], max_tokens: int
) -> None:
    answers = [Answer(prompt, completion) for completion in completions]
    names = ["completion"] * len(answers)
    if max(map(len, completions)) >= max_tokens:
        with pytest.raises(RowError, match=r"too long: .* tokens without its prompt, of which one must be left"):
            fitting(answers, names, TokenLimit(max_tokens, "left"))
        return
    cut = fitting(answers, names, TokenLimit(max_tokens, "left"))
    assert [answer.completion_ids for answer in cut] == completions
    assert all(answer.prompt_ids and prompt[-len(answer.prompt_ids) :] == answer.prompt_ids for answer in cut)
    sequences = tuple((*answer.prompt_ids, *answer.completion_ids) for answer in cut)
    assert sequences == truncated([prompt + one for one in completions], TokenLimit(max_tokens, "left"))


@given(st.lists(IDS, min_size=1, max_size=4), IDS, st.integers(2, 16))
def test_cut_at_both_ends_completions_keep_their_beginnings_and_the_prompt_its_end(
    completions: list[tuple[int, ...]], prompt: tuple[int, ...], max_tokens: int
) -> None:
    answers = [Answer(prompt, completion, (range(1, len(completion)),)) for completion in completions]
    cut = fitting(answers, ["completion"] * len(answers), TokenLimit(max_tokens, "both"))
    (kept,) = {answer.prompt_ids for answer in cut}
    assert prompt[-len(kept) :] == kept
    assert len(kept) == min(len(prompt), max(max_tokens - max_tokens // 2, max_tokens - max(map(len, completions))))
    for answer, completion in zip(cut, completions, strict=True):
        assert answer.completion_ids == completion[: max_tokens - len(kept)]
        assert sum(map(len, answer.between)) == len(answer.completion_ids) - 1


def test_a_limit_of_one_token_is_told_to_be_raised() -> None:
    """It said that the answer has 1 token, and to set what was set."""
    with pytest.raises(RowError, match=r"`chosen` has 3 tokens .* the limit is 1 .*; shorten the row, raise it to 2"):
        fitting([Answer((1, 2), (3, 4, 5))], ["chosen"], TokenLimit(1, "both"))


def test_a_batch_holds_each_answer_once_with_those_of_a_prompt_side_by_side() -> None:
    answers = [Answer((1, 2), (3,)), Answer((1,), (4, 5)), Answer((1, 2), (6, 7, 8)), Answer((9,), (9,))]
    batch = collate_answers(answers, [2, 1, 0, 2])
    assert batch.answer_B.tolist() == [1, 0, 2]
    assert batch.ids_BS.tolist() == [[1, 4, 5, 0, 0], [1, 2, 3, 0, 0], [1, 2, 6, 7, 8]]
    assert batch.lengths_B.tolist() == [3, 3, 5]
    assert batch.prompt_lengths_B.tolist() == [1, 2, 2]


@given(prompts=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_mismatched_completions_are_those_of_other_prompts(prompts: list[int], seed: int) -> None:
    table = AnswerTable()
    places = [table.place(Answer((prompt,), (prompt, 100 + index))) for index, prompt in enumerate(prompts)]
    labels = [AnswerLabel(str(index), place, index % 2 == 0) for index, place in enumerate(places)]
    found = with_mismatched(labels, table, 2, seed)
    assert [(label.prompt_id, label.answer, label.is_wanted) for label in found] == [
        (label.prompt_id, label.answer, label.is_wanted) for label in labels
    ]
    for label, prompt in zip(found, prompts, strict=True):
        if len(set(prompts)) == 1:
            assert label.mismatched == -1
            continue
        mixed = table.answers[label.mismatched]
        assert mixed.prompt_ids == (prompt,)
        assert len(mixed.completion_ids) == 1 and mixed.completion_ids[0] != prompt


def test_mismatched_completions_depend_on_the_seed_alone() -> None:
    def found(seed: int) -> list[AnswerLabel]:
        table = AnswerTable()
        labels = [AnswerLabel("", table.place(Answer((index,), (index,))), True) for index in range(20)]
        return with_mismatched(labels, table, 9, seed)

    assert found(1) == found(1) != found(2)
    assert with_mismatched([AnswerPair("", 0, 1)], AnswerTable(), 9, 0) == []


def test_a_mismatched_completion_is_that_of_the_next_row_in_the_circle() -> None:
    table = AnswerTable()
    labels = [AnswerLabel("", table.place(Answer((index,), (index,))), True) for index in range(12)]
    found = [table.answers[label.mismatched].completion_ids[0] for label in with_mismatched(labels, table, 9, seed=3)]
    order = permutation(derive(3, "mismatched"), 0, 12)
    assert [found[index] for index in order] == [*order[1:], order[0]]
