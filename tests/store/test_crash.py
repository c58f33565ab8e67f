"""Many raters at once, and a server that is killed right after it said yes."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select

from tunesmith.collect.store.database import OwnedDatabase
from tunesmith.collect.store.records import NewItem
from tunesmith.collect.store.tables import presentations, votes
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore

NUM_KILLS = 10

# Votes and prints each receipt; killed from outside at whatever it is doing.
_VOTER = """
import sys
from tunesmith.collect.store.votes import VoteStore
store = VoteStore.open(sys.argv[1])
(campaign,) = store.reader.campaigns()
rater = store.add_rater(sys.argv[2]).rater.id
print("ready", flush=True)
while True:
    for shown in store.next_presentations(rater, campaign.id, 3):
        receipt = store.vote(shown.token, rater, "left", request_key=shown.token)
        print(shown.token, receipt.id, flush=True)
"""


def test_twenty_raters_at_once_lose_nothing_and_keep_the_overlap(
    store: VoteStore, campaign: Callable[..., int], pairs: Callable[..., list[NewItem]]
):
    asked = campaign(overlap=2)
    # More than are needed: near the end a rater may find nothing but what they have judged already.
    store.add_items(asked, pairs(600))
    raters = [store.add_rater(f"rater {number}").rater.id for number in range(20)]
    receipts: list[tuple[int, str]] = []
    errors: list[BaseException] = []

    def work(rater: int) -> None:
        try:
            for _ in range(50):
                (shown, *_) = store.next_presentations(rater, asked, 2)
                receipt = store.vote(shown.token, rater, "left", request_key=shown.token)
                receipts.append((receipt.id, shown.token))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rater,)) for rater in raters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    votes = list(store.reader.export())
    assert len(votes) == len({row.vote_id for row in votes}) == len(set(receipts)) == 1000
    assert {row.vote_id for row in votes} == {id_ for id_, _ in receipts}
    assert max(Counter(row.prompt for row in votes).values()) == 2
    assert len({(row.rater, row.prompt) for row in votes}) == 1000


def test_a_vote_that_was_acknowledged_survives_a_kill_exactly_once(
    path: str | Path, pairs: Callable[..., list[NewItem]], campaign: Callable[..., int], store: VoteStore
):
    store.add_items(campaign(overlap=100), pairs(300))
    store.close()
    acknowledged: dict[str, int] = {}
    for number in range(NUM_KILLS):
        process = subprocess.Popen(
            [sys.executable, "-c", _VOTER, str(path), f"rater {number}"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(number + 1):
            token, id_ = process.stdout.readline().split()
            acknowledged[token] = int(id_)
        os.kill(process.pid, signal.SIGKILL)
        for line in process.stdout.read().splitlines():
            if len(line.split()) == 2 and line.split()[1].isdigit():
                acknowledged[line.split()[0]] = int(line.split()[1])
        process.wait()
        process.stdout.close()
    # The reader alone must find them, in the log that the killed process left behind.
    with VoteReader.open(path) as reader:
        found = [vote.id for vote in reader.votes_after(0, limit=100_000)]
    assert len(found) == len(set(found))
    assert set(acknowledged.values()) <= set(found)
    with VoteStore.open(path) as again:
        assert {row.vote_id for row in again.reader.export()} == set(found)
    query = select(presentations.c.token, votes.c.id).join_from(votes, presentations)
    with OwnedDatabase(path, "votes", durable=True) as owned, owned.connection.begin():
        if isinstance(path, Path):
            assert owned.connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        stored = {row.token: row.id for row in owned.connection.execute(query)}
    for token, id_ in acknowledged.items():
        assert stored[token] == id_
