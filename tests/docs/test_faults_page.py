"""The page of faults: every row has what happens and a test that exists, and no promised fault is missing."""

import ast
import re
from dataclasses import dataclass
from functools import lru_cache

import pytest

from pages import ROOT
from tunesmith.core.faults import ACTIONS, VARIABLE

PAGE = ROOT / "docs" / "faults.md"
HEADER = ["fault", "what happens", "test"]
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")

PROMISED = """
unknown or misspelt key; NaN, infinite, negative or text numbers; config missing; config binary; config is a folder;
huge; YAML tag; output folder of another config; resume with another recipe; blank line; BOM; cut last line;
duplicate id;
wrong type; missing field; chosen = rejected; empty completion; longer than the context; lone surrogates; NUL; emoji;
1 MB line; all rewards equal; truncated; bit-flipped; future version; half-written; full disk during a save;
full disk at start; full disk for metrics; read-only folder; SIGTERM; SIGTERM twice; SIGINT;
kill -9 at each named fault point; kill -9 at random moments; two processes on one run folder; stale lock; pickle file;
remote code; reward raises; reward hangs; NaN, text, the wrong length or None; non-finite loss or gradient;
non-finite logits; N refused steps in a row; memory exhausted in update; memory exhausted in rollout; clock jumps back;
changed data or model on resume; leak; KL alarm; length alarm; entropy alarm; same prompt twice; all completions dropped
"""


@dataclass(frozen=True)
class Row:
    """A row of a table of faults, with its line on the page."""

    line: int
    cells: tuple[str, ...]


def cells_of(text: str) -> list[str]:
    """The cells of a line of a table; a bar inside of code or behind a backslash separates nothing."""
    code = re.split(r"(`[^`]*`)", text.strip().strip("|"))
    kept = [part if index % 2 else re.sub(r"(?<!\\)\|", "\0", part) for index, part in enumerate(code)]
    return [cell.strip() for cell in "".join(kept).split("\0")]


def rows_of(page: str) -> list[Row]:
    """The rows of all tables with the header of faults, in order."""
    found: list[Row] = []
    inside = False
    for number, line in enumerate(page.splitlines(), start=1):
        if not line.startswith("|"):
            inside = False
        elif cells_of(line) == HEADER:
            inside = True
        elif inside and not re.fullmatch(r"[|\s-]+", line):
            found.append(Row(number, tuple(cells_of(line))))
    return found


def problem_of(row: Row) -> str:
    """What is wrong with a row; empty if nothing is."""
    if len(row.cells) != len(HEADER):
        return f"has {len(row.cells)} cells, not {len(HEADER)}"
    for name, cell in zip(HEADER, row.cells, strict=True):
        if not re.search(r"\w{3}", cell):
            return f"says nothing under `{name}`"
    references = REFERENCE.findall(row.cells[2])
    if not references:
        return "names no test; write `tests/folder/test_file.py::test_name`"
    for file, name in references:
        if name not in names_in(file):
            return f"names {file}::{name}, which does not exist"
    return ""


@lru_cache
def names_in(file: str) -> frozenset[str]:
    """The names of the test functions of a file, also those inside of classes; empty if there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def places_in_the_code() -> set[str]:
    """The places that the code names to `faults.reach` by plain text."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "faults.reach":
                found |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    return found


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=[f"line {row.line}" for row in ROWS])
def test_a_row_has_what_happens_and_a_test_that_exists(row: Row) -> None:
    assert problem_of(row) == ""


@pytest.mark.parametrize("fault", [" ".join(fault.split()) for fault in PROMISED.split(";")])
def test_a_promised_fault_has_a_row(fault: str) -> None:
    assert any(fault.lower() in row.cells[0].lower() for row in ROWS)


def test_no_fault_stands_twice() -> None:
    faults = [row.cells[0] for row in ROWS]
    assert sorted(set(faults)) == sorted(faults)


def test_variable_actions_and_places_are_explained() -> None:
    page = PAGE.read_text(encoding="utf-8")
    places = places_in_the_code()
    assert len(places) >= 5
    for name in (VARIABLE, *ACTIONS, *places):
        assert f"`{name}`" in page


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("| a fault | something | `tests/docs/test_faults_page.py::test_no_fault_stands_twice` |", ""),
        ("| a fault (`| head`) | something | `tests/docs/test_faults_page.py::test_no_fault_stands_twice` |", ""),
        ("| a fault | something | |", "says nothing under `test`"),
        (
            "| a fault | | `tests/docs/test_faults_page.py::test_no_fault_stands_twice` |",
            "says nothing under `what happens`",
        ),
        ("| a fault | something | later |", "names no test"),
        ("| a fault | something | `tests/docs/test_faults_page.py::test_of_nothing` |", "which does not exist"),
        ("| a fault | something | `tests/docs/test_nowhere.py::test_no_fault_stands_twice` |", "which does not exist"),
        ("| a fault | something |", "has 2 cells"),
    ],
)
def test_a_row_without_a_test_is_found(line: str, problem: str) -> None:
    (row,) = rows_of(
        f"| {' | '.join(HEADER)} |\n| --- | --- | --- |\n{line}\n\n| other | table |\n| --- | --- |\n| 1 | 2 |\n"
    )
    found = problem_of(row)
    assert problem in found
    assert bool(problem) == bool(found)
