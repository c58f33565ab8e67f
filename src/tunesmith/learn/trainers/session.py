"""An open run: its folder and lock, and the work after each step: metrics, alarms, checkpoints, stop requests.

A run is resumed by the same code that starts it: `run` builds the learner of step 0, and `open_session` loads the
newest whole checkpoint into it.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from tunesmith.base.config.load import origins_of
from tunesmith.base.config.recipe import Recipe, SamplingRecipe
from tunesmith.base.config.schema import SPECS
from tunesmith.base.core.errors import CheckpointError, ProfiledError, RunError, StoppedError, TrainingError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.system import trim_memory, unused_heap_gb
from tunesmith.base.core.trace import Trace, span, trace
from tunesmith.base.runs.checkpoint import Checkpoint, CheckpointWriter, aside_folder
from tunesmith.base.runs.environment import peak_rss_gb, rss_gb
from tunesmith.base.runs.folder import PLACES, RunFolder
from tunesmith.base.runs.lock import RunLock
from tunesmith.base.runs.manifest import step_folder
from tunesmith.base.runs.progress import Reporter, progress
from tunesmith.base.runs.trackers import Track, tracking
from tunesmith.base.schema.records import Finding
from tunesmith.collect.data.sets import Facts
from tunesmith.engine.distributed.ranks import num_ranks, stages, tell
from tunesmith.learn.trainers import restart
from tunesmith.learn.trainers.alarms import alarms
from tunesmith.learn.trainers.api import Learner, Listener, Metrics, StepResult, Wishes
from tunesmith.learn.trainers.memory import memory_advice
from tunesmith.learn.trainers.setup import RunResult, Stopwatch
from tunesmith.learn.trainers.signals import StopRequest, stop_signals
from tunesmith.observe.profiling.diagnosis import slow_findings
from tunesmith.observe.profiling.meter import Meter, available_gb, metering
from tunesmith.observe.profiling.recorder import StepProfiler
from tunesmith.observe.profiling.stage import Stage
from tunesmith.observe.profiling.watchdog import watched
from tunesmith.observe.reports.html import write_run_report

_log = get_logger(__name__)

_MAX_REFUSED_DUMPS = 20


@dataclass(frozen=True, slots=True)
class Job:
    """A learner, the length of its run, and the hashes that a resumed run must find unchanged.

    With `profile_steps` the run ends once it has profiled that many. `listener` is told of its events.
    """

    learner: Learner
    num_steps: int
    identity: Mapping[str, str]
    profile_steps: int = 0
    listener: Listener = field(default_factory=Listener)


class Session:
    """An open run. `facts` are figures kept in checkpoints, such as an accuracy measured before the first step; `meter`
    measures the steps, None measures nothing.
    """

    def __init__(
        self,
        cfg: Recipe,
        folder: RunFolder,
        job: "Job",
        stop: StopRequest,
        trackers: Sequence[Track],
        reporter: Reporter,
        meter: Meter | None,
    ) -> None:
        self.cfg = cfg
        self.folder = folder
        self.metrics: list[Metrics] = []
        self.facts: dict[str, object] = {}
        self.first_step = 0
        self.stage = Stage(None)
        self._job = job
        self._stop = stop
        self._trackers = trackers
        self._reporter = reporter
        self.meter = meter
        self._measured: Metrics = {}
        self._places: list[dict[str, object]] = []
        self._between = Trace()  # what follows a step delays the next one, and is a part of its time
        self._watch = Stopwatch()
        self._num_findings = 0
        self._writer = CheckpointWriter(folder.checkpoints, cfg.run.keep_checkpoints)
        self._saved_step: int | None = None
        self._wishes = Wishes()
        self._profiler = StepProfiler(folder.path, job.profile_steps)

    def steps(self) -> Iterator[int]:
        """Indices, from 0, of the remaining steps, until the listener asks for the end."""
        self._job.listener.begin(self.cfg, self._job.learner, self.folder.path, self.first_step, self._job.num_steps)
        self._reporter.begin(self.first_step)
        self._close_step(self.first_step)
        if self.meter is not None:
            self.meter.begin(self.first_step + 1, is_new=True)
        with trace(self._between):
            self._profiler.between_steps(self.first_step)
        yield from takewhile(lambda _: not self._wishes.stop, range(self.first_step, self._job.num_steps))

    def is_due(self, index: int, every: int) -> bool:
        """True at every `every`-th step and at the last; with 0 at the last alone."""
        return index + 1 == self._job.num_steps or bool(every and (index + 1) % every == 0)

    @contextmanager
    def working(self) -> Iterator[Trace]:
        """The trace of a step, from the end of the step before. If memory runs out inside, the error names the stage
        and the setting to lower.
        """
        self.stage.beat(min(self.num_done + 1, self._job.num_steps), "between stages")
        with trace(self._between) as times, memory_advice(self.cfg, times, self.folder.path):
            yield times
        self._close_step(self.num_done + 1)

    def _close_step(self, step: int) -> None:
        """Begin the time of the next step, and measure `step`, which has ended."""
        self._between = Trace()
        with trace(self._between), span("log"):
            self._measured = {} if self.meter is None else self.meter.step()
            is_last = step == self._job.num_steps
            self._places = [] if self.meter is None else self.meter.places(step, is_last=is_last)

    def end_step(self, step: int, result: StepResult) -> None:
        """Record `step` (counted from 1), check for alarms, save a checkpoint if one is due, stop if a signal asked.

        The checkpoint is written while the next step runs; recording that step waits until it is on disk. Freed memory
        is kept for the next step, unless there is more of it than the system has left for all.

        Raises:
            TrainingError: if too many steps in a row were refused, naming the parameter whose gradient was bad.
            StoppedError: after SIGTERM or SIGINT, once the checkpoint is written.
            ProfiledError: once the profile that the run was started for is recorded.
        """
        with trace(self._between):
            with span("checkpoint"):
                self._settle()
            with span("log"):
                self._record(step, result)
            with span("callback"):
                self._wishes = self._job.listener.step_ended(step, dict(self.metrics[-1]))
            every = self.cfg.run.checkpoint_every
            if self._wishes.save or (every and self.is_due(step - 1, every)):
                with span("checkpoint"):
                    self._save()
            self._profiler.between_steps(step)
            # Blocks of other sizes do not fit into the gaps that a step leaves, so the heap grows from step to step.
            if unused_heap_gb() > available_gb():
                trim_memory()
        if self._profiler.is_done:
            self.finish({"algorithm": self.cfg.algorithm, "steps": step})
            raise ProfiledError(self.folder.path)
        self.leave_if_asked()

    def _record(self, step: int, result: StepResult) -> None:
        row = {**result.metrics, **self._measured, "memory/rss_gb": rss_gb(), "memory/peak_rss_gb": peak_rss_gb()}
        self.metrics.append({"step": step, **row})
        self.folder.append_metrics(step, row)
        if self._places:
            self.folder.append(PLACES, self._places)
        is_due = step == self._job.num_steps or (step - 1) % self.cfg.run.sample_every == 0
        if is_due and (rows := result.samples(step)):
            self.folder.append("samples.jsonl", rows)
        for track in self._trackers:
            track(step, row)
        if step % self.cfg.run.log_every == 0:
            shown = [name for name in SPECS[self.cfg.algorithm].headline if name in row]
            self._reporter.update(step, {name.rsplit("/", 1)[-1]: row[name] for name in shown})
        if isinstance(self.cfg, SamplingRecipe):
            for finding in alarms(self.metrics, self.cfg.alarms):
                self.find(finding)
        self._check_refused(step, result)

    @property
    def num_refused(self) -> int:
        """Updates that were refused because they were not finite."""
        return int(sum(row["refused_steps"] for row in self.metrics))

    @property
    def num_done(self) -> int:
        """Number of finished steps."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def leave_if_asked(self) -> None:
        """If a signal asked the run to stop, save a checkpoint unless one is up to date, and raise StoppedError."""
        if self._stop.signal is None:
            return
        self.save_now()
        name, number = self._stop.signal.name, int(self._stop.signal)
        raise StoppedError(
            f"stopped by {name} after step {self.num_done}; `tunesmith resume {self.folder.path}` goes on", number
        )

    def save_now(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one."""
        self._settle()
        if self._saved_step != self.num_done:
            self._save()
            self._settle()

    def find(self, finding: Finding) -> None:
        """Record a finding and log it."""
        self.folder.append("findings.jsonl", [asdict(finding)])
        self._num_findings += 1
        _log.warning("step %d, %s: %s", finding.step, finding.name, finding.message)

    def finish(self, summary: Mapping[str, object]) -> RunResult:
        """Write summary and report after the last checkpoint is on disk; returns the run's result."""
        self._settle()
        for finding in slow_findings(self.folder.path):
            self.find(finding)
        facts = {**summary, "findings": self._num_findings, "minutes": self._watch.minutes}
        self.folder.write_json("result.json", facts)
        try:
            write_run_report(self.folder.path)
        except OSError as error:
            _log.warning("cannot write the report (%s); everything else of the run is there", error)
        _log.info("run written to %s", self.folder.path)
        self._job.listener.ended()
        return RunResult(self.folder.path, tuple(self.metrics), facts, self.cfg.model.trust_remote_code)

    def restore(self) -> None:
        """Load the newest whole checkpoint and truncate the logs to it; without any checkpoint, start from step 0.

        Raises:
            RunError: if there are checkpoints but none is whole; nothing is changed.
        """
        found = restart.newest(self.folder)
        if found.checkpoint is not None:
            self._take_over(found.checkpoint)
        elif found.skipped:
            reasons = "\n".join(f"  {reason}" for reason in found.skipped)
            raise RunError(
                f"{self.folder.path} has no checkpoint that can be used:\n{reasons}\nput one back from a copy, remove "
                "the checkpoints folder to train from the beginning, or start a new run"
            )
        else:
            self.folder.cut_logs({})
        (self.folder.path / "result.json").unlink(missing_ok=True)  # of a run that has ended and is given more steps
        for reason in found.skipped:
            message = f"passed over a damaged checkpoint: {reason}"
            self.find(Finding(self.first_step, "checkpoint", "warning", message))

    def _take_over(self, checkpoint: Checkpoint) -> None:
        own = restart.SessionState(**cast(dict[str, Any], checkpoint.state["session"]))
        restart.check_identity(own.identity, self._job.identity, self.folder.path)
        tell(restart.RESTORE, step_folder(self.folder.checkpoints, checkpoint.step).absolute())
        restart.restore(self._job.learner, checkpoint)
        restart.restore_generators(checkpoint.tensors["generators"], own.generators)
        self.folder.cut_logs(own.log_sizes)
        self.metrics = self.folder.read_metrics()
        self.facts, self.first_step, self._num_findings = dict(own.facts), checkpoint.step, own.num_findings
        self._watch, self._saved_step = Stopwatch(own.minutes), checkpoint.step
        _log.info("resumed after step %d", checkpoint.step)

    def _check_refused(self, step: int, result: StepResult) -> None:
        report = result.report
        if report is None or not report.refused:
            return
        place = self.folder.path / "refused"
        message = f"{report.bad_part} is not finite, so the update was refused and the weights stay as they were"
        if not place.exists() or len(list(place.iterdir())) < _MAX_REFUSED_DUMPS:
            self.folder.write_rows(f"refused/step-{step:06d}.jsonl", result.batch())
            message += f"; the batch is in refused/step-{step:06d}.jsonl"
        self.find(Finding(step, "refused", "warning", message))
        if report.num_refused_in_row >= self.cfg.optimizer.max_refused_steps:
            raise TrainingError(
                f"{report.num_refused_in_row} optimizer steps in a row were not finite, the last in {report.bad_part}. "
                f"The weights are those of the last good step, and so are the checkpoints. Look at the batches in "
                f"{place}, and go on with `tunesmith resume {self.folder.path} --optimizer.learning-rate ...`"
            )

    def close(self) -> None:
        """Wait for a checkpoint that is being written; end a profile that is being recorded."""
        self._profiler.close()
        self._writer.close()

    def _save(self) -> None:
        """Start writing a checkpoint of the current state."""
        parts = aside_folder(self.folder.checkpoints.absolute(), self.num_done) if num_ranks() > 1 else None
        try:
            tensors, trainer_state = restart.contents(self._job.learner, parts)
        except CheckpointError as error:
            self.find(Finding(self.num_done, "checkpoint", "error", str(error)))
            if parts is not None:
                shutil.rmtree(parts, ignore_errors=True)
            return
        generators, values = restart.capture_generators()
        own = restart.SessionState(
            identity=self._job.identity,
            log_sizes=self.folder.log_sizes(),
            generators=values,
            facts=self.facts,
            minutes=self._watch.minutes,
            num_findings=self._num_findings,
        )
        state = {**trainer_state, "session": asdict(own)}
        checkpoint = Checkpoint(self.num_done, {**tensors, "generators": generators}, state, self._score(), parts)
        self._writer.begin(checkpoint, in_background=self.cfg.run.checkpoint_in_background)

    def _settle(self) -> None:
        """Wait for the checkpoint; if it failed, record a finding and train on: the older ones are still valid."""
        settled = self._writer.settle()
        if settled is None:
            return
        if settled.problem:
            self.find(Finding(settled.step, "checkpoint", "error", settled.problem))
        else:
            self._saved_step = settled.step
            self._job.listener.saved(settled.step)

    def _score(self) -> float | None:
        """The figure that checkpoints are ranked by: on held-out rows, or else, in all steps, on those trained on."""
        row = self.metrics[-1] if self.metrics else {}
        best = SPECS[self.cfg.algorithm].best
        return row.get(f"eval/{best}" if self.cfg.run.eval_every else best)


@contextmanager
def open_session(
    cfg: Recipe,
    job: Job,
    *,
    provenance: Mapping[str, str] | None,
    show_progress: bool,
    data: Facts,
    resume: Path | None = None,
    from_python: Sequence[str] = (),
) -> Iterator[Session]:
    """An open run for `cfg`, in a new folder, or in the folder `resume` from its newest whole checkpoint on.

    `data` is written to `data.json`, and its findings are recorded. `from_python` names the inputs given as Python
    objects, which a recipe cannot hold. When the block ends, also by an error, trackers and lock are closed; the files
    written so far stay.

    Raises:
        RunError: if the folder cannot be written, has too little space, or is in use by another process.
    """
    recipe = cfg.model_dump(mode="json")
    parent = Path(cfg.run.dir) if resume is None else resume
    modules, optimizer = job.learner.modules.values(), job.learner.optimizer
    num_stages = 1 if (pipeline := stages()) is None else pipeline.count  # about as large as this one
    weights, moments = restart.num_bytes(modules) * num_stages, optimizer.moment_bytes * num_stages
    require_space(parent, weights, moments, cfg.run.keep_checkpoints if cfg.run.checkpoint_every else 0)
    with ExitStack() as stack:
        if resume is None:
            origins = origins_of(cfg) if provenance is None else provenance
            folder = RunFolder.create(parent, cfg.run.name or cfg.algorithm, recipe, origins, from_python)
        else:
            folder = RunFolder(resume)
        stack.enter_context(RunLock(folder.path))
        stop = stack.enter_context(stop_signals())
        trackers = [stack.enter_context(tracking(name, folder.path, recipe)) for name in cfg.run.report_to]
        reporter = stack.enter_context(progress(f"train {cfg.algorithm}", job.num_steps, enabled=show_progress))
        meter = stack.enter_context(metering()) if cfg.run.measure else None
        session = Session(cfg, folder, job, stop, trackers, reporter, meter)
        stack.callback(session.close)
        if resume is not None:
            session.restore()
        if session.first_step == 0:
            folder.write_json("data.json", data.to_json())
            for finding in data.findings:
                session.find(finding)
        session.stage = stack.enter_context(watched(folder.path, cfg.run.hang_after_s, session.find))
        yield session


def require_space(folder: Path, weights: int, moments: int, num_checkpoints: int) -> None:
    """Check that `folder` can be made and written, and that its disk can hold the model and the checkpoints.

    `weights` are the bytes of a checkpoint's weights, `moments` those of its moments.

    Raises:
        RunError: naming the folder, or the bytes that are free and those that are needed.
    """
    place = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    try:
        Path(tempfile.mkdtemp(prefix=".tunesmith-", dir=place)).rmdir()  # what permissions and mounts say can be wrong
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{place} cannot be written ({reason}); choose another folder with --run.dir") from error
    # A checkpoint also holds the moments of each trained number; one more is being written while the others exist.
    each = weights + moments
    needed = weights + (each * (num_checkpoints + 2) if num_checkpoints else 0)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise RunError(
            f"the disk of {place} has {free / 1e9:.2f} GB free, but the model and {num_checkpoints} checkpoints need "
            f"{needed / 1e9:.2f} GB; free some space, set run.checkpoint_every to 0, or choose another --run.dir"
        )
