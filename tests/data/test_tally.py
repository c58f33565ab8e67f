"""Bad rows are an error or are counted; none vanishes."""

import logging
from dataclasses import asdict

import pytest

from tunesmith.base.core.errors import DataError
from tunesmith.collect.data.rows import BadRows, RowError, Tally


def rows_with(num_rows: int, *kinds: str, skip: bool) -> BadRows:
    bad = BadRows(skip=skip)
    bad.opened("p.jsonl", num_rows)
    for line, kind in enumerate(kinds, start=1):
        bad.add(f"p.jsonl:{line}", RowError(f"reason {line}", kind))  # type: ignore[arg-type]
    return bad


def test_strict_bad_rows_are_an_error_that_names_them_and_the_way_out():
    with pytest.raises(DataError, match=r"(?s)2 bad rows of 9 in p.jsonl; .*p.jsonl:1: reason 1\n.*2\nskip_bad: true"):
        rows_with(9, "empty", "blank line", skip=False).check()


def test_of_several_sources_the_rows_of_the_one_with_bad_rows_are_counted():
    bad = BadRows()
    bad.opened("a.jsonl", 5)
    bad.check()
    bad.opened("b.jsonl", 2)
    bad.add("b.jsonl:1", RowError("reason", "empty"))
    with pytest.raises(DataError, match=r"1 bad row of 2 in b\.jsonl;"):
        bad.check()
    bad.opened_all("a.jsonl, b.jsonl")
    with pytest.raises(DataError, match=r"1 bad row of 7 in a\.jsonl, b\.jsonl;"):
        bad.check()


def test_skipped_rows_are_counted_by_reason_and_said(caplog: pytest.LogCaptureFixture):
    bad = rows_with(9, "empty", "blank line", "empty", skip=True)
    bad.check()
    with caplog.at_level(logging.WARNING):
        tally = bad.finish()
    assert tally == Tally(9, 6, {"empty": 2, "blank line": 1})
    assert (tally.num_dropped, str(tally)) == (3, "6 of 9 rows used; dropped: empty 2, blank line 1")
    assert "p.jsonl: 6 of 9 rows used" in caplog.text and "p.jsonl:3: reason 3" in caplog.text
    assert asdict(tally) == {"num_rows": 9, "num_used": 6, "reasons": {"empty": 2, "blank line": 1}}


def test_skipping_every_row_is_an_error():
    with pytest.raises(DataError, match=r"2 bad rows of 2 in p.jsonl; none is left to use"):
        rows_with(2, "empty", "empty", skip=True).check()


def test_good_rows_say_nothing(caplog: pytest.LogCaptureFixture):
    bad = rows_with(3, skip=True)
    bad.check()
    assert bad.finish() == Tally(3, 3) and caplog.text == ""
