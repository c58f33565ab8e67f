"""`tunesmith chat`: talk to a run or a model, optionally side by side with another one."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.apps.cli.options import Positional, SamplingFlags, flag, parse
from tunesmith.apps.cli.output import LiveText
from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.core.errors import InputError, RunError
from tunesmith.base.core.log import visible
from tunesmith.base.core.system import keep_freed_memory

if TYPE_CHECKING:
    from rich.console import Console

    from tunesmith.engine.batch.rollout import SamplingParams
    from tunesmith.engine.rollout.engine import Engine

_BASE = "base"
_COMMANDS = "/reset begins anew, /quit or Ctrl-D ends"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingFlags):
    """Talk to a run or a model. With --against, two of them answer side by side; `base` is what the run started from.

    A model without a chat template continues each line that you type. Lines may also come from a pipe. Ctrl-C cuts
    the current answer short.
    """

    model: Annotated[str, Positional, flag("Run folder, hub id, folder, GGUF file, smollm2.", "RUN")]
    against: Annotated[str | None, flag("base, or another model.", "ID")] = None
    max_new_tokens: Annotated[int, flag("Limit of an answer.", "N")] = 128
    seed: Annotated[int | None, flag("Same seed and lines, same answers.", "N")] = None
    trust_remote_code: Annotated[bool, flag("Run code that the models bring along.")] = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a model; `is_cut` if Ctrl-C ended it."""

    text: str
    is_cut: bool = False


@dataclass(slots=True)
class Speaker:
    """One model in the conversation, with what was said so far from its side."""

    name: str
    engine: "Engine"
    has_template: bool
    history: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def answer(self, line: str, sampling: "SamplingParams", show: Callable[[str], None] = lambda piece: None) -> Answer:
        """The answer to `line`, which joins the history; without a chat template, the continuation of `line`.

        `show` is called with each piece of it. Of an answer that is cut, what was said by then joins the history.
        """
        from tunesmith.base.schema.records import Prompt

        message = {"role": "user", "content": line}
        content = (*self.history, message) if self.has_template else line
        pieces: list[str] = []

        def on_text(_prompt: int, _sample: int, piece: str) -> None:
            pieces.append(piece)
            show(piece)

        is_cut = False
        try:
            self.engine.generate([Prompt("chat", content)], 1, sampling, on_text=on_text)
        except KeyboardInterrupt:
            is_cut = True
        text = "".join(pieces)
        if self.has_template and (text or not is_cut):
            self.history += [message, {"role": "assistant", "content": text}]
        return Answer(text, is_cut)


def chat(words: Sequence[str]) -> None:
    """Run `tunesmith chat`."""
    options = parse(ChatOptions, words, "chat")
    from rich.console import Console

    names = [options.model]
    if options.against:
        names.append(base_of(Path(options.model).expanduser()) if options.against == _BASE else options.against)
    console = Console(highlight=False, markup=False, emoji=False)
    speakers = _load(names, options)
    for speaker in speakers:
        if not speaker.has_template:
            sys.stderr.write(f"{speaker.name} has no chat template: it continues each line\n")
    if sys.stdin.isatty():
        console.print(f"{' and '.join(speaker.name for speaker in speakers)}; {_COMMANDS}", style="dim")
    for turn, line in enumerate(_lines()):
        if line == "/reset":
            for speaker in speakers:
                speaker.history.clear()
        elif line.startswith("/"):
            sys.stderr.write(f"{line.split()[0]} is no command: {_COMMANDS}\n")
        else:
            _take_turn(speakers, line, _sampling(options, turn), console)


def base_of(run: Path) -> str:
    """The name of the model that `run` started from, as its recipe says; RunError if `run` is no run folder."""
    from tunesmith.base.runs.listing import read_recipe

    if not (run / "recipe.yaml").is_file():
        raise RunError(f"{run} is no run folder, so its base is not known; name a model: --against ID")
    model = read_recipe(run).get("model")
    name = model.get("name") if is_mapping(model) else None
    if not isinstance(name, str):
        raise RunError(f"{run / 'recipe.yaml'} names no model; give one: --against ID")
    return name


def _load(names: Sequence[str], options: ChatOptions) -> list[Speaker]:
    from tunesmith.base.config.sections import ModelSection
    from tunesmith.base.schema.records import Prompt
    from tunesmith.engine.models.load import load_policy
    from tunesmith.engine.rollout.engine import check_request
    from tunesmith.engine.rollout.factory import open_engine

    check_request([Prompt("chat", "")], 1, _sampling(options, 0))  # before a model is loaded
    keep_freed_memory()
    speakers: list[Speaker] = []
    for name in names:
        loaded = load_policy(ModelSection(name=name, trust_remote_code=options.trust_remote_code))
        has_template = bool(loaded.tokenizer.chat_template)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        engine = open_engine(loaded.model, loaded.tokenizer, backend=options.backend)
        speakers.append(Speaker(name, engine, has_template))
    return speakers


def _sampling(options: ChatOptions, turn: int) -> "SamplingParams":
    from tunesmith.base.core.seeds import derive

    seed = None if options.seed is None else derive(options.seed, "chat", turn)
    return options.sampling(options.max_new_tokens, seed)


def _lines() -> Iterator[str]:
    """Lines that are not blank, from the keyboard or a pipe, up to `/quit` or the end."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport] - gives `input` its line editing
    while True:
        try:
            line = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except EOFError:
            return
        if not line and not sys.stdin.isatty():
            return
        if line.strip() in ("/quit", "/exit"):
            return
        if line.strip():
            yield line.strip()


def _take_turn(speakers: Sequence[Speaker], line: str, sampling: "SamplingParams", console: "Console") -> None:
    """Ask all speakers and show what they say. Ctrl-C cuts the answer, and does not end the conversation."""
    is_live = len(speakers) == 1 and console.is_terminal
    live = LiveText(console.file, strips=True)  # pyright: ignore[reportArgumentType] - IO[str] is what a TextIO is
    answers: list[Answer] = []
    try:
        for speaker in speakers:
            answers.append(speaker.answer(line, sampling, live.add) if is_live else speaker.answer(line, sampling))
            if answers[-1].is_cut:
                break
    except InputError as error:
        sys.stderr.write(f"error: {error}\n/reset begins anew\n")
        return
    if is_live:
        live.end()
    else:
        _show(speakers, [visible(answer.text).strip() for answer in answers], console)
    if answers[-1].is_cut:
        if not sys.stdin.isatty():
            raise KeyboardInterrupt
        sys.stderr.write("stopped\n")


def _show(speakers: Sequence[Speaker], answers: Sequence[str], console: "Console") -> None:
    if len(speakers) == 1:
        console.print(answers[0], soft_wrap=True)
    elif not console.is_terminal:
        for speaker, text in zip(speakers, answers, strict=False):
            console.print(f"{speaker.name}: {text}", soft_wrap=True)
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True)
        for speaker in speakers[: len(answers)]:
            table.add_column(Text(speaker.name), ratio=1, overflow="fold")
        table.add_row(*map(Text, answers))
        console.print(table)
