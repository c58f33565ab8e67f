"""Places where people keep the databases of votes and runs."""

import sqlite3
from pathlib import Path

import pytest

from tunesmith.collect.store import database
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import VoteStore


def journal_of(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        return connection.execute("PRAGMA journal_mode").fetchone()[0]


@pytest.mark.parametrize(("kind", "journal"), [("nfs4", "delete"), ("cifs", "delete"), ("ext4", "wal")])
def test_no_write_ahead_log_on_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, journal: str
) -> None:
    """Home folders of clusters are on NFS. Reported: anomalyco/opencode#14970, charmbracelet/crush#3461."""
    monkeypatch.setattr(database, "file_system", lambda folder: kind)
    path = tmp_path / "votes.db"
    with VoteStore.open(path):
        assert journal_of(path) == journal
        with VoteReader.open(path):
            pass
