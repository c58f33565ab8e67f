"""Random orders of asking, voting, changing, undoing, skipping and waiting: what always holds."""

import sqlite3
import tempfile
from collections import Counter
from pathlib import Path
from typing import get_args

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tunesmith.base.core.errors import VoteConflictError, VoteError
from tunesmith.collect.store.records import CampaignSettings, Candidate, NewItem, Presentation, Verdict
from tunesmith.collect.store.votes import VoteStore

LEASE_S = 10.0
UNDO_S = 15.0
NUM_RATERS = 3
RATERS = st.integers(0, NUM_RATERS - 1)


class Queue(RuleBasedStateMachine):
    """The store, beside a model: the last verdict of each presentation, and when it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "votes.db"
        self.store = VoteStore.open(self.path, seed=0)
        self.shown: dict[str, Presentation] = {}
        self.owner: dict[str, int] = {}
        self.effective: dict[str, tuple[str, float]] = {}
        self.now = 0.0

    @initialize(overlap=st.integers(1, 2), limit=st.sampled_from([0, 3]), gold_share=st.sampled_from([0.0, 0.4]))
    def begin(self, overlap: int, limit: int, gold_share: float) -> None:
        self.overlap, self.limit = overlap, limit
        given = CampaignSettings(
            overlap=overlap, max_votes_per_rater=limit, gold_share=gold_share, lease_s=LEASE_S, undo_s=UNDO_S
        )
        self.campaign = self.store.set_campaign(given, now=0.0).id
        items = [NewItem(f"p{number}", (Candidate("a"), Candidate("b"))) for number in range(4)]
        items += [NewItem(f"gold{number}", (Candidate("a"), Candidate("b")), gold=0) for number in range(2)]
        self.store.add_items(self.campaign, items)
        self.raters = [self.store.add_rater(f"r{number}", now=0.0).rater.id for number in range(NUM_RATERS)]

    def tick(self) -> float:
        """Time goes on a little with each call."""
        self.now += 0.001
        return self.now

    @rule(rater=RATERS, count=st.integers(1, 3))
    def ask(self, rater: int, count: int) -> None:
        got = self.store.next_presentations(self.raters[rater], self.campaign, count, now=self.tick())
        assert len(got) <= count
        assert len({one.token for one in got}) == len(got)
        for one in got:
            assert self.owner.setdefault(one.token, rater) == rater
            before = self.shown.setdefault(one.token, one)
            assert (before.prompt, before.answers) == (one.prompt, one.answers)
            assert self.effective.get(one.token, ("withdrawn", 0.0))[0] == "withdrawn"

    @rule(data=st.data(), verdict=st.sampled_from(get_args(Verdict)))
    def vote(self, data: st.DataObject, verdict: Verdict) -> None:
        token = self.any_token(data)
        if token is None:
            return
        last = self.effective.get(token)
        try:
            receipt = self.store.vote(token, self.raters[self.owner[token]], verdict, now=self.tick())
        except VoteConflictError:
            return
        assert receipt.is_repeat == (last is not None and last[0] == verdict)
        if not receipt.is_repeat:
            if last is not None and last[0] != "withdrawn":
                assert self.now <= last[1] + UNDO_S
            self.effective[token] = (verdict, self.now)

    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        token = self.any_token(data)
        if token is None:
            return
        last = self.effective.get(token)
        try:
            receipt = self.store.withdraw(token, self.raters[self.owner[token]], now=self.tick())
        except VoteConflictError:
            return
        except VoteError:
            assert last is None
            return
        assert last is not None
        assert receipt.is_repeat == (last[0] == "withdrawn")
        if not receipt.is_repeat:
            self.effective[token] = ("withdrawn", self.now)

    @rule(seconds=st.sampled_from([1.0, 11.0, 16.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def any_token(self, data: st.DataObject) -> str | None:
        if not self.shown:
            return None
        # By the order of showing: tokens are drawn anew in each run, and a failing run must repeat.
        return list(self.shown)[data.draw(st.integers(0, len(self.shown) - 1))]

    @invariant()
    def no_item_is_over_its_overlap_and_no_rater_over_the_limit(self) -> None:
        if not self.shown:
            return
        with sqlite3.connect(self.path) as connection:
            rows = connection.execute(
                "SELECT p.item_id, p.rater_id, p.state, p.lease_until, i.is_gold, i.is_open FROM presentations p "
                "JOIN items i ON i.id = p.item_id"
            ).fetchall()
        connection.close()
        active = [row for row in rows if row[2] == "done" or (row[2] == "open" and row[3] > self.now)]
        per_item = Counter(row[0] for row in active if not row[4])
        assert all(count <= self.overlap for count in per_item.values())
        if self.limit:
            assert all(count <= self.limit for count in Counter(row[1] for row in active).values())
        assert len({(row[0], row[1]) for row in rows}) == len(rows)
        done = Counter(row[0] for row in rows if row[2] == "done" and not row[4])
        for item_id, _, _, _, is_gold, is_open in rows:
            assert bool(is_open) == (bool(is_gold) or done[item_id] < self.overlap)

    @invariant()
    def exactly_the_last_verdict_of_each_presentation_counts(self) -> None:
        if not self.shown:
            return
        expected = sorted(
            (self.owner[token], str(self.shown[token].prompt), verdict)
            for token, (verdict, _) in self.effective.items()
            if verdict not in ("skip", "withdrawn")
        )
        votes = [one for one in self.store.reader.votes_after(0) if one.verdict not in ("skip", "withdrawn")]
        found = sorted((self.raters.index(one.rater_id), str(one.prompt), one.verdict) for one in votes)
        assert found == expected

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestQueue = Queue.TestCase
TestQueue.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
