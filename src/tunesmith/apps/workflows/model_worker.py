"""The process that draws for the server: for the arena, and for the OpenAI endpoint. The server need not load torch.

`python -m tunesmith.apps.workflows.model_worker` reads requests from stdin and writes replies to stdout, one JSON
object a line. Without `--stay` it ends when nothing is asked for ten minutes; with `--int8` it draws with products in 8
bits. A request:

- `id`, and the `model`, a section of a recipe;
- what is read: `messages` (with `tools`, schemas, if there are any), a `text`, or `token_ids`. `as_text` has a model
  with a chat template read messages as one text;
- `n`, which is 0 if it is to be read alone, and the `sampling` parameters: those of `SamplingParams`, of which
  `max_new_tokens` may be missing: at most `most_new_tokens` then, and no more than the context holds.
  `presence_penalty`, `frequency_penalty` and `num_top` as in `engine/rollout/open_batch.py`. Other keys are ignored.

Its replies: `begun`, with the `prompt` as the model reads it, as text and ids, and the length of its `context`; any
number with what was drawn of a `sample`: new `text`, `token_ids`, and their `scores`; an `answer` for each sample; then
`done`. With `tools` the `text` is the content of the answer's message, as far as it cannot be the beginning of a call;
the `thinking` before it comes as a whole. Or an `error`, whose `kind` is `model` for one that cannot be loaded,
`context` for a prompt that is too long, `prompt` for what cannot be drawn otherwise, and `engine` if the engine failed.
`{"stop": id}` ends a request without further replies.
"""

import json
import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import ContextFullError, InputError, ModelError, TunesmithError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.system import keep_freed_memory, trim_memory
from tunesmith.base.schema.records import Message, Prompt, Text
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.batch.rollout import Completion, SamplingParams
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase, context_length
from tunesmith.engine.models.tokenizer import decode_marked, encode_prompt, token_bytes
from tunesmith.engine.models.tool_messages import with_tools
from tunesmith.engine.models.turns import Answer, ContentStream, call_ends, parse_answer
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.engine.rollout.native_engine import Native
from tunesmith.engine.rollout.open_batch import Ask, OpenBatch, Piece, TokenScore, open_batch
from tunesmith.observe.profiling.meter import available_gb

MAX_MODELS = 3
"""Models that are kept in memory: in a live loop the base, the served version and the one before it."""

IDLE_S = 600.0
"""Seconds without a request after which the process ends, and frees its memory. The server starts another."""

MOST_NEW_TOKENS = 1024
"""Tokens of an answer for which the request names no limit."""

_log = get_logger(__name__)

_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
_COPIES = 3.0
"""Bytes in memory of each byte of weights: 16-bit weights as float32, and the engine's packed copy of them."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded model; its requests are drawn in `batch`."""

    batch: OpenBatch
    tokenizer: PreTrainedTokenizerBase
    context: int


