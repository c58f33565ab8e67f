"""A judge: compares two answers, each in both orders, or grades one, and keeps within what it may cost."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from tunesmith.base.config.judge import JudgeSettings
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger
from tunesmith.base.schema.records import Preference, Text
from tunesmith.collect.store.content import encode_json
from tunesmith.learn.judges.answers import Answers, Begun, LimitError, PeopleAgreement, Ticket
from tunesmith.learn.judges.asking import Asker, AwayError, FatalError, RefusedError, Reply
from tunesmith.learn.judges.rubric import (
    EVEN,
    FIRST,
    SECOND,
    Question,
    grade_question,
    pair_question,
    read_grade,
    read_verdict,
)

_log = get_logger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_SIGNALS_S = 0.2
_BUSY_S = 0.1
_MORE_S = 5.0  # than its timeout, until a request is stored
_MAX_REFUSED = 8
"""Questions in a row that a server refuses before it is asked no more."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unjudged:
    """No verdict, and why: the answer could not be read, the limit of cost is reached, the server is away, it refused
    the question, or it answers none at all.
    """

    kind: Literal["unreadable", "limit", "away", "refused", "fatal"]
    message: str


@dataclass(frozen=True, slots=True)
class PairText:
    """Two answers to a prompt; `where` names them in messages."""

    prompt: Text
    a: str
    b: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class AnswerText:
    """An answer to a prompt; `where` names it in messages."""

    prompt: Text
    text: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """What a judge says of two answers: a tie also if the order in which they were shown decided, which
    `order_decided` says. `reasons` is its answer with `a` first, if it explains.
    """

    preference: Preference
    order_decided: bool
    reasons: str = ""

    @property
    def score_a(self) -> float:
        """1 if `a` is better, 0 if `b` is, 0.5 for a tie."""
        return {"a": 1.0, "b": 0.0, "tie": 0.5}[self.preference]


@dataclass(frozen=True, slots=True)
class Grade:
    """A grade, from 0, the worst on the scale, to 1. `reasons` is the judge's answer, if it explains."""

    value: float
    reasons: str = ""


@dataclass(frozen=True, slots=True)
class _Said(Generic[T]):
    """What an answer says, and the answer itself, if the judge explains."""

    verdict: T
    reasons: str


@dataclass(frozen=True, slots=True)
class _Priced:
    """A question, and the tokens that it costs at most."""

    question: Question
    most_tokens: int


@dataclass(slots=True)
class _Round:
    """What the threads of one call share. `ended` is why nothing more is asked, None while it is."""

    ended: Unjudged | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    num_refused: int = 0
    last_answer_s: float = field(default_factory=time.monotonic)
    not_before_s: float = 0.0

    def end(self, why: Unjudged) -> Unjudged:
        self.ended = self.ended or why
        self.stop.set()
        return why


def _nothing(_: int) -> None:
    """Tell nobody."""


