"""Work that another process hands to the owner of the votes: damaged files are answered, and stop nothing."""

import json
import time
from pathlib import Path

import pytest

from tunesmith.collect.store.inbox import Chore, HandedOver, folder_of
from tunesmith.collect.store.votes import VoteStore

PATIENCE_S = 20.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense\n",
        bytes(range(128, 256)),
        b"3\n",
        b'{"work": "select", "other": 1}\n',
        b'{"campaign": "a"}\n[1]',
        b'{"work": "select", "facts": {}}',
    ],
    ids=["empty", "text", "binary", "number", "chore", "rows", "facts"],
)
def test_damaged_work_is_answered_and_what_comes_later_is_done(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "votes.db"
    with VoteStore.open(path) as store:
        folder = folder_of(path)
        folder.mkdir(exist_ok=True)
        (folder / "damaged.rows").write_bytes(content)
        answer, began_s = folder / "damaged.result", time.monotonic()
        while not answer.exists():
            assert time.monotonic() - began_s < PATIENCE_S, "the process that handed it over would wait forever"
            time.sleep(0.05)
        assert "is damaged or of another release, and cannot be done" in json.loads(answer.read_text())["error"]
        while (folder / "damaged.rows").exists():  # removed after the answer is there
            assert time.monotonic() - began_s < PATIENCE_S, "damaged work would be answered again and again"
            time.sleep(0.05)
        later = HandedOver(folder, Chore("note", {"kind": "noted", "detail": {}}))
        while later.result(lambda *_: None) is None:
            assert time.monotonic() - began_s < PATIENCE_S
            time.sleep(0.05)
        assert store.reader.campaigns() == []
