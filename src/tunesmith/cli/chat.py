"""`tunesmith chat`: talk to a run or a model, if wanted beside another one."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.cli.options import Positional, flag, parse
from tunesmith.cli.output import visible
from tunesmith.core.errors import InputError, RunError

if TYPE_CHECKING:
    from rich.console import Console

    from tunesmith.batch.rollout import SamplingParams
    from tunesmith.rollout.engine import Engine

_BASE = "base"
_COMMANDS = "/reset begins anew, /quit or Ctrl-D ends"


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Talk to a run or a model. With --against, two of them answer side by side; `base` is what the run started from.

    A model without a chat template continues each line that you type. Lines may also come from a pipe.
    """

    model: Annotated[str, Positional, flag("Run folder, hub id, folder, GGUF file, smollm2.", metavar="RUN")]
    against: Annotated[str | None, flag("base, or another model.", metavar="ID")] = None
    max_new_tokens: Annotated[int, flag("Limit of an answer.", metavar="N", shows_default=True)] = 128
    temperature: Annotated[float, flag("0 is greedy.", metavar="T", shows_default=True)] = 0.7
    top_p: Annotated[float, flag("Nucleus size; 1 is off.", metavar="P", shows_default=True)] = 1.0
    seed: Annotated[int | None, flag("Same seed and lines, same answers.", metavar="N")] = None
    trust_remote_code: Annotated[bool, flag("Run code that the models bring along.")] = False


@dataclass(slots=True)
class Speaker:
    """One model in the conversation, with what was said so far from its side."""

    name: str
    engine: "Engine"
    has_template: bool
    history: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def answer(self, line: str, sampling: "SamplingParams") -> str:
        """The answer to `line`, which joins the history; without a chat template, the continuation of `line`."""
        from tunesmith.schema.records import Prompt

        asked = {"role": "user", "content": line}
        content = (*self.history, asked) if self.has_template else line
        (group,) = self.engine.generate([Prompt("chat", content)], 1, sampling)
        text = group.completions[0].text
        if self.has_template:
            self.history += [asked, {"role": "assistant", "content": text}]
        return text


def chat(words: Sequence[str]) -> None:
    """Run `tunesmith chat`."""
    options = parse(ChatOptions, words, "chat")
    from rich.console import Console

    names = [options.model]
    if options.against:
        names.append(base_of(Path(options.model).expanduser()) if options.against == _BASE else options.against)
    console = Console(highlight=False, markup=False, emoji=False)
    speakers = _load(names, options.trust_remote_code)
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
    from tunesmith.config.yaml_text import is_mapping
    from tunesmith.config.yaml_text import parse as parse_yaml

    recipe = run / "recipe.yaml"
    if not recipe.is_file():
        raise RunError(f"{run} is no run folder, so its base is not known; name a model: --against ID")
    data = parse_yaml(recipe.read_text(encoding="utf-8"), str(recipe)).data
    model = data.get("model") if is_mapping(data) else None
    name = model.get("name") if is_mapping(model) else None
    if not isinstance(name, str):
        raise RunError(f"{recipe} names no model; give one: --against ID")
    return name


def _load(names: Sequence[str], trust_remote_code: bool) -> list[Speaker]:
    from tunesmith.config.sections import ModelSection
    from tunesmith.models.load import load_policy
    from tunesmith.rollout.transformers_backend import TransformersEngine

    speakers: list[Speaker] = []
    for name in names:
        loaded = load_policy(ModelSection(name=name, trust_remote_code=trust_remote_code))
        has_template = bool(loaded.tokenizer.chat_template)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        speakers.append(Speaker(name, TransformersEngine(loaded.model, loaded.tokenizer), has_template))
    return speakers


def _sampling(options: ChatOptions, turn: int) -> "SamplingParams":
    from tunesmith.batch.rollout import SamplingParams
    from tunesmith.core.seeds import derive

    seed = None if options.seed is None else derive(options.seed, "chat", turn)
    return SamplingParams(options.max_new_tokens, temperature=options.temperature, top_p=options.top_p, seed=seed)


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
    """Ask all speakers and show what they say. Ctrl-C stops the answer, not the conversation."""
    try:
        answers = [visible(speaker.answer(line, sampling)).strip() for speaker in speakers]
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        sys.stderr.write("\nstopped\n")
        return
    except InputError as error:
        sys.stderr.write(f"error: {error}\n/reset begins anew\n")
        return
    if len(speakers) == 1:
        console.print(answers[0], soft_wrap=not console.is_terminal)
    elif not console.is_terminal:
        for speaker, text in zip(speakers, answers, strict=True):
            console.print(f"{speaker.name}: {text}", soft_wrap=True)
    else:
        _show_side_by_side(speakers, answers, console)


def _show_side_by_side(speakers: Sequence[Speaker], answers: Sequence[str], console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True)
    for speaker in speakers:
        table.add_column(Text(speaker.name), ratio=1, overflow="fold")
    table.add_row(*map(Text, answers))
    console.print(table)
