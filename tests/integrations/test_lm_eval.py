"""lm-eval itself, over local files: its figures with our engine are those of its own backend of transformers.

lm-eval is no part of `dev`, because it needs an older python-dateutil; the first test brings the extra `eval` into an
environment of its own, and runs the others there.

    python -m pytest tests/integrations/test_lm_eval.py -m nightly
"""

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness
from tunesmith import train
from tunesmith.apps.cli.main import main
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.faults import VARIABLE
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parent.parent.parent
IS_HERE = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not IS_HERE, reason="needs the package lm_eval")
PIP_S = 500

COLOURS = {"the sky": "blue", "grass": "green", "blood": "red", "snow": "white", "coal": "black", "a lemon": "yellow"}
WORDS = ["film", "story", "music", "quiet", "long", "dull", "warm", "and", "the", "was", "with", "a", "very", "one"]


@pytest.mark.skipif(IS_HERE, reason="lm_eval is here, so the tests below run")
def test_the_extra_brings_a_package_with_which_these_tests_pass(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = tmp_path / "bin" / "python"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *extras["eval"]]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=PIP_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip took longer than {PIP_S} s")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"pip cannot bring the extra eval: {'; '.join(lines) or 'pip failed'}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "nightly", "-rs", Path(__file__)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "1 skipped" in done.stdout, done.stdout[-5000:]


def write_task(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], **settings: Any) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **settings}
    (folder / f"{name}.yaml").write_text(json.dumps(task))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A choice, a choice with examples, texts, other texts, a sampled one, and a group of the choices."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = random.Random(0)
    names = list(COLOURS.values())
    asked = [
        {"question": f"{' '.join(rng.choices(WORDS, k=n % 7))} What colour is {thing}?", "choices": names, "answer": at}
        for n in range(4)
        for at, thing in enumerate(COLOURS)
    ]
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    write_task(folder, "colours", asked, **choice)
    write_task(folder, "shown_colours", asked, fewshot_split="test", num_fewshot=2, **choice)
    sums = [{"question": f"{n} + {n} =", "answer": str(2 * n)} for n in range(10)]
    told = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}],
        "filter_list": [{"name": "first", "filter": [{"function": "take_first"}]}],
    }
    write_task(folder, "sums", sums, generation_kwargs={"until": ["e", "\n"], "max_gen_toks": 12}, **told)
    write_task(folder, "beams", sums, generation_kwargs={"until": [], "num_beams": 4, "max_gen_toks": 4}, **told)
    write_task(folder, "endless", sums, generation_kwargs={"until": [], "max_gen_toks": 10_000}, **told)
    reviews = [{"text": " ".join(rng.choices(WORDS, k=length))} for length in (3, 60, 200)]
    perplexity = {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}]}
    write_task(folder, "reviews", reviews, output_type="loglikelihood_rolling", **perplexity)
    write_task(folder, "broken", sums, **{**told, "doc_to_text": "{{question.no.such}}"})
    group = {"group": "all_colours", "task": ["colours", "shown_colours"]}
    (folder / "group.yaml").write_text(json.dumps({**group, "aggregate_metric_list": [{"metric": "acc"}]}))
    return folder


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_policy("tiny:llama", dtype=torch.float32)


class Request:
    """As lm-eval's `Instance`."""

    task_name = "none"

    def __init__(self, *args: Any) -> None:
        self.args = args


def both(loaded: LoadedModel) -> tuple[Any, Any]:
    """Our model, and lm-eval's own."""
    from lm_eval.models.huggingface import HFLM

    from tunesmith.integrations.lm_eval.model import TunesmithLM

    return TunesmithLM(loaded), HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=3, device="cpu")


@needs_lm_eval
@pytest.mark.parametrize("task", ["colours", "shown_colours", "all_colours", "sums", "reviews"])
def test_the_figures_are_those_of_lm_evals_own_backend(task: str, folder: Path, loaded: LoadedModel) -> None:
    from tunesmith.integrations.lm_eval.tasks import Tasks, TaskSettings

    tasks = Tasks(TaskSettings((task,), folder))
    ours, theirs = (tasks.evaluate(lm, tasks.load()) for lm in both(loaded))
    assert [figure.key for figure in ours] == [figure.key for figure in theirs] != []
    assert [figure.value for figure in ours] == pytest.approx([figure.value for figure in theirs], rel=1e-4)
    assert [figure.of_question for figure in ours] == [figure.of_question for figure in theirs]
    if task == "all_colours":
        assert len(ours[0].of_question) == ours[0].num_questions == 48


