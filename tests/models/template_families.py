"""Tokenizers with the chat templates of published models, and conversations as their templates take them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.models.tokenizer import continuation, decode_marked, encode_rendered
from tunesmith.engine.models.tool_messages import as_template_takes, with_tools
from tunesmith.engine.models.turns import next_turn, parse_answer

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
GEMMA_4 = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>"),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
)
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
MISTRAL_RESULTS = (*MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")

# SmolLM2-Instruct's: as in its tokenizer_config.json, with a default system message and no tools.
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What Mistral-7B-Instruct-v0.3 (tokenizer v3) writes, as mistral-common documents it: system message and tools stand
# before the last turn of the user, calls are one JSON list with ids of nine characters, results name the id.
MISTRAL_V3_TEMPLATE = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set seen = namespace(index=0) %}
{%- for message in turns %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {%- if (message.role == 'user') != (seen.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user/assistant') }}
        {%- endif %}
        {%- set seen.index = seen.index + 1 %}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\n\n' if system is defined and message == asked[-1] else '') }}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if not call.id or call.id | length != 9 %}{{ raise_exception('ids of calls have length 9') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if not message.tool_call_id or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids of calls have length 9') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('unknown role') }}{% endif %}
{%- endfor %}"""

# What Mistral Small 3.2 and later (tokenizer v11, v13) write: a system prompt first, and each call by name.
MISTRAL_V13_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}{% endif %}
    {%- if loop.index0 == (1 if messages[0].role == 'system' else 0) and tools %}
        {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}"""

CORPUS = [
    '{"name": "search", "arguments": {"query": "weather in Paris", "days": 3}}\n\n<tool_call>\n</tool_call>',
    "user\nassistant\nsystem\n  two  spaces\n\n  and lines\n\n\nHello, hello! It's 2 + 2 = 4; isn't it? naïve café",
] * 8


def published(name: str) -> str:
    """A template as TRL has it from the published models."""
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def byte_level(special: tuple[str, ...], added: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    """Byte-level BPE, as of Llama 3, Qwen, SmolLM2 and gpt-oss; `added` are tokens by name that are not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = [AddedToken(name, special=True, normalized=False) for name in special]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=names,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def sentence_piece(special: tuple[str, ...], *, first_space: bool) -> PreTrainedTokenizerBase:
    """BPE with bytes for unknown pieces: Gemma's without and Mistral's with a space before each text."""
    pieces = [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    letters = sorted({letter for text in CORPUS for letter in text if letter not in " \n"})
    names = {name: index for index, name in enumerate(dict.fromkeys((*pieces, *letters, "▁a", "he", "▁he")))}
    model = models.BPE(
        names, [("▁", "a"), ("h", "e"), ("▁", "he")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if first_space else replace
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if first_space else [])])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@dataclass(frozen=True)
class Family:
    """A published template with a small tokenizer that has its special tokens.

    `calls`: how many calls a turn can have there. `thinking`: its field for reasoning. `asks_after_results`: a turn of
    the user may follow results of tools.
    """

    template: Callable[[], str]
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    eos: str
    bos: str | None = None
    calls: int = 0
    thinking: str | None = None
    asks_after_results: bool = True

    def make(self) -> PreTrainedTokenizerBase:
        tokenizer: Any = self.tokenizer()
        tokenizer.eos_token, tokenizer.bos_token = self.eos, self.bos
        tokenizer.chat_template = self.template()
        return tokenizer


QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def _qwen(name: str, **options: Any) -> Family:
    return Family(lambda: published(name), lambda: byte_level(CHATML, QWEN_ADDED), "<|im_end|>", calls=3, **options)


