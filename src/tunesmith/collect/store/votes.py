"""`VoteStore`: the server's side of `votes.db`, its only writer."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from tunesmith.base.core.errors import StoreInUseError
from tunesmith.collect.store import answers, asking, audit, campaigns, inferences, items, machine_votes, removal
from tunesmith.collect.store.asking import AskedItem
from tunesmith.collect.store.database import Closeable, OwnedDatabase, file_of, or_now
from tunesmith.collect.store.inbox import TAKEN_WITHIN_S, Chore, HandedOver, Inbox, OnProgress, Request, folder_of
from tunesmith.collect.store.machine_votes import MachineVote
from tunesmith.collect.store.queue import next_presentations
from tunesmith.collect.store.records import (
    Campaign,
    CampaignSettings,
    CommandKind,
    Feedback,
    Given,
    GivenFeedback,
    GivenVote,
    Imported,
    Inference,
    KeySettings,
    NewItem,
    NewRater,
    Offer,
    Person,
    PolicyVersion,
    Presentation,
    Role,
    StoredFeedback,
    Verdict,
    VoteReceipt,
)
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.writer import Writer

_POLL_S = 0.1

_ROWS_AT_ONCE = 500
"""Rows of an import between two looks at whether others wait to write, such as raters who vote meanwhile."""

_ROWS_PER_TRANSACTION = 20_000
"""Rows of an import for which one transaction waits: each writes most pages of an index whose keys are random."""

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")


def _ignore(num_done: int, num_all: int) -> None:
    """No progress is wanted."""


class VoteStore(Closeable):
    """Writes campaigns, raters, items and votes; `reader` reads them.

    Safe to call from any number of threads: every call blocks until its change is on disk. One thread writes, and
    commits calls that arrive within `GROUP_S` together. `now` is in seconds since the epoch, by default the clock's.
    """

    @classmethod
    def open(cls, path_or_url: str | Path, *, seed: int | None = None) -> "VoteStore":
        """The store in a file, which is created if missing and migrated if older, or at a database URL.

        `seed` fixes the order of answers and the choice of gold items, for tests. Raises StoreError if the file is
        damaged, written by a newer release, or in use by another server.
        """
        return cls(path_or_url, seed)

    def __init__(self, place: str | Path, seed: int | None = None) -> None:
        self._writer = Writer(OwnedDatabase(place, "votes", durable=True))
        self.reader = VoteReader(place)
        # Used by the writing thread alone.
        self._rng = random.SystemRandom() if seed is None else random.Random(seed)
        path = file_of(place)
        self._inbox = None if path is None else Inbox(folder_of(path), self._handle)

    def close(self) -> None:
        """Finish pending writes and close the file."""
        if self._inbox is None:
            self._writer.close()
        else:
            self._inbox.close(self._writer.close)
        self.reader.close()

    def set_campaign(self, settings: CampaignSettings, now: float | None = None) -> Campaign:
        """Create the campaign of this name, or change its settings. Raises StoreError for values out of range."""
        return self._write(campaigns.set_campaign, settings, or_now(now))

    def close_campaign(self, campaign_id: int, now: float | None = None) -> None:
        """Stop asking for votes."""
        self._write(campaigns.close_campaign, campaign_id, or_now(now))

    def add_rater(
        self,
        name: str,
        role: Role = "rater",
        *,
        invited_by: int | None = None,
        expires_at: float | None = None,
        now: float | None = None,
        key: KeySettings | None = None,
    ) -> NewRater:
        """A new rater and their access token, which is not stored; with `key` one of the API.

        Raises StoreError if the name is taken or empty.
        """
        return self._write(campaigns.add_rater, name, role, invited_by, expires_at, or_now(now), key)

    def redeem(
        self, token: str, *, expires_at: float | None = None, name: str | None = None, now: float | None = None
    ) -> NewRater | None:
        """The same rater with a fresh token in place of `token`, which is void from now on; None for a bad token.

        `name` renames the rater.
        """
        return self._write(campaigns.redeem, token, name, expires_at, or_now(now))

    def disable_rater(self, rater_id: int, now: float | None = None, *, by: int | None = None) -> None:
        """End a rater's access; their votes stay. `by` is the admin or key that ends it."""
        self._write(campaigns.disable_rater, rater_id, or_now(now), by)

    def add_items(self, campaign_id: int, new: Sequence[NewItem]) -> list[int]:
        """Ids of the items of `new`, in its order. Existing ones, in whatever order of answers, are not added again.

        Raises DataError for fewer than two or equal answers, or text that cannot be stored; then nothing is added.
        """
        return [item_id for added in self._add_items(campaign_id, new, _ignore) for item_id in added.item_ids]

    def import_items(self, campaign_id: int, new: Sequence[NewItem], progress: OnProgress = _ignore) -> Imported:
        """As `add_items`, but returns the numbers of new and of existing items. Existing ones become gold or held out
        where `new` says so. `progress` is called with the numbers of items done and of all.
        """
        added = self._add_items(campaign_id, new, progress)
        num_new = sum(one.num_new for one in added)
        changed = frozenset[int]().union(*(one.changed_ids for one in added))
        return Imported(num_new, len(new) - num_new, len(changed))

    def import_votes(
        self,
        campaign_id: int,
        given: Sequence[GivenVote],
        now: float | None = None,
        progress: OnProgress = _ignore,
    ) -> Imported:
        """Add votes that were made elsewhere. Unknown raters are created without access.

        Raises DataError as `add_items` does; then nothing is added.
        """
        for number, vote in enumerate(given, start=1):
            items.check_item(vote.item, f"vote {number}")
        moment = or_now(now)
        added = self._in_portions(
            given, lambda c, part: answers.add_votes(c, self._rng, campaign_id, part, moment), progress
        )
        num_new, num_other = sum(one.num_new for one in added), sum(one.num_other for one in added)
        changed = frozenset[int]().union(*(one.changed_ids for one in added))
        return Imported(num_new, len(given) - num_new - num_other, len(changed), num_other)

    def import_feedback(
        self, given: Sequence[GivenFeedback], now: float | None = None, progress: OnProgress = _ignore
    ) -> Imported:
        """Add what was said elsewhere of answers that were given elsewhere. Unknown raters are created without access.

        Raises VoteError or DataError for what cannot be stored; then nothing is added.
        """
        for one in given:
            inferences.check_given(one)
        moment = or_now(now)
        num_new = sum(self._in_portions(given, lambda c, part: inferences.add_given(c, part, moment), progress))
        return Imported(num_feedback=num_new, num_feedback_there=len(given) - num_new)

    def import_rows(
        self,
        campaign: str,
        rows: Iterable[Given],
        progress: OnProgress = _ignore,
        num_rows: int | None = None,
        *,
        by: int | None = None,
    ) -> Imported:
        """Add items, votes and feedback to the campaign of this name, which is made if there is none. Of an iterator
        one portion at a time is held; `num_rows` is how many it has, for `progress`. `by` is the admin who imports.
        """
        named = [one for one in self.reader.campaigns() if one.settings.name == campaign]
        campaign_id = (named[0] if named else self.set_campaign(CampaignSettings(name=campaign))).id
        num_all = len(rows) if isinstance(rows, Sequence) else num_rows or 0
        done, num_done = Imported(), 0

        def step(num: int, _: int) -> None:
            progress(num_done + num, num_all)

        for part in portions(rows):
            votes = [row for row in part if isinstance(row, GivenVote)]
            new = [row for row in part if isinstance(row, NewItem)]
            said = [row for row in part if isinstance(row, GivenFeedback)]
            done += self.import_votes(campaign_id, votes, progress=step)
            num_done += len(votes)
            done += self.import_items(campaign_id, new, step)
            num_done += len(new)
            done += self.import_feedback(said, progress=step)
            num_done += len(said)
        self.note("import", {"campaign": campaign, **{name: num for name, num in asdict(done).items() if num}}, by=by)
        return done

    def do(self, chore: Chore) -> Mapping[str, Any]:
        """Do what a command asks for; returns what came of it."""
        facts = chore.facts
        if chore.work == "prune":
            return self.prune(facts["days"])
        if chore.work == "judge":
            return self.judge(facts["name"], [MachineVote(**one) for one in facts["votes"]])
        if chore.work == "select":
            return self.select(facts["campaign_id"], facts["method"], [AskedItem(**one) for one in facts["order"]])
        if chore.work == "delete":
            return self.delete_person(Person(**facts))
        self.note(facts["kind"], facts["detail"])
        return {}

    def _handle(self, request: Request | Chore, progress: OnProgress) -> Mapping[str, Any]:
        if isinstance(request, Chore):
            return self.do(request)
        return asdict(self.import_rows(request.campaign, request.rows, progress))

    def judge(self, name: str, given: Sequence[MachineVote], now: float | None = None) -> dict[str, int]:
        """Add votes of the machine `name`, which is made if there is none, on stored pairs; returns the numbers of new
        ones (`num_new`), and of pairs that it has judged, or that are gone (`num_there`).

        Raises NameTakenError if a person has this name.
        """
        return self._write(machine_votes.add, name, given, or_now(now))

    def select(
        self, campaign_id: int, method: str, order: Sequence[AskedItem], now: float | None = None
    ) -> Mapping[str, int]:
        """Have raters asked about given items of a campaign in this order, which `method` chose, before all others that
        nobody was shown. Returns the numbers of items that are in it (`num_placed`), and of those that were shown
        meanwhile or are gone (`num_gone`).
        """
        moment = or_now(now)
        return self._writer.do(lambda c: asking.set_order(c, campaigns.campaign(c, campaign_id), method, order, moment))

    def ingest(self, campaign_id: int, offers: Sequence[Offer], now: float | None = None) -> int:
        """Number of items made from the trainer's offers. Known ones are skipped, stale ones retired."""
        return self._write(items.ingest, campaign_id, offers, or_now(now))

    def next_presentations(
        self, rater_id: int, campaign_id: int, count: int = 1, now: float | None = None
    ) -> list[Presentation]:
        """At most `count` presentations to judge next: those that the rater holds, then fresh items.

        Each is stored before it is returned. Fewer are returned where overlap, quota or items are used up.
        """
        moment = or_now(now)

        def take(connection: Connection) -> list[Presentation]:
            campaigns.check_not_deleted(connection, rater_id)
            campaign = campaigns.campaign(connection, campaign_id)
            return next_presentations(connection, self._rng, rater_id, campaign, count, moment)

        return self._writer.do(take)

    def vote(
        self,
        token: str,
        rater_id: int,
        verdict: Verdict,
        reason: str = "",
        dwell_ms: int | None = None,
        request_key: str | None = None,
        now: float | None = None,
    ) -> VoteReceipt:
        """Store a vote and return its receipt. The same `request_key`, or the same content, returns the first receipt
        again; another verdict is a new revision, which replaces the first.

        Raises:
            UnknownPresentationError: for a token that is not this rater's.
            VoteConflictError: if the lease ran out and others took the slot, or the time to change is over.
            VoteError: for a verdict that does not fit.
        """
        return self._answer(token, rater_id, now, lambda one: one.vote(verdict, reason, dwell_ms, request_key))

    def vote_on_pair(
        self,
        campaign_id: int,
        item: NewItem,
        rater_id: int,
        verdict: Verdict,
        reason: str = "",
        dwell_ms: int | None = None,
        now: float | None = None,
    ) -> VoteReceipt:
        """As `vote`, for a pair that the rater was shown outside of the queue, its candidates from left to right.

        Repeating it returns the first receipt. Raises DataError, as `add_items`, too.
        """
        items.check_item(item, "the vote")
        moment = or_now(now)
        return self._writer.do(
            lambda c: answers.answering_pair(c, self._rng, campaign_id, item, rater_id, moment).vote(
                verdict, reason, dwell_ms, None
            )
        )

    def withdraw(
        self, token: str, rater_id: int, now: float | None = None, *, request_key: str | None = None
    ) -> VoteReceipt:
        """Undo the vote or ranking, which opens the presentation again. Errors as in `vote`; VoteError if none."""
        return self._answer(token, rater_id, now, lambda one: one.withdraw(request_key))

    def rank(
        self,
        token: str,
        rater_id: int,
        ranks: Sequence[int],
        dwell_ms: int | None = None,
        request_key: str | None = None,
        now: float | None = None,
        *,
        reason: str = "",
    ) -> VoteReceipt:
        """As `vote`, for a ranking: `ranks[i]` is the rank (1 the best, ties allowed) of the i-th answer shown."""
        return self._answer(token, rater_id, now, lambda one: one.rank(ranks, reason, dwell_ms, request_key))

    def demonstrate(
        self, token: str, rater_id: int, text: str, request_key: str | None = None, now: float | None = None
    ) -> VoteReceipt:
        """As `vote`, for an answer that the rater wrote, in addition to the vote."""
        return self._answer(token, rater_id, now, lambda one: one.demonstrate(text, request_key))

    def rater_of_user(self, key_id: int, user: str, now: float | None = None) -> int:
        """Id of the rater for a user of a key; created, without access to the pages, if missing."""
        return self._write(campaigns.rater_of_user, key_id, user, or_now(now))

    def record(self, answered: Inference, by: int | None = None) -> None:
        """Store a request of the API and its answers; `by` is the rater who sent it, if it is one for a user of the
        key. Raises DataDeletedError if the data of either was deleted meanwhile.
        """
        self._write(inferences.record, answered, by)

    def charge(self, rater_id: int, num_tokens: int, now: float | None = None) -> None:
        """Count tokens that a key read and drew; see `VoteReader.tokens_of_day`."""
        self._write(inferences.charge, rater_id, num_tokens, or_now(now))

    def give_feedback(
        self, campaign_id: int, said: Feedback, speaker: inferences.Speaker, now: float | None = None
    ) -> StoredFeedback:
        """Store what a key, or a user of it, says of one of their answers, and the vote that it makes; the same again
        returns the first.

        Raises:
            UnknownPresentationError: the speaker has no such answer or conversation.
            VoteError, VoteConflictError, DataError: the value does not fit, or the vote cannot be stored.
        """
        moment = or_now(now)
        return self._writer.do(lambda c: inferences.give(c, self._rng, campaign_id, said, speaker, moment))

    def command(self, kind: CommandKind, argument: str, rater_id: int, now: float | None = None) -> int:
        """Id of a new command for the trainer."""
        return self._write(campaigns.add_command, kind, argument, rater_id, or_now(now))

    def note(self, kind: audit.Kind, detail: Mapping[str, Any], *, by: int | None = None) -> None:
        """Add an entry to the audit log; `by` is the rater or key that did it, None for the server or a command."""
        self._write(audit.add, kind, by, detail, or_now(None))

    def prune(
        self,
        days: float,
        *,
        by: int | None = None,
        now: float | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> dict[str, int]:
        """Remove stored answers, feedback, usage and entries of the audit log that are older than `days`; returns how
        many of each. Votes stay.

        It is done in small transactions, between which others write, and until `is_over`.
        """
        moment = or_now(now)
        num: Counter[str] = Counter()
        while not is_over() and (some := self._write(removal.remove_old, moment - days * inferences.DAY_S)):
            num += some
        if num:
            self._write(audit.add, "prune", by, {"days": days, **num}, moment)
        return dict(num)

    def delete_person(self, person: Person, *, by: int | None = None, now: float | None = None) -> dict[str, int]:
        """Remove what is stored of a person, and have the live loop forget it; returns how much of what, and the `id`
        under which they remain, without a name.

        Answers without feedback go first, in small transactions; then everything else at once. A call that was cut
        off can be repeated.
        """
        num_answers = 0
        self._write(removal.forget_requests, person, or_now(now))
        while num := self._write(removal.remove_unrated, person):
            num_answers += num
        return self._write(removal.remove_person, person, by, num_answers, or_now(now))

    def copy_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Add or replace the copies of the trainer's versions, which make `votes.db` readable without `runs.db`."""
        self._write(campaigns.copy_versions, versions)

    def _add_items(self, campaign_id: int, new: Sequence[NewItem], progress: OnProgress) -> list[items.Added]:
        for number, item in enumerate(new, start=1):
            items.check_item(item, f"item {number}")
        return self._in_portions(new, lambda c, part: items.add_items(c, campaign_id, part), progress)

    def _in_portions(
        self, rows: Sequence[S], add: Callable[[Connection, Sequence[S]], T], progress: OnProgress
    ) -> list[T]:
        """The values of `add` for portions of `rows`. A transaction ends as soon as somebody else waits to write."""
        added: list[T] = []
        num_done = 0

        def write(connection: Connection) -> tuple[int, list[T]]:
            end = min(num_done + _ROWS_PER_TRANSACTION, len(rows))
            fresh: list[T] = []  # not `added`: a transaction may be repeated
            for start in range(num_done, end, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, end)
                fresh.append(add(connection, rows[start:stop]))
                progress(stop, len(rows))
                if self._writer.is_awaited():
                    return stop, fresh
            return end, fresh

        while num_done < len(rows):
            num_done, fresh = self._writer.do(write)
            added += fresh
        return added

    def _write(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._writer.do(lambda connection: work(connection, *args, **kwargs))

    def _answer(
        self, token: str, rater_id: int, now: float | None, answer: Callable[[answers.Answering], VoteReceipt]
    ) -> VoteReceipt:
        moment = or_now(now)
        return self._writer.do(lambda c: answer(answers.Answering(c, token, rater_id, moment)))


def portions(rows: Iterable[S]) -> Iterator[list[S]]:
    """`rows` in lists of at most `_ROWS_PER_TRANSACTION`."""
    left = iter(rows)
    while part := list(islice(left, _ROWS_PER_TRANSACTION)):
        yield part


def import_into(
    place: str | Path,
    campaign: str,
    rows: Iterable[Given],
    progress: OnProgress,
    waiting: Callable[[str], None],
    num_rows: int | None = None,
) -> Imported:
    """Add rows to the database at `place`, as `VoteStore.import_rows` does; if it is a file that another process has,
    such as a server, that one adds them.

    `waiting` is called with a message before the other process is asked. Raises StoreInUseError if it takes no imports.
    """
    try:
        with VoteStore.open(place) as store:
            return store.import_rows(campaign, rows, progress, num_rows)
    except StoreInUseError:
        path = file_of(place)
        if path is None:
            raise
        waiting(f"{path} is in use; its process is asked to add the rows")
    done, num_done = Imported(), 0
    for part in portions(rows):
        request = HandedOver(folder_of(path), Request(campaign, part))
        try:
            told = _result_of(request, path, lambda num, _, before=num_done: progress(before + num, num_rows or 0))
            done += Imported(**told)
        finally:
            request.remove()
        num_done += len(part)
    return done


def do_in(place: str | Path, chore: Chore, waiting: Callable[[str], None]) -> Mapping[str, Any]:
    """What comes of `VoteStore.do` for the database at `place`; if it is a file that another process has, that one does
    it.

    Raises StoreInUseError if that one takes no such work.
    """
    try:
        with VoteStore.open(place) as store:
            return store.do(chore)
    except StoreInUseError:
        path = file_of(place)
        if path is None:
            raise
        waiting(f"{path} is in use; its process is asked to do it")
    request = HandedOver(folder_of(path), chore)
    try:
        return _result_of(request, path, _ignore)
    finally:
        request.remove()


def _result_of(request: HandedOver, path: Path, progress: OnProgress) -> Mapping[str, Any]:
    """The outcome of `request` at the owner of the database; if it ends before, this process is the next owner."""
    began_s = time.monotonic()
    with ExitStack() as owned:
        while (done := request.result(progress)) is None:
            with suppress(StoreInUseError):
                # Its own lock is one more refusal.
                owned.enter_context(VoteStore.open(path))
            if not request.is_taken and time.monotonic() - began_s > TAKEN_WITHIN_S:
                raise StoreInUseError(
                    f"{path} is in use by a process that takes no imports, maybe of an older release; stop that one"
                )
            time.sleep(_POLL_S)
        return done
