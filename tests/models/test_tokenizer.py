"""Prompts and completions as token ids."""

import pytest

from tunesmith.base.core.errors import DataError, ModelError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.models.tiny import byte_tokenizer, tiny_model
from tunesmith.engine.models.tokenizer import (
    decode,
    encode_pair_side,
    encode_prompt,
    same_vocabulary,
    spare_pad_token,
    stop_token_ids,
)

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def shown(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def test_a_text_prompt_is_encoded_as_it_stands(tokenizer):
    assert shown(tokenizer, encode_prompt(tokenizer, Prompt("1", "The film "))) == "The film "


def test_token_ids_of_a_prompt_are_kept(tokenizer):
    assert encode_prompt(tokenizer, Prompt("1", "abc", token_ids=(5, 6))) == (5, 6)


def test_a_conversation_goes_through_the_template_and_opens_the_assistants_turn(tokenizer):
    ids = encode_prompt(tokenizer, Prompt("1", (USER,)))
    assert shown(tokenizer, ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_that_ends_with_the_assistant_is_continued(tokenizer):
    ids = encode_prompt(tokenizer, Prompt("1", (USER, ANSWER)))
    assert shown(tokenizer, ids).endswith("<|im_start|>assistant\nyo")


def test_an_eos_that_the_tokenizer_appends_is_taken_off_a_prompt(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    assert shown(tokenizer, encode_prompt(tokenizer, Prompt("1", "ab"))) == "<|im_start|>ab"
    pair = encode_pair_side(tokenizer, Prompt("1", "ab"), "cd")
    assert shown(tokenizer, pair) == "<|im_start|>abcd<|im_end|>"


def test_an_empty_prompt_becomes_the_begin_token_or_is_refused_by_name(tokenizer):
    assert encode_prompt(tokenizer, Prompt("1", "")) == (1,)
    tokenizer.bos_token = None
    with pytest.raises(DataError, match=r"films\.jsonl:3 is empty"):
        encode_prompt(tokenizer, Prompt("films.jsonl:3", ""))


def test_a_conversation_needs_a_chat_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        encode_prompt(tokenizer, Prompt("1", (USER,)))


def test_a_template_that_refuses_messages_names_the_prompt(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"p1.*roles must alternate"):
        encode_prompt(tokenizer, Prompt("p1", (USER,)))


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("Say ", "yes", "Say yes<|im_end|>"),
        ("", "all of it", "all of it<|im_end|>"),
        ((USER,), "yo", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"),
        ((USER,), (ANSWER,), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"),
        ("", (USER, ANSWER), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>"),
    ],
)
def test_a_pair_side_ends_with_its_eos_and_nothing_after_it(tokenizer, prompt, completion, expected):
    assert shown(tokenizer, encode_pair_side(tokenizer, Prompt("1", prompt), completion)) == expected


def test_a_pair_side_is_the_prompt_as_generated_from_followed_by_the_completion(tokenizer):
    prompt = Prompt("1", (USER,))
    head, whole = encode_prompt(tokenizer, prompt), encode_pair_side(tokenizer, prompt, "yo")
    assert whole[: len(head)] == head


def test_messages_after_a_text_prompt_are_refused(tokenizer):
    with pytest.raises(DataError, match="give both as text or as messages"):
        encode_pair_side(tokenizer, Prompt("1", "Say"), (ANSWER,))


def test_decoding_drops_special_tokens_and_keeps_spaces(tokenizer):
    ids = tokenizer("a , b .")["input_ids"]
    assert decode(tokenizer, (1, *ids, 2)) == "a , b ."


def test_stop_ids_come_from_the_generation_config_then_from_the_tokenizer():
    loaded = tiny_model("llama")
    assert stop_token_ids(loaded.model, loaded.tokenizer) == (2,)
    loaded.model.generation_config.eos_token_id = [2, 7]
    assert stop_token_ids(loaded.model, loaded.tokenizer) == (2, 7)
    loaded.model.generation_config.eos_token_id = None
    assert stop_token_ids(loaded.model, loaded.tokenizer) == (2,)


def test_the_spare_padding_token_is_never_the_eos(tokenizer):
    assert spare_pad_token(tokenizer) == "<|endoftext|>"


def test_vocabularies_are_compared_by_content(tokenizer):
    other = byte_tokenizer()
    assert same_vocabulary(tokenizer, other)
    other.add_tokens(["more"])
    assert not same_vocabulary(tokenizer, other)
