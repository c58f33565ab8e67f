"""Conversations with two models side by side, of which the person does not know which is which until they vote.

Each turn is answered by both from the same conversation, so the two answers are a pair whose prompt is the conversation
so far: an ordinary vote, which trains as every other. After it the conversation goes on with one answer in both. A
conversation is a file, written before each reply, so it survives the server; votes are in the store of votes alone.
"""

import json
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom
from typing import Any

from fastapi.exceptions import HTTPException

from tunesmith.base.config.schema import trains_reward_model
from tunesmith.base.config.yaml_text import is_mapping
from tunesmith.base.core.errors import DataError, RunError, StoreError, VoteConflictError, VoteError
from tunesmith.base.core.system import fsync
from tunesmith.base.runs.folder import TRIAL
from tunesmith.base.runs.listing import read_recipe
from tunesmith.base.schema.records import Text
from tunesmith.collect.store.content import check_content, check_text
from tunesmith.collect.store.records import MODEL_SOURCE, Candidate, NewItem, Person, Verdict
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.collect.web.drawing import Drawer, Drawing
from tunesmith.collect.web.run_index import RunIndex

MAX_TURNS = 50
MAX_OPEN = 1_000
"""Conversations that are kept in memory; others are read again from their files."""

FOLDER = "arena"
"""Folder of the conversations, in that of the server."""

KEPT_DAYS = 30.0
"""Days after which the file of a conversation is removed, at the start of a server."""

NO_MODEL = "there is no model to talk with yet: start `tunesmith live`, or train a run"
GONE = "this conversation was removed with all data of its rater"
_SAMPLING = {"max_new_tokens": 128, "temperature": 0.7}
"""Of runs; a live loop draws as its recipe says, because it learns from the votes."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model that may answer: its name, its section of a recipe, and how it is sampled; `version` in a live loop.

    `as_text`: it reads conversations as one text, although it may have a chat template.
    """

    name: str
    model: Mapping[str, Any]
    sampling: Mapping[str, Any]
    version: int | None = None
    as_text: bool = False


@dataclass(slots=True)
class Turn:
    """A message, the models on the left and right, and their answers, empty until both are whole.

    The conversation goes on with the answer `kept`. `verdict` is empty until there is one; `token` is that of the vote.
    """

    text: str
    sides: list[Contestant]
    answers: list[Json] = field(default_factory=list[Json])
    kept: int = 0
    verdict: str = ""
    token: str = ""

    @property
    def obstacle(self) -> str:
        """Why the two answers cannot be voted on; empty if they can."""
        texts = [str(one["text"]).strip() for one in self.answers]
        if len(texts) == 2 and texts[0] == texts[1]:
            return "the two answers are the same, so there is nothing to compare"
        try:
            for text, letter in zip(texts, "AB", strict=False):
                check_text(text, f"answer {letter}")
            if self.answers:
                check_content(_prompt(self), "the conversation before the answers")
        except DataError as error:
            return f"{str(error).removesuffix('; remove it')}, which no vote can be stored with"
        return ""

    @property
    def is_revealed(self) -> bool:
        """True once there was a vote, also if it was undone."""
        return bool(self.token)


@dataclass(slots=True)
class Conversation:
    """A conversation of one rater; `names` are the only models that may answer, empty for all. The models read it from
    the turn `first` on.
    """

    id: str
    rater_id: int
    names: list[str]
    turns: list[Turn] = field(default_factory=list[Turn])
    first: int = 0
    drawings: list[Drawing] = field(default_factory=list[Drawing])

    def messages(self) -> list[dict[str, str]]:
        """The part of the conversation that the models read, up to what the person said last."""
        found: list[dict[str, str]] = []
        for turn in self.turns[self.first : -1]:
            found.append({"role": "user", "content": turn.text})
            found.append({"role": "assistant", "content": turn.answers[turn.kept]["text"]})
        return [*found, {"role": "user", "content": self.turns[-1].text}]

    def to_json(self) -> str:
        """The stored form."""
        return json.dumps({**asdict(self), "drawings": []})

    @classmethod
    def of(cls, text: str) -> "Conversation":
        """The conversation of `to_json`."""
        facts: Json = json.loads(text)
        rows: list[Json] = [{**turn, "sides": [Contestant(**one) for one in turn["sides"]]} for turn in facts["turns"]]
        turns = [Turn(**row) for row in rows]
        return cls(facts["id"], facts["rater_id"], facts["names"], turns, facts.get("first", 0))


@dataclass(frozen=True, slots=True)
class Progress:
    """Answers of the last turn while they are drawn; `is_over` once they are stored, or an `error` ended them."""

    texts: tuple[str, str]
    error: str = ""
    is_over: bool = False


