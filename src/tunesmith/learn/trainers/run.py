"""The loop of all algorithms: `run` takes a task's learner from step to step, and writes the run folder."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from statistics import fmean
from typing import Any, Protocol

import torch

from tunesmith.base.config.effects import check_effects
from tunesmith.base.config.load import origins_of
from tunesmith.base.config.recipe import PolicyRecipe, Recipe, SamplingRecipe
from tunesmith.base.config.schema import SPECS
from tunesmith.base.core.errors import CheckpointError, EnvironmentFailedError, RunError, ServerError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import derive
from tunesmith.base.core.trace import span
from tunesmith.base.runs import checkpoint
from tunesmith.base.runs.environment import peak_rss_gb
from tunesmith.base.runs.trackers import check_trackers
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.sets import Sets
from tunesmith.engine.distributed.launch import as_started, ranks_of
from tunesmith.engine.distributed.ranks import END, data_rank, gathered, num_ranks, orders, rank, tell
from tunesmith.engine.models.division import make_whole
from tunesmith.engine.models.export import ModelCard
from tunesmith.engine.models.language_model import model_of_recipe
from tunesmith.engine.models.lora import trained_parameters
from tunesmith.engine.models.optimizer import moment_bytes
from tunesmith.engine.models.tokenizer import decode_marked, encode_prompt
from tunesmith.engine.rollout.products import with_chosen_weights
from tunesmith.engine.rollout.remote.in_process import vllm_library
from tunesmith.engine.rollout.remote.server import Server
from tunesmith.engine.rollout.workers.actors import ray_library
from tunesmith.learn.trainers import restart, setup
from tunesmith.learn.trainers.api import Inputs, Learner, Listener, Metrics, StepResult
from tunesmith.learn.trainers.computing import computing, rates_of
from tunesmith.learn.trainers.estimate import Estimate, announce, ending_s
from tunesmith.learn.trainers.reward import RewardTask
from tunesmith.learn.trainers.rollouts import PolicyLearner, PolicyTask, sampling_params
from tunesmith.learn.trainers.session import Job, Session, open_session, require_space
from tunesmith.learn.trainers.token_check import TokenFacts, token_facts
from tunesmith.learn.trainers.work import Work, announce_time, trial, trial_engine
from tunesmith.observe.reports.text import count_of

_ANSWER_S = 10.0
"""Seconds that `preview` waits for a rollout server."""

_MOST_MADE = 20
"""Steps of a resumed run, the last ones, whose mean time is expected of those to come."""

_log = get_logger(__name__)


class Task(Protocol):
    """The data of a run, and how its learner is built, evaluated and summarized.

    The constructor takes a recipe, `Inputs` and a device, loads the model and reads the data; it raises InputError for
    anything that cannot be used.
    """

    @property
    def data(self) -> Sets[Any]:
        """Rows to train on and held-out rows."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        ...

    def build(self) -> Learner:
        """The learner before its first step."""
        ...

    def prepare(self, learner: Any, progress: bool, /) -> dict[str, str]:
        """Finish what must be computed before the first step; hashes that a resumed run must find unchanged."""
        ...

    def estimate(self) -> Estimate:
        """Memory and work of the run."""
        ...

    def batch(self, index: int) -> Sequence[Any]:
        """The rows of step `index` (from 0): a pure function of the run's seed and the index."""
        ...

    def evaluate(self, learner: Any, /) -> Metrics:
        """Metrics on the held-out rows, named `eval/...`; empty without any."""
        ...

    def measure(self, learner: Any, when: str, /) -> dict[str, object]:
        """Figures measured once `when` ("before" or "after" training), for the summary; names end in `_<when>`."""
        ...

    def summary(self, learner: Any, session: Session, /) -> dict[str, object]:
        """Figures of the finished run as JSON values; further files are written to `session.folder`."""
        ...


def run(
    cfg: Recipe,
    inputs: Inputs | None = None,
    *,
    provenance: Mapping[str, str] | None = None,
    progress: bool = True,
    resume: Path | None = None,
    algorithm: type[PolicyLearner] | None = None,
    profile_steps: int = 0,
    listener: Listener | None = None,
) -> setup.RunResult:
    """Train as the recipe `cfg` says, or continue the run in the folder `resume`; returns folder, metrics and summary.

    `inputs` are used in place of data and rewards that `cfg` names; `provenance` is the origin of each key of `cfg`,
    recorded with the run. `algorithm` is a learner's class of your own, used in place of that of `cfg.algorithm`; it
    draws completions, and reads that algorithm's section. With `profile_steps` the run ends, with a ProfiledError, when
    it has profiled that many steps. `listener` is told of the run's events, and may end it early.

    Raises:
        InputError: for a config, model, data or reward that cannot be used, before the run folder is made.
        TrainingError: if too many steps in a row are not finite, or memory runs out.
        ServerError, EnvironmentFailedError: if its rollout server is lost for too long, or its environment breaks every
            trajectory, once a checkpoint is written.
        StoppedError: after SIGTERM or SIGINT, once a checkpoint is written.

    With several ranks (`scale.ranks`, or under `torchrun`) this process leads or follows; each returns the result.
    """
    if provenance is None and resume is None:  # made in Python, or loaded and given without its origins
        check_effects(cfg, origins_of(cfg), only_warns=True)
    inputs, cfg = inputs or Inputs(), as_started(cfg)
    others = partial(follow, cfg, inputs, algorithm)
    with ranks_of(cfg.scale, others):
        if rank() > 0:
            return others()
        session = partial(
            open_session, cfg, provenance=provenance, show_progress=progress, resume=resume, from_python=inputs.given
        )
        return lead(cfg, inputs, algorithm, session, progress, (profile_steps, listener or Listener()))


