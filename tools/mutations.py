"""Break lines of the source on purpose, and count how many of them the tests notice.

    python tools/mutations.py OLD NEW --out mutations.jsonl

OLD and NEW are checkouts, each with a `.venv`, which may be a link to the same. Lines that both have are chosen by
seed, as many in each folder. One token of each is changed, and the tests nearest to its module run until the first
failure, then all tests of its folder if none failed, in both checkouts at the same time. One row is added for each line
and checkout; rows that exist are not computed again, so the command can be started again after an interruption.
"""

import argparse
import ast
import io
import json
import os
import random
import re
import subprocess
import tokenize
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDERS = ("algorithms", "trainers", "rollout", "store", "data")
SWAPS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"},
    **{"+": "-", "-": "+", "*": "+", "/": "*", "+=": "-=", "min": "max", "max": "min"},
    **{"and": "or", "or": "and", "not": "bool", "if": "if not", "True": "False", "False": "True"},
}
TIMEOUT_S = 1800
MAX_TEST_FILES = 14

Place = tuple[Path, int]


def code_lines(text: str) -> list[tuple[int, str]]:
    """(Number from 1, line without indentation) of the lines outside of strings."""
    strings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    strings = [node for node in strings if isinstance(node.value, str)]
    prose = {number for node in strings for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if number not in prose]


def place_of(root: Path, folder: str) -> Path:
    """The folder of the package with this name, below a wing where there are wings."""
    package = root / "src/tunesmith"
    return next(one for one in (package / folder, *sorted(package.glob(f"[!b]*/{folder}"))) if one.is_dir())


def unique_lines(root: Path) -> dict[tuple[str, str], Place]:
    """(Folder, line without indentation) -> its place, for lines of code that stand there once."""
    found: dict[tuple[str, str], list[Place]] = {}
    for folder in FOLDERS:
        for file in sorted(place_of(root, folder).rglob("*.py")):
            for number, line in code_lines(file.read_text()):
                found.setdefault((folder, line), []).append((file, number))
    return {key: places[0] for key, places in found.items() if len(places) == 1}


def changeable(line: str) -> list[tokenize.TokenInfo]:
    """The tokens of `line` that can be swapped; none in imports, definitions and messages."""
    if re.match(r"(from|import|def|class|@|#|\"|'|raise|assert|f\"|else|elif|with|except)", line):
        return []
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except (tokenize.TokenError, IndentationError):
        return []
    chosen = [t for t in tokens if t.string in SWAPS or (t.type == tokenize.NUMBER and t.string.isdigit())]
    return [t for t in chosen if not (t.string in "+-*" and re.search(r"->|\*\*|=\*", line))]


def changed(line: str, token: tokenize.TokenInfo) -> str:
    """`line` with `token` swapped; a whole number becomes the next."""
    new = SWAPS.get(token.string) or str(int(token.string) + 1)
    return line[: token.start[1]] + new + line[token.end[1] :]


def with_line(place: Place, line: str) -> str:
    """The text of the file with `line` at `place`."""
    file, number = place
    lines = file.read_text().splitlines(keepends=True)
    old = lines[number - 1]
    lines[number - 1] = old[: len(old) - len(old.lstrip())] + line + "\n"
    return "".join(lines)


def is_valid(text: str) -> bool:
    """True if `text` is Python."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def nearest_tests(root: Path, file: Path) -> list[str]:
    """Test files: of the module's name, then those that import it."""
    module = ".".join(file.relative_to(root / "src").with_suffix("").parts)
    parent, _, stem = module.rpartition(".")
    imports = re.compile(rf"(from|import) {re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{stem}\b")
    tests = sorted((root / "tests").rglob("test_*.py"))
    near = [test for test in tests if stem in test.stem] + [test for test in tests if imports.search(test.read_text())]
    near = [test for test in dict.fromkeys(near) if not {"web", "workflows"} & set(test.parts)][:MAX_TEST_FILES]
    return [str(test.relative_to(root)) for test in near]


def outcome_of(root: Path, tests: list[str]) -> str:
    """`caught` or `survived`; `timeout` counts as caught, other words are pytest's exit code."""
    paths = {"PYTHONPATH": f"{root}/src{os.pathsep}{root}"}  # two checkouts may share one environment
    env = {**os.environ, **paths, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    markers = "not slow and not nightly" if '"nightly' in (root / "pyproject.toml").read_text() else "not slow"
    command = [".venv/bin/python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", markers, *tests]
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "timeout"
    return {0: "survived", 1: "caught"}.get(done.returncode, f"exit code {done.returncode}")


def chosen_lines(sides: dict[str, dict[tuple[str, str], Place]], seed: int, count: int) -> list[tuple[str, str, str]]:
    """(Folder, line, changed line), `count` in all, as many of each folder."""
    shared = sorted(key for key in sides["old"] if key in sides["new"] and changeable(key[1]))
    draw, taken = random.Random(seed), Counter[str]()
    draw.shuffle(shared)
    chosen: list[tuple[str, str, str]] = []
    for folder, line in shared:
        new = changed(line, draw.choice(changeable(line)))
        if taken[folder] < count // len(FOLDERS) and all(
            is_valid(with_line(places[folder, line], new)) for places in sides.values()
        ):
            taken[folder] += 1
            chosen.append((folder, line, new))
    return chosen


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    roots = {"old": options.old.resolve(), "new": options.new.resolve()}
    sides = {side: unique_lines(root) for side, root in roots.items()}
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["line"], row["side"]) for row in rows}
    chosen = chosen_lines(sides, options.seed, options.count)

    def break_lines(side: str) -> None:
        for folder, line, new in chosen:
            if (line, side) in done:
                continue
            place = sides[side][folder, line]
            original = place[0].read_text()
            try:
                place[0].write_text(with_line(place, new))
                near = nearest_tests(roots[side], place[0])
                outcome = outcome_of(roots[side], near) if near else "survived"
                if outcome == "survived":
                    outcome = outcome_of(roots[side], [f"tests/{folder}"])
            finally:
                place[0].write_text(original)
            row = {"side": side, "folder": folder, "line": line, "changed": new, "outcome": outcome}
            rows.append(row)
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{side} {outcome:<10} {folder}: {new}", flush=True)

    with ThreadPoolExecutor() as pool:  # each checkout on a core of its own
        list(pool.map(break_lines, roots))
    for side in roots:
        print(side, dict(Counter(row["outcome"] for row in rows if row["side"] == side)))


if __name__ == "__main__":
    main()