class Judge:
    """The judge of `settings`. Answers are kept in the file that they name, so that none is paid for twice.

    What fails is no exception but an `Unjudged` in the place of the verdict, and what was answered by then is kept:
    when the limit is reached or a server stays away, the same call later goes on where this one ended. Safe to call
    from several threads. `on_answers` is called with the number of questions that were just answered.
    """

    def __init__(self, settings: JudgeSettings, asker: Asker) -> None:
        self.settings = settings
        self.on_answers: Callable[[int], object] = _nothing
        self.answers = Answers(Path(settings.answers).expanduser())
        self._asker = asker
        self._slots = threading.Semaphore(asker.num_threads)

    @property
    def name(self) -> str:
        """The model's name. Raises InputError if its server does not tell it."""
        self._model()
        return self._asker.name

    @property
    def identity(self) -> str:
        """A short hash of what its verdicts depend on: model, rubric, mode, options; not of what it may cost.

        Raises InputError if its server does not tell the model.
        """
        names = ("rubric", "mode", "scale", "explain", "answer_tokens", "temperature", "seed", "options", "tries")
        given = {name: getattr(self.settings, name) for name in names}
        whole = encode_json({"model": self._model(), **given})
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:12]

    @property
    def rater_name(self) -> str:
        """Its name as a rater, which says that it is a machine and which one."""
        return f"judge {self.name[-150:]} {self.identity[:8]}"

    def pairs(self, given: Sequence[PairText]) -> list[PairVerdict | Unjudged]:
        """The verdict on each pair. The judge is asked twice, with either answer first; of equal answers it is not."""
        differing = [place for place, pair in enumerate(given) if pair.a.strip() != pair.b.strip()]
        found = dict(zip(differing, self._compared([given[place] for place in differing]), strict=True))
        return [found.get(place, PairVerdict("tie", order_decided=False)) for place in range(len(given))]

    def _compared(self, given: Sequence[PairText]) -> list[PairVerdict | Unjudged]:
        questions: list[Question] = []
        for pair in given:
            questions.append(pair_question(self.settings, pair.prompt, pair.a, pair.b, pair.where))
            questions.append(pair_question(self.settings, pair.prompt, pair.b, pair.a, pair.where))
        said = self._read(questions, read_verdict)
        return [_verdict(a_first, b_first) for a_first, b_first in zip(said[::2], said[1::2], strict=True)]

    def grades(self, given: Sequence[AnswerText]) -> list[Grade | Unjudged]:
        """The grade of each answer."""
        low, high = self.settings.scale
        questions = [grade_question(self.settings, one.prompt, one.text, one.where) for one in given]
        said = self._read(questions, partial(read_grade, scale=self.settings.scale))
        return [
            one if isinstance(one, Unjudged) else Grade((one.verdict - low) / (high - low), one.reasons) for one in said
        ]

    def preferences(self, given: Sequence[PairText]) -> list[PairVerdict | Unjudged]:
        """The verdict on each pair, of a judge of either mode: the higher grade is better, equal ones are a tie."""
        if self.settings.mode == "pairwise":
            return self.pairs(given)
        sides = [AnswerText(pair.prompt, text, pair.where) for pair in given for text in (pair.a, pair.b)]
        grades = self.grades(sides)
        return [_higher(a, b) for a, b in zip(grades[::2], grades[1::2], strict=True)]

    @property
    def agreement(self) -> PeopleAgreement | None:
        """How far this judge agreed with people when that was measured last; None if it never was."""
        return self.answers.agreement(self.identity)

    def set_agreement(self, found: PeopleAgreement) -> None:
        """Keep what was measured, beside the answers."""
        self.answers.set_agreement(self.identity, found)

    def facts(self) -> dict[str, Any]:
        """The judge as JSON values: model, mode, agreement with people (null if it was not measured), and costs."""
        found = self.agreement
        return {
            "model": self.name,
            "judge": self.identity,
            "mode": self.settings.mode,
            "rubric": self.settings.rubric,
            "agreement": None if found is None else asdict(found),
            **asdict(self.answers.costs),
            "answers": str(self.answers.path),
        }

    def _read(self, questions: Sequence[Question], read: Callable[[str], T | None]) -> "list[_Said[T] | Unjudged]":
        """What `read` finds in the answer to each question. Where it is nothing, it asks again, with another seed."""
        found: dict[int, _Said[T] | Unjudged] = {}
        left = list(range(len(questions)))
        shared = _Round()
        for number in range(self.settings.tries):
            replies = self._replies([questions[place] for place in left], self.settings.seed + number, shared)
            unread: list[int] = []
            for place, reply in zip(left, replies, strict=True):
                if isinstance(reply, Unjudged):
                    found[place] = reply
                elif (verdict := read(reply)) is not None:
                    found[place] = _Said(verdict, reply.strip() if self.settings.explain else "")
                else:
                    shown = " ".join(reply.split())[-80:]
                    found[place] = Unjudged("unreadable", f"the answer of {self.name} holds no verdict: {shown!r}")
                    unread.append(place)
            left = unread
            if not left:
                break
        return [found[place] for place in range(len(questions))]

    def _replies(self, questions: Sequence[Question], seed: int, shared: _Round) -> "list[str | Unjudged]":
        """The answer to each question: from the file, or of the model. Equal questions are asked once."""
        identity = self._asker_identity()
        if isinstance(identity, Unjudged):
            return [identity for _ in questions]
        keys = [question.key(identity, self.settings, seed) for question in questions]
        known: dict[str, str | Unjudged] = {**self.answers.found(list(dict.fromkeys(keys)))}
        missing = {key: question for key, question in zip(keys, questions, strict=True) if key not in known}
        if missing:
            known |= self._asked(missing, seed, shared)
        return [known[key] for key in keys]

    def _model(self) -> str:
        found = self._asker_identity()
        if isinstance(found, Unjudged):
            raise InputError(f"the judge cannot be asked: {found.message}")
        return found

    def _asker_identity(self) -> "str | Unjudged":
        """The model's identity, for which a server is asked, and waited for."""
        shared = _Round()
        waited = 0
        while True:
            try:
                return self._asker.identity
            except (FatalError, RefusedError) as error:
                return Unjudged("fatal", str(error))
            except AwayError as error:
                if why := self._gave_up(error, shared, waited):
                    return why
                waited += 1

    def _asked(self, missing: Mapping[str, Question], seed: int, shared: _Round) -> "dict[str, str | Unjudged]":
        """The answers of the model, by key."""
        found: dict[str, str | Unjudged] = {}
        priced: list[tuple[str, _Priced]] = []
        for key, question in missing.items():
            try:
                priced.append((key, _Priced(question, self._asker.most_tokens(question))))
            except RefusedError as error:
                found[key] = Unjudged("refused", str(error))
        size = self._asker.batch_size
        batches = [dict(priced[start : start + size]) for start in range(0, len(priced), size)]
        pool = ThreadPoolExecutor(self._asker.num_threads, thread_name_prefix="tunesmith-judge")
        futures: set[Future[dict[str, str | Unjudged]]] = set()
        try:
            futures = {pool.submit(self._ask, batch, seed, shared) for batch in batches}
            while futures:
                done, futures = wait(futures, _SIGNALS_S, FIRST_COMPLETED)
                for one in done:
                    found |= one.result()
                    self.on_answers(len(one.result()))
        finally:
            if futures:  # after an interrupt, or an error of ours
                shared.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while futures:
                self._asker.abort()
                # A future that was cancelled before it ran is done, but `wait` does not know it.
                futures = {one for one in wait(futures, _SIGNALS_S).not_done if not one.done()}
        return found

    def _ask(self, batch: "Mapping[str, _Priced]", seed: int, shared: _Round) -> "dict[str, str | Unjudged]":
        """The answers to a batch, waiting for a server that is away. Only what the limits allow is asked."""
        waited = 0
        while True:
            if shared.stop.is_set():
                why = shared.ended or Unjudged("away", "it was stopped")
                return dict.fromkeys(batch, why)
            if (left_s := shared.not_before_s - time.monotonic()) > 0:
                shared.stop.wait(left_s)
                continue
            try:
                begun = self._begin(batch)
            except LimitError as error:
                return dict.fromkeys(batch, shared.end(Unjudged("limit", str(error))))
            if not (begun.tickets or begun.known):
                shared.stop.wait(_BUSY_S)
                continue
            answered: dict[str, str | Unjudged] = {**begun.known}
            try:
                answered |= self._answer({one: batch[one.key].question for one in begun.tickets}, seed)
            except AwayError as error:
                if why := self._gave_up(error, shared, waited):
                    return dict.fromkeys(batch, shared.end(why))
                waited += 1
                continue
            except RefusedError as error:
                shared.num_refused += 1
                why = Unjudged("refused", str(error))
                if shared.num_refused >= _MAX_REFUSED:
                    shared.end(Unjudged("fatal", f"{_MAX_REFUSED} questions in a row were refused. {error}"))
                return dict.fromkeys(batch, why)
            except FatalError as error:
                return dict.fromkeys(batch, shared.end(Unjudged("fatal", str(error))))
            shared.num_refused, shared.last_answer_s = 0, time.monotonic()
            rest = {key: question for key, question in batch.items() if key not in answered}
            return answered if not rest else answered | self._ask(rest, seed, shared)

    def _begin(self, batch: "Mapping[str, _Priced]") -> Begun:
        wanted, cfg = {key: one.most_tokens for key, one in batch.items()}, self.settings
        longest_s = cfg.timeout_s + _MORE_S if self._asker.can_wait else None
        return self.answers.begin(wanted, cfg.most_requests, cfg.most_tokens, longest_s)

    def _answer(self, asked: Mapping[Ticket, Question], seed: int) -> "dict[str, str | Unjudged]":
        """The answers of one request, stored. Errors as those of `Asker.ask`."""
        if not asked:
            return {}
        try:
            with self._slots:
                replies: Sequence[Reply] = self._asker.ask(list(asked.values()), seed)
        except (AwayError, RefusedError, FatalError) as error:
            for ticket in asked:
                if isinstance(error, AwayError | FatalError) and not error.was_sent:
                    self.answers.take_back(ticket)
                else:
                    self.answers.fail(ticket, is_refused=not isinstance(error, AwayError) or error.is_refused)
            raise
        return {
            ticket.key: self.answers.end(ticket, self.name, reply.text, reply.num_tokens)
            for ticket, reply in zip(asked, replies, strict=True)
        }

    def _gave_up(self, error: AwayError, shared: _Round, waited: int) -> Unjudged | None:
        """Wait before the next try; returns why there is none, if the server was away for too long."""
        now_s = time.monotonic()
        wait_s = max(error.wait_s, min(_FIRST_WAIT_S * 2**waited, _LONGEST_WAIT_S))
        if not self._asker.can_wait or now_s + wait_s - shared.last_answer_s > self.settings.patience_s:
            asks = f"; it asks to wait {error.wait_s:.0f} s" if error.wait_s else ""
            return Unjudged(
                "away", f"{error}{asks}; no answer within patience_s, {self.settings.patience_s:g} s: go on later"
            )
        if error.wait_s:  # it is said to one, and meant for all
            shared.not_before_s = max(shared.not_before_s, now_s + error.wait_s)
        elif waited == 0:
            _log.info("the judge is waited for: %s", error)
        shared.stop.wait(wait_s)
        return None