def lead(
    cfg: Recipe,
    inputs: Inputs,
    algorithm: type[PolicyLearner] | None,
    open_run: Callable[..., AbstractContextManager[Session]],
    progress: bool = False,
    asked: tuple[int, Listener] = (0, Listener()),
) -> setup.RunResult:
    """The run as rank 0, or the only process, makes it. Other ranks are told of each step before it begins.

    `open_run` opens its session; `asked` are the steps to profile and what is told of the events.
    """
    device = setup.prepare(cfg)
    task = task_of(cfg, inputs, device, algorithm)
    cfg = settled(cfg, task)
    try:
        return led(cfg, task, device, open_run, progress, asked)
    finally:
        if isinstance(task, PolicyTask):
            task.close()


def led(
    cfg: Recipe,
    task: Task,
    device: torch.device,
    open_run: Callable[..., AbstractContextManager[Session]],
    progress: bool,
    asked: tuple[int, Listener],
) -> setup.RunResult:
    """The run of `task`, as of `lead`."""
    tokens_of(task).check()
    cost = cost_of(cfg, task, task.estimate()) if progress else Work()  # before the model is divided among ranks
    learner = task.build()
    estimate = task.estimate()
    announce(estimate, progress, device)
    if assumed := getattr(task, "assumed", ""):
        setup.say(f"estimates assume {assumed}", enabled=progress)
    if progress and estimate.work.preparation != Work():
        announce_time(estimate.work.preparation.seconds(cost), "what comes before the first step")
    identity = {**agreed(task.prepare(learner, progress)), "the device": device.type}
    with open_run(Job(learner, task.num_steps, identity, *asked), data=task.data.facts) as session:
        rates = partial(rates_of, cfg, estimate, device)
        with session.working():
            session.folder.write_json("setup.json", computing(cfg, learner, estimate))
        if progress and (num_left := task.num_steps - session.first_step):
            left_s, by = estimate.work.remaining(num_left, cfg.run.eval_every).seconds(cost), "a trial of this model"
            made = [row["time/step_s"] for row in session.metrics[-_MOST_MADE:] if "time/step_s" in row]
            if assumed and made:  # trajectories have another length than the longest, and replies take time
                left_s, by = num_left * fmean(made), f"{count_of(len(made), 'step')} that this run has made"
            announce_time(left_s + ending_s(estimate, cfg), count_of(num_left, "step"), by)
        measure(task, learner, session, "before")
        for index in session.steps():
            take_step(task, learner, session, rates, index)
        measure(task, learner, session, "after")
        with session.working():
            figures = task.summary(learner, session)
        card = ModelCard(
            base_model=cfg.model.name,
            algorithm=SPECS[cfg.algorithm].title_of(cfg),
            title=session.folder.path.name,
            metrics=figures,
            recipe=cfg.model_dump(mode="json"),
        )
        tell(restart.WHOLE)
        make_whole(learner.modules)
        learner.export(session.folder.final, card)
        result = session.finish({**figures, "algorithm": cfg.algorithm})
    tell(END, result)
    return result


def follow(cfg: Recipe, inputs: Inputs, algorithm: type[PolicyLearner] | None) -> setup.RunResult:
    """The run as a rank above 0 makes it: it computes its share of what rank 0 orders, and writes nothing."""
    device = setup.prepare(cfg)
    task = task_of(cfg, inputs, device, algorithm)
    cfg = settled(cfg, task)
    tokens_of(task).check()
    learner = task.build()
    agreed(task.prepare(learner, False))
    result: Any = None
    for order, arguments in orders():
        if order == restart.RESTORE:
            restart.restore(learner, checkpoint.load(*arguments))
        elif order == "step":
            computed_step(cfg, task, learner, *arguments)
        elif order == "evaluate":
            task.evaluate(learner)
        elif order == "measure":
            task.measure(learner, *arguments)
        elif order == restart.STATE:
            with suppress(CheckpointError):  # rank 0 records it
                restart.contents(learner, *arguments)
        elif order == restart.WHOLE:
            make_whole(learner.modules)
        elif order == END:
            (result,) = arguments
    return result


