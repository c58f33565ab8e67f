"""Small tokenizers of the kinds that models bring, and chat templates of the kinds that they come with."""

import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunesmith.engine.models.tiny import CHAT_TEMPLATE, byte_tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|end|>")
CORPUS = [
    "The cat was happy. The sun was shining.\n\nOnce upon a time, there was a little girl.",
    "  two  spaces\n\n  and lines\n\n\nHello, hello! It's 2 + 2 = 4; isn't it?",
    "user assistant system [INST] [/INST] User: Assistant: \n\n naïve café",
] * 8


def _trained(backend: Tokenizer, *, eos: str = "</s>", **options: object) -> PreTrainedTokenizerBase:
    special = [AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, show_progress=False, **options)  # type: ignore[arg-type]
    backend.train_from_iterator(CORPUS, trainer)
    return _wrapped(backend, eos)


def _wrapped(backend: Tokenizer, eos: str = "</s>") -> PreTrainedTokenizerBase:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token=eos, pad_token=eos
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_level(*, add_prefix_space: bool = False) -> PreTrainedTokenizerBase:
    """GPT-2, Llama 3, SmolLM2: byte-level BPE, which merges across most places."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _trained(backend, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))


def _byte_pieces() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _sentence_piece(normalizer: object, pre_tokenizer: object, *, strips: bool) -> PreTrainedTokenizerBase:
    """BPE over pieces in which a space is `▁`, with a byte for what has no piece; `strips`: decoding drops the first
    space.
    """
    teacher = Tokenizer(models.BPE(unk_token="<unk>"))
    teacher.normalizer, teacher.pre_tokenizer = normalizer, pre_tokenizer  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=220, special_tokens=list(SPECIAL), show_progress=False)
    teacher.train_from_iterator([text.replace("\n", " ") for text in CORPUS], trainer)
    learnt = json.loads(teacher.to_str())["model"]
    names = [*SPECIAL, *_byte_pieces(), *(name for name in learnt["vocab"] if name not in SPECIAL)]
    merges = [tuple(pair) for pair in learnt["merges"]]
    model = models.BPE(
        vocab={name: index for index, name in enumerate(names)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer  # type: ignore[assignment]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    return _wrapped(backend)


def llama_2() -> PreTrainedTokenizerBase:
    """Llama 2, Mistral, TinyLlama: a space before each text, and bytes for what has no piece."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentence_piece(normalizer, None, strips=True)


def metaspace(scheme: str) -> PreTrainedTokenizerBase:
    """Gemma (`never`), newer Llama 2 files (`first`), T5 (`always`): Metaspace with or without a first space."""
    pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    return _sentence_piece(None, pre_tokenizer, strips=scheme != "never")


def unigram() -> PreTrainedTokenizerBase:
    """ALBERT, XLNet, T5: the likeliest pieces of a whole text."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=180, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return _wrapped(backend)


def word_piece() -> PreTrainedTokenizerBase:
    """BERT: words and their endings; white space and case are not kept."""
    letters = sorted({letter for text in CORPUS for letter in text.lower() if not letter.isspace()})
    words = ["the", "cat", "cats", "was", "happy", "hello", "user", "assistant", "##s", "##py", "##ing", "shin"]
    names = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return _wrapped(backend)


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "bytes": byte_tokenizer,
    "byte-level": byte_level,
    "byte-level, first space": lambda: byte_level(add_prefix_space=True),
    "Llama 2": llama_2,
    "Metaspace, never": lambda: metaspace("never"),
    "Metaspace, first": lambda: metaspace("first"),
    "Metaspace, always": lambda: metaspace("always"),
    "Unigram": unigram,
    "WordPiece": word_piece,
}
"""Makers of a tokenizer of each kind."""

LOSSY = frozenset({"WordPiece", "Unigram"})
"""Kinds that do not give every text back."""

_TURNS = "{% for m in messages %}"
_OPEN = "{% endfor %}{% if add_generation_prompt %}"
TEMPLATES = {
    "ChatML": CHAT_TEMPLATE,
    "Llama 2": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %}"
    " {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}",
    "plain": _TURNS + "{{ m.role }}: {{ m.content }}\n\n" + _OPEN + "assistant:{% endif %}",
    "opens thinking": _TURNS
    + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    + _OPEN
    + "<|im_start|>assistant\n<think>\n{% endif %}",
    "drops thinking": _TURNS
    + "{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
    + "{% set c = c.split('</think>')[-1] %}{% endif %}<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n"
    + _OPEN
    + "<|im_start|>assistant\n{% endif %}",
    "opens and drops thinking": _TURNS
    + "{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
    + "{% set c = c.split('</think>')[-1] %}{% endif %}<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n"
    + _OPEN
    + "<|im_start|>assistant\n<think>\n{% endif %}",
    "fills in empty thinking": _TURNS
    + "<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' and '</think>' not in m.content %}"
    + "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    + _OPEN
    + "<|im_start|>assistant\n{% endif %}",
    "own end": _TURNS + "<{{ m.role }}>{{ m.content }}<|end|>\n" + _OPEN + "<assistant>{% endif %}",
    "own end, then eos": _TURNS
    + "<{{ m.role }}>\n{{ m.content }}<|end|>\n"
    + _OPEN
    + "<assistant>\n{% else %}{{ eos_token }}{% endif %}",
    "trims": _TURNS
    + "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    + _OPEN
    + "<|im_start|>assistant\n{% endif %}",
}
"""Chat templates by what they do."""