@dataclass(slots=True)
class Worker:
    """Answers requests; `reply` is called with the replies of a step. The models used last are kept in `speakers`, the
    requests that nobody waits for any more in `stopped`. All models are drawn with `weights`.
    """

    reply: Callable[[Sequence[Json]], None]
    weights: Weights = "model"
    speakers: OrderedDict[str, Speaker] = field(default_factory=OrderedDict[str, Speaker])
    stopped: set[int] = field(default_factory=set[int])
    _busy: dict[int, str] = field(default_factory=dict[int, str])  # the model of each open request
    _replies: list[Json] = field(default_factory=list[Json])

    def work(self, requests: "queue.SimpleQueue[Json | None]", idle_s: float | None = IDLE_S) -> None:
        """Answer requests until None comes and all are answered, or nothing comes for `idle_s`, if that is given."""
        has_ended = False
        while not has_ended or self._busy:
            if not has_ended:
                try:
                    has_ended = self._begin_all(requests, idle_s)
                except queue.Empty:
                    return
            self._step()

    def _begin_all(self, requests: "queue.SimpleQueue[Json | None]", idle_s: float | None) -> bool:
        """Take what has come, and wait for something if nothing is drawn; True at the end of the requests."""
        if not self._busy and requests.empty():
            self.stopped.clear()  # all of them have ended
        while not (self._busy and requests.empty()):
            request = requests.get(timeout=idle_s)
            if request is None:
                return True
            self.begin(request)
            self._send()
        return False

    def begin(self, request: Json) -> None:
        """Take a request, or say why it cannot be answered."""
        id = request["id"]
        if id in self.stopped:
            return
        try:
            key, speaker = self.speaker(request["model"])
        except (TunesmithError, OSError, MemoryError) as error:
            self._fail(id, str(error) or "there is too little memory", "model")
            return
        try:
            prompt, begun = self._read(speaker, request)
            if request.get("n", 1):
                speaker.batch.add(self._ask(speaker, request, prompt, begun["prompt_ids"]))
                self._busy[id] = key
            self._replies.append({"id": id, "begun": begun})
            if id not in self._busy:
                self._replies.append({"id": id, "done": True})
        except InputError as error:
            self._fail(id, str(error), _kind(error))
        except Exception as error:  # noqa: BLE001 - a template is anybody's code, and costs no other request
            _log.warning("request %d cannot be read", id, exc_info=True)
            self._fail(id, f"the model's template or tokenizer cannot read it ({type(error).__name__})", "prompt")

    def speaker(self, model: Json) -> tuple[str, Speaker]:
        """The loaded model, by a key. Raises ModelError if there is none, or it is too large for the free memory."""
        key = json.dumps(model, sort_keys=True)
        if key not in self.speakers:
            idle = [one for one in self.speakers if one not in self._busy.values()]
            for one in idle[: max(0, len(self.speakers) - MAX_MODELS + 1)]:
                del self.speakers[one]
                trim_memory()  # a cache seldom fits into the gaps that another one leaves in the heap
            section = ModelSection.model_validate(model)
            check_memory(section.name)
            loaded = load_policy(section)
            batch = open_batch(open_engine(loaded.model, loaded.tokenizer, backend=Native(self.weights)))
            self.speakers[key] = Speaker(batch, loaded.tokenizer, context_length(loaded.model) or 1_000_000)
        self.speakers.move_to_end(key)
        return key, self.speakers[key]

    def _read(self, speaker: Speaker, request: Json) -> tuple[Prompt, dict[str, Any]]:
        """The prompt, and as what the model reads it. Raises InputError."""
        prompt = prompt_of(request, speaker.tokenizer)
        ids = encode_prompt(speaker.tokenizer, prompt) if prompt.token_ids is None else prompt.token_ids
        return prompt, {"prompt": prompt.content, "prompt_ids": ids, "context": speaker.context}

    def _ask(self, speaker: Speaker, request: Json, prompt: Prompt, ids: tuple[int, ...]) -> Ask:
        """The request for the engine. Raises InputError if it cannot be drawn."""
        id, tokenizer = request["id"], speaker.tokenizer
        given = dict(request["sampling"])
        most, room = request.get("most_new_tokens", MOST_NEW_TOKENS), speaker.context - len(ids)
        if room < 1:
            raise ContextFullError(f"the prompt has {len(ids)} tokens, and the model's context holds {speaker.context}")
        given.setdefault("max_new_tokens", min(most, room))
        if given["max_new_tokens"] > room:  # told here without the number that the engine knows the prompt by
            raise ContextFullError(
                f"the prompt has {len(ids)} tokens and max_new_tokens is {given['max_new_tokens']}, but the model's "
                f"context holds {speaker.context}; shorten the prompt or lower max_new_tokens"
            )
        tools = request.get("tools") or ()
        given["stop_token_ids"] = (*given.get("stop_token_ids", ()), *(call_ends(tokenizer) if tools else ()))
        given["stop_strings"] = tuple(given.get("stop_strings", ()))
        given["logit_bias"] = _bias(given.get("logit_bias") or {})
        sampling = SamplingParams(**given)
        num_left = request.get("n", 1)
        contents = [ContentStream(tokenizer, ids) for _ in range(num_left if tools else 0)]

        def on_piece(piece: Piece) -> None:
            nonlocal num_left
            stop = _stop_string(tokenizer, piece.completion, sampling.stop_strings)
            message, said = None, {"text": piece.text}
            if tools:
                answer = piece.completion and _answer(tokenizer, ids, piece.completion, tools, stop)
                message, said = _said(contents[piece.sample], piece, answer)
            reply: dict[str, Any] = {"id": id, "sample": piece.sample, **{name: it for name, it in said.items() if it}}
            if piece.token_ids:
                reply["token_ids"] = piece.token_ids
            if piece.scores:
                reply["scores"] = [_shown(tokenizer, score) for score in piece.scores]
            if piece.completion is not None:
                reply["answer"] = {**_facts(prompt.content, piece.completion), "message": message, "stop_string": stop}
                num_left -= 1
            self._replies.append(reply)
            if num_left == 0:
                self._replies.append({"id": id, "done": True})
                del self._busy[id]

        def on_error(error: TunesmithError) -> None:
            del self._busy[id]
            self._fail(id, str(error), _kind(error))

        def is_stopped() -> bool:
            return id in self.stopped

        return Ask(
            prompt=Prompt(str(id), prompt.content, token_ids=ids),
            n=request.get("n", 1),
            sampling=sampling,
            on_piece=on_piece,
            on_error=on_error,
            is_stopped=is_stopped,
            presence_penalty=request.get("presence_penalty", 0.0),
            frequency_penalty=request.get("frequency_penalty", 0.0),
            num_top=request.get("num_top"),
        )

    def _step(self) -> None:
        """Draw a step of every model that has requests, and send what was drawn."""
        stopped = [id for id in self._busy if id in self.stopped]
        for key in set(self._busy.values()):
            try:
                self.speakers[key].batch.step()
            except Exception as error:  # noqa: BLE001 - requests of other models go on
                _log.warning("the engine failed", exc_info=True)
                del self.speakers[key]  # nobody knows its state; the next request loads the model again
                for id in [id for id, model in self._busy.items() if model == key]:
                    del self._busy[id]
                    self._fail(id, f"the engine failed ({type(error).__name__}); the server's log says why", "engine")
        self._send()
        for id in stopped:  # which the engine knows now
            self._busy.pop(id, None)

    def _fail(self, id: int, reason: str, kind: str) -> None:
        self._replies.append({"id": id, "error": reason, "kind": kind})

    def _send(self) -> None:
        replies = [reply for reply in self._replies if reply["id"] not in self.stopped]
        self._replies.clear()
        if replies:
            self.reply(replies)