def agreed(identity: dict[str, str]) -> dict[str, str]:
    """`identity`, the hashes of model and data, if all ranks have the same.

    Raises:
        RunError: naming a rank and what differs.
    """
    for other, found in enumerate(gathered([identity], "hashes of model and data", all_ranks=True)):
        different = [name for name in identity if found.get(name) != identity[name]]
        if different:
            raise RunError(
                f"rank {other} differs from rank {rank()} in {', '.join(different)}; give all the same files"
            )
    return identity


def computed_step(cfg: Recipe, task: Task, learner: Learner, index: int) -> tuple[int, StepResult]:
    """(Number of rows, result) of step `index` (from 0), each rank's share of it."""
    if num_ranks() > 1:  # what rewards or dropout draw from global generators is no rank's copy of another's
        setup.seed_generators(derive(cfg.run.seed, "rank", data_rank(), index))
    batch = batch_of(task, index)
    result = learner.step(batch, index)
    if num_ranks() == 1:
        return len(batch), result
    peaks = enumerate(gathered([peak_rss_gb()], "memory", all_ranks=True))
    return len(batch), replace(
        result, metrics={**result.metrics, **{f"memory/peak_rss_gb/rank_{i}": size_gb for i, size_gb in peaks}}
    )


def take_step(task: Task, learner: Learner, session: Session, rates: Callable[..., Metrics], index: int) -> None:
    """Take step `index` (from 0), evaluate where that is due, and record it.

    If its rollout server is lost, or its environment fails, a checkpoint of the last whole step is written first.
    """
    version, lost = learner.optimizer.weight_version, None
    with session.working() as times:
        tell("step", index)
        try:
            num_rows, result = computed_step(session.cfg, task, learner, index)
        except (ServerError, EnvironmentFailedError):
            if learner.optimizer.weight_version == version:
                session.save_now()
            raise
        evaluation: Metrics = {}
        try:
            if session.is_due(index, session.cfg.run.eval_every):
                tell("evaluate")
                evaluation = task.evaluate(learner)
        except (ServerError, EnvironmentFailedError) as error:
            lost = error  # the step itself is whole
    per_s = rates(num_rows, result.metrics.get("num_tokens"), times)
    metrics = {**result.metrics, **evaluation, **times.metrics(), **per_s}
    session.end_step(index + 1, replace(result, metrics=metrics))
    if lost is not None:
        session.save_now()
        raise lost


def task_of(cfg: Recipe, inputs: Inputs, device: torch.device, algorithm: type[PolicyLearner] | None = None) -> Task:
    """The task of the recipe `cfg`, with a learner of the class `algorithm` if one is given."""
    check_installed(cfg)
    code: Any = algorithm or resolve_name(SPECS[cfg.algorithm].code)
    make: Any = partial(PolicyTask, code) if algorithm or isinstance(cfg, PolicyRecipe) else code
    task: Task = make(cfg, inputs, device)
    if cfg.run.eval_every and not task.data.heldout:
        data = cfg.data_section()
        _log.warning(
            "run.eval_every is %d, which has no effect: no %s are held out to evaluate on; give %s.heldout_fraction a "
            "share above 0, %s.heldout_source a file, or set run.eval_every to 0",
            *(cfg.run.eval_every, data, data, data),
        )
    return task


def settled(cfg: Recipe, task: Any) -> Recipe:
    """`cfg`, and that of `task`, with the choice of `rollout.weights: auto` made, before ranks divide the model."""
    if isinstance(cfg, SamplingRecipe) and cfg.rollout.weights == "auto":
        task.cfg = cfg = with_chosen_weights(cfg, model_of_recipe(task.loaded.model, cfg.model))
    return cfg


def check_installed(cfg: Recipe) -> None:
    """Check that the packages are installed which the recipe asks for and which only its run would need.

    Raises:
        MissingDependencyError: naming the package and the setting.
    """
    check_trackers(cfg.run.report_to)
    if isinstance(cfg, SamplingRecipe) and cfg.rollout.backend == "vllm" and cfg.rollout.server_url is None:
        vllm_library()
    if isinstance(cfg, SamplingRecipe) and cfg.scale.address is not None:
        ray_library()


def batch_of(task: Task, index: int) -> Sequence[Any]:
    """The rows of step `index` (from 0)."""
    with span("data"):
        return task.batch(index)


def measure(task: Task, learner: Learner, session: Session, when: str) -> None:
    """Store the task's figures `when` training in the session, unless a checkpoint has them already."""
    if any(name.endswith(f"_{when}") for name in session.facts) or (when == "before" and session.first_step > 0):
        return
    with session.working():
        tell("measure", when)
        session.facts |= task.measure(learner, when)
    session.leave_if_asked()


