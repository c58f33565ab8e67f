"""lm-eval's tasks by our engine against lm-eval's own backend of transformers: the same figures, and times as fast.

The tasks are over local files, for there may be no hub: word problems of GSM8K with four numbers to choose from and
with answers in words, the sentiment of single sentences, and the perplexity of film reviews. Both sides have the same
weights, precision and threads in one process, and work in turns; lm-eval's backend, which adds up log-probs in the
precision of the weights, is told to do so in float32, as we do. A time is that of the model: what reads files, makes
prompts and computes metrics is lm-eval's on both sides. Where other programs are busy, the processor's time
(`cpu_ratio`) says more than that of the clock. lm-eval's backend is tried at each of --batch-sizes, and its
fastest counts. Data: the folder TUNESMITH_DATA. It needs `pip install 'tunesmith[eval]'`.
"""

import gzip
import json
import os
import random
import tempfile
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import (
    Say,
    benchmark,
    head,
    in_turns,
    load_warning,
    paired,
    print_table,
    run,
    spread_text,
)
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.extras import naming_extras
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.learn.evaluation.benchmarks import Figure

OURS, THEIRS = "tunesmith", "lm-eval"
BOUND = 0.005
"""Most that a share may differ by: half a point."""

_METHODS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
_GSM8K = "math/gsm8k.train.jsonl.gz"
_POLARITY = "sentiment/nltk.sentence_polarity.zip"
_REVIEWS = "sentiment/imdb5k.text2vec.jsonl.gz"
_SIZES = {"gsm8k_choices": 200, "polarity": 200, "gsm8k": 48, "reviews": 32}

_MEAN = {"aggregation": "mean", "higher_is_better": True}
_CHOICE = {
    "output_type": "multiple_choice",
    "metric_list": [{"metric": "acc", **_MEAN}, {"metric": "acc_norm", **_MEAN}],
}
_TASKS: Mapping[str, Mapping[str, Any]] = {
    "gsm8k_choices": {
        **_CHOICE,
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
    },
    "polarity": {
        **_CHOICE,
        "doc_to_text": "Review: {{text}}\nSentiment:",
        "doc_to_choice": ["negative", "positive"],
        "doc_to_target": "label",
        "num_fewshot": 4,
    },
    "gsm8k": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "num_fewshot": 2,
        "generation_kwargs": {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "max_gen_toks": 128},
        "metric_list": [{"metric": "exact_match", **_MEAN, "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"]}],
        "filter_list": [
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                    {"function": "take_first"},
                ],
            }
        ],
    },
    "reviews": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name, "aggregation": name.replace("word", "weighted"), "higher_is_better": False}
            for name in ("word_perplexity", "bits_per_byte")
        ],
    },
}


