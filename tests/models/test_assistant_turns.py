"""The assistant's tokens are found in what any prefix-stable template writes, and TRL's marked templates agree."""

import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tunesmith.base.core.errors import DataError, ModelError
from tunesmith.base.schema.records import Demonstration, Message, Prompt
from tunesmith.engine.models.tiny import CHAT_TEMPLATE, byte_tokenizer
from tunesmith.engine.models.tokenizer import (
    PreTrainedTokenizerBase,
    decode,
    encode_completed,
    encode_demonstration,
    encode_pair_side,
    encode_prompt,
)

TALK: tuple[Message, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo \U0001f600"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "Four.\n"},
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)


def merging_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE that merges across the places where turns begin, with GPT-2's trimmed offsets."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    special = [AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")]
    text = ["assistant\n\n  Four", "  ", "\n\n", "user\nHi", "Yo there"] * 5
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def learnt_texts(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration, loss_on: str = "assistant") -> list:
    found = encode_demonstration(tokenizer, demonstration, loss_on)  # type: ignore[arg-type]
    return [tokenizer.decode(list(found.ids[span.start : span.stop])) for span in found.spans]


def alone(messages: tuple[Message, ...]) -> Demonstration:
    return Demonstration(Prompt("1", ""), messages)


def test_of_a_conversation_every_turn_of_the_assistant_is_learnt_with_its_end() -> None:
    assert learnt_texts(byte_tokenizer(), alone(TALK)) == ["Yo \U0001f600<|im_end|>", "Four.\n<|im_end|>"]
    assert learnt_texts(byte_tokenizer(), alone(TALK), "last") == ["Four.\n<|im_end|>"]
    everything = encode_demonstration(byte_tokenizer(), alone(TALK), "all")
    assert everything.spans == (range(1, len(everything.ids)),)


def test_with_a_prompt_the_turns_of_the_completion_alone_are_learnt() -> None:
    demonstration = Demonstration(Prompt("1", TALK[:4]), "Four.")
    assert learnt_texts(byte_tokenizer(), demonstration) == ["Four.<|im_end|>"]
    assert learnt_texts(byte_tokenizer(), Demonstration(Prompt("1", TALK[:2]), TALK[2:])) == [
        "Yo \U0001f600<|im_end|>",
        "Four.\n<|im_end|>",
    ]


@pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer])
def test_the_ids_are_those_of_a_reward_model_and_learning_begins_where_generation_does(make) -> None:
    tokenizer = make()
    demonstration = Demonstration(Prompt("1", TALK[:4]), "Four.")
    found = encode_demonstration(tokenizer, demonstration, "assistant")
    assert found.ids == encode_pair_side(tokenizer, demonstration.prompt, "Four.")
    prompt_ids = encode_prompt(tokenizer, demonstration.prompt)
    assert found.ids[: len(prompt_ids)] == prompt_ids
    assert found.spans == (range(len(prompt_ids), len(found.ids)),)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_any_text_is_found_to_the_last_byte(turns: list[tuple[str, str]]) -> None:
    messages = [
        message
        for question, answer in turns
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]
    expected = [f"{answer}<|im_end|>" for _, answer in turns]
    assert learnt_texts(byte_tokenizer(), alone(tuple(messages))) == expected


@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_no_token_crosses_the_place_where_the_assistant_begins(loss_on: str) -> None:
    tokenizer = merging_tokenizer()
    messages = (*TALK[1:3], TALK[1], {"role": "assistant", "content": "\n  Four"})
    assert learnt_texts(tokenizer, alone(messages), loss_on)[-1] == "\n  Four<|im_end|>"
    found = encode_demonstration(tokenizer, alone(messages), loss_on)  # type: ignore[arg-type]
    prompt_ids = encode_prompt(tokenizer, Prompt("1", messages[:3]))
    assert found.ids[: len(prompt_ids)] == prompt_ids
    assert found.spans[-1] == range(len(prompt_ids), len(found.ids))


@pytest.mark.parametrize("space", [" ", "   "])
def test_white_space_at_either_end_of_a_turn_belongs_to_the_turn(space: str) -> None:
    messages = (TALK[1], {"role": "assistant", "content": f"{space}Yo there{space}"})
    assert learnt_texts(merging_tokenizer(), alone(messages)) == [f"{space}Yo there{space}<|im_end|>"]


def test_a_template_that_closes_no_turn_gets_the_end_of_sequence_token() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert learnt_texts(tokenizer, alone(TALK[1:])) == ["Yo \U0001f600\n", "Four.\n\n<|im_end|>"]


def test_every_byte_of_a_last_character_is_learnt_though_nothing_closes_the_turn() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert learnt_texts(tokenizer, alone(TALK[1:])) == ["Yo \U0001f600", "Four.\n<|im_end|>"]


FORGETFUL = (
    "{% for m in messages %}{% set last = loop.last %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_the_last_alone_is_learnt() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(DataError, match=r"writes the turn 2 of 5 otherwise alone than .*loss_on: last"):
        encode_demonstration(tokenizer, alone(TALK), "assistant")
    assert learnt_texts(tokenizer, alone(TALK), "last") == ["<think></think>Four.\n<|im_end|>"]


def test_a_template_whose_opening_is_not_in_the_conversation_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>' }}")
    with pytest.raises(DataError, match="writes what comes before turn 2 of 5 otherwise"):
        encode_demonstration(tokenizer, alone(TALK), "assistant")
    assert learnt_texts(tokenizer, alone(TALK), "last") == ["Four.\n<|im_end|>"]
    assert learnt_texts(tokenizer, alone(TALK[1:3]), "assistant") == ["Yo \U0001f600<|im_end|>"]


def test_without_a_chat_template_messages_are_an_error() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        encode_demonstration(tokenizer, alone(TALK), "assistant")


def test_text_is_learnt_behind_its_prompt_and_whole_without_one() -> None:
    tokenizer = byte_tokenizer()
    behind = Demonstration(Prompt("1", "The film"), " was")
    assert learnt_texts(tokenizer, behind) == learnt_texts(tokenizer, behind, "last") == [" was<|im_end|>"]
    assert learnt_texts(tokenizer, behind, "all") == ["he film was<|im_end|>"]
    assert learnt_texts(tokenizer, Demonstration(Prompt("1", ""), "The film")) == ["he film<|im_end|>"]


def _templates() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else Path()
    return sorted(folder.glob("*_training.jinja"))


STABLE = ("qwen2_5", "qwen2_5_vl", "qwen3_vl", "qwen3_instruct_2507", "lfm2", "llama3", "gemma", "gemma3", "cohere")


@pytest.mark.parametrize("name", STABLE)
def test_trl_marks_the_same_tokens_in_its_templates_with_tags(name: str) -> None:
    """TRL's templates learn the white space behind the closing token too, which is left out here."""
    by_name = {path.name.removesuffix("_training.jinja"): path for path in _templates()}
    if not by_name:
        pytest.skip("TRL is not installed")
    tagged = by_name[name]
    plain = (tagged.parent / f"{name}.jinja").read_text()
    tokenizer = byte_tokenizer()
    special = sorted(set(re.findall(r"<[|\w]+>|<end_of_turn>", plain)))
    tokenizer.add_special_tokens({"additional_special_tokens": special})  # type: ignore[arg-type]
    messages = TALK[1:]
    tokenizer.chat_template = tagged.read_text()
    marked = tokenizer.apply_chat_template(
        [dict(message) for message in messages], return_dict=True, return_assistant_tokens_mask=True
    )
    theirs = [index for index, learnt in enumerate(marked["assistant_masks"]) if learnt]
    tokenizer.chat_template = plain
    found = encode_demonstration(tokenizer, alone(messages), "assistant")
    length = min(len(found.ids), len(marked["input_ids"]))
    assert found.ids[:length] == tuple(marked["input_ids"][:length])
    ours = [index for span in found.spans for index in span if index < length]
    extra = [marked["input_ids"][index] for index in set(theirs) - set(ours)]
    assert set(ours) <= set(theirs)
    assert not decode(tokenizer, extra).strip()
    assert len(extra) <= 2 * 2


CALLED: tuple[Message, ...] = (
    {"role": "user", "content": "What is 6 times 7?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}],
    },
    {"role": "tool", "name": "multiply", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
WITH_TOOLS = ("qwen2_5", "qwen3_instruct_2507", "llama3_1")


def of_trl(name: str) -> PreTrainedTokenizerBase:
    pytest.importorskip("trl", reason="needs TRL, which has the templates of published models")
    by_name = {path.name.removesuffix("_training.jinja"): path for path in _templates()}
    folder = next(iter(by_name.values())).parent
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    special = sorted(set(re.findall(r"<\|[\w]+\|>", tokenizer.chat_template)))
    tokenizer.add_special_tokens({"additional_special_tokens": special})  # type: ignore[arg-type]
    tokenizer.eos_token = "<|im_end|>" if "<|im_end|>" in special else "<|eot_id|>"
    return tokenizer


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_of_a_completion_of_several_turns_the_replies_are_between_what_is_said(name: str) -> None:
    """The ids are those of TRL's DPO trainer, which counts the replies in the log-probs of a completion too."""
    tokenizer = of_trl(name)
    found = encode_completed(tokenizer, Prompt("1", CALLED[:1], {"tools": TOOLS}), CALLED[1:])
    theirs = [
        tokenizer.apply_chat_template([dict(one) for one in part], tools=TOOLS, return_dict=False, **options)
        for part, options in ((CALLED[:1], {"add_generation_prompt": True}), (CALLED, {}))
    ]
    assert found.prompt_ids == tuple(theirs[0])
    assert found.ids == tuple(theirs[1][: len(found.ids)])
    assert not decode(tokenizer, theirs[1][len(found.ids) :]).strip()
    (between,) = found.between
    reply = tokenizer.decode(list(found.completion_ids[between.start : between.stop]))
    said = (found.completion_ids[: between.start], found.completion_ids[between.stop :])
    called, answered = (tokenizer.decode(list(ids)) for ids in said)
    assert "42" in reply and "assistant" in reply and "multiply" not in reply
    assert "multiply" in called and answered == f"It is 42.{tokenizer.eos_token}"
    sft = encode_demonstration(
        tokenizer, Demonstration(Prompt("1", CALLED[:1], {"tools": TOOLS}), CALLED[1:]), "assistant"
    )
    assert sft.ids == found.ids
    begin = len(found.prompt_ids)
    assert sft.spans == (range(begin, begin + between.start), range(begin + between.stop, len(found.ids)))


def test_a_completion_may_begin_with_what_is_not_said() -> None:
    tokenizer = of_trl("qwen2_5")
    found = encode_completed(tokenizer, Prompt("1", CALLED[:2], {"tools": TOOLS}), CALLED[2:])
    (between,) = found.between
    assert between.start == 0
    assert tokenizer.decode(list(found.completion_ids[between.stop :])) == "It is 42.<|im_end|>"


def test_turns_of_weight_zero_are_context_alone() -> None:
    tokenizer = byte_tokenizer()
    first, last = ({**TALK[2], "weight": 0}, TALK[4]), (TALK[2], {**TALK[4], "weight": 0})
    assert learnt_texts(tokenizer, alone((TALK[1], first[0], TALK[3], first[1]))) == ["Four.\n<|im_end|>"]
    assert learnt_texts(tokenizer, alone((TALK[1], last[0], TALK[3], last[1]))) == ["Yo \U0001f600<|im_end|>"]
    assert learnt_texts(tokenizer, alone((TALK[1], last[0], TALK[3], last[1])), "last") == []
    unweighted = encode_demonstration(tokenizer, alone(TALK[1:]), "assistant")
    assert encode_demonstration(tokenizer, alone((TALK[1], first[0], *TALK[3:])), "assistant").ids == unweighted.ids
    with pytest.raises(DataError, match="weight 0, but loss_on is all"):
        encode_demonstration(tokenizer, alone((TALK[1], first[0])), "all")