@needs_lm_eval
def test_log_likelihoods_and_texts_are_those_of_lm_evals_own_backend(loaded: LoadedModel) -> None:
    ours, theirs = both(loaded)
    long = " ".join(WORDS * 12)  # longer than the context
    pairs = [
        ("The film", " was"),
        ("The film", " was long"),
        ("", "one two"),
        ("Ends in a space ", "and"),
        (long, " a"),
    ]
    answers = [lm.loglikelihood([Request(*pair) for pair in pairs]) for lm in (ours, theirs)]
    assert [logp for logp, _ in answers[0]] == pytest.approx([logp for logp, _ in answers[1]], abs=1e-3)
    assert [greedy for _, greedy in answers[0]] == [greedy for _, greedy in answers[1]]
    texts = [Request(text) for text in ("", "one", long, long[:256], long[:257])]
    ours_read, theirs_read = (lm.loglikelihood_rolling(texts) for lm in (ours, theirs))
    assert ours_read == pytest.approx(theirs_read, abs=1e-2)
    settings = ({"until": ["e"], "max_gen_toks": 20}, {"until": "a", "max_gen_toks": 6}, {"max_gen_toks": 3})
    asked = [Request(text, given) for text in ("one two", "The", long) for given in settings]
    assert ours.generate_until(asked) == theirs.generate_until(asked)


@needs_lm_eval
def test_a_sampled_text_depends_on_the_seed_alone(loaded: LoadedModel) -> None:
    from tunesmith.integrations.lm_eval.model import TunesmithLM

    given = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 0.9, "top_p": 0.95}
    asked = [Request("one two", given), Request("one two", given)]
    first, again, other = (TunesmithLM(loaded, seed=seed).generate_until(asked) for seed in (1, 1, 2))
    assert first == again != other and first[0] != first[1]


