"""The vocabulary of a GGUF file: tokens, their kinds, merges or scores, and the name of llama.cpp's pre-tokenizer.

llama.cpp has no regular expression in the file, but a name that it knows one by. Which one it is, is read from what the
tokenizer does: it splits a text of many scripts where the named one splits it. Nothing else of a tokenizer is guessed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from tunesmith.base.core.errors import ModelError
from tunesmith.base.core.log import get_logger

_logger = get_logger(__name__)

_UNMERGED = -1e6
"""The score of a token that no merge makes: llama.cpp prefers all others."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_START = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _BYTES])  # type: ignore[list-item]


def _words(ending: str) -> str:
    """Words that end where capital letters begin."""
    return rf"{_START}{_UPPER}*{_LOWER}+{ending}|{_START}{_UPPER}+{_LOWER}*{ending}"


@dataclass(frozen=True, slots=True)
class _Named:
    """A pre-tokenizer of llama.cpp; with `ignores_merges` a piece that is a token is not merged from its letters."""

    name: str
    splits: pre_tokenizers.PreTokenizer
    ignores_merges: bool = False


_PRE_TOKENIZERS = (
    _Named("gpt-2", _GPT2),
    _Named("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])),  # type: ignore[list-item]
    _Named("qwen2", _split(rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{_REST}")),
    _Named("llama-bpe", _split(rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}{_REST}"), ignores_merges=True),
    _Named("dbrx", _split(rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}{_REST}")),
    _Named("gpt-4o", _split(_words(_CASED) + r"|\p{N}{1,3}" + _REST_SLASH)),
    _Named("tekken", _split(_words("") + r"|\p{N}" + _REST_SLASH), ignores_merges=True),
)

_SAMPLE = (
    "Hello world, it's 12 345 6789 o'clock; I'VE we'll They'D can'T!\n\n\n  two  spaces\t\ttabs \r\n end. "
    "na\u00efve caf\u00e9 \u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d\u4e16\u754c \u0645\u0631\u062d\u0628\u0627 "
    "\u0915\u093f\u0924\u093e\u092c \u1780\u17b6\u1793 \U0001f680\U0001f600 \u2167\u00bd\u0663 camelCaseXMLHttp "
    "http://a.b/c?d=e&f#g x_y-z (a+b)*c//d \u00a0nbsp\u3000wide '''\"\"\"...!!!???  "
)
"""Letters, digits, marks and white space, where the pre-tokenizers differ."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The entries `tokenizer.ggml.*`. `merges` is None for a vocabulary with `scores`, and the other way round."""

    model: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str] | None
    scores: Sequence[float] | None
    adds_space: bool | None
    adds_bos: bool
    adds_eos: bool


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, num_rows: int, name: str) -> Vocabulary:
    """The vocabulary of `tokenizer` with one token for each of the `num_rows` rows of the embedding.

    Raises:
        ModelError: llama.cpp has no tokenizer like it; the message says which part.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(f"the tokenizer of {name} has no tokenizer.json, so it cannot be written as GGUF")
    document = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    model = document["model"]
    odd = [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(key)]
    if model["type"] != "BPE" or odd:
        what = f"with {', '.join(odd)}" if odd else f"of the kind {model['type']}"
        raise ModelError(f"the tokenizer of {name} is one {what}; BPE is what can be written as GGUF")
    adds_bos, adds_eos = _added_around(tokenizer, name)
    shared = {"adds_bos": adds_bos, "adds_eos": adds_eos}
    merges = [tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in model["merges"]]
    if model.get("byte_fallback"):
        return _of_pieces(tokenizer, document, merges, num_rows, name, shared)
    pre = _pre_tokenizer(tokenizer, document, name)
    tokens, types = _tokens(tokenizer, num_rows)
    lines = [" ".join(pair) for pair in merges]
    return Vocabulary("gpt2", pre, tokens, types, lines, None, None, **shared)


def _pre_tokenizer(tokenizer: PreTrainedTokenizerBase, document: Mapping[str, Any], name: str) -> str:
    """llama.cpp's name of the pre-tokenizer of a byte-level tokenizer."""
    backend: Any = getattr(tokenizer, "backend_tokenizer")  # noqa: B009 - not every tokenizer has it
    normalizer = (document.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise ModelError(f"the tokenizer of {name} changes texts ({normalizer}), for which GGUF has no place")
    found = backend.pre_tokenizer.pre_tokenize_str(_SAMPLE) if backend.pre_tokenizer else None
    ignores_merges = bool(document["model"].get("ignore_merges"))
    for one in _PRE_TOKENIZERS:
        if one.ignores_merges == ignores_merges and one.splits.pre_tokenize_str(_SAMPLE) == found:
            return one.name
    known = ", ".join(one.name for one in _PRE_TOKENIZERS)
    raise ModelError(
        f"the tokenizer of {name} splits texts as none of llama.cpp's that are known here ({known}), so it would read "
        "other tokens; export it without --format, and try llama.cpp's own convert_hf_to_gguf.py"
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens; rows of the embedding without one are `[PADi]`."""
    added = tokenizer.added_tokens_decoder
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens: list[str] = []
    types: list[int] = []
    for index in range(num_rows):
        kind = TokenType.NORMAL if index in by_id else TokenType.UNUSED
        if index in added:
            kind = TokenType.CONTROL if added[index].special else TokenType.USER_DEFINED
        text = by_id.get(index, f"[PAD{index}]")
        # llama.cpp looks for these in the text as it is.
        tokens.append(text.replace("\u2581", " ") if kind == TokenType.USER_DEFINED else text)
        types.append(int(kind))
    return tokens, types


def _of_pieces(
    tokenizer: PreTrainedTokenizerBase,
    document: Mapping[str, Any],
    merges: Sequence[tuple[str, ...]],
    num_rows: int,
    name: str,
    shared: Mapping[str, bool],
) -> Vocabulary:
    """A vocabulary of SentencePiece's kind: llama.cpp merges the pair whose token has the best score."""
    space = _first_space(document)
    if space is None:
        raise ModelError(
            f"the tokenizer of {name} makes pieces of texts in a way for which GGUF has no place "
            f"({json.dumps(document.get('normalizer'))[:60]}, {json.dumps(document.get('pre_tokenizer'))[:60]})"
        )
    if space in ("first", "spaceless"):
        behind = ", and behind special tokens" if space == "first" else ""
        _logger.warning(
            "llama.cpp splits texts that begin with a space%s otherwise than the tokenizer of %s", behind, name
        )
    tokens, types = _tokens(tokenizer, num_rows)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = [float(-ranks[token]) if token in ranks else _UNMERGED for token in tokens]
    for index, token in enumerate(tokens):
        if token == document["model"].get("unk_token"):
            types[index] = int(TokenType.UNKNOWN)
        elif len(token) == 6 and token.startswith("<0x"):
            types[index] = int(TokenType.BYTE)
    return Vocabulary("llama", "default", tokens, types, None, scores, space != "never", **shared)


def _first_space(document: Mapping[str, Any]) -> str | None:
    """When a space is written before a text: `always`, only before one without (`spaceless`), of these only at its
    beginning and not behind special tokens (`first`), or `never`; None for what is not known.
    """
    normalizer, pre = document.get("normalizer"), document.get("pre_tokenizer")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    if normalizer is None and pre is not None and pre["type"] == "Metaspace" and not pre.get("split", True):
        return "spaceless" if pre["prepend_scheme"] == "always" else pre["prepend_scheme"]
    if normalizer == spaces and (pre is None or pre["type"] == "Split"):
        return "never"  # Gemma
    prepends = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces]}
    return "always" if normalizer == prepends and pre is None else None


def _added_around(tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[bool, bool]:
    """True for the special tokens that the tokenizer writes before and behind a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for adds_bos in (False, True):
        for adds_eos in (False, True):
            before = [tokenizer.bos_token_id] if adds_bos else []
            behind = [tokenizer.eos_token_id] if adds_eos else []
            if [*before, *plain, *behind] == whole:  # type: ignore[misc]
                return adds_bos, adds_eos
    raise ModelError(f"the tokenizer of {name} writes {whole} for 'a', more than one token around it")
