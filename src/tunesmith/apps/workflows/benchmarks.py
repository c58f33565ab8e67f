"""`tunesmith eval`: lm-eval's tasks for a model and the one that it was trained from, kept with the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.log import get_logger
from tunesmith.base.runs.environment import package_version
from tunesmith.base.runs.folder import add_row
from tunesmith.base.runs.listing import is_run, number, read_object
from tunesmith.engine.models.load import load_policy
from tunesmith.integrations.lm_eval.model import TunesmithLM
from tunesmith.integrations.lm_eval.tasks import Tasks, TaskSettings
from tunesmith.learn.evaluation.benchmarks import BenchmarkRow, Figure, benchmark_rows
from tunesmith.learn.evaluation.kept import FILE as ANSWERS
from tunesmith.observe.reports.benchmark_figures import FILE
from tunesmith.observe.reports.html import write_run_report

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """The figures of the model `after`, and with a model `before` of both, on tasks asked by `settings`.

    `num_steps` are the steps that the run `after` had made; None if it is no run.
    """

    after: str
    before: str | None
    num_steps: int | None
    settings: TaskSettings
    rows: Sequence[BenchmarkRow]

    def to_json(self) -> dict[str, object]:
        """A line of the file `benchmarks.jsonl` in a run folder."""
        asked = self.settings
        return {
            "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "lm_eval": package_version("lm_eval"),
            "after": self.after,
            "before": self.before,
            "steps": self.num_steps,
            "tasks": list(asked.names),
            "include_path": None if asked.include_path is None else str(asked.include_path),
            "num_fewshot": asked.num_fewshot,
            "limit": asked.limit,
            "chat_template": asked.uses_chat_template,
            "rows": [row.to_json() for row in self.rows],
        }


def run_benchmarks(
    after: str,
    before: str | None,
    settings: TaskSettings,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    shows_progress: bool = False,
) -> Benchmarks:
    """The figures of the model named `after`, and of `before` if it is given, one model in memory at a time.

    If `after` is a run, the answers of both are kept in its folder, and those that are there serve again.

    Raises:
        InputError: a model or task cannot be used.
    """
    tasks = Tasks(settings)
    run = Path(after).expanduser()
    kept = run / ANSWERS if is_run(run) else None
    found: list[list[Figure]] = []
    for name in filter(None, (before, after)):
        loaded_tasks = tasks.load()  # before the model, which takes longer
        loaded = load_policy(ModelSection(name=name, dtype=dtype, trust_remote_code=trust_remote_code))
        _log.info("%s", name)
        lm = TunesmithLM(loaded, seed=seed, shows_progress=shows_progress, kept=kept)
        tasks.check(lm, loaded_tasks)
        found.append(tasks.evaluate(lm, loaded_tasks))
        if lm.kept.num_found:
            _log.info("%d answers of %s were in %s from before", lm.kept.num_found, name, kept)
    steps = number(read_object(run / "result.json").get("steps")) if is_run(run) else None
    rows = benchmark_rows(found[-1], found[0] if before is not None else None, seed=seed)
    return Benchmarks(after, before, None if steps is None else int(steps), settings, rows)


def keep(run: Path, found: Benchmarks) -> Path | None:
    """Add the figures to the run in the folder `run`, and write its report again; returns the report's path.

    None, with a warning, if they cannot be written: they took long, and are there to be printed.
    """
    try:
        add_row(run / FILE, found.to_json())
        return write_run_report(run)
    except OSError as error:
        _log.warning("the figures or the report cannot be kept in %s: %s", run, error.strerror or error)
        return None