class Arena:
    """The conversations in `folder`, whose answers `drawer` has drawn. `contestants()` are the models there are, of
    which the first always takes part if `keeps_first`. `is_deleted` of a rater: nothing of theirs is stored any more,
    also where another process deleted their data. Safe to call from any number of threads.
    """

    def __init__(
        self,
        folder: Path,
        drawer: Drawer,
        contestants: Callable[[], Sequence[Contestant]],
        *,
        keeps_first: bool,
        is_deleted: Callable[[int], bool],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.contestants = contestants
        self._folder = folder
        self._keeps_first = keeps_first
        self._is_deleted = is_deleted
        self._drawer = drawer
        self._open: OrderedDict[str, Conversation] = OrderedDict()
        self._lock = threading.RLock()
        self._random = SystemRandom()
        oldest = time.time() - KEPT_DAYS * 24 * 3600
        for file in folder.glob("*.json"):
            if file.stat().st_mtime < oldest:
                file.unlink(missing_ok=True)

    def begin(self, rater_id: int, names: Sequence[str] = ()) -> Conversation:
        """A new conversation, stored. Raises RunError if there is no model, or none of `names`."""
        conversation = Conversation(secrets.token_hex(16), rater_id, list(names))
        with self._lock:
            self._sides(conversation)  # there are some
            self._save(conversation)
        return conversation

    def forget(self, rater_id: int) -> int:
        """Remove the conversations of a rater, and return how many there were."""
        with self._lock:
            for one in [one for one in self._open.values() if one.rater_id == rater_id]:
                self._stop(one)
                del self._open[one.id]
            return remove_talks(self._folder, rater_id)

    def get(self, id: str, rater_id: int) -> Conversation:
        """The conversation of this rater. Raises HTTPException 404 if it is not theirs, or there is none."""
        with self._lock:
            found = self._open.get(id) or self._read(id)
            if found is None or found.rater_id != rater_id:
                raise HTTPException(404, "there is no such conversation; begin a new one")
            self._keep(found)
            return found

    def say(self, conversation: Conversation, number: int, text: str) -> None:
        """Store what the person says as turn `number`, counted from 0; a repeat changes nothing.

        Without a vote on the turn before, the conversation goes on with one of its answers, drawn at random.

        Raises:
            VoteConflictError: if the last turn is not answered yet, or `number` is not the next.
            VoteError: for a text that is empty or cannot be stored.
        """
        if not text.strip():
            raise VoteError("the message is empty; write something")
        check_text(text, "the message")
        with self._lock:
            turns = conversation.turns
            if number == len(turns) - 1 and turns[number].text == text:
                return
            if number != len(turns) or (turns and not turns[-1].answers):
                raise VoteConflictError("the conversation is at another turn; reload the page")
            if len(turns) >= MAX_TURNS:
                raise VoteConflictError(f"a conversation has {MAX_TURNS} turns at most; begin a new one")
            is_blind = bool(turns) and not turns[-1].is_revealed
            turns.append(Turn(text, turns[-1].sides if is_blind else self._sides(conversation)))
            conversation.drawings = []
            self._save(conversation)

    def take_back(self, conversation: Conversation, number: int) -> None:
        """Remove turn `number`, the last, before it is answered, and end the drawing of its answers; a repeat changes
        nothing. Raises VoteConflictError if it is answered, or not the last.
        """
        with self._lock:
            turns = conversation.turns
            if number == len(turns):
                return
            if number != len(turns) - 1 or turns[number].answers:
                raise VoteConflictError("this message is answered already; reload the page")
            self._stop(conversation)
            turns.pop()
            conversation.first = min(conversation.first, max(len(turns) - 1, 0))
            self._save(conversation)

    def begin_at(self, conversation: Conversation, number: int) -> None:
        """Have the models read the conversation from turn `number` on. Raises VoteConflictError if there is no such
        turn, or the last is answered: its answers are to the conversation as it was.
        """
        with self._lock:
            turns = conversation.turns
            if not turns or turns[-1].answers or not 0 <= number < len(turns):
                raise VoteConflictError("the conversation is at another turn; reload the page")
            self._stop(conversation)
            conversation.first = number
            self._save(conversation)

    def progress(self, conversation: Conversation) -> Progress:
        """The answers to the last turn as far as they are drawn; stored when both are whole. Begins to draw them, also
        again after an error was told, or in a new server.
        """
        with self._lock:
            if not conversation.turns:
                return Progress(("", ""), is_over=True)
            turn = conversation.turns[-1]
            if turn.answers:
                return Progress((turn.answers[0]["text"], turn.answers[1]["text"]), is_over=True)
            try:
                drawings = conversation.drawings or self._draw(conversation)
            except RunError as error:
                return Progress(("", ""), str(error), is_over=True)
            texts = (drawings[0].text, drawings[1].text)
            failed = next((one for one in drawings if one.error), None)
            if failed is not None:
                lost = [side.name for side, one in zip(turn.sides, drawings, strict=True) if one.is_lost]
                if lost:
                    turn.sides = self._sides(conversation, lost)
                conversation.drawings = []
                return Progress(texts, failed.error, is_over=True)
            answers = [dict(one.answer) for one in drawings if one.answer is not None]
            if len(answers) < 2:
                return Progress(texts)
            turn.answers, turn.kept = answers, self._random.randrange(2)
            try:
                self._save(conversation)
            except RunError as error:
                return Progress(("", ""), str(error), is_over=True)
            return Progress((answers[0]["text"], answers[1]["text"]), is_over=True)

    def vote(
        self,
        conversation: Conversation,
        number: int,
        verdict: Verdict,
        reason: str,
        dwell_ms: int | None,
        votes: VoteStore,
        campaign_id: int,
    ) -> None:
        """Store a verdict on the last turn, as a vote on its two answers; a repeat changes nothing.

        The conversation goes on with the better answer, or with one drawn at random. `skip` stores no vote, and undoes
        an earlier one. Raises VoteConflictError if the conversation has gone on, or the models were revealed.
        """
        with self._lock:
            turn = conversation.turns[number] if number == len(conversation.turns) - 1 else None
            if turn is None or not turn.answers:
                raise VoteConflictError("the conversation is at another turn; reload the page")
            if verdict == turn.verdict:
                return
            if verdict == "skip":
                if turn.token:
                    votes.vote(turn.token, conversation.rater_id, "skip")
            elif turn.is_revealed:
                raise VoteConflictError("the models were revealed, so the vote stays as it is; it can be undone")
            elif turn.obstacle:
                raise VoteError(f"{turn.obstacle}; go on")
            else:
                item = NewItem(_prompt(turn), (_candidate(turn, 0), _candidate(turn, 1)))
                who = conversation.rater_id
                turn.token = votes.vote_on_pair(campaign_id, item, who, verdict, reason, dwell_ms).token
                if verdict not in ("tie", "both_bad"):
                    turn.kept = int(verdict.startswith("right"))
            turn.verdict = verdict
            self._save(conversation)

    def _sides(self, conversation: Conversation, lost: Sequence[str] = ()) -> list[Contestant]:
        """Two models in random order, or one twice if there is no other; those that were `lost` only if all were."""
        wanted = conversation.names
        pool = [one for one in self.contestants() if not wanted or one.name in wanted]
        if not pool:
            raise RunError("the models that you chose are not there any more; choose others" if wanted else NO_MODEL)
        pool = [one for one in pool if one.name not in lost] or pool
        first = pool[0] if self._keeps_first else self._random.choice(pool)
        others = [one for one in pool if one is not first] or [first]
        sides = [first, self._random.choice(others)]
        self._random.shuffle(sides)
        return sides

    def _draw(self, conversation: Conversation) -> list[Drawing]:
        """Raises RunError if the rater's data was deleted."""
        if self._is_deleted(conversation.rater_id):
            raise RunError(GONE)
        messages = conversation.messages()
        conversation.drawings = [
            self._drawer.draw(side.model, messages, side.sampling, as_text=side.as_text)
            for side in conversation.turns[-1].sides
        ]
        return conversation.drawings

    def _stop(self, conversation: Conversation) -> None:
        """End drawings that nobody waits for. Those that are over are left alone."""
        for drawing in conversation.drawings:
            self._drawer.stop(drawing.id)
        conversation.drawings = []

    def _file(self, id: str) -> Path:
        return self._folder / f"{id}.json"

    def _read(self, id: str) -> Conversation | None:
        try:
            return Conversation.of(self._file(id).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def _save(self, conversation: Conversation) -> None:
        """Have the conversation on disk, all of it or nothing. Raises StoreError if it cannot be written, and RunError
        if the rater's data was deleted.
        """
        aside = self._folder / f".{conversation.id}"
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(conversation.to_json())
                file.flush()
                fsync(file.fileno())
            os.replace(aside, self._file(conversation.id))
        except OSError as error:
            # What is in memory is ahead of the file: read it again.
            self._open.pop(conversation.id, None)
            raise StoreError(f"{self._folder} cannot be written ({error.strerror}); free some space") from error
        # Asked when the file is there: a deletion that comes later finds it.
        if self._is_deleted(conversation.rater_id):
            self._stop(conversation)
            self._open.pop(conversation.id, None)
            self._file(conversation.id).unlink(missing_ok=True)
            raise RunError(GONE)
        self._keep(conversation)

    def _keep(self, conversation: Conversation) -> None:
        self._open[conversation.id] = conversation
        self._open.move_to_end(conversation.id)
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)


def talks_of(folder: Path, rater_id: int) -> Iterator[tuple[Path, Conversation]]:
    """The conversations of a rater in an arena's folder, with their files, in the order of their times."""
    found: list[tuple[float, Path, Conversation]] = []
    for file in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # a server removes it meanwhile
            talk = Conversation.of(file.read_text(encoding="utf-8"))
            if talk.rater_id == rater_id:
                found.append((file.stat().st_mtime, file, talk))
    yield from ((file, talk) for _, file, talk in sorted(found, key=lambda one: one[:2]))


def person_rows(reader: VoteReader, folder: Path, person: Person) -> Iterator[Json]:
    """The rows of an export of one person's data: those that `reader` has, and conversations in the server's folder."""
    yield from reader.data_of(person)
    for file, talk in talks_of(folder / FOLDER, person.rater_id):
        changed_at = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
        turns = [
            {"text": one.text, "answers": [answer["text"] for answer in one.answers], "verdict": one.verdict or None}
            for one in talk.turns
        ]
        yield {"kind": "conversation", "id": talk.id, "time": changed_at, "turns": turns}


def remove_talks(folder: Path, rater_id: int) -> int:
    """Remove the files of a rater's conversations, and return how many there were."""
    files = [file for file, _ in talks_of(folder, rater_id)]
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _prompt(turn: Turn) -> Text:
    """The prompt that both answers continue: messages if both models read messages, else one text."""
    prompts: list[Text] = [
        one["prompt"] if isinstance(one["prompt"], str) else tuple(one["prompt"]) for one in turn.answers
    ]
    texts = [one for one in prompts if isinstance(one, str)]
    return texts[0] if texts else prompts[0]


def _candidate(turn: Turn, place: int) -> Candidate:
    """An answer for the store. The token ids of a version are those that the live loop learns from."""
    side, answer = turn.sides[place], turn.answers[place]
    if side.version is None:
        return Candidate(answer["text"], source_id=f"{MODEL_SOURCE}{side.name}"[:200])
    tokens = tuple(answer["token_ids"]), tuple(answer["logps"])
    return Candidate(answer["text"], *tokens, side.version, source_id=side.name)


def of_live_loop(folder: Path, runs: RunReader, *, has_all: bool = False) -> list[Contestant]:
    """The served version of the live loop in `folder`, the one before it (with `has_all` all others that are kept, the
    newest first), and the base; empty without a trainer.
    """
    recipe = read_recipe(folder)
    model, rollout = recipe.get("model"), recipe.get("rollout")
    if not is_mapping(model) or not is_mapping(rollout):
        return []
    sampling = {name: rollout[name] for name in _SAMPLING if name in rollout}
    # As the loop draws and learns, and as its held-out prompts are, which votes are to make better.
    as_text = all(isinstance(one.prompt, str) for one in runs.offers_after(0, 1))
    base = Contestant("v0", {**model, "trust_remote_code": False}, sampling, 0, as_text)
    known = runs.versions()
    versions = {one.version: Path(one.path).name for one in known if one.accepted and one.path}
    serving = next((one.version for one in known if one.serving), 0)
    before = sorted((number for number in versions if number <= serving), reverse=True)
    others = sorted((number for number in versions if number > serving), reverse=True)
    paths = {
        number: folder / "versions" / versions[number] for number in ([*before, *others] if has_all else before[:2])
    }
    found = [
        Contestant(f"v{number}", {"name": str(path)}, sampling, number, as_text)
        for number, path in paths.items()
        if path.is_dir()
    ]
    # The served one is the first.
    return [*found, base] if serving else [base, *found]


def tried_in(folder: Path, served: Contestant) -> tuple[Contestant, float] | None:
    """The version that the live loop in `folder` tries beside the one `served`, and its share of the conversations."""
    try:
        found = json.loads((folder / TRIAL).read_text(encoding="utf-8"))
        number, share = int(found["version"]), float(found["share"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    path = folder / "versions" / f"v{number:06d}"
    if not path.is_dir() or number == served.version:
        return None
    return replace(served, name=f"v{number}", model={"name": str(path)}, version=number), share


def of_runs(index: RunIndex) -> list[Contestant]:
    """The runs that wrote a model, and the models that they started from."""
    runs = [one for one in index.facts() if not trains_reward_model(one.algorithm) and (one.path / "final").is_dir()]
    found = [Contestant(one.name, {"name": str(one.path)}, _SAMPLING) for one in runs]
    bases = dict.fromkeys(one.model for one in runs if one.model)
    return found + [Contestant(name, {"name": name}, _SAMPLING) for name in bases]
