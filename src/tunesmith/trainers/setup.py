"""What every trainer's `run` does around its steps: threads, run folder, progress, trackers, checkpoints, report."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tunesmith.config.schema import PPORecipe, RewardRecipe
from tunesmith.core.errors import ModelError, TrainingError
from tunesmith.core.log import get_logger
from tunesmith.distributed.checkpoint import Checkpoint, save
from tunesmith.models.optimizer import StepReport
from tunesmith.reports.html import write_run_report
from tunesmith.telemetry.environment import peak_rss_gb, rss_gb, usable_cores
from tunesmith.telemetry.progress import Reporter, progress
from tunesmith.telemetry.run_folder import RunFolder
from tunesmith.telemetry.trackers import Tracker, check_trackers, open_trackers

_log = get_logger(__name__)

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: its folder, the metrics of each step, and a summary of a few figures."""

    run_dir: Path
    metrics: Sequence[Metrics]
    summary: Mapping[str, object] = field(default_factory=dict[str, object])

    def generate(self, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.7, seed: int = 0) -> str:
        """The trained policy's continuation of `prompt`; the model is loaded from the run's `final/`.

        Raises:
            ModelError: if this run trained a reward model, which writes no text.
        """
        from tunesmith.batch.rollout import SamplingParams
        from tunesmith.config.schema import ModelSection
        from tunesmith.models.load import load_policy
        from tunesmith.rollout.transformers_backend import TransformersEngine
        from tunesmith.schema.records import Prompt

        if self.summary.get("algorithm") == "reward":
            raise ModelError(
                f"{self.run_dir} holds a reward model, which scores text and writes none; use the run of a policy"
            )
        loaded = load_policy(ModelSection(name=str(self.run_dir / "final")))
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        (group,) = TransformersEngine(loaded.model, loaded.tokenizer).generate([Prompt("0", prompt)], 1, sampling)
        return group.completions[0].text


class Session:
    """An open run: where steps are recorded."""

    def __init__(
        self, cfg: RewardRecipe | PPORecipe, folder: RunFolder, trackers: list[Tracker], reporter: Reporter
    ) -> None:
        self.cfg = cfg
        self.folder = folder
        self.metrics: list[Metrics] = []
        self._trackers = trackers
        self._reporter = reporter

    def record(self, step: int, metrics: Mapping[str, float], shown: Sequence[str]) -> None:
        """Write the metrics of `step` (counted from 1) and show the ones named in `shown`."""
        row = {**metrics, "memory/rss_gb": rss_gb(), "memory/peak_rss_gb": peak_rss_gb()}
        self.metrics.append({"step": step, **row})
        self.folder.append_metrics(step, row)
        for tracker in self._trackers:
            tracker.log(step, row)
        if step % self.cfg.run.log_every == 0:
            self._reporter.update(step, {name.rsplit("/", 1)[-1]: row[name] for name in shown if name in row})

    def checkpoint(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        state: Mapping[str, object],
        *,
        is_last: bool,
    ) -> None:
        """Write a checkpoint where the recipe wants one after `step`."""
        every = self.cfg.run.checkpoint_every
        if every and (is_last or step % every == 0):
            save(self.folder.checkpoints, Checkpoint(step, tensors, state), keep=self.cfg.run.keep_checkpoints)

    def finish(self, summary: Mapping[str, object]) -> RunResult:
        """Write summary and report; the run's result."""
        self.folder.write_json("result.json", summary)
        write_run_report(self.folder.path)
        _log.info("run written to %s", self.folder.path)
        return RunResult(self.folder.path, tuple(self.metrics), dict(summary))

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()


@contextmanager
def session(
    cfg: RewardRecipe | PPORecipe, num_steps: int, *, provenance: Mapping[str, str] | None, show_progress: bool
) -> Iterator[Session]:
    """An open run for `cfg`; when the block ends, also by an error, trackers are closed and what was written stays."""
    check_trackers(cfg.run.report_to)
    recipe = cfg.model_dump(mode="json")
    folder = RunFolder.create(Path(cfg.run.dir), cfg.run.name or cfg.algorithm, recipe, provenance)
    trackers = open_trackers(cfg.run.report_to, folder.path, recipe)
    with progress(f"train {cfg.algorithm}", num_steps, enabled=show_progress) as reporter:
        opened = Session(cfg, folder, trackers, reporter)
        try:
            yield opened
        finally:
            opened.close()


def prepare(cfg: RewardRecipe | PPORecipe) -> torch.device:
    """The device to train on, with the thread count and the seed of the run set."""
    torch.set_num_threads(cfg.run.num_threads or usable_cores())
    torch.manual_seed(cfg.run.seed)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_refused(report: StepReport, limit: int, run_dir: Path) -> None:
    """Say that a step was refused, and stop the run once `limit` of them came in a row.

    Raises:
        TrainingError: naming the first parameter whose gradient was not finite.
    """
    if not report.refused:
        return
    _log.warning("step refused: the gradient of %s is not finite; the weights stay as they were", report.bad_parameter)
    if report.num_refused_in_row >= limit:
        raise TrainingError(
            f"{report.num_refused_in_row} optimizer steps in a row had a gradient that is not finite, first in "
            f"{report.bad_parameter}; the weights are those of the last good step. Lower optimizer.learning_rate, or "
            f"look at the samples in {run_dir}"
        )


def say(message: str, *, enabled: bool) -> None:
    """One line on stderr for a person who watches, unless progress is off."""
    if enabled:
        sys.stderr.write(message + "\n")


class Stopwatch:
    """Seconds since it was made, monotonic."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    @property
    def minutes(self) -> float:
        """Minutes since it was made."""
        return (time.monotonic() - self._start_s) / 60
