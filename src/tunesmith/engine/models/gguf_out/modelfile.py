"""Ollama's Modelfile of a GGUF file, with the chat template in Go's language: Ollama does not run Jinja."""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_MARKS = {"system": "\u2039one\u203a", "user": "\u2039two\u203a", "assistant": "\u2039three\u203a"}
_LAST = "\u2039four\u203a"

Messages = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The pieces that a template writes: `start` before a chat without a system message, before and behind each kind of
    message (`system` is None where it takes none), and before an answer.
    """

    start: str
    system: tuple[str, str] | None
    user: tuple[str, str]
    assistant: tuple[str, str]
    opening: str

    def rendered(self, messages: Messages) -> str:
        """The text of a chat whose next message is the assistant's."""
        has_system = messages[0][0] == "system"
        texts = ["" if has_system else self.start]
        for role, content in messages:
            before, behind = {"system": self.system or ("", ""), "user": self.user, "assistant": self.assistant}[role]
            texts.append(before + content + behind)
        return "".join([*texts, self.opening])

    def in_go(self) -> str:
        """The template in Go's language. An assistant's message at the end is continued."""
        begins = f"{{{{ if .System }}}}{{0}}{{{{ .System }}}}{{1}}{{{{ else }}}}{self.start}{{{{ end }}}}"
        begins = (
            self.start if self.system is None else begins.replace("{0}", self.system[0]).replace("{1}", self.system[1])
        )
        return (
            f"{begins}{{{{ range $i, $_ := .Messages }}}}{{{{ $last := eq (len (slice $.Messages $i)) 1 }}}}"
            f'{{{{ if eq .Role "user" }}}}{self.user[0]}{{{{ .Content }}}}{self.user[1]}'
            f'{{{{ else if eq .Role "assistant" }}}}{self.assistant[0]}{{{{ .Content }}}}'
            f"{{{{ if not $last }}}}{self.assistant[1]}{{{{ end }}}}{{{{ end }}}}"
            f'{{{{ if and (ne .Role "assistant") $last }}}}{self.opening}{{{{ end }}}}{{{{ end }}}}'
        )


def modelfile(file_name: str, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], license: str) -> str:
    """The text of a Modelfile beside the GGUF file `file_name`.

    A template whose messages are not written one by one, each as it is, has no `TEMPLATE`; a comment says so.
    """
    lines = [f"FROM ./{file_name}"]
    template = go_template(tokenizer)
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    elif tokenizer.chat_template:
        lines.append(
            "# The chat template has no simple form in Go's language; ollama.com/library may have one by hand."
        )
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if '"' not in stop and "\n" not in stop]
    if license and '"""' not in f'{license}""':
        lines.append(f'LICENSE """{license}"""')
    return "\n".join(lines) + "\n"


def go_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template of `tokenizer` in Go's language, or None. It writes the same for messages of text, but trims
    nothing and leaves out no thinking.

    A begin-of-sequence token that the tokenizer writes by itself is left out: Ollama writes it too.
    """
    try:
        parts = _parts(tokenizer)
    except (TemplateError, ValueError):
        return None
    pieces = (parts.start, parts.opening, *(parts.system or ()), *parts.user, *parts.assistant)
    if any(bad in piece for piece in pieces for bad in ("{{", "}}", '"""')):
        return None
    return parts.in_go()


def _parts(tokenizer: PreTrainedTokenizerBase) -> _Parts:
    """Raises ValueError if the template does not write messages one by one, TemplateError if it refuses them."""
    if not tokenizer.chat_template:
        raise ValueError("no template")
    user, assistant, last = ("user", _MARKS["user"]), ("assistant", _MARKS["assistant"]), ("user", _LAST)
    opening = _rendered(tokenizer, [user]).removeprefix(_rendered(tokenizer, [user], opens=False))
    before, between, behind, end = _cut(
        _rendered(tokenizer, [user, assistant, last], opens=False), user, assistant, last
    )
    closing = _rendered(tokenizer, [user, assistant], opens=False).partition(assistant[1])[2]
    of_user = (_rest(behind, closing), end)
    of_assistant = (_rest(between, end), closing)
    start = before.removesuffix(of_user[0])
    system: tuple[str, str] | None = None
    try:
        first, after, *_ = _cut(
            _rendered(tokenizer, [("system", _MARKS["system"]), user]), ("system", _MARKS["system"]), user
        )
        system = (first, after.removesuffix(of_user[0]))
    except (TemplateError, ValueError):
        pass
    bos = str(tokenizer.bos_token or "")
    parts = _Parts(start, system, of_user, of_assistant, opening)
    chats: list[Messages] = [[user], [user, assistant, last], [("user", " a\n"), assistant, last, assistant, user]]
    chats += [] if system is None else [[("system", "Be brief."), user], [("system", "x"), user, assistant, last]]
    for chat in chats:
        trimmed = [(role, content.strip()) for role, content in chat]  # as many templates do
        if _rendered(tokenizer, chat) not in (parts.rendered(chat), parts.rendered(trimmed)):
            raise ValueError("it does not write messages one by one")
    if bos and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:  # type: ignore[index]
        stripped = None if system is None else (system[0].removeprefix(bos), system[1])
        return _Parts(start.removeprefix(bos), stripped, of_user, of_assistant, opening)
    return parts


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, opens: bool = True) -> str:
    rows = [{"role": role, "content": content} for role, content in messages]
    return str(tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=opens))


def _cut(text: str, *messages: tuple[str, str]) -> list[str]:
    """The texts before, between and behind the contents of `messages`."""
    found: list[str] = []
    for _, content in messages:
        before, mark, text = text.partition(content)
        if not mark:
            raise ValueError("a message is not written as it is")
        found.append(before)
    return [*found, text]


def _rest(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError("messages are written by their place")
    return text.removeprefix(start)
