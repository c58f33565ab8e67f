"""`tunesmith chat`: talk to a run, a model or a server, optionally side by side with another one."""

import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from tunesmith.apps.cli.options import (
    EnvironmentFlags,
    Positional,
    SamplingFlags,
    environment_of,
    flag,
    parse_with_environment,
)
from tunesmith.apps.cli.output import LiveText
from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.core.errors import InputError, RunError
from tunesmith.base.core.log import visible
from tunesmith.base.core.system import keep_freed_memory

if TYPE_CHECKING:
    from rich.console import Console

    from tunesmith.base.config.sections import EnvironmentSection
    from tunesmith.base.schema.records import Message, Prompt
    from tunesmith.engine.batch.rollout import Group, SamplingParams
    from tunesmith.engine.rollout.engine import Engine, OnText
    from tunesmith.learn.environments.chat import Partner
    from tunesmith.learn.environments.episodes import Open

_BASE = "base"
_COMMANDS = "/reset begins anew, /quit or Ctrl-D ends"
_KEY = "OPENAI_API_KEY"
_TIMEOUT_S = 120.0
"""Seconds without a piece of an answer after which a server is given up."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingFlags, EnvironmentFlags):
    """Talk to a run or a model. With --against, two of them answer side by side; `base` is what the run started from.
    An address such as http://localhost:8000 is a server with OpenAI's API, as `tunesmith serve --openai` is one.

    A model without a chat template continues each line that you type. Lines may also come from a pipe. Ctrl-C cuts
    the current answer short, or leaves a call that runs. Calls of --tools are made and shown; a run that was trained
    with tools has them. Settings of the environment are flags too: --environment.timeout-s 5.
    """

    model: Annotated[str, Positional, flag("Run folder, hub id, folder, GGUF file, smollm2, address.", "RUN")]
    against: Annotated[str | None, flag("base, or another model.", "ID")] = None
    key: Annotated[str | None, flag(f"Key of the server; without it, that in {_KEY}.", "KEY")] = None
    no_tools: Annotated[bool, flag("Leave out the tools that the run was trained with.")] = False
    max_new_tokens: Annotated[int, flag("Limit of an answer, or of a turn.", "N")] = 128
    seed: Annotated[int | None, flag("Same seed and lines, same answers.", "N")] = None
    trust_remote_code: Annotated[bool, flag("Run code that the models bring along.")] = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a model; `is_cut` if Ctrl-C ended it."""

    text: str
    is_cut: bool = False


class Remote:
    """The first model of a server with OpenAI's API at `address`, which answers as an engine does."""

    def __init__(self, address: str, key: str) -> None:
        parts = urlsplit(address)
        if not parts.hostname:
            raise InputError(f"{address} names no server; give one such as http://localhost:8000")
        self._address, self._place, self._key = address, parts, key.strip()
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        said = b"".join(self._lines("GET", "/models"))
        try:
            self._model: str = json.loads(said)["data"][0]["id"]
        except (json.JSONDecodeError, LookupError, TypeError):
            raise RunError(f"{address} lists no model; is it a server with OpenAI's API?") from None

    def generate(
        self, prompts: "Sequence[Prompt]", n: int, sampling: "SamplingParams", *, on_text: "OnText"
    ) -> "list[Group]":
        """Hand the answer to a conversation to `on_text` as it comes. Raises RunError if the server gives none."""
        settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        settings |= {"stop": list(sampling.stop_strings) or None, "min_p": sampling.min_p or None}
        settings |= {"repetition_penalty": None if sampling.repetition_penalty == 1 else sampling.repetition_penalty}
        body: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        body |= {"model": self._model, "max_tokens": sampling.max_new_tokens, "stream": True}
        body["messages"] = prompts[0].content
        with closing(self._lines("POST", "/chat/completions", body)) as lines:
            events = (line[5:].strip() for line in lines if line.startswith(b"data:"))
            for event in (json.loads(one) for one in events if one != b"[DONE]"):
                if "error" in event:
                    raise RunError(f"{self._address}: {event['error']['message']}")
                on_text(0, 0, "".join(choice["delta"].get("content") or "" for choice in event["choices"]))
        return []

    def _lines(self, method: str, path: str, body: object = None) -> Generator[bytes]:
        """The lines of a response as they come. To close it ends what is drawn."""
        kind = HTTPSConnection if self._place.scheme == "https" else HTTPConnection
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            with closing(kind(self._place.netloc.rpartition("@")[2], timeout=_TIMEOUT_S)) as connection:
                connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
                response = connection.getresponse()
                if response.status != 200:
                    said = response.read(1000).decode(errors="replace")
                    told = f"; give its key by --key, or in {_KEY}" if response.status == 401 else ""
                    raise RunError(f"{self._address} answers {response.status}: {said}{told}")
                yield from response
        except (OSError, HTTPException, UnicodeError) as error:
            raise RunError(f"{self._address} cannot be asked: {error}; is the server running?") from error


