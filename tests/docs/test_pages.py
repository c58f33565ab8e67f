"""The parser of pages reads blocks, comments and commands as documented."""

import re
from pathlib import Path

import pytest

import pages

PAGE = """# Title

<!-- file: my.py -->

```python
x = 1
```

```python
x = 2
```

<!-- run with: steps=50 -> steps=1; smollm2 -> tiny:llama -->
```python
train("smollm2", steps=50)
```

<!-- not run: needs the hub -->
Some words between the comment and the block make it another block's comment.

```console
$ tunesmith train ppo \\
    --steps 3   # quick
output
$ make demo
```
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[pages.Block]:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    return pages.blocks(tmp_path / "page.md")


def test_blocks_carry_language_place_and_comment(found: list[pages.Block]):
    assert [(block.language, block.kind, block.value) for block in found[:2]] == [
        ("python", "file", "my.py"),
        ("python", "", ""),
    ]
    assert found[0].where == "page.md:6"
    assert found[0].text == "x = 1\n"


def test_a_comment_holds_for_the_block_right_after_it_alone(found: list[pages.Block]):
    assert found[3].kind == ""


def test_replacements_are_made(found: list[pages.Block]):
    assert found[2].replaced().text == 'train("tiny:llama", steps=1)\n'


def test_a_replacement_that_matches_nothing_is_an_error(found: list[pages.Block]):
    stale = pages.Block(found[2].page, 1, "python", "other\n", "run with", "steps=50 -> steps=1")
    with pytest.raises(ValueError, match="not in the block"):
        stale.replaced()


def test_commands_are_joined_over_lines_and_lose_their_comments(found: list[pages.Block]):
    assert found[3].commands() == [["tunesmith", "train", "ppo", "--steps", "3"], ["make", "demo"]]


WRITTEN = (*pages.PAGES, pages.PAGES[0].parent / "CHANGELOG.md")
WIDTH = 120


@pytest.mark.parametrize("page", WRITTEN, ids=[str(page.relative_to(pages.PAGES[0].parent)) for page in WRITTEN])
def test_lines_have_at_most_120_columns(page: Path):
    """Except lines that cannot be broken: a single token, such as the name of a test."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    assert [number for number, line in lines if len(line) > WIDTH and len(line.split()) > 1] == []


@pytest.mark.parametrize("page", WRITTEN, ids=[str(page.relative_to(pages.PAGES[0].parent)) for page in WRITTEN])
def test_links_between_pages_lead_to_files(page: Path):
    """Sphinx checks the links inside of docs/; README and CONTRIBUTING are not part of its tree."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