def prompt_of(request: Json, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt: messages as the model's template takes them, a text, or ids. Without a chat template messages are
    one text, each turn of the person on a new line and the answer directly after it.

    Raises:
        InputError: tools for a model without a chat template, or a conversation that the template refuses.
    """
    if "token_ids" in request:
        ids = tuple(request["token_ids"])
        if max(ids) >= len(tokenizer):
            raise InputError(f"the prompt holds token id {max(ids)}; ids must lie in [0, {len(tokenizer)})")
        return Prompt("", decode_marked(tokenizer, ids), token_ids=ids)
    if "text" in request:
        return Prompt("", request["text"])
    messages: list[Message] = request["messages"]
    tools = request.get("tools")
    if tokenizer.chat_template and not request.get("as_text"):
        columns = {"tools": tools} if tools else {}
        prompt = Prompt("", tuple(messages), columns)
        return with_tools(tokenizer, prompt) if tools or _has_calls(messages) else prompt
    if tools:
        raise InputError("the model has no chat template, so it cannot be told of tools; leave them out")
    parts = (
        ("\n" if one["role"] == "user" and place else "") + str(one["content"]) for place, one in enumerate(messages)
    )
    return Prompt("", "".join(parts))


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError:
        raise InputError("logit_bias names a token that is no id; give whole numbers") from None


def _has_calls(messages: Sequence[Message]) -> bool:
    return any(one["role"] == "tool" or one.get("tool_calls") for one in messages)


def check_memory(name: str) -> None:
    """Raise ModelError if the weights in a folder or file are larger than what is free."""
    path = Path(name).expanduser()
    folder = path / "final" if (path / "final").is_dir() else path
    files = [folder] if folder.is_file() else [file for form in _WEIGHTS for file in folder.glob(form)]
    needed_gb, free_gb = _COPIES * sum(file.stat().st_size for file in files) / 1e9, available_gb()
    if needed_gb > free_gb:
        raise ModelError(f"{name} needs about {needed_gb:.1f} GB of memory, {free_gb:.1f} GB are free")


def _kind(error: TunesmithError) -> str:
    if isinstance(error, ContextFullError):
        return "context"
    return "prompt" if isinstance(error, InputError) else "engine"


def _facts(prompt: Text, completion: Completion) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logps": completion.raw_logps,
        "drawn_logps": completion.logps,
        "finish_reason": completion.finish_reason,
    }


def _stop_string(
    tokenizer: PreTrainedTokenizerBase, completion: Completion | None, stop_strings: Sequence[str]
) -> str | None:
    """The stop string that ended a completion; None if it ended otherwise."""
    if completion is None or completion.finish_reason != "stop" or not stop_strings:
        return None
    ids = list(completion.token_ids)
    shown = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    texts = (shown, decode_marked(tokenizer, ids))  # in which the engine looks for them
    found = [(text.find(stop), stop) for text in texts for stop in stop_strings if stop in text]
    return min(found)[1] if found else None


def _said(stream: ContentStream, piece: Piece, answer: Answer | None) -> tuple[Json | None, dict[str, str]]:
    """The message of an answer that has ended, None before, and what is new of its reasoning and content."""
    message = None
    if piece.completion is None:
        thinking, text = stream.push(piece.text, piece.token_ids)
    else:
        message, thinking, text = stream.finish(piece.text, piece.completion.text, answer)
    return message, {"thinking": thinking, "text": text}


def _answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    completion: Completion,
    tools: Sequence[Any],
    stop: str | None,
) -> Answer | None:
    """The answer with its calls of tools, ended by the stop string `stop` or not; None if it cannot be read."""
    ended = completion.token_ids[-1:] if completion.finish_reason == "stop" and stop is None else ()
    try:
        answer = parse_answer(tokenizer, prompt_ids, completion.token_ids, tools, stop_ids=ended)
    except Exception:  # noqa: BLE001 - the schemas of the tools are the client's
        _log.warning("an answer cannot be parsed for calls", exc_info=True)
        return None
    if stop is None:
        return answer
    cut = {name: said.partition(stop)[0] if isinstance(said, str) else said for name, said in answer.message.items()}
    return replace(answer, message={**cut, "role": "assistant"})


def _shown(tokenizer: PreTrainedTokenizerBase, score: TokenScore) -> Json:
    """A score with the bytes of its tokens."""
    top = [[list(token_bytes(tokenizer, token)), logp] for token, logp in score.top]
    return {"bytes": list(token_bytes(tokenizer, score.token_id)), "logp": score.logp, "top": top}


def main(source: TextIO, target: TextIO, idle_s: float | None = IDLE_S, weights: Weights = "model") -> None:
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

    def reply(messages: Sequence[Json]) -> None:
        target.write("".join(json.dumps(message, default=dict) + "\n" for message in messages))
        target.flush()

    keep_freed_memory()
    worker = Worker(reply, weights)
    threading.Thread(target=read, name="requests", daemon=True).start()
    worker.work(requests, idle_s)


if __name__ == "__main__":
    # Whatever a library prints must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, replies, None if "--stay" in sys.argv else IDLE_S, "int8" if "--int8" in sys.argv else "model")
