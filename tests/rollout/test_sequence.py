"""A completion ends where its limits say, also where a stop string is spread over tokens or cuts one in two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.core.errors import InputError
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.models.tokenizer import decode as decode_with
from tunesmith.engine.rollout.sequence import Decode, Limits, Sequence

BYTES = [b"", b"a", b"b", b"ab", b"ba", b" end", b"\n", "é".encode()[:1], "é".encode()[1:], "€".encode()[:2], b"\xac"]


def decode(token_ids: list[int]) -> str:
    """A byte-level tokenizer: token i is `BYTES[i]`, the empty one stands for a special token."""
    return b"".join(BYTES[index] for index in token_ids).decode(errors="replace")


def _drawn(token_ids: list[int], limits: Limits) -> Sequence:
    sequence = Sequence(0, 0, (1, 2, 3), limits, Decode(decode))
    for number, token_id in enumerate(token_ids):
        if sequence.append(token_id, -0.5 * number, -1.0 * number):
            break
    return sequence


def test_the_length_ends_a_completion():
    sequence = _drawn([1, 2, 1, 2, 1], Limits(max_new_tokens=4))
    assert sequence.token_ids == [1, 2, 1, 2] and sequence.text == "abab"
    assert sequence.logps == [0.0, -0.5, -1.0, -1.5] and sequence.raw_logps == [0.0, -1.0, -2.0, -3.0]
    assert sequence.finish_reason == "length"


def test_a_stop_id_is_the_last_id_and_not_shown_in_the_text():
    sequence = _drawn([1, 2, 6, 1], Limits(max_new_tokens=4, stop_ids=frozenset({6})))
    assert sequence.token_ids == [1, 2, 6] and sequence.text == "ab" and sequence.finish_reason == "stop"


def test_position_counts_the_prompt_and_what_is_drawn():
    sequence = _drawn([1, 2], Limits())
    assert sequence.position == 5 and sequence.finish_reason is None


def test_stop_ids_are_masked_until_enough_is_drawn():
    sequence = Sequence(0, 0, (1,), Limits(max_new_tokens=4, min_new_tokens=2, stop_ids=frozenset({6})), Decode(decode))
    masks: list[bool] = []
    for token_id in (1, 1, 6):
        masks.append(sequence.masks_stop_ids)
        sequence.append(token_id, 0.0, 0.0)
    assert masks == [True, True, False]
    assert sequence.finish_reason == "stop" and len(sequence.token_ids) == 3


@pytest.mark.parametrize(
    ("token_ids", "stops", "text", "num_ids"),
    [
        ([1, 2, 5, 1], ("b e",), "a", 3),  # begins in one token, ends within the next
        ([3, 3, 1], ("bab",), "a", 2),  # in the middle of two tokens
        ([1, 5, 1], ("end", "a e"), "", 2),  # of several that end at once, the first in the text
        ([1, 1, 2], ("b", "ab"), "a", 3),
        ([7, 8, 2], ("é",), "", 2),  # a character of two tokens
        ([9, 10, 2], ("€b",), "", 3),
        ([1, 0, 2, 1], ("ab",), "", 3),  # a special token without text between
        ([2, 9, 1], ("b",), "", 1),
    ],
)
def test_a_stop_string_cuts_the_text_and_keeps_the_ids(
    token_ids: list[int], stops: tuple[str, ...], text: str, num_ids: int
):
    sequence = _drawn(token_ids, Limits(stop_strings=stops))
    assert (sequence.text, len(sequence.token_ids), sequence.finish_reason) == (text, num_ids, "stop")


def test_a_stop_string_before_the_least_length_ends_nothing():
    limits = Limits(max_new_tokens=6, min_new_tokens=3, stop_strings=("ab",))
    sequence = _drawn([1, 2, 2, 1, 2, 1], limits)
    assert sequence.text == "abb" and sequence.finish_reason == "stop" and len(sequence.token_ids) == 5
    assert _drawn([3, 7, 7, 7, 7, 7], limits).finish_reason == "length", "the text before unfinished bytes is old too"
    beside_a_long_one = Limits(max_new_tokens=6, min_new_tokens=3, stop_strings=("ab", "a long one"))
    assert _drawn([1, 2, 2, 2, 2, 2], beside_a_long_one).finish_reason == "length", "what is kept for it is old too"


def test_a_stop_id_wins_over_a_stop_string_and_both_over_the_length():
    limits = Limits(max_new_tokens=2, stop_ids=frozenset({2}), stop_strings=("ab", "aa"))
    assert _drawn([1, 2], limits).text == "a"
    assert _drawn([1, 2], limits).finish_reason == "stop"
    assert _drawn([1, 1], limits).finish_reason == "stop"


@given(
    st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=30),
    st.lists(st.text("ab en\né€", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 4),
)
def test_stop_strings_end_where_a_search_of_the_whole_text_says(token_ids: list[int], stops: list[str], least: int):
    limits = Limits(max_new_tokens=30, min_new_tokens=least, stop_strings=tuple(stops))
    sequence = _drawn(token_ids, limits)
    seen = 0
    for count in range(1, len(token_ids) + 1):
        text = decode(token_ids[:count]).rstrip("\ufffd")
        places = [text.find(stop, max(0, seen - len(stop) + 1)) for stop in stops]
        places = [place for place in places if place >= 0]
        seen = max(seen, len(text))
        if places and count >= least:
            assert (sequence.text, len(sequence.token_ids)) == (text[: min(places)], count)
            return
    assert sequence.text == decode(token_ids) and len(sequence.token_ids) == len(token_ids)


def test_tokens_that_lose_their_space_at_a_beginning_keep_it_in_a_completion():
    words = [" a", " b", "c"]  # as with SentencePiece, whose decoder drops the first space
    sequence = Sequence(
        0, 0, (1,), Limits(stop_strings=("b a",)), Decode(lambda ids: "".join(words[i] for i in ids)[1:])
    )
    ended = [sequence.append(token_id, 0.0, 0.0) for token_id in (0, 2, 1, 0)]
    assert ended == [False, False, False, True] and sequence.text == " ac "


def test_a_stop_id_that_was_to_be_masked_ends_nothing():
    limits = Limits(max_new_tokens=5, min_new_tokens=2, stop_ids=frozenset({6}))
    assert _drawn([6, 6, 1, 6, 1], limits).token_ids == [6, 6, 1, 6]


def test_with_a_real_tokenizer_the_text_is_that_of_the_whole():
    tokenizer = tiny_model("llama").tokenizer
    ids = tokenizer("The film was good, naïve 日本 and long. STOP here")["input_ids"]
    limits = Limits(stop_strings=("STOP",))
    sequence = Sequence(0, 0, (1,), limits, Decode(lambda token_ids: decode_with(tokenizer, token_ids)))
    for token_id in ids:
        if sequence.append(token_id, 0.0, 0.0):
            break
    assert sequence.finish_reason == "stop"
    assert sequence.text == decode_with(tokenizer, ids).split("STOP")[0]
    assert sequence.token_ids == ids[: len(sequence.token_ids)]


def test_work_per_token_does_not_grow_with_the_completion():
    lengths: list[int] = []

    def counted(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    sequence = Sequence(0, 0, (1,), Limits(max_new_tokens=1000, stop_strings=("zz",)), Decode(counted))
    for _ in range(1000):
        sequence.append(1, 0.0, 0.0)
    assert len(lengths) <= 2003 and max(lengths) <= 2


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; allow at least 1"),
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens is 3; it must lie between 0 and"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"stop_strings": "end"}, "the one text 'end'; give a tuple"),
        ({"stop_strings": ("a", "")}, "'' is no stop string"),
        ({"stop_strings": (3,)}, "3 is no stop string"),
        ({"stop_ids": frozenset({"</s>"})}, "'</s>' is no stop id"),
        ({"stop_ids": frozenset({-1})}, "-1 is no stop id"),
        ({"stop_ids": frozenset({True})}, "True is no stop id"),
    ],
)
def test_limits_that_cannot_be_used_are_refused(limits: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        Limits(**limits)  # type: ignore[arg-type]
