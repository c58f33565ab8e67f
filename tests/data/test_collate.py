import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.base.core.errors import DataError
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.collate import (
    EncodedPreference,
    TokenLimit,
    collate_pairs,
    encode_preferences,
    measure_prompts,
    pad_right,
    prefix_prompts,
    truncated,
)
from tunesmith.collect.data.pairs import load_preferences
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.engine.models.tiny import EOS_ID, byte_tokenizer
from tunesmith.engine.models.tokenizer import decode, encode_pair_side, encode_prompt

TOKENIZER = byte_tokenizer()


def test_sequences_are_padded_at_the_end_and_keep_their_lengths():
    ids_BT, lengths_B = pad_right([(5, 6), (7,), (1, 2, 3)], pad_id=9)
    assert ids_BT.tolist() == [[5, 6, 9], [7, 9, 9], [1, 2, 3]]
    assert lengths_B.tolist() == [2, 1, 3]
    assert ids_BT.dtype == lengths_B.dtype == torch.int64
    assert pad_right([], pad_id=0)[0].shape == (0, 0)


def test_the_sides_of_a_pair_stand_together_and_padding_equal_to_eos_changes_no_length():
    pairs = [
        EncodedPreference("a", ((1, 2, EOS_ID), (1, EOS_ID)), (1, 2), margin=0.5),
        EncodedPreference("b", ((4,), (5, 6)), (1, 1)),
    ]
    batch = collate_pairs(pairs, pad_id=EOS_ID)
    assert batch.ids_BT.tolist() == [[1, 2, 2], [1, 2, 2], [4, 2, 2], [5, 6, 2]]
    assert batch.lengths_B.tolist() == [3, 2, 1, 2]
    assert (batch.margin_N.tolist(), batch.tie_N.tolist()) == ([0.5, 0.0], [False, True])
    chosen_N, rejected_N = batch.chosen_N, batch.rejected_N
    assert (chosen_N.tolist(), rejected_N.tolist()) == ([0, 2], [1, 3])


def test_pairs_are_encoded_with_prompt_and_end_token():
    user, reply = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
    rows = [
        {"prompt": "It", "chosen": " is", "rejected": " was", "margin": 1},
        {"prompt": [user], "chosen": [reply], "rejected": [{**reply, "content": "No"}], "tie": True},
    ]
    pairs = load_preferences(rows)
    text, chat = encode_preferences(pairs, TOKENIZER, max_tokens=100)
    assert text.sequences[0] == (*TOKENIZER("It is")["input_ids"], EOS_ID)
    assert (text.prompt_id, text.margin, text.is_tie) == ("pairs[0]", 1.0, False)
    assert chat.sequences[1] == encode_pair_side(TOKENIZER, pairs[1].prompt, pairs[1].rejected)
    assert chat.is_tie


def test_too_long_rows_are_all_named():
    pairs = load_preferences([{"prompt": "a", "chosen": "b" * n, "rejected": "c"} for n in (1, 20, 30)])
    with pytest.raises(
        DataError, match=r"(?s)2 bad rows of 3 .*pairs\[1\]: too long: .*`chosen` have 22.* is 10.*pairs\[2\]"
    ):
        encode_preferences(pairs, TOKENIZER, max_tokens=10)
    prompts = load_prompts(["a" * n for n in (5, 11, 12, 13, 14, 15, 16)])
    with pytest.raises(DataError, match=r"(?s)6 bad rows of 7 .*prompts\[1\]: too long: 11 tokens, the limit is 10"):
        measure_prompts(prompts, TOKENIZER, max_tokens=10)
    measured = measure_prompts(prompts, TOKENIZER, max_tokens=16)
    assert [one.num_tokens for one in measured] == [5, 11, 12, 13, 14, 15, 16]


