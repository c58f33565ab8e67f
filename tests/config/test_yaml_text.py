import os
from pathlib import Path

import pytest

from tunesmith.base.config.yaml_text import MAX_BYTES, parse, parse_value, read
from tunesmith.base.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-3E+2", -300.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("[2, 8]", [2, 8]),
        ('{"a": [1e-3, "x"]}', {"a": [1e-3, "x"]}),
        ('"1e-6"', "1e-6"),
        ("./my.py:fn", "./my.py:fn"),
        ("[unclosed", "[unclosed"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_infinities_and_nan_are_numbers() -> None:
    assert parse_value("-.inf") == float("-inf")
    assert parse_value(".nan") != parse_value(".nan")


def test_every_key_knows_its_line() -> None:
    document = parse("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - e: 3\n", "f.yaml")
    assert document.lines["a",] == 1
    assert document.lines["b", "c"] == 3
    assert document.lines["b", "d", 1, "e"] == 6


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2\n", "f.yaml:2: the key 'a' is given twice"),
        ("a: !!python/object/apply:os.system ['true']\n", "f.yaml:1: tag"),
        ("a: !!binary aGVsbG8=\n", "f.yaml:1: tag"),
        ("!!python/name:os.system a: 1\n", "f.yaml:1: tag"),
        ("a: !!bool maybe\n", "f.yaml:1: tag"),
        ("a: !!null nothing\n", "f.yaml:1: tag"),
        ("a: !!int many\n", "'many' is no number that can be read"),
        ("a: [1, 2\n", "f.yaml:2:1: not valid YAML"),
        ("a: b: c\n", "f.yaml:1:5: not valid YAML"),
        ("? [1, 2]\n: 3\n", "a key must be plain text"),
        ("a: \x07\n", "not valid YAML"),
        ("---\na: 1\n---\nb: 2\n", "not valid YAML"),
    ],
)
def test_what_is_no_plain_recipe_is_refused_in_one_line_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml") as caught:
        parse(text, "f.yaml")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_python_tags_run_no_code(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(ConfigError):
        parse(f"a: !!python/object/apply:pathlib.Path.touch [{canary}]\n", "f.yaml")
    assert not canary.exists()


def test_an_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="too large"):
        parse("\n".join(lines), "bomb.yaml")


@pytest.mark.parametrize("text", ["a: &a [*a]", "[" * 3000, "{a: " * 3000])
def test_endless_and_deep_nesting_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text, "deep.yaml")


def test_aliases_of_a_sane_size_work() -> None:
    assert parse("a: &x {b: 1}\nc: *x\n", "f.yaml").data == {"a": {"b": 1}, "c": {"b": 1}}


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    binary, large, fifo = tmp_path / "b.yaml", tmp_path / "l.yaml", tmp_path / "p.yaml"
    binary.write_bytes(b"\x89PNG\xff\xfe\x00")
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    os.mkfifo(fifo)
    for file, problem in (
        (tmp_path / "none.yaml", "does not exist"),
        (tmp_path, "is a folder"),
        (binary, "is not UTF-8 text"),
        (large, "at most 1,000,000"),
        (fifo, "is not a regular file"),
    ):
        with pytest.raises(ConfigError, match=problem) as caught:
            read(file)
        assert str(file) in str(caught.value)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert parse(read(file), "f.yaml").data == {"a": 1}
