"""Notes for developers: each asks one question, says what was measured and what holds, and stands in the index."""

import re
from pathlib import Path

import pytest

from pages import ROOT

FOLDER = ROOT / "docs" / "dev" / "notes"
NOTES = sorted(FOLDER.glob("2*.md"))


@pytest.mark.parametrize("note", NOTES, ids=[note.stem for note in NOTES])
def test_a_note_has_a_verdict_and_a_measurement(note: Path):
    text = note.read_text(encoding="utf-8")
    assert re.match(r"# .+\n\n\*\*Verdict\.\*\* ", text)
    assert text.count("**What was measured.**") == 1
    assert text.count("**Verdict.**") == 1


@pytest.mark.parametrize("note", NOTES, ids=[note.stem for note in NOTES])
def test_a_name_begins_with_a_date(note: Path):
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d(-[a-z0-9]+)+\.md", note.name)


def test_the_index_lists_each_note_once_with_its_day():
    rows = re.findall(r"\]\((2[^)]+)\) \|.+\| (\d+) \|$", (FOLDER / "index.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == [note.name for note in NOTES]
    assert [name for name, day in rows if int(name[8:10]) != int(day)] == []
