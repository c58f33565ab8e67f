"""The page of faults: every entry says what happens and names a test that exists; no promised fault is missing."""

import ast
import re
from dataclasses import dataclass
from functools import lru_cache

import pytest

from pages import ROOT
from tunesmith.base.core.faults import ACTIONS, VARIABLE

PAGE = ROOT / "docs" / "faults.md"
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
class Entry:
    """An entry of the page: its line, the fault, what happens, and the tests as `file::name`."""

    line: int
    fault: str
    what_happens: str
    tests: str


def entries_of(page: str) -> list[Entry]:
    """The list items that begin with a bold fault, in order."""
    items = re.finditer(r"^- \*\*(.+?)\*\*(.*(?:\n  .*)*)", page, re.MULTILINE)
    found: list[Entry] = []
    for item in items:
        before, _, tests = item.group(2).partition("`tests/")
        text = " ".join(before.split()).removeprefix(":").strip()
        found.append(
            Entry(page.count("\n", 0, item.start()) + 1, item.group(1), text, "`tests/" + tests if tests else "")
        )
    return found


def problem_of(entry: Entry) -> str:
    """What is wrong with an entry; empty if nothing is."""
    if not re.search(r"\w{3}", entry.what_happens):
        return "does not say what happens"
    references = REFERENCE.findall(entry.tests)
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


ENTRIES = entries_of(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", ENTRIES, ids=[f"line {entry.line}" for entry in ENTRIES])
def test_an_entry_says_what_happens_and_names_a_test_that_exists(entry: Entry) -> None:
    assert problem_of(entry) == ""


@pytest.mark.parametrize("fault", [" ".join(fault.split()) for fault in PROMISED.split(";")])
def test_a_promised_fault_has_an_entry(fault: str) -> None:
    assert any(fault.lower() in entry.fault.lower() for entry in ENTRIES)


def test_no_fault_is_listed_twice() -> None:
    faults = [entry.fault for entry in ENTRIES]
    assert len(faults) >= 150
    assert sorted(set(faults)) == sorted(faults)


def test_variable_actions_and_places_are_explained() -> None:
    page = PAGE.read_text(encoding="utf-8")
    places = places_in_the_code()
    assert len(places) >= 5
    for name in (VARIABLE, *ACTIONS, *places):
        assert f"`{name}`" in page


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ("- **a fault**: something.\n  `tests/docs/test_faults_page.py::test_no_fault_is_listed_twice`", ""),
        ("- **a fault**: over\n  two lines.\n  `tests/docs/test_faults_page.py::test_no_fault_is_listed_twice`", ""),
        ("- **a fault**: something.", "names no test"),
        ("- **a fault**\n  `tests/docs/test_faults_page.py::test_no_fault_is_listed_twice`", "what happens"),
        ("- **a fault**: something.\n  later", "names no test"),
        ("- **a fault**: something.\n  `tests/docs/test_faults_page.py::test_of_nothing`", "which does not exist"),
        ("- **a fault**: something.\n  `tests/docs/test_nowhere.py::test_no_fault`", "which does not exist"),
    ],
)
def test_an_entry_without_a_test_is_found(item: str, problem: str) -> None:
    (entry,) = entries_of(f"# Faults\n\n{item}\n\n- an item of another list\n")
    found = problem_of(entry)
    assert problem in found
    assert bool(problem) == bool(found)