@needs_lm_eval
def test_a_run_and_its_base_are_in_one_table_kept_with_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taught = [{"prompt": f"Question: What colour is {a}?\nAnswer:", "completion": f" {b}"} for a, b in COLOURS.items()]
    run = train.sft(
        model="tiny:llama",
        demonstrations=taught * 4,
        steps=30,
        **{"run.dir": str(tmp_path), "optimizer.learning_rate": 3e-3, "demonstrations.heldout_fraction": 0},
    ).run_dir
    capsys.readouterr()
    words = ["eval", str(run), "--tasks", "colours,sums", "--include-path", str(folder), "--limit", "6"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (facts["before"], facts["steps"], facts["limit"]) == ("tiny:llama", 30, 6)
    accuracy = next(row for row in facts["rows"] if (row["task"], row["metric"]) == ("colours", "acc"))
    assert accuracy["before"] < 0.5 < accuracy["after"] == 1.0 and accuracy["low"] > 0
    (line,) = (run / "benchmarks.jsonl").read_text().splitlines()
    assert json.loads(line)["rows"] == facts["rows"]
    assert "Standard benchmarks" in (run / "report.html").read_text()
    assert main([*words, "--alone"]) == 0
    out = capsys.readouterr().out
    assert "standard error" in out and "difference" not in out
    assert len((run / "benchmarks.jsonl").read_text().splitlines()) == 2


@needs_lm_eval
def test_a_killed_evaluation_of_a_run_goes_on_to_the_same_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taught = [{"prompt": f"Question: What colour is {a}?\nAnswer:", "completion": f" {b}"} for a, b in COLOURS.items()]
    run = train.sft(
        model="tiny:llama",
        demonstrations=taught,
        steps=2,
        **{"run.dir": str(tmp_path / "runs"), "demonstrations.heldout_fraction": 0},
    ).run_dir
    undisturbed = shutil.copytree(run, tmp_path / "undisturbed")
    words = ["--tasks", "all_colours,sums,reviews", "--include-path", str(folder), "--json"]

    def rows_of(asked: Path, *more: str) -> object:
        capsys.readouterr()
        assert main(["eval", str(asked), *words, *more]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]

    path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    file, num_lines = run / "benchmark_answers.jsonl", [0]
    for visit in (2, 3, 9):  # in the first texts, in those of perplexity or choices, in the second model
        environment = {**os.environ, "PYTHONPATH": path, VARIABLE: f"evaluation/answered:kill:{visit}"}
        command = [sys.executable, "-m", "tunesmith", "eval", str(run), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
        num_lines.append(len(file.read_text().splitlines()))
        assert num_lines[-1] - num_lines[-2] == visit - 1  # what was answered before is not answered again
    expected = rows_of(undisturbed)
    assert rows_of(run) == expected
    whole = file.read_bytes()
    assert rows_of(run) == expected and file.read_bytes() == whole
    assert rows_of(run, "--limit", "4") == rows_of(undisturbed, "--limit", "4") != expected  # other questions


@needs_lm_eval
@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("colors", "did you mean colours?"),
        ("sums,nothing_at_all_*", "there is no task 'nothing_at_all_*' in lm-eval nor in"),
        ("beams", "draws with num_beams=4, which the engine does not have; it has until"),
        ("endless", "draws 10000 tokens, but the model's context holds 256"),
        ("broken", "a template of the tasks broken does not fit"),
        ("arc_easy", "without a network give tasks over files of yours with --include-path"),
    ],
)
def test_what_cannot_be_asked_says_why(
    tasks: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert main(["eval", "tiny:llama", "--tasks", tasks, "--include-path", str(folder)]) == 2
    assert message in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ("", {}, "the data of the tasks odd cannot be read: a file has no rows; mend the files"),
        ('{"question": "cut', {}, "the data of the tasks odd cannot be read: JSON parse error"),
        ('{"question": "x", "choices": null, "answer": 0}\n', {}, "the tasks odd cannot be evaluated: TypeError"),
        ('{"question": "x", "choices": [], "answer": 0}\n', {}, "the tasks odd cannot be evaluated: ValueError"),
        (None, {"aggregation": "none_such"}, "the tasks odd cannot be evaluated: TypeError"),
        (None, {"metric": "none_such"}, "the tasks odd have no figure: lm-eval knows none of their metrics"),
    ],
)
def test_damaged_tasks_are_explained(
    rows: str | None,
    changes: Mapping[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    choices = {"doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "answer"}
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True, **changes}]
    good = [{"question": f"Which {number}?", "choices": ["a", "b"], "answer": 0} for number in range(8)]
    write_task(tmp_path, "odd", good, output_type="multiple_choice", metric_list=metrics, **choices)
    file = tmp_path / "odd.jsonl"
    if rows is not None:
        file.write_text(file.read_text() + rows if rows else "")
    assert main(["eval", "tiny:llama", "--tasks", "odd", "--include-path", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.parametrize("task", ["endless", "beams"])
def test_a_text_that_cannot_be_drawn_is_refused_before_the_first_question(
    task: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunesmith.integrations.lm_eval.model import TunesmithLM

    asked: list[object] = []
    monkeypatch.setattr(TunesmithLM, "loglikelihood", lambda _, requests, **__: asked.append(requests))
    assert main(["eval", "tiny:llama", "--tasks", f"colours,{task}", "--include-path", str(folder)]) == 2
    assert f"the task {task} draws" in capsys.readouterr().err
    assert not asked


@needs_lm_eval
def test_a_task_that_runs_code_must_be_allowed(folder: Path, tmp_path: Path) -> None:
    from tunesmith.integrations.lm_eval.tasks import Tasks, TaskSettings

    task = json.loads((folder / "sums.yaml").read_text())
    (tmp_path / "unsafe.yaml").write_text(json.dumps({**task, "task": "unsafe", "unsafe_code": True}))
    with pytest.raises(InputError, match="unsafe executes code that the model wrote; allow it with --runs-code"):
        Tasks(TaskSettings(("unsafe",), tmp_path)).load()
    assert Tasks(TaskSettings(("unsafe",), tmp_path, runs_code=True)).load()["tasks"]


@needs_lm_eval
@pytest.mark.skipif(not os.environ.get("TUNESMITH_DATA"), reason="TUNESMITH_DATA names no folder with the test data")
def test_the_benchmark_finds_equal_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny:llama", "--dtype", "float32", "--rounds", "1", "--threads", "1", "--batch-sizes", "2"]
    assert harness.main([*words, "--quick", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(facts["tasks"]) == {"gsm8k_choices", "polarity", "gsm8k", "reviews"}
    assert facts["largest_difference"] <= harness.BOUND
    for row in facts["tasks"].values():
        assert row["ratio_median"] > 0 and row["cpu_ratio_median"] > 0 and row["questions"] == 4
        assert all(metric["equal_questions"] in (None, 1.0) for metric in row["metrics"])