@dataclass(slots=True)
class Speaker:
    """One model in the conversation, with what was said so far from its side."""

    name: str
    engine: "Engine | Remote"
    has_template: bool
    history: list["Message"] = field(default_factory=list["Message"])
    partner: "Partner | None" = None

    def answer(self, line: str, sampling: "SamplingParams", show: Callable[[str], None] = lambda piece: None) -> Answer:
        """The answer to `line`, which joins the history; without a chat template, the continuation of `line`.

        `show` is called with each piece of it. Of an answer that is cut, what was said by then joins the history.
        """
        from tunesmith.base.schema.records import Prompt

        if self.partner is not None:
            return self._answer_with(self.partner, line, sampling, show)
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

    def _answer_with(
        self, partner: "Partner", line: str, sampling: "SamplingParams", show: Callable[[str], None]
    ) -> Answer:
        """The answer to `line`: all turns of the model, with the calls and replies between them."""
        pieces: list[str] = []
        num_before = 0

        def say(piece: str) -> None:
            pieces.append(piece)
            show(piece)

        def on_text(_prompt: int, _sample: int, piece: str) -> None:
            say(piece)

        try:
            if partner.has_begun:
                self.history.append({"role": "user", "content": line})
            else:
                self.history += partner.begin(line, sampling.seed or 0)
                if added := str(self.history[-1]["content"]).removeprefix(line).strip():
                    say(f"[environment {added}]\n")
            settings, num_turns, goes_on = partner.sampling(sampling), 0, True
            while goes_on:
                num_before = len(pieces)
                (group,) = self.engine.generate([partner.prompt(self.history)], 1, settings, on_text=on_text)
                num_before = len(pieces)  # of a turn whose call is cut short nothing stays: no answer would follow it
                num_turns += 1
                step = partner.reply(group, num_turns)
                self.history += step.messages
                say("".join(f"\n{one}" for one in step.lines) + ("\n" if step.goes_on else ""))
                goes_on = step.goes_on
        except KeyboardInterrupt:
            if said := "".join(pieces[num_before:]):
                self.history.append({"role": "assistant", "content": said})
            return Answer("".join(pieces), is_cut=True)
        if not partner.has_begun:
            self.history.clear()
        return Answer("".join(pieces))

    def reset(self) -> None:
        """Begin the conversation anew."""
        self.history.clear()
        if self.partner is not None:
            self.partner.has_begun = False


