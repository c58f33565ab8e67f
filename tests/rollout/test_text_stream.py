"""Pieces of a text that grows: joined they are the text, and no piece has to be taken back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.tiny import byte_tokenizer, tiny_model
from tunesmith.engine.models.tokenizer import decode
from tunesmith.engine.rollout.engine import Callbacks, make_request
from tunesmith.engine.rollout.sequence import Decode, Limits, Sequence, TextStream

TOKENIZER = byte_tokenizer()
WORDS = ("all", " EN", "OUGH", "D", " END", "é", "\n", "E", "ND")


def _words(token_ids: list[int]) -> str:
    return "".join(WORDS[token] for token in token_ids)


def _bytes(token_ids: list[int]) -> str:
    return decode(TOKENIZER, token_ids)


def _pieces(sequence: Sequence, token_ids: list[int]) -> list[str]:
    """What a reader sees of `token_ids`, piece by piece, until the sequence ends."""
    stream = TextStream(sequence.decode, sequence.context, sequence.limits.stop_strings)
    pieces: list[str] = []
    for token in token_ids:
        ended = sequence.append(token, -1.0, -1.0)
        pieces.append(stream.finish(sequence.text) if ended else stream.push(sequence.token_ids))
        if ended:
            break
    return pieces


def _sequence(limits: Limits, decode=_words) -> Sequence:
    return Sequence(0, 0, (1,), limits, Decode(decode))


def test_text_is_given_as_soon_as_it_is_settled() -> None:
    assert _pieces(_sequence(Limits(max_new_tokens=4)), [0, 1, 2, 3]) == ["all", " EN", "OUGH", "D"]


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not() -> None:
    limits = Limits(max_new_tokens=3, stop_strings=("END",))
    assert _pieces(_sequence(limits), [0, 1, 2]) == ["all", " ", "ENOUGH"]


def test_a_stop_string_is_never_shown() -> None:
    assert _pieces(_sequence(Limits(stop_strings=("END",))), [0, 1, 3]) == ["all", " ", ""]


def test_what_is_held_at_the_end_is_given() -> None:
    assert _pieces(_sequence(Limits(max_new_tokens=2, stop_strings=("END",))), [0, 1]) == ["all", " EN"]


def test_an_ordinary_token_that_is_a_stop_id_is_not_shown() -> None:
    assert _pieces(_sequence(Limits(stop_ids=frozenset({6}))), [0, 6]) == ["all", ""]


def test_a_character_of_several_tokens_comes_whole() -> None:
    ids = TOKENIZER("a€b")["input_ids"]
    assert _pieces(_sequence(Limits(max_new_tokens=len(ids)), _bytes), ids) == ["a", "", "", "€", "b"]


def test_work_per_token_does_not_grow_with_the_completion() -> None:
    longest = 0

    def counted(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return _words(token_ids)

    stream, token_ids = TextStream(Decode(counted), [], ("END",)), []
    for token in [0, 1, 2, 3] * 50:
        token_ids.append(token)
        stream.push(token_ids)
    assert longest <= 2


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=12),
    stops=st.lists(st.text("ENDOallé \n", min_size=1, max_size=4), max_size=3),
    min_new_tokens=st.integers(0, 12),
)
def test_pieces_of_words_joined_are_the_text(token_ids: list[int], stops: list[str], min_new_tokens: int) -> None:
    limits = Limits(len(token_ids), min(min_new_tokens, len(token_ids)), stop_strings=tuple(stops))
    sequence = _sequence(limits)
    assert "".join(_pieces(sequence, token_ids)) == sequence.text


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, 258), min_size=1, max_size=16), stops=st.lists(st.text("a€", min_size=1)))
def test_pieces_of_bytes_joined_are_the_text(token_ids: list[int], stops: list[str]) -> None:
    sequence = _sequence(Limits(len(token_ids), stop_strings=tuple(stops)), _bytes)
    assert "".join(_pieces(sequence, token_ids)) == sequence.text


@pytest.mark.parametrize("stops", [(), ("END",)])
def test_callbacks_get_the_text_of_each_completion_and_the_number_that_ended(stops: tuple[str, ...]) -> None:
    texts: dict[tuple[int, int], str] = {}
    counts: list[tuple[int, int]] = []

    def on_text(prompt: int, sample: int, text: str) -> None:
        assert text
        texts[prompt, sample] = texts.get((prompt, sample), "") + text

    loaded = tiny_model("llama")
    prompts = [Prompt(str(index), "a") for index in range(4)]
    request = make_request(loaded.model, loaded.tokenizer, prompts, 2, SamplingParams(), 8, 0)
    callbacks = Callbacks(request, on_progress=lambda done, total: counts.append((done, total)), on_text=on_text)
    rows = [
        Sequence(3, sample, (1,), Limits(max_new_tokens=3, stop_strings=stops), Decode(_words)) for sample in (0, 1)
    ]
    for tokens in ((0, 0), (4, 1), (5, 2)):
        going = [(row, token) for row, token in zip(rows, tokens, strict=True) if not row.finish_reason]
        ended = [row for row, token in going if row.append(token, -1.0, -1.0)]
        callbacks.note([row for row, _ in going], ended)
    assert texts == {(3, row.sample): row.text for row in rows}
    assert counts[-1] == (2, 8)