def test_prefixes_are_the_first_tokens_of_the_text():
    text = "The film that I saw yesterday evening"
    prompts = [Prompt(id=str(index), content=text, columns={"label": index}) for index in range(200)]
    prefixes = prefix_prompts(prompts, TOKENIZER, (2, 8), seed=0)
    whole = encode_prompt(TOKENIZER, prompts[0])
    lengths = [len(prefix.token_ids or ()) for prefix in prefixes]
    assert set(lengths) == {2, 3, 4, 5, 6, 7, 8}
    for prompt, prefix, length in zip(prompts, prefixes, lengths, strict=True):
        assert prefix.token_ids == whole[:length]
        assert prefix.content == decode(TOKENIZER, whole[:length])
        assert (prefix.id, prefix.columns) == (prompt.id, prompt.columns)


def test_the_length_of_a_prefix_depends_on_seed_and_index_alone():
    first = prefix_prompts([Prompt(str(n), "abcdefghijk") for n in range(50)], TOKENIZER, (2, 8), seed=3)
    second = prefix_prompts([Prompt(f"x{n}", "ABCDEFGHIJKLMN") for n in range(70)], TOKENIZER, (2, 8), seed=3)
    other = prefix_prompts([Prompt(str(n), "abcdefghijk") for n in range(50)], TOKENIZER, (2, 8), seed=4)
    lengths = [[len(prefix.token_ids or ()) for prefix in prefixes] for prefixes in (first, second, other)]
    assert lengths[0] == lengths[1][:50] != lengths[2]


def test_a_prefix_ends_at_a_whole_character():
    prompts = [Prompt(str(n), "ab\u00e9\u20ac\U0001f600\u00e9\u20ac tail") for n in range(100)]
    for prefix in prefix_prompts(prompts, TOKENIZER, (2, 8), seed=0):
        assert "\ufffd" not in prefix.content
        assert 2 <= len(prefix.token_ids or ()) <= 8


def test_a_character_longer_than_the_range_is_kept_whole():
    (prefix,) = prefix_prompts([Prompt("0", "\U0001f600!")], TOKENIZER, (2, 3), seed=0)
    assert prefix.content == "\U0001f600"


def test_short_texts_are_kept_whole_and_shorter_ones_refused():
    assert prefix_prompts([Prompt("0", "abc")], TOKENIZER, (3, 8), seed=0)[0].content == "abc"
    with pytest.raises(DataError, match="0: 1 tokens; `prefix_tokens` needs 2"):
        prefix_prompts([Prompt("0", "a")], TOKENIZER, (2, 8), seed=0)


def test_a_conversation_has_no_prefix():
    with pytest.raises(DataError, match=r"prompts\[0\]: a conversation; `prefix_tokens` cuts texts alone"):
        prefix_prompts(load_prompts([[{"role": "user", "content": "Hi"}]]), TOKENIZER, (2, 8), seed=0)


def test_special_tokens_in_front_do_not_count_as_text():
    tokenizer = byte_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    (prefix,) = prefix_prompts([Prompt("0", "abcdef")], tokenizer, (2, 2), seed=0)
    assert prefix.content == "ab"
    assert prefix.token_ids is not None and prefix.token_ids[0] == 1 and len(prefix.token_ids) == 3


def test_a_pair_that_is_too_long_loses_the_beginning_of_its_prompt_on_both_sides_alike():
    pairs = load_preferences([{"prompt": "abcdefgh", "chosen": "12345", "rejected": "67"}])
    (whole,) = encode_preferences(pairs, TOKENIZER, 100, truncate="left")
    (cut,) = encode_preferences(pairs, TOKENIZER, 9, truncate="left")
    assert whole.sequences == encode_preferences(pairs, TOKENIZER, 100)[0].sequences
    assert [decode(TOKENIZER, ids) for ids in cut.sequences] == ["fgh12345", "fgh67"]
    assert all(ids[-1] == EOS_ID for ids in cut.sequences)


