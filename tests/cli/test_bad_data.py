"""Data and rewards that cannot be used, through the real command line: exit code 2, one message that names file and
line, no trace on disk. Odd but good text trains.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunesmith.apps.cli.main import main

pytestmark = pytest.mark.usefixtures("own_logging")

Capture = pytest.CaptureFixture[str]
GOOD_PAIR = {"prompt": "The film was", "chosen": " a joy", "rejected": " dull"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts)


def refused(capsys: Capture, folder: Path, *words: str) -> str:
    """The one message with which the command ends."""
    before = everything_in(folder)
    capsys.readouterr()
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err
    assert everything_in(folder) == before
    return captured.err


def train(algorithm: str, source: str) -> list[str]:
    words = ["train", algorithm, "--model", "tiny:llama", "--steps", "1", "--rollout.max-new-tokens", "4"]
    if algorithm == "reward":
        return [*words[:-2], "--pairs", source]
    if algorithm == "sft":
        return [*words[:-2], "--demonstrations", source]
    return [*words, "--prompts", source, "--reward", "length"]


def line(**columns: object) -> bytes:
    return json.dumps(columns).encode() + b"\n"


def pair(**columns: object) -> bytes:
    return line(**{**GOOD_PAIR, **columns})


PROMPT, PAIR = line(prompt="The film was"), pair()
DEMONSTRATION = line(prompt="The film was", completion=" a joy")

BAD_ANYWHERE: dict[str, tuple[bytes, str]] = {
    "blank line": (b"\n", "blank line"),
    "no JSON": (b"not json\n", "not JSON"),
    "a list": (b"[1, 2]\n", "a list, not an object"),
    "a number": (b"3\n", "a number, not an object"),
    "NaN": (b'{"prompt": NaN, "chosen": "a", "rejected": "b"}\n', "NaN is no JSON number"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}\n', "key `prompt` is given twice"),
    "not UTF-8": (b'{"prompt": "\xff"}\n', "not UTF-8"),
    "nested too deeply": (b'{"prompt": ' + b"[" * 100_000 + b"\n", "nested too deeply"),
}
BAD_PROMPTS: dict[str, tuple[bytes, str]] = {
    **BAD_ANYWHERE,
    "missing field": (line(promt="A"), "no column `prompt`; the row has `promt`"),
    "wrong type": (line(prompt=3), "`prompt` is a number; give text or a list of messages"),
    "null": (line(prompt=None), "`prompt` is null"),
    "empty": (line(prompt=""), "empty"),
    "empty conversation": (line(prompt=[]), "empty"),
    "unknown role": (line(prompt=[{"role": "boss", "content": "Hi"}]), "boss"),
    "NUL": (line(prompt="a\x00b"), "a text holds a NUL character"),
    "lone surrogate": (line(prompt="a\ud800b"), "a text holds a lone surrogate (U+D800)"),
    "lone surrogate in another column": (line(prompt="A", answer="\udfff"), "lone surrogate (U+DFFF)"),
    "longer than max_tokens": (line(prompt="word " * 200), "tokens"),
    "a megabyte": (line(prompt="word " * 200_000), "tokens"),
}
BAD_DEMONSTRATIONS: dict[str, tuple[bytes, str]] = {
    **BAD_ANYWHERE,
    "missing field": (line(prompt="A"), "no column `completion`; the row has `prompt`"),
    "wrong type": (line(prompt="A", completion=3), "`completion` is a number"),
    "empty": (line(text=" "), "`text` is empty"),
    "no answer": (line(messages=[{"role": "user", "content": "Hi"}]), "no turn of the assistant"),
    "two forms": (line(prompt="A", completion=[{"role": "assistant", "content": "b"}]), "`prompt` is text but"),
    "NUL": (line(text="a\x00b"), "a text holds a NUL character"),
    "longer than max_tokens": (line(prompt="A", completion="word " * 300), "tokens"),
}
BAD_PAIRS: dict[str, tuple[bytes, str]] = {
    **BAD_ANYWHERE,
    "missing field": (line(prompt="A", chosen="b"), "no column `rejected`"),
    "wrong type": (pair(chosen=3), "`chosen` is a number"),
    "null": (pair(rejected=None), "`rejected` is null"),
    "empty completion": (pair(chosen=""), "`chosen` is empty"),
    "chosen equals rejected": (pair(chosen=" dull"), "`chosen` and `rejected` are the same"),
    "a margin below 0": (pair(margin=-1), "margin"),
    "a margin that is text": (pair(margin="wide"), "margin"),
    "a tie that is text": (pair(tie="perhaps"), "tie"),
    "one completion": (line(prompt="A", completions=["b"]), "completions"),
    "NUL": (pair(chosen="a\x00b"), "a text holds a NUL character"),
    "lone surrogate": (pair(rejected="\udc00"), "a text holds a lone surrogate (U+DC00)"),
    "longer than max_tokens": (pair(chosen="word " * 300), "tokens"),
    "a megabyte": (pair(chosen="word " * 200_000), "tokens"),
}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_with_file_and_line(algorithm: str, name: str, folder: Path, capsys: Capture) -> None:
    bad, problem = BAD_PROMPTS[name]
    (folder / "mine.jsonl").write_bytes(PROMPT + bad + PROMPT)
    message = refused(capsys, folder, *train(algorithm, "mine.jsonl"))
    assert "mine.jsonl:2: " in message
    assert problem in message
    assert "1 bad row of 3" in message
    assert len(message) < 1000


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_a_bad_pair_is_refused_with_file_and_line(name: str, folder: Path, capsys: Capture) -> None:
    bad, problem = BAD_PAIRS[name]
    (folder / "mine.jsonl").write_bytes(PAIR + bad + PAIR)
    message = refused(capsys, folder, *train("reward", "mine.jsonl"))
    assert "mine.jsonl:2: " in message
    assert problem in message
    assert "1 bad row of 3" in message
    assert len(message) < 1000


@pytest.mark.parametrize("name", BAD_DEMONSTRATIONS)
def test_a_bad_demonstration_is_refused_with_file_and_line(name: str, folder: Path, capsys: Capture) -> None:
    bad, problem = BAD_DEMONSTRATIONS[name]
    (folder / "mine.jsonl").write_bytes(DEMONSTRATION + bad + DEMONSTRATION)
    message = refused(capsys, folder, *train("sft", "mine.jsonl"))
    assert "mine.jsonl:2: " in message
    assert problem in message
    assert "1 bad row of 3" in message
    assert len(message) < 1000


def test_skip_bad_drops_and_counts_demonstrations(folder: Path) -> None:
    bad = [row for row, _ in BAD_DEMONSTRATIONS.values()]
    (folder / "mine.jsonl").write_bytes(b"".join([*bad, DEMONSTRATION, DEMONSTRATION.replace(b"film", b"end")]))
    assert main([*train("sft", "mine.jsonl"), "--skip-bad", "--demonstrations.heldout-fraction", "0"]) == 0
    tally = json.loads((the_run(folder) / "data.json").read_text())["tally"]
    assert (tally["num_rows"], tally["num_used"]) == (len(bad) + 2, 2)


@pytest.mark.parametrize(
    ("algorithm", "row"), [("ppo", PROMPT), ("grpo", PROMPT), ("reward", PAIR)], ids=["ppo", "grpo", "reward"]
)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row: row * 2 + row[:-5], "mine.jsonl:3: the last line is cut off"),
        (lambda row: 2 * row.replace(b"{", b'{"id": 7, '), "mine.jsonl:2: id '7' is already at mine.jsonl:1"),
        (lambda row: b"", "mine.jsonl has no rows"),
        (lambda row: b"\n\n", "mine.jsonl has no rows"),
        (lambda row: row.decode().encode("utf-16"), "mine.jsonl is UTF-16; save it as UTF-8"),
        (lambda row: b"\x1f\x8b\x08broken", "damaged or cut-off gzip file"),
    ],
    ids=["cut last line", "duplicate id", "empty", "blank lines alone", "UTF-16", "damaged gzip"],
)
def test_a_bad_file_is_refused(
    algorithm: str, row: bytes, change: Callable[[bytes], bytes], problem: str, folder: Path, capsys: Capture
) -> None:
    (folder / "mine.jsonl").write_bytes(change(row))
    assert problem in refused(capsys, folder, *train(algorithm, "mine.jsonl"))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reward"])
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("none.jsonl", "none.jsonl does not exist"),
        ("mine.jsonk", "did you mean mine.jsonl?"),
        ("plain", "plain is a folder, but none that the datasets library saved"),
        ("mine.txt", "mine.txt: unknown kind of file"),
        ("mine.parquet", "mine.parquet"),
    ],
)
def test_a_source_that_is_no_data_is_refused(
    algorithm: str, source: str, problem: str, folder: Path, capsys: Capture
) -> None:
    (folder / "mine.jsonl").write_bytes(PROMPT)
    (folder / "plain").mkdir()
    (folder / "mine.txt").write_text("text")
    (folder / "mine.parquet").write_bytes(b"PAR1 no more")
    assert problem in refused(capsys, folder, *train(algorithm, source))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("lenght", "did you mean"),
        ("./none.py:score", "none.py"),
        ("./mine.py:scroe", "mine.py has no `scroe`"),
        ("./broken.py:score", "broken.py"),
        ("./mine.py:number", "cannot be called"),
        ("no.such.module:score", "no.such.module"),
        ("plain", "plain"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused(
    algorithm: str, source: str, problem: str, folder: Path, capsys: Capture
) -> None:
    (folder / "mine.jsonl").write_bytes(PROMPT)
    (folder / "mine.py").write_text("number = 3\ndef score(completions, **_):\n    return [1.0] * len(completions)\n")
    (folder / "broken.py").write_text("def score(:\n")
    (folder / "plain").mkdir()
    words = train(algorithm, "mine.jsonl")
    message = refused(capsys, folder, *words[: words.index("--reward")], "--reward", source)
    assert problem in message


def the_run(folder: Path) -> Path:
    (run_dir,) = (folder / "runs").iterdir()
    return run_dir


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in file.read_text(encoding="utf-8").split("\n") if row]


ODD = {
    "emoji": "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd",
    "combined": "a\u0301 \ufdfa",
    "line separators": "a\u2028b\u0085c",
    "a byte order mark": "\ufeff mark",
    "control": "\x1b[31mred",
}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("name", ODD)
def test_odd_but_good_text_is_trained_on_and_written_down_as_it_was(algorithm: str, name: str, folder: Path) -> None:
    """In a file with a byte order mark, on lines of a megabyte."""
    text = ODD[name]
    (folder / "mine.jsonl").write_bytes(b"\xef\xbb\xbf" + line(prompt=text, note="x" * 1_000_000))
    assert main(train(algorithm, "mine.jsonl")) == 0
    samples = rows_of(the_run(folder) / "samples.jsonl")
    assert {sample["prompt"] for sample in samples} == {text}
    assert rows_of(the_run(folder) / "metrics.jsonl")[0]["step"] == 1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reward"])
def test_skip_bad_drops_and_counts(algorithm: str, folder: Path) -> None:
    kinds = BAD_PAIRS if algorithm == "reward" else BAD_PROMPTS
    good = [PAIR.replace(b"film", f"film {i}".encode()) for i in range(6)] if algorithm == "reward" else [PROMPT] * 2
    (folder / "mine.jsonl").write_bytes(b"".join([bad for bad, _ in kinds.values()] + good))
    assert main([*train(algorithm, "mine.jsonl"), "--skip-bad"]) == 0
    tally = json.loads((the_run(folder) / "data.json").read_text())["tally"]
    assert tally["num_rows"] == len(kinds) + len(good)
    assert tally["num_used"] == len(good)
    assert sum(tally["reasons"].values()) == len(kinds)
    (finding,) = [row for row in rows_of(the_run(folder) / "findings.jsonl") if row["name"] == "bad_rows"]
    assert f"{len(good)} of {tally['num_rows']} rows used" in finding["message"]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reward"])
def test_skip_bad_of_nothing_but_bad_rows_is_refused(algorithm: str, folder: Path, capsys: Capture) -> None:
    (folder / "mine.jsonl").write_bytes(b"{}\n" * 3)
    message = refused(capsys, folder, *train(algorithm, "mine.jsonl"), "--skip-bad")
    assert "none is left to use" in message


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_prompt_in_training_and_evaluation_is_a_finding(algorithm: str, folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(line(prompt="The film was") + line(prompt="A story"))
    (folder / "test.jsonl").write_bytes(line(prompt="the  FILM was") + line(prompt="Something new"))
    assert main([*train(algorithm, "train.jsonl"), "--prompts.heldout-source", "test.jsonl"]) == 0
    (leak,) = [row for row in rows_of(the_run(folder) / "findings.jsonl") if row["name"] == "leak"]
    assert "1 of 2 held-out prompts are trained on (test.jsonl:1 = train.jsonl:1)" in leak["message"]


def test_pairs_in_training_and_evaluation_are_a_finding(folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(b"".join(pair(prompt=f"Film {i}") for i in range(6)))
    (folder / "test.jsonl").write_bytes(pair(prompt="film 3") + pair(prompt="New"))
    assert main([*train("reward", "train.jsonl"), "--pairs.heldout-source", "test.jsonl"]) == 0
    (leak,) = [row for row in rows_of(the_run(folder) / "findings.jsonl") if row["name"] == "leak"]
    assert "1 of 2 held-out prompts are trained on (test.jsonl:1 = train.jsonl:4)" in leak["message"]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_one_prompt_given_twice_is_two_rows(algorithm: str, folder: Path) -> None:
    """Two rows of one text stay two, and their completions are drawn apart."""
    (folder / "mine.jsonl").write_bytes(PROMPT * 2)
    assert main([*train(algorithm, "mine.jsonl"), "--rollout.prompts-per-step", "2"]) == 0
    samples = rows_of(the_run(folder) / "samples.jsonl")
    assert {sample["prompt"] for sample in samples} == {"The film was"}
    assert len({sample["completion"] for sample in samples}) > 1


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_prompt_longer_than_the_context_is_refused_though_max_tokens_allows_it(
    algorithm: str, folder: Path, capsys: Capture
) -> None:
    (folder / "mine.jsonl").write_bytes(line(prompt="word " * 2000))
    message = refused(capsys, folder, *train(algorithm, "mine.jsonl"), "--prompts.max-tokens", "100000")
    assert "mine.jsonl:1" in message
    assert "context" in message


def test_a_pair_longer_than_the_context_is_refused_though_max_tokens_allows_it(folder: Path, capsys: Capture) -> None:
    (folder / "mine.jsonl").write_bytes(pair(prompt="word " * 2000))
    words = ["train", "reward", "--model", "tiny:gpt2", "--steps", "1", "--pairs", "mine.jsonl"]
    message = refused(capsys, folder, *words, "--pairs.max-tokens", "100000")
    assert "mine.jsonl:1" in message
    assert "context" in message


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: None, "there is no run folder runs/mine"),
        (lambda folder: folder.mkdir(parents=True), "is no run folder"),
        (lambda folder: folder.parent.mkdir() or folder.write_text(""), "there is no run folder"),
    ],
    ids=["missing", "an empty folder", "a file"],
)
def test_a_resume_of_what_is_no_run_is_refused(
    make: Callable[[Path], object], problem: str, folder: Path, capsys: Capture
) -> None:
    make(folder / "runs" / "mine")
    assert problem in refused(capsys, folder, "resume", "runs/mine")