def _verdict(a_first: "_Said[str] | Unjudged", b_first: "_Said[str] | Unjudged") -> "PairVerdict | Unjudged":
    """The verdict on a pair from those in both orders; a tie unless both name the same answer."""
    if isinstance(a_first, Unjudged):
        return a_first
    if isinstance(b_first, Unjudged):
        return b_first
    of_a_first: Mapping[str, Preference] = {FIRST: "a", SECOND: "b", EVEN: "tie"}
    of_b_first: Mapping[str, Preference] = {FIRST: "b", SECOND: "a", EVEN: "tie"}
    first, second = of_a_first[a_first.verdict], of_b_first[b_first.verdict]
    return PairVerdict(first if first == second else "tie", first != second, a_first.reasons)


def _higher(a: Grade | Unjudged, b: Grade | Unjudged) -> PairVerdict | Unjudged:
    """The verdict on a pair from the grades of its answers."""
    if isinstance(a, Unjudged):
        return a
    if isinstance(b, Unjudged):
        return b
    better: Preference = "tie" if a.value == b.value else "a" if a.value > b.value else "b"
    return PairVerdict(better, order_decided=False, reasons=(b if better == "b" else a).reasons)


def open_judge(settings: JudgeSettings) -> Judge:
    """The judge of `settings`, with its model loaded if our own engine draws from it."""
    if settings.is_server:
        from tunesmith.learn.judges.server import ServerAsker

        return Judge(settings, ServerAsker(settings))
    from tunesmith.learn.judges.engine import EngineAsker

    return Judge(settings, EngineAsker(settings))


def said_of(unjudged: Sequence[Unjudged], num_all: int) -> str:
    """One sentence on what was not judged, and why; empty if all was."""
    if not unjudged:
        return ""
    kinds = {one.kind: one for one in reversed(unjudged)}
    parts = [f"{sum(other.kind == kind for other in unjudged)} {kind}: {one.message}" for kind, one in kinds.items()]
    return f"{len(unjudged)} of {num_all} were not judged ({'; '.join(parts)})"


def check_answered(verdicts: Sequence[object]) -> None:
    """Raise InputError if a server answers no question at all: a wrong key, an unknown model."""
    unjudged = [one for one in verdicts if isinstance(one, Unjudged)]
    fatal = next((one for one in unjudged if one.kind == "fatal"), None)
    if fatal is not None and len(unjudged) == len(verdicts):
        raise InputError(f"the judge cannot be asked: {fatal.message}")
