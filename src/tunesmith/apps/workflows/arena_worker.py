"""The process that draws the answers of the arena, so that the server need not load torch.

`python -m tunesmith.apps.workflows.arena_worker` reads requests from stdin and writes replies to stdout, one JSON
object a line. A request has an `id`, the `model` (a section of a recipe), the `messages` of the conversation, the
`sampling` parameters, and `as_text`, which has a model with a chat template read text. Its replies are any number of
`{"id", "text"}` with new text, then the `answer`, or an `error`, whose `kind` is `model` for one that cannot be loaded
and `prompt` for a conversation that it cannot answer. `{"stop": id}` ends a request without an answer.
"""

import json
import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ContextFullError, InputError, ModelError, TunesmithError
from tunesmith.base.core.system import keep_freed_memory
from tunesmith.base.schema.records import Message, Prompt, Text
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.observe.profiling.meter import available_gb

MAX_MODELS = 3
"""Models that are kept in memory: in a live loop the base, the served version and the one before it."""

IDLE_S = 600.0
"""Seconds without a request after which the process ends, and frees its memory. The server starts another."""

TOO_LONG = (
    "the conversation is longer than a model's context; leave out its oldest turns, change the message, or begin a new "
    "conversation"
)
"""The words for a person in place of numbers of tokens, which they cannot set."""

_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
_COPIES = 3.0
"""Bytes in memory of each byte of weights: 16-bit weights as float32, and the engine's packed copy of them."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded model."""

    engine: Engine
    has_template: bool


class _StoppedError(Exception):
    """Nobody waits for what is drawn."""


@dataclass(slots=True)
class Worker:
    """Answers requests; `reply` is called with each reply. The models used last are kept in `speakers`, the requests
    that nobody waits for any more in `stopped`.
    """

    reply: Callable[[Json], None]
    speakers: OrderedDict[str, Speaker]
    stopped: set[int] = field(default_factory=set[int])

    def work(self, requests: "queue.SimpleQueue[Json | None]", idle_s: float = IDLE_S) -> None:
        """Answer requests until None comes, or nothing for `idle_s`.

        Those of one model that wait together are drawn together, which takes hardly longer than one of them.
        """
        waiting: list[Json] = []
        while arrived(requests, waiting, idle_s):
            first = waiting[0]
            batch = [one for one in waiting if all(one[key] == first[key] for key in ("model", "sampling"))]
            waiting = [one for one in waiting if one not in batch]
            self.answer(batch)

    def answer(self, batch: Sequence[Json]) -> None:
        """Draw the answers to requests of one model with one set of sampling parameters."""
        batch = [one for one in batch if one["id"] not in self.stopped]
        if not batch:
            return
        try:
            speaker = self.speaker(batch[0]["model"])
        except (TunesmithError, OSError, MemoryError) as error:
            for one in batch:
                self.reply({"id": one["id"], "error": str(error) or "there is too little memory", "kind": "model"})
            return
        prompts = [Prompt(str(one["id"]), prompt_of(one, speaker.has_template)) for one in batch]
        try:
            self._draw(speaker, prompts, batch)
        except _StoppedError:
            return
        except InputError as error:  # nothing was drawn
            if len(batch) == 1:
                reason = TOO_LONG if isinstance(error, ContextFullError) else str(error)
                self.reply({"id": batch[0]["id"], "error": reason, "kind": "prompt"})
            else:
                for one in batch:  # each alone, so that one that cannot be answered costs no other
                    self.answer([one])

    def speaker(self, model: Json) -> Speaker:
        """The loaded model. Raises ModelError if there is none, or it is too large for the free memory."""
        key = json.dumps(model, sort_keys=True)
        if key not in self.speakers:
            while len(self.speakers) >= MAX_MODELS:
                self.speakers.popitem(last=False)
            section = ModelSection.model_validate(model)
            check_memory(section.name)
            loaded = load_policy(section)
            has_template = bool(loaded.tokenizer.chat_template)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            self.speakers[key] = Speaker(open_engine(loaded.model, loaded.tokenizer), has_template)
        self.speakers.move_to_end(key)
        return self.speakers[key]

    def _draw(self, speaker: Speaker, prompts: Sequence[Prompt], batch: Sequence[Json]) -> None:
        def on_text(index: int, _sample: int, text: str) -> None:
            self.reply({"id": batch[index]["id"], "text": text})
            if all(one["id"] in self.stopped for one in batch):
                raise _StoppedError

        groups = speaker.engine.generate(prompts, 1, SamplingParams(**batch[0]["sampling"]), on_text=on_text)
        for request, group in zip(batch, groups, strict=True):
            self.reply({"id": request["id"], "answer": _facts(group.prompt.content, group.completions[0])})


def arrived(requests: "queue.SimpleQueue[Json | None]", waiting: list[Json], idle_s: float) -> bool:
    """Move all that is in the queue to `waiting`, at least one; False at its end, and after `idle_s` without any."""
    try:
        while not waiting or not requests.empty():
            request = requests.get(timeout=idle_s)
            if request is None:
                requests.put(None)  # for the next call, after those that wait
                return bool(waiting)
            waiting.append(request)
    except queue.Empty:
        return False
    return True


def prompt_of(request: Json, has_template: bool) -> Text:
    """The conversation as the model reads it: messages, or one text, each turn of the person on a new line and the
    answer directly after it.
    """
    messages: list[Message] = request["messages"]
    if has_template and not request["as_text"]:
        return tuple(messages)
    parts = (("\n" if one["role"] == "user" and place else "") + one["content"] for place, one in enumerate(messages))
    return "".join(parts)


def check_memory(name: str) -> None:
    """Raise ModelError if the weights in a folder or file are larger than what is free."""
    path = Path(name).expanduser()
    folder = path / "final" if (path / "final").is_dir() else path
    files = [folder] if folder.is_file() else [file for form in _WEIGHTS for file in folder.glob(form)]
    needed_gb, free_gb = _COPIES * sum(file.stat().st_size for file in files) / 1e9, available_gb()
    if needed_gb > free_gb:
        raise ModelError(f"{name} needs about {needed_gb:.1f} GB of memory, {free_gb:.1f} GB are free")


def _facts(prompt: Text, completion: Completion) -> Json:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logps": completion.raw_logps,
    }


def main(source: TextIO, target: TextIO) -> None:
    """Answer the requests in `source` until it ends."""
    requests: queue.SimpleQueue[Json | None] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            request = json.loads(line)
            if "stop" in request:
                worker.stopped.add(request["stop"])
            else:
                requests.put(request)
        requests.put(None)

    def reply(message: Json) -> None:
        target.write(json.dumps(message, default=dict) + "\n")
        target.flush()

    keep_freed_memory()
    worker = Worker(reply, OrderedDict())
    threading.Thread(target=read, name="requests", daemon=True).start()
    worker.work(requests)


if __name__ == "__main__":
    # Whatever a library prints must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, replies)
