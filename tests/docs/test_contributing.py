"""CONTRIBUTING names files that exist, and sections that are there."""

import re

import pytest

from pages import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = (ROOT, ROOT / "src", ROOT / "src" / "tunesmith")
PLAIN = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
PATHS = sorted(
    path
    for path in set(re.findall(r"(?<!`)`([\w./<>*-]+)`(?!`)", PLAIN))
    if re.search(r"\.(py|md|yaml|toml|html|js|json)$", path) or path.endswith("/")
)
ABSENT = {"utils/"}
"""Named as what there is not."""


def exists(path: str) -> bool:
    """True if a file or folder of the repository or of the package has this path; `<name>` stands for any name."""
    pattern = re.sub(r"<\w+>", "*", path).rstrip("/")
    return any(any(folder.glob(pattern)) for folder in FOLDERS)


def test_the_lists_of_files_are_found():
    assert {"base/config/spec.py", "base/config/algorithms/<name>.py", "tests/registered/mean_scaled.py"} <= set(PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_is_named_exists(path: str):
    assert exists(path) == (path not in ABSENT)


def test_a_file_that_is_gone_is_found():
    assert not exists("base/config/algorithms/no_such_file.py")


def test_links_within_the_page_lead_to_its_headings():
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings
