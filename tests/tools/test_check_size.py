"""The size budgets: each rule catches its violation, and the allow-list only shrinks."""

import subprocess
import sys
from pathlib import Path

import pytest

import check_size
from check_size import LIMITS, Allowance, Excess

ALL_RULES = tuple(LIMITS)


def rules_broken(source: str, rules: tuple[str, ...] = ALL_RULES) -> list[str]:
    return [excess.rule for excess in check_size.measure("a.py", source, rules)]


def nested(depth: int, header: str = "if x:") -> str:
    lines = ["def f(x):"] + ["    " * (level + 1) + header for level in range(depth)]
    return "\n".join([*lines, "    " * (depth + 1) + "pass"])


def test_a_file_of_the_limit_passes_and_one_line_more_does_not():
    assert rules_broken("x = 1\n" * 600) == []
    assert rules_broken("x = 1\n" * 601) == ["file"]


def test_a_function_counts_signature_and_docstring():
    def function(num_body_lines: int) -> str:
        return "def f():\n    '''What it returns.'''\n" + "    x = 1\n" * num_body_lines

    assert rules_broken(function(58)) == []
    assert rules_broken(function(59)) == ["function"]


@pytest.mark.parametrize("header", ["if x:", "for i in x:", "while x:", "with x:"])
def test_three_nested_blocks_pass_and_four_do_not(header: str):
    assert rules_broken(nested(3, header)) == []
    assert rules_broken(nested(4, header)) == ["nesting"]


def test_try_and_match_count_as_blocks():
    source = """
def f(x):
    try:
        for i in x:
            match i:
                case 1:
                    if x:
                        pass
    finally:
        pass
"""
    assert rules_broken(source) == ["nesting"]


def test_an_except_branch_is_as_deep_as_its_try():
    source = (
        "def f(x):\n    try:\n        pass\n    except ValueError:\n"
        + "        if x:\n            if x:\n                if x:\n"
    )
    assert rules_broken(source + "                    pass") == ["nesting"]


def test_a_chain_of_elif_is_one_level():
    chain = "".join(f"    elif x == {i}:\n        pass\n" for i in range(6))
    assert rules_broken("def f(x):\n    if x:\n        pass\n" + chain) == []


def test_an_if_alone_in_else_after_a_loop_is_a_level():
    source = (
        "def f(x):\n    for a in x:\n        pass\n    else:\n        if x:\n            if x:\n                if x:\n"
    )
    assert rules_broken(source + "                    pass") == ["nesting"]


def test_nesting_of_an_inner_function_counts_for_itself():
    source = """
def outer(x):
    if x:
        if x:
            def inner(y):
                if y:
                    if y:
                        pass
"""
    assert rules_broken(source) == []


def test_nesting_at_module_level_is_checked():
    source = "if x:\n if x:\n  if x:\n   if x:\n    pass\n"
    assert rules_broken(source) == ["nesting"]


def test_eight_arguments_pass_and_nine_do_not():
    assert rules_broken("def f(a, b, /, c, d, *, e, f, g, h): ...") == []
    assert rules_broken("def f(a, b, /, c, d, *, e, f, g, h, i): ...") == ["arguments"]


def test_the_arguments_of_a_triton_kernel_do_not_count():
    source = "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i): pass\n"
    assert rules_broken(source) == []
    assert rules_broken(source.replace("@triton.jit", "@cache")) == ["arguments"]


def test_starred_arguments_count():
    assert rules_broken("def f(a, b, c, d, e, f, g, *args, **kwargs): ...") == ["arguments"]


def test_self_and_cls_do_not_count_but_arguments_of_static_methods_do():
    eight = "a, b, c, d, e, f, g, h"
    assert rules_broken(f"class A:\n    def f(self, {eight}): ...") == []
    assert rules_broken(f"class A:\n    @classmethod\n    def f(cls, {eight}): ...") == []
    assert rules_broken(f"class A:\n    @staticmethod\n    def f({eight}, i): ...") == ["arguments"]


def test_names_are_qualified():
    body = "        x = 1\n" * 60
    (excess,) = check_size.measure("a.py", f"class A:\n    def f(self):\n{body}", ALL_RULES)
    assert (excess.name, excess.line, excess.measured) == ("A.f", 2, 61)
    assert str(excess) == "a.py:2: A.f: function 61, budget 60"


def test_only_the_rules_asked_for_apply():
    assert rules_broken(nested(4), rules=("file",)) == []


OVER = Excess("src/a.py", 3, "f", "function", 70)


def entry(measured: int) -> Allowance:
    return Allowance("src/a.py", "f", "function", measured, reason="a kernel body")


def test_an_allowed_excess_is_no_complaint():
    assert check_size.judge([OVER], [entry(70)]) == []


def test_growing_beyond_the_entry_is_a_complaint():
    assert check_size.judge([OVER], [entry(69)]) == [str(OVER)]


def test_an_entry_that_allows_more_than_is_there_must_be_lowered():
    (complaint,) = check_size.judge([OVER], [entry(80)])
    assert "lower measured to 70" in complaint


def test_an_unused_entry_is_a_complaint():
    (complaint,) = check_size.judge([], [entry(70)])
    assert "remove the entry" in complaint


def test_an_entry_without_a_reason_is_refused(tmp_path: Path):
    allow_list = tmp_path / "allow.toml"
    allow_list.write_text('[[allow]]\npath = "a"\nname = "f"\nrule = "file"\nmeasured = 500\nreason = " "\n')
    with pytest.raises(ValueError, match="reason"):
        check_size.read_allow_list(allow_list)


def test_tests_keep_the_budget_of_files_alone(tmp_path: Path):
    for folder in ("src", "tools", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(nested(4))
    assert [line.split(":")[0] for line in check_size.check(tmp_path)] == ["src/a.py", "tools/a.py"]


def test_the_command_prints_places_and_exits_1(tmp_path: Path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "long.py").write_text("x = 1\n" * 700)
    done = subprocess.run(
        [sys.executable, check_size.__file__, "--root", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "src/long.py:1: file: file 700, budget 600\n"
