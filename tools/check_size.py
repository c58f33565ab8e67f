"""Size budgets of the code: a file, a function, its nesting and its arguments each have a limit.

`python tools/check_size.py` prints one line for each place over its budget and exits 1 if there is any. `src`,
`tools` and `benchmarks` keep all four budgets, `tests` the one of files. `tools/size_allow.toml` lists exceptions with
their reasons; an entry that is not needed, or that allows more than is used, is an error too, so the list only shrinks.
"""

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIMITS = {"file": 600, "function": 60, "nesting": 3, "arguments": 8}
"""Lines of a file; lines of a function, signature and docstring included; its nested blocks; its arguments."""

RULES_BY_FOLDER = {"src": tuple(LIMITS), "tools": tuple(LIMITS), "benchmarks": tuple(LIMITS), "tests": ("file",)}
ALLOW_LIST = Path("tools/size_allow.toml")
ROOT = Path(__file__).resolve().parent.parent
Block = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.TryStar | ast.Match
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Excess:
    """A place over its budget. `name` is the function's qualified name, empty for a whole file."""

    path: str
    line: int
    name: str
    rule: str
    measured: int

    def __str__(self) -> str:
        place = self.name or "file"
        return f"{self.path}:{self.line}: {place}: {self.rule} {self.measured}, budget {LIMITS[self.rule]}"


@dataclass(frozen=True, slots=True)
class Allowance:
    """An entry of the allow-list: `path`, `name` and `rule` say where, `measured` how much, `reason` why."""

    path: str
    name: str
    rule: str
    measured: int
    reason: str

    def __str__(self) -> str:
        return f"{ALLOW_LIST}: {self.path} {self.name} {self.rule}"


def nesting(node: ast.AST) -> int:
    """Deepest stack of blocks inside `node`.

    An `elif` is no deeper than its `if`; inner functions and classes count for themselves.
    """
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child) + (isinstance(child, Block) and not is_elif))
    return deepest


def num_arguments(function: Function, *, is_method: bool) -> int:
    """Arguments of a function, starred ones included; the `self` or `cls` of a method is not counted."""
    arguments = function.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    count += (arguments.vararg is not None) + (arguments.kwarg is not None)
    is_static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in function.decorator_list)
    return count - (is_method and not is_static)


def is_kernel(function: Function) -> bool:
    """Whether it is a kernel in Triton: a launch hands over pointers, strides and sizes one by one."""
    return any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list)


def functions(node: ast.AST, prefix: str = "", *, in_class: bool = False) -> Iterator[tuple[str, Function, bool]]:
    """Qualified name, node, and whether it is a method, of every function under `node`, inner ones included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}{child.name}", child, in_class
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.", in_class=True)
        else:
            yield from functions(child, prefix, in_class=in_class)


def measure(path: str, source: str, rules: tuple[str, ...]) -> list[Excess]:
    """Every place of one file that is over a budget named in `rules`."""
    found = [Excess(path, 1, "", "file", len(source.splitlines()))]
    tree = ast.parse(source, filename=path)
    found.append(Excess(path, 1, "<module>", "nesting", nesting(tree)))
    for name, function, is_method in functions(tree):
        num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
        found.append(Excess(path, function.lineno, name, "function", num_lines))
        found.append(Excess(path, function.lineno, name, "nesting", nesting(function)))
        if not is_kernel(function):
            count = num_arguments(function, is_method=is_method)
            found.append(Excess(path, function.lineno, name, "arguments", count))
    return [excess for excess in found if excess.rule in rules and excess.measured > LIMITS[excess.rule]]


def read_allow_list(path: Path) -> list[Allowance]:
    """The entries of the allow-list, none if there is no file; `ValueError` if one has no reason or lacks a key."""
    if not path.exists():
        return []
    entries: list[Allowance] = []
    for row in tomllib.loads(path.read_text(encoding="utf-8")).get("allow", []):
        if set(row) != set(Allowance.__slots__) or not str(row["reason"]).strip():
            raise ValueError(
                f"{path}: entry {row} must have {', '.join(Allowance.__slots__)}, and a reason that is not empty"
            )
        entries.append(Allowance(**row))
    return entries


def judge(excesses: list[Excess], allowances: list[Allowance]) -> list[str]:
    """Complaints: each excess that no entry allows, and each entry that is unused or allows more than is there."""
    unused = {(entry.path, entry.name, entry.rule): entry for entry in allowances}
    complaints: list[str] = []
    for excess in excesses:
        entry = unused.pop((excess.path, excess.name, excess.rule), None)
        if entry is None or excess.measured > entry.measured:
            complaints.append(str(excess))
        elif excess.measured < entry.measured:
            complaints.append(f"{entry}: lower measured to {excess.measured}")
    return complaints + [f"{entry}: within budget; remove the entry" for entry in unused.values()]


def check(root: Path) -> list[str]:
    """Complaints about the tree at `root`."""
    excesses: list[Excess] = []
    for folder, rules in RULES_BY_FOLDER.items():
        for file in sorted((root / folder).rglob("*.py")):
            excesses += measure(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"), rules)
    return judge(excesses, read_allow_list(root / ALLOW_LIST))


def main() -> int:
    """Exit code: 0 if everything is within budget, else 1."""
    parser = argparse.ArgumentParser(description="Check the size budgets of src, tools, benchmarks and tests.")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the repository")
    complaints = check(parser.parse_args().root)
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