def test_an_answer_longer_than_the_limit_loses_its_own_beginning_and_the_other_stays_whole():
    pairs = load_preferences([{"prompt": "ab", "chosen": "123456789", "rejected": "z"}])
    (cut,) = encode_preferences(pairs, TOKENIZER, 4, truncate="left")
    assert [decode(TOKENIZER, ids) for ids in cut.sequences] == ["789", "z"]


def test_cut_at_both_ends_a_prompt_loses_its_beginning_and_answers_their_ends():
    pairs = load_preferences([{"prompt": "abcdefgh", "chosen": "123456789", "rejected": "67"}])
    cuts = [encode_preferences(pairs, TOKENIZER, most, truncate="both")[0] for most in (100, 16, 9)]
    assert cuts[0].sequences == encode_preferences(pairs, TOKENIZER, 100)[0].sequences
    said = [[decode(TOKENIZER, ids) for ids in cut.sequences] for cut in cuts[1:]]
    assert said == [["abcdefgh12345678", "abcdefgh67"], ["defgh1234", "defgh67"]]  # half of the limit, rounded up
    assert [cut.answer_lengths for cut in cuts] == [(10, 3), (8, 3), (4, 3)]


def test_cut_at_both_ends_a_long_prompt_alone_pays_for_answers_that_fit():
    pairs = load_preferences([{"prompt": "abcdefgh", "chosen": "123", "rejected": "67"}])
    (both,), (left,) = (encode_preferences(pairs, TOKENIZER, 10, truncate=how) for how in ("both", "left"))
    assert [decode(TOKENIZER, ids) for ids in both.sequences] == ["cdefgh123", "cdefgh67"]
    assert both == left and both.answer_lengths == (4, 3)


def test_completions_of_a_ranking_are_cut_together():
    rows = [{"prompt": "abcdef", "completions": ["1", "234", "56"], "ranks": [1, 2, 3]}]
    (cut,) = encode_preferences(load_preferences(rows), TOKENIZER, 6, truncate="left")
    assert [decode(TOKENIZER, ids) for ids in cut.sequences] == ["ef1", "ef234", "ef56"]


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@given(st.lists(IDS, min_size=2, max_size=4), st.lists(st.integers(0, 2), max_size=8).map(tuple), st.integers(1, 10))
def test_cut_sequences_are_ends_within_the_limit_and_what_fits_is_kept(tails, prompt, limit):
    sequences = [prompt + tail for tail in tails]
    cut = truncated(sequences, TokenLimit(limit, "left"))
    assert all(ids == whole[len(whole) - len(ids) :] for ids, whole in zip(cut, sequences, strict=True))
    assert max(map(len, cut)) == min(limit, max(map(len, sequences)))
    if len(prompt) >= max(map(len, sequences)) - limit:  # the prompt alone pays
        assert len({len(whole) - len(ids) for ids, whole in zip(cut, sequences, strict=True)}) == 1


@given(st.lists(IDS, min_size=2, max_size=4), st.lists(st.integers(0, 2), max_size=8).map(tuple), st.integers(2, 10))
def test_sequences_cut_at_both_ends_keep_half_of_the_limit_before_their_first_difference(tails, prompt, limit):
    sequences = [prompt + tail for tail in tails]
    cut = truncated(sequences, TokenLimit(limit, "both"))
    columns = enumerate(zip(*sequences, strict=False))
    num_common = next((place for place, ids in columns if len(set(ids)) > 1), min(map(len, sequences)))
    num_kept = min(num_common, max(limit - limit // 2, limit - (max(map(len, sequences)) - num_common)))
    assert all(ids == whole[num_common - num_kept :][:limit] for ids, whole in zip(cut, sequences, strict=True))
    assert max(map(len, cut)) <= limit
    assert len(set(cut)) > 1 or len(set(sequences)) == 1, "what differs first stays"
    if max(map(len, sequences)) <= limit:
        assert cut == tuple(sequences)