FAMILIES: dict[str, Family] = {
    "SmolLM2": Family(lambda: SMOLLM2_TEMPLATE, lambda: byte_level(CHATML), "<|im_end|>"),
    "Qwen 2.5": _qwen("qwen2_5"),
    "Qwen 3": _qwen("qwen3", thinking="reasoning_content"),
    "Qwen 3 2507": _qwen("qwen3_instruct_2507"),
    "Qwen 3.5": _qwen("qwen3_5_think", thinking="reasoning_content"),
    "Qwen 3.5, no thinking": _qwen("qwen3_5_nothink"),
    "Llama 3": Family(lambda: published("llama3"), lambda: byte_level(LLAMA), "<|eot_id|>", "<|begin_of_text|>"),
    "Llama 3.1": Family(lambda: published("llama3_1"), lambda: byte_level(LLAMA), "<|eot_id|>", "<|begin_of_text|>", 1),
    "Llama 3.2": Family(lambda: published("llama3_2"), lambda: byte_level(LLAMA), "<|eot_id|>", "<|begin_of_text|>", 1),
    "Gemma": Family(
        lambda: published("gemma"), lambda: sentence_piece(GEMMA, first_space=False), "<end_of_turn>", "<bos>"
    ),
    "Gemma 3": Family(
        lambda: published("gemma3"), lambda: sentence_piece(GEMMA, first_space=False), "<end_of_turn>", "<bos>"
    ),
    "Gemma 4": Family(
        lambda: published("gemma4"),
        lambda: sentence_piece(GEMMA_4, first_space=False),
        "<turn|>",
        "<bos>",
        calls=3,
        thinking="reasoning_content",
    ),
    "Mistral v3": Family(
        lambda: MISTRAL_V3_TEMPLATE,
        lambda: sentence_piece(MISTRAL_RESULTS, first_space=True),
        "</s>",
        "<s>",
        calls=3,
        asks_after_results=False,
    ),
    "Mistral v13": Family(lambda: MISTRAL_V13_TEMPLATE, lambda: byte_level(MISTRAL_RESULTS), "</s>", "<s>", 3),
    "gpt-oss": Family(
        lambda: published("gptoss"), lambda: byte_level(HARMONY), "<|return|>", calls=1, thinking="thinking"
    ),
}
"""The families by name."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "a text"},
                    "count": {"type": "integer", "description": "a number"},
                    "flag": {"type": "boolean", "description": "whether"},
                    "data": {"type": "object", "description": "anything"},
                },
                "required": ["text"],
            },
        },
    }
    for name in ("search", "get_weather")
]
USER = [{"role": "user", "content": "B"}]
TOOL = [{"role": "tool", "content": "B"}]
HERMES_CALL = '<tool_call>\n{"name": "search", "arguments": {"text": "a"}}\n</tool_call>'
"""A call as Qwen 2.5 writes it."""


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return FAMILIES[name].make()


def rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, messages: Sequence[Any], *, opens: bool) -> str:
    """The whole conversation as the template writes it, by transformers alone."""
    arguments: Any = prompt.template_arguments
    taken = [dict(message) for message in as_template_takes(tokenizer, messages)]
    return str(tokenizer.apply_chat_template(taken, tokenize=False, add_generation_prompt=opens, **arguments))


def ids_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first = encode_rendered(tokenizer, before)
    return first, continuation(tokenizer, first, encode_rendered(tokenizer, before + text), text)


def asked(name: str, **columns: object) -> tuple[PreTrainedTokenizerBase, Prompt, str]:
    """A tokenizer, the prompt "Q" as its template takes it, and its text."""
    tokenizer = tokenizer_of(name)
    prompt = with_tools(tokenizer, Prompt("1", ({"role": "user", "content": "Q"},), columns))
    return tokenizer, prompt, rendered(tokenizer, prompt, prompt.content, opens=True)


def turn_of(name: str, said: str, new: list[dict[str, str]], **columns: object) -> str | None:
    """The text of the suffix behind a sampled text, which has the tokens that end it by name."""
    tokenizer, prompt, opened = asked(name, **columns)
    _, sampled = ids_after(tokenizer, opened, said)
    parsed = parse_answer(tokenizer, opened, sampled, TOOLS)
    suffix = next_turn(tokenizer, prompt, prompt.content, parsed.message, sampled, new)
    return None if suffix is None else decode_marked(tokenizer, suffix)