def write_tasks(folder: Path, data: Path, most: int | None) -> None:
    """Write YAML and JSONL of all tasks, with at most so many questions."""
    rng = random.Random(0)
    problems = [
        {**row, "number": row["answer"].rpartition("#### ")[2].replace(",", "")} for row in _rows(data / _GSM8K)
    ]
    for problem in problems:
        wrong = list({str(abs(int(problem["number"]) + rng.choice((-10, -2, -1, 1, 3, 10)))) for _ in range(12)})
        choices = [problem["number"], *[number for number in wrong if number != problem["number"]][:3]]
        rng.shuffle(choices)
        problem |= {"choices": choices, "right": choices.index(problem["number"])}
    sentences: list[dict[str, object]] = []
    with zipfile.ZipFile(data / _POLARITY) as archive:
        for label, name in enumerate(("neg", "pos")):
            found = next(entry for entry in archive.namelist() if entry.endswith(f".{name}"))
            lines = archive.read(found).decode("latin-1").splitlines()
            sentences += [{"text": line.strip(), "label": label} for line in lines]
    rng.shuffle(sentences)
    reviews = [{"text": row["text"]} for row in _rows(data / _REVIEWS)]
    rows = {"gsm8k_choices": problems, "polarity": sentences, "gsm8k": problems, "reviews": reviews}
    for name, size in _SIZES.items():
        num = size if most is None else min(size, most)
        files = {"test": rows[name][:num], "train": rows[name][-16:]}
        for split, part in files.items():
            (folder / f"{name}.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {split: str(folder / f"{name}.{split}.jsonl") for split in files}},
            "test_split": "test",
            "fewshot_split": "train",
            "metadata": {"version": 1},
            **_TASKS[name],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def _rows(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of the clock and of the processor."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


class Clock:
    """Adds up the seconds that a model of lm-eval answers for: of the clock, and of the processor in all threads."""

    def __init__(self, lm: Any) -> None:
        self.spent = Spent()
        for name in _METHODS:
            setattr(lm, name, self._timed(getattr(lm, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            try:
                return method(*arguments, **options)
            finally:
                wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
                self.spent = Spent(self.spent.wall_s + wall_s, self.spent.cpu_s + cpu_s)

        return timed


class Side:
    """A model of lm-eval, its clock, and its figures of the last evaluation."""

    def __init__(self, lm: Any, folder: Path) -> None:
        self.lm, self.clock, self._folder = lm, Clock(lm), folder
        self.figures: Sequence[Figure] = ()

    def answer(self, task: str, limit: int | None = None) -> Spent:
        """The time that the model answers the questions of `task` for."""
        from tunesmith.integrations.lm_eval.tasks import Tasks, TaskSettings

        tasks = Tasks(TaskSettings((task,), self._folder, limit=limit))
        self.clock.spent = Spent()
        self.figures = tasks.evaluate(self.lm, tasks.load())
        return self.clock.spent


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark."""
    data = Path(os.environ.get("TUNESMITH_DATA", ""))
    if not all((data / name).is_file() for name in (_GSM8K, _POLARITY, _REVIEWS)):
        raise InputError(f"TUNESMITH_DATA is {str(data)!r}; give the folder that has {_GSM8K}, {_POLARITY}, {_REVIEWS}")
    loaded = load_policy(ModelSection.model_validate({"name": options.model, "dtype": options.dtype}))
    names = options.task or list(_SIZES)
    if unknown := [name for name in names if name not in _SIZES]:
        raise InputError(f"there is no task {unknown[0]!r}; there are {', '.join(_SIZES)}")
    most = 4 if options.quick else options.questions
    with _folder(data, most) as folder, naming_extras():
        tasks = {name: _measured(name, loaded, folder, options, say) for name in names}
    return {
        **head(options, "harness", "model", "dtype", "rounds", packages=("torch", "transformers", "lm_eval")),
        "tasks": tasks,
        "largest_difference": max(row["largest_difference"] for row in tasks.values()),
        "load": max((row["load"] for row in tasks.values()), key=lambda load: load["other_busy_cores"]["cores_max"]),
    }


@contextmanager
def _folder(data: Path, most: int | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        write_tasks(Path(name), data, most)
        yield Path(name)


def _measured(name: str, loaded: LoadedModel, folder: Path, options: Namespace, say: Say) -> dict[str, Any]:
    """The figures of both sides on one task."""
    from tunesmith.integrations.lm_eval.model import TunesmithLM

    say(f"{name}:")
    ours, theirs = Side(TunesmithLM(loaded), folder), _fastest(name, loaded, folder, options, say)
    for side in (ours, theirs):
        side.answer(name, limit=1)
    sides = {OURS: lambda _: ours.answer(name), THEIRS: lambda _: theirs.answer(name)}
    found, load = in_turns(
        sides, options.rounds, say, lambda spent: ", ".join(_line(spent[side][-1]) for side in sides)
    )
    wall_s = {side: [one.wall_s for one in spent] for side, spent in found.items()}
    cpu_s = {side: [one.cpu_s for one in spent] for side, spent in found.items()}
    figures = {figure.key: figure for figure in theirs.figures}
    metrics = [_compared(figure, figures[figure.key]) for figure in ours.figures]
    return {
        "questions": ours.figures[0].num_questions,
        "batch_size": theirs.lm.batch_size,
        "metrics": metrics,
        "largest_difference": max(metric["difference"] for metric in metrics),
        **paired(wall_s[THEIRS], wall_s[OURS]).facts("ratio"),
        **paired(cpu_s[THEIRS], cpu_s[OURS]).facts("cpu_ratio"),
        "seconds": {side: fmean(spent) for side, spent in wall_s.items()},
        "load": load,
    }


def _line(spent: Spent) -> str:
    return f"{spent.wall_s:.1f} s ({spent.cpu_s:.1f} s of the processor)"


def _fastest(name: str, loaded: LoadedModel, folder: Path, options: Namespace, say: Say) -> Side:
    """lm-eval's backend with the batch size that answers a part of the questions fastest."""
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    found: dict[float, Side] = {}
    for size in options.batch_sizes:
        lm = HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=size, device="cpu", softmax_dtype="float32")
        side = Side(lm, folder)
        if len(options.batch_sizes) == 1:
            return side
        spent = side.answer(name, limit=2 * max(options.batch_sizes))
        say(f"  lm-eval with {size} at a time: {_line(spent)}")
        found[spent.cpu_s] = side
    return found[min(found)]


def _compared(ours: Figure, theirs: Figure) -> dict[str, Any]:
    """A metric of both sides. Of shares `difference` is absolute, of others, as perplexities, relative."""
    is_share = bool(ours.of_question)
    difference = abs(ours.value - theirs.value) / (1.0 if is_share else abs(theirs.value))
    pairs = list(zip(ours.of_question, theirs.of_question, strict=True))
    return {
        "metric": ours.metric,
        "ours": ours.value,
        "theirs": theirs.value,
        "difference": difference,
        "equal_questions": fmean(a == b for a, b in pairs) if is_share else None,
    }


def show(facts: Mapping[str, Any]) -> None:
    """Print a line for each metric, then what holds."""
    rows = [
        (
            name,
            metric["metric"],
            str(row["questions"]),
            f"{metric['ours']:.4f}",
            f"{metric['theirs']:.4f}",
            "-" if metric["equal_questions"] is None else f"{metric['equal_questions']:.3f}",
            *(f"{row['seconds'][side]:.1f}" for side in (OURS, THEIRS)),
            spread_text(row),
            f"{row['cpu_ratio_median']:.2f}x",
        )
        for name, row in facts["tasks"].items()
        for metric in row["metrics"]
    ]
    print_table(
        ("task", "metric", "questions", OURS, THEIRS, "same", "s", "s, lm-eval", "times as fast", "processor"), rows
    )
    largest = facts["largest_difference"]
    print(
        f"largest difference {largest:.4f}, {'at most' if largest <= BOUND else 'ABOVE'} {BOUND}{load_warning(facts)}"
    )


main = benchmark(
    measure,
    show,
    "model",
    "threads",
    "rounds",
    "dtype",
    "quick",
    task={"action": "append", "metavar": "NAME", "help": f"one task; repeatable: {', '.join(_SIZES)}"},
    rounds={"default": 3},
    questions={"type": int, "metavar": "N", "help": "most questions of a task; each task's own number if left out"},
    batch_sizes={"type": int, "nargs": "+", "default": (1, 8, 32), "metavar": "N", "help": "of lm-eval's backend"},
)

if __name__ == "__main__":
    run("harness")