def chat(words: Sequence[str]) -> None:
    """Run `tunesmith chat`."""
    options, overrides = parse_with_environment(ChatOptions, words, "chat")
    given = bool(overrides.values)
    if given and options.no_tools:
        raise InputError("tools are given, and --no-tools leaves them out; give one of both")
    section = environment_of(overrides) if given else None
    from rich.console import Console

    names = [options.model]
    if options.against:
        names.append(base_of(Path(options.model).expanduser()) if options.against == _BASE else options.against)
    if options.key is not None and not any(map(_is_address, names)):
        raise InputError("--key is for a server, and none is named; give its address, such as http://localhost:8000")
    console = Console(highlight=False, markup=False, emoji=False)
    if section is None and not options.no_tools:
        section = _trained_with(Path(options.model).expanduser())
    speakers = _load(names, options, section, is_own=not given)
    for speaker in speakers:
        if not speaker.has_template:
            sys.stderr.write(f"{speaker.name} has no chat template: it continues each line\n")
    if sys.stdin.isatty():
        console.print(f"{' and '.join(speaker.name for speaker in speakers)}; {_COMMANDS}", style="dim")
    try:
        _converse(speakers, options, console)
    finally:
        for speaker in speakers:
            if speaker.partner is not None:
                speaker.partner.close()


def _converse(speakers: Sequence[Speaker], options: ChatOptions, console: "Console") -> None:
    """Answer each line, up to the last."""
    for turn, line in enumerate(_lines()):
        if line == "/reset":
            for speaker in speakers:
                speaker.reset()
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


def _trained_with(run: Path) -> "EnvironmentSection | None":
    """The environment and tools that the run in the folder `run` was trained with, which is told; None without any."""
    from tunesmith.base.config.sections import EnvironmentSection
    from tunesmith.base.runs.listing import read_object, read_recipe

    facts = read_object(run / "environment.json").get("given_in_python")
    if isinstance(facts, list) and {"tools", "environment_factory"} & {*facts}:
        sys.stderr.write(
            f"{run} was trained with tools given in Python, which are not known here: name them by --tools\n"
        )
    try:
        section = EnvironmentSection.model_validate(read_recipe(run).get("environment") or {})
    except ValueError:  # a recipe of another release
        return None
    return section if section.is_given else None


def _load(
    names: Sequence[str], options: ChatOptions, section: "EnvironmentSection | None", *, is_own: bool
) -> list[Speaker]:
    """The models, each beside what `section` names; if that `is_own` of the run, and not to be had here, without."""
    from tunesmith.base.config.sections import ModelSection
    from tunesmith.base.schema.records import Prompt
    from tunesmith.engine.models.load import load_policy
    from tunesmith.engine.rollout.engine import check_request
    from tunesmith.engine.rollout.factory import open_engine
    from tunesmith.learn.environments.chat import Partner
    from tunesmith.learn.environments.sources import opener

    check_request([Prompt("chat", "")], 1, _sampling(options, 0))  # before a model is loaded
    open_episode: Open | None = None
    if section is not None:
        named = ", ".join(filter(None, (section.source, *section.tools)))
        try:
            open_episode = opener(section)
        except InputError as error:
            if not is_own:
                raise
            sys.stderr.write(f"{names[0]} was trained with {named}, which is left out: {error}\n")
        else:
            if is_own:
                sys.stderr.write(
                    f"{names[0]} was trained with {named}, which it has here too; --no-tools leaves it out\n"
                )
    keep_freed_memory()
    speakers: list[Speaker] = []
    for name in names:
        if _is_address(name):
            if open_episode is not None:
                raise InputError(
                    f"{name} is a server, but tools are called by a model that is loaded here; leave them out"
                )
            key = os.environ.get(_KEY, "") if options.key is None else options.key
            speakers.append(Speaker(name, Remote(name, key), has_template=True))
            continue
        loaded = load_policy(ModelSection(name=name, trust_remote_code=options.trust_remote_code))
        has_template = bool(loaded.tokenizer.chat_template)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        engine = open_engine(loaded.model, loaded.tokenizer, backend=options.engine)
        speaker = Speaker(name, engine, has_template)
        if open_episode is not None and section is not None:
            speaker.partner = Partner(open_episode, loaded.tokenizer, section)
        speakers.append(speaker)
    return speakers


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


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
        sys.stderr.write(f"error: {visible(str(error))}\n/reset begins anew\n")
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
