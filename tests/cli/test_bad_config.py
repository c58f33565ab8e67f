"""Recipes and models that cannot be used, through the real command line: exit code 2, one clear message, no trace on
disk.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from tunesmith.apps.cli.main import main
from tunesmith.base.config.yaml_text import MAX_BYTES

Capture = pytest.CaptureFixture[str]
ALGORITHMS = ("ppo", "reward", "grpo")
GOOD = "algorithm: ppo\nmodel: tiny:llama\nreward: [length]\nrun: {steps: 1}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(capsys: Capture, folder: Path, *words: str) -> str:
    """The one message with which the command ends."""
    before = everything_in(folder)
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err
    assert everything_in(folder) == before
    return captured.err


def refused_text(capsys: Capture, folder: Path, text: str | bytes, algorithm: str = "ppo") -> str:
    file = folder / "mine.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return refused(capsys, folder, "train", algorithm, "--config", "mine.yaml")


def test_the_recipe_of_these_tests_is_right(folder: Path, capsys: Capture) -> None:
    (folder / "mine.yaml").write_text(GOOD)
    assert main(["train", "ppo", "--config", "mine.yaml", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert everything_in(folder) == ["mine.yaml"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_missing_config_names_the_command_that_makes_one(folder: Path, capsys: Capture, algorithm: str) -> None:
    message = refused(capsys, folder, "train", algorithm, "--config", "none.yaml")
    assert "none.yaml does not exist; `tunesmith recipes cp NAME none.yaml` makes a recipe" in message


def make_link_loop(folder: Path) -> None:
    (folder / "place").symlink_to(folder / "place")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: (folder / "place").mkdir(), "place is a folder; give a YAML file"),
        (lambda folder: os.mkfifo(folder / "place"), "place is not a regular file"),
        (lambda folder: (folder / "place").symlink_to("/dev/zero"), "place is not a regular file"),
        (make_link_loop, "place "),
        (lambda folder: (folder / "place").symlink_to("nowhere"), "place does not exist"),
    ],
    ids=["a folder", "a pipe", "a device", "a loop of links", "a dead link"],
)
def test_what_is_no_file_is_not_read(folder: Path, capsys: Capture, make: Callable[[Path], None], problem: str) -> None:
    make(folder)
    assert problem in refused(capsys, folder, "train", "ppo", "--config", "place")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "mine.yaml is not UTF-8 text (byte 0)"),
        (pickle.dumps({"algorithm": "ppo"}), "mine.yaml is not UTF-8 text"),
        (GOOD.encode("utf-16"), "mine.yaml is not UTF-8 text"),
        (b"algorithm: ppo\n\x00\n", "not valid YAML"),
        (b"\x7fELF\x02\x01\x01", "not valid YAML"),
        (b"#" * (MAX_BYTES + 1), f"a recipe has at most {MAX_BYTES:,}"),
        (GOOD.encode() + b"# " + b"x" * 10_000_000, "10,000,0"),
    ],
    ids=["png", "pickle", "utf-16", "nul", "program", "huge", "10 MB"],
)
def test_binary_and_huge_files_are_refused(folder: Path, capsys: Capture, content: bytes, problem: str) -> None:
    assert problem in refused_text(capsys, folder, content)


def bomb() -> str:
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (bomb(), "too large"),
        ("a: &a [*a]\n", "mine.yaml:1: too large"),
        ("[" * 5000, "mine.yaml"),
        ("a: " + "[" * 200 + "]" * 200, "mine.yaml"),
        ("a: &x {b: 1}\n<<: *x\n", "unknown key"),
    ],
    ids=["a bomb of aliases", "a loop", "deep", "rather deep", "merge key"],
)
def test_bombs_of_aliases_and_nesting_are_refused(folder: Path, capsys: Capture, text: str, problem: str) -> None:
    message = refused_text(capsys, folder, text)
    assert problem in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.mkdir [{canary}]",
        "!!python/object/apply:os.system ['mkdir {canary}']",
        "!!python/object/new:os.mkdir [{canary}]",
        "!!python/object/apply:subprocess.check_output [[mkdir, {canary}]]",
        "!!python/name:os.mkdir",
        "!!python/module:os",
        "!mine {{x: 1}}",
        "!!binary aGVsbG8=",
        "!!set {{a, b}}",
    ],
)
@pytest.mark.parametrize("place", ["model: {tag}\n", "{tag}\n", "run: {{name: {tag} }}\n", "? {tag}\n: 1\n"])
def test_yaml_tags_build_nothing_and_run_nothing(folder: Path, capsys: Capture, tag: str, place: str) -> None:
    canary = folder / "canary"
    message = refused_text(capsys, folder, place.format(tag=tag.format(canary=canary)))
    assert "mine.yaml:1: tag" in message or "a key must be plain text" in message
    assert not canary.exists()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("optimizer: {learning_rate: .nan}", "optimizer.learning_rate: nan given; must be"),
        ("optimizer: {learning_rate: .inf}", "optimizer.learning_rate: inf given; must be a finite number"),
        ("optimizer: {learning_rate: -1e-5}", "optimizer.learning_rate: -1e-05 given; must be greater than"),
        ("optimizer: {learning_rate: fast}", "optimizer.learning_rate: 'fast' given; must be a valid number"),
        ("optimizer: {learning_rate: [1]}", "optimizer.learning_rate: [1] given; must be a valid number"),
        ("optimizer: {learning_rate: null}", "optimizer.learning_rate: None given; must be a valid number"),
        ("run: {steps: -3}", "run.steps: -3 given; must be greater than or equal to 1"),
        ("run: {steps: 0}", "run.steps: 0 given; must be greater than or equal to 1"),
        ("run: {steps: 2.5}", "run.steps: 2.5 given; must be a valid integer"),
        ("run: {steps: many}", "run.steps: 'many' given; must be a valid integer"),
        ("run: {steps: .nan}", "run.steps: nan given; must be a"),
        ("run: {seed: -1}", "run.seed: -1 given; must be greater than or equal to 0"),
        ("rollout: {temperature: .nan}", "rollout.temperature: nan given; must be"),
        ("rollout: {top_p: 1.5}", "rollout.top_p: 1.5 given; must be less than or equal to 1"),
        ("rollout: {max_new_tokens: 1e400}", "rollout.max_new_tokens: inf given; must be a"),
        ("reward: [{source: length, weight: .nan}]", "reward.0.weight: nan given; must be a finite number"),
        ("model: {trust_remote_code: perhaps}", "model.trust_remote_code: 'perhaps' given; must be a valid boolean"),
    ],
)
def test_numbers_that_are_none_are_refused_with_key_value_rule_and_line(
    folder: Path, capsys: Capture, line: str, problem: str
) -> None:
    # Each section stands once: the line takes the place of the one in the good recipe.
    section = line.partition(":")[0]
    kept = [good for good in GOOD.splitlines() if not good.startswith(f"{section}:")]
    message = refused_text(capsys, folder, "\n".join([*kept, line]) + "\n")
    assert problem in message
    assert f"mine.yaml:{len(kept) + 1}" in message


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--optimizer.learning-rate", "nan"], "optimizer.learning_rate: 'nan' given; must be"),
        (["--optimizer.learning-rate", ".nan"], "optimizer.learning_rate: nan given; must be"),
        (["--optimizer.learning-rate=-1"], "optimizer.learning_rate: -1 given; must be greater than"),
        (["--steps", "-1"], "run.steps: -1 given; must be greater than or equal to 1"),
        (["--steps", "ten"], "run.steps: 'ten' given; must be a valid integer"),
        (["--rollout.temprature", "1"], "unknown key; did you mean rollout.temperature?"),
    ],
)
def test_bad_values_on_the_command_line_are_refused_the_same_way(
    folder: Path, capsys: Capture, words: list[str], problem: str
) -> None:
    message = refused(capsys, folder, "train", "ppo", "--model", "tiny:llama", "--reward", "length", *words)
    assert problem in message
    assert "(command line --" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rollout: {max_new_tokenz: 3}\n", "rollout.max_new_tokenz: unknown key; did you mean rollout.max_new_tokens?"),
        ("optimiser: {learning_rate: 1}\n", "did you mean optimizer"),
        ("lr: 1e-5\n", "did you mean optimizer.learning_rate?"),
        ("algorithm: pop\n", "did you mean ppo?"),
        ("schema_version: 2\n", "schema_version: 2 given; must be 1"),
        ("- a\n- b\n", "mine.yaml"),
        ("just text\n", "mine.yaml"),
        ("run: 3\n", "run"),
        ("a: 1\na: 2\n", "the key 'a' is given twice"),
    ],
)
def test_what_the_schema_does_not_know_is_named_with_what_was_meant(
    folder: Path, capsys: Capture, text: str, problem: str
) -> None:
    assert problem in refused_text(capsys, folder, text)


def test_all_problems_of_a_config_come_in_one_message(folder: Path, capsys: Capture) -> None:
    message = refused_text(capsys, folder, "run: {steps: -1, seeed: 1}\noptimizer: {learning_rate: x}\n")
    for key in ("run.steps", "run.seeed", "optimizer.learning_rate"):
        assert key in message


@pytest.mark.parametrize("kind", ["pickle", "code", "config of 10 MB"])
@pytest.mark.parametrize(
    "words", [["ppo", "--reward", "length"], ["reward", "--pairs", "pairs.jsonl"]], ids=["ppo", "reward"]
)
def test_a_model_that_would_run_code_is_refused_before_a_run_folder_is_made(
    folder: Path, capsys: Capture, kind: str, words: list[str]
) -> None:
    model, canary = folder / "model", folder / "canary"
    model.mkdir()
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 3)
    (model / "config.json").write_text('{"model_type": "llama"}')

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(canary),)

    if kind == "pickle":
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
        expected = "Tunesmith reads safetensors alone"
    elif kind == "code":
        (model / "model.safetensors").write_bytes(b"")
        (model / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "mine.Mine"}}))
        (model / "mine.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
        expected = "set model.trust_remote_code to true"
    else:
        (model / "config.json").write_text(" " * 10_000_000 + "{}")
        expected = "10,000,002 bytes, more than"
    assert expected in refused(capsys, folder, "train", *words, "--model", "model", "--steps", "1")
    assert not canary.exists()