def cost_of(cfg: Recipe, task: Any, estimate: Estimate) -> Work:
    """Seconds of each kind of work of the run, by a trial; ranks share the work."""
    work = estimate.work
    if isinstance(task, RewardTask):
        return trial(task.model, work.rows, optimizer=cfg.optimizer) * (1 / num_ranks())
    policy = model_of_recipe(task.loaded.model, cfg.model)
    if not isinstance(cfg, SamplingRecipe):
        return trial(policy, work.rows, optimizer=cfg.optimizer) * (1 / num_ranks())
    engine, sampling = trial_engine(policy, task.loaded.tokenizer, cfg.rollout), sampling_params(cfg.rollout, 0)
    return trial(policy, work.rows, engine, sampling, work.num_slots, optimizer=cfg.optimizer) * (1 / num_ranks())


def tokens_of(task: Any, prompts: Sequence[Prompt] | None = None) -> TokenFacts:
    """The token ids that the task samples, scores and trains; of a policy with `prompts` in place of its first ones."""
    if isinstance(task, RewardTask):
        model, data = task.model, task.data
        return token_facts(model.model, model.tokenizer, data.prompts, data.learnt, draws=False)
    loaded, data = task.loaded, task.data
    rewards = task.scorer.model_rewards if isinstance(task, PolicyTask) else {}
    return token_facts(loaded.model, loaded.tokenizer, prompts or data.prompts, data.learnt, rewards)


@dataclass(frozen=True, slots=True)
class Preview:
    """Size of the model, memory in GB by part and by stage, number of items of an epoch and of those held out, the
    first row as text, about how long the steps take, the tokens of the first rows, whose problems a run would raise,
    and why its rollout server does not answer now, for which a run would wait. With an environment, the estimates are
    of trajectories of the length that `assumed` says, and `least_seconds` of those that end with their first turn.
    """

    model: str
    num_parameters: int
    memory_gb: dict[str, float]
    stage_gb: dict[str, float]
    num_items: int
    num_heldout: int
    sample: str
    num_steps: int
    seconds: float
    tokens: TokenFacts
    server: str
    assumed: str = ""
    least_seconds: float | None = None


def preview(cfg: Recipe) -> Preview:
    """Model, data, memory and time of a run of `cfg` on a CPU, without training.

    Raises:
        InputError: for a model, data or reward that cannot be used, as the run would.
    """
    task: Any = task_of(cfg, Inputs(), torch.device("cpu"))
    cfg = settled(cfg, task)
    module = task.model if isinstance(task, RewardTask) else task.loaded.model
    moments = moment_bytes(sum(one.numel() for one in trained_parameters(module).values()), cfg.optimizer)
    num_checkpoints = cfg.run.keep_checkpoints if cfg.run.checkpoint_every else 0
    require_space(Path(cfg.run.dir), restart.num_bytes([module]), moments, num_checkpoints)
    estimate, data = task.estimate(), task.data
    sizes = estimate.num_parameters, estimate.memory_gb, estimate.stage_gb, len(data.train), len(data.heldout)

    def seconds(estimated: Estimate) -> float:
        work = estimated.work.preparation + estimated.work.remaining(task.num_steps, cfg.run.eval_every)
        return work.seconds(cost_of(cfg, task, estimated)) + ending_s(estimated, cfg)

    prompts, sample, assumed, least = data.prompts, data.sample, "", None
    if isinstance(task, PolicyTask) and task.conversations is not None:
        prompts = task.conversations.begun(prompts, cfg.run.seed)
        rendered = decode_marked(task.loaded.tokenizer, encode_prompt(task.loaded.tokenizer, prompts[0]))
        sample = f"prompt, as the first turn reads it:\n{rendered}"
        assumed, least = task.assumed, seconds(task.estimate(longest=False))
    tokens, server = tokens_of(task, prompts), _absent_server(cfg)
    if isinstance(task, PolicyTask):
        task.close()
    time_s = seconds(estimate)
    return Preview(cfg.model.name, *sizes, sample, task.num_steps, time_s, tokens, server, assumed, least)


def _absent_server(cfg: Recipe) -> str:
    """Why the rollout server of a recipe does not answer now; empty if it does, or if there is none."""
    if not isinstance(cfg, SamplingRecipe) or cfg.rollout.backend != "vllm" or cfg.rollout.server_url is None:
        return ""
    server = Server(cfg.rollout.server_url, timeout_s=_ANSWER_S, num_slots=1)
    why = server.absence()
    wait = f"a run waits for it for {cfg.rollout.server_timeout_s:g} s (rollout.server_timeout_s)"
    return f"{server.name} does not answer: {why}; {wait}" if why else ""
