"""The frame of `benchmarks.step` and `benchmarks.update`: our GRPO learner and TRL's trainer, in alternation.

TRL owns its loop, so its process answers from inside a callback: a step is timed from the call to the end of the step.
"""

import importlib
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from transformers import TrainerCallback

from benchmarks.common import Say, in_turns, load_warning, paired, spread_text
from benchmarks.process import Process, Server
from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import MissingDependencyError, TrainingError
from tunesmith.base.core.trace import trace
from tunesmith.base.runs.environment import peak_rss_since_reset_gb, reset_peak_rss
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.load import load_policy
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.grpo import GRPO
from tunesmith.learn.trainers.rollouts import PolicyTask

LEARNING_RATE = 1e-6
MICRO_BATCHES = (4, 8, 16, 32)
MANY_STEPS = 100_000
"""More than are ever taken."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One step or update: seconds, tokens, memory in GB, gradient norm before clipping, seconds of its stages.

    `peak_gb` is the peak of resident memory so far, `memory_gb` that above the resting state, 0 if not measured.
    """

    seconds: float
    num_tokens: int = 0
    peak_gb: float = 0.0
    memory_gb: float = 0.0
    grad_norm: float = 0.0
    stages_s: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class TRLSettings:
    """TRL's trainer on the model in `folder`: dtype of the weights, attention, rows of a pass, autocast to bfloat16.

    `arguments` are further ones of its GRPOConfig; `environment` names an environment class, which has the reward.
    With `inputs`, tensors as lists, completions are given, not drawn.
    """

    folder: str
    prompts: Sequence[object]
    num_rows: int
    num_threads: int
    micro_batch_size: int
    dtype: str
    arguments: Mapping[str, object]
    inputs: Mapping[str, Any] | None = None
    attention: str = "sdpa"
    autocasts: bool = False
    environment: str = ""

    def config(self) -> dict[str, object]:
        """Arguments of GRPOConfig: nothing is saved, logged or recomputed."""
        return {
            "model_init_kwargs": {"dtype": self.dtype, "attn_implementation": self.attention},
            "bf16": self.autocasts,
            "use_cpu": not torch.cuda.is_available(),
            "gradient_checkpointing": False,
            "per_device_train_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.num_rows // self.micro_batch_size,
            "learning_rate": LEARNING_RATE,
            "max_steps": MANY_STEPS,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **self.arguments,
        }

    def start(self) -> Process:
        """The trainer in a process of its own."""
        return Process("benchmarks.trl:TRL", self, num_threads=self.num_threads)


def token_sum(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """A reward that costs nothing and differs within a group: a group of equal rewards would be left out by us."""
    return [sum(ids) % 101 / 101 for ids in completion_ids]


class Memory:
    """Peak of resident memory above what was resident when it was made; free memory is given back before."""

    def __init__(self, *, measures: bool = False) -> None:
        self._rest_gb = 0.0
        self._measures = measures
        if measures:
            reset_peak_rss()
            self._rest_gb = psutil.Process().memory_info().rss / 1e9

    def above_rest_gb(self) -> float:
        """In GB (1e9 bytes); 0 where nothing is measured."""
        return peak_rss_since_reset_gb() - self._rest_gb if self._measures else 0.0


def our_task(cfg: GRPORecipe, prompts: Sequence[str]) -> PolicyTask:
    """The task of our GRPO learner, as `tunesmith train grpo` makes it."""
    return PolicyTask(GRPO, cfg, Inputs(prompts=prompts, rewards=[token_sum]), setup.prepare(cfg))


class Buildable(Protocol):
    """Settings of our side."""

    def build(self) -> tuple[GRPO, PolicyTask]:
        """The learner before its first step, and its task."""
        ...


class Ours:
    """Steps of our GRPO learner."""

    def __init__(self, settings: Buildable) -> None:
        self._learner, self._task = settings.build()
        self._num_prompt_tokens = round(self._task.data.mean_tokens * len(self._task.data.train))
        self._index = 0
        reset_peak_rss()

    def take(self, *, measures: bool = False) -> Taken:
        """One step. With `measures` free memory is given back before, so that its time means nothing."""
        memory = Memory(measures=measures)
        start_s = time.perf_counter()
        with trace() as times:
            result = self._learner.step(self._task.batch(self._index), self._index)
        seconds, found = time.perf_counter() - start_s, result.metrics
        self._index += 1
        if found["frac_reward_zero_std"] > 0:
            raise TrainingError(
                "a group of equal rewards was left out, so this step did less than TRL's; change --seed"
            )
        num_completions = self._task.cfg.rollout.completions_per_prompt
        return Taken(
            seconds,
            int(found["num_tokens"]) + num_completions * self._num_prompt_tokens,
            peak_rss_since_reset_gb(),
            memory.above_rest_gb(),
            found["grad_norm"],
            dict(times.metrics()),
        )


class TRL:
    """TRL's trainer with its own loop, which waits for a call before each step."""

    def __init__(self, settings: TRLSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        trl, datasets = load_trl()
        self.grad_norm = 0.0
        self._memory = Memory()
        self._folder = tempfile.TemporaryDirectory()
        trainer = trl.GRPOTrainer if settings.inputs is None else _given(trl, settings.inputs, self)
        self._trainer = trainer(
            model=settings.folder,
            **_rewards(settings.environment),
            args=trl.GRPOConfig(output_dir=self._folder.name, **settings.config()),
            train_dataset=datasets.Dataset.from_dict({"prompt": list(settings.prompts)}),
            callbacks=[step_callback(self)],
        )

    def serve(self, server: Server) -> None:
        """Take a step for each call, until the benchmark is done."""
        self._server = server
        reset_peak_rss()
        self._trainer.train()

    def wait(self, num_tokens_seen: int) -> None:
        """Wait for the next call; before the first step, and after each."""
        call = self._server.next()
        if call is None:
            raise SystemExit(0)  # the loop has no other way out before its first step
        self._memory = Memory(**call[2])
        self._tokens_before = num_tokens_seen
        self._start_s = time.perf_counter()

    def answer(self, num_tokens_seen: int) -> None:
        """Answer the call when a step has ended, and wait for the next."""
        seconds = time.perf_counter() - self._start_s
        num_tokens = num_tokens_seen - self._tokens_before
        memory_gb = self._memory.above_rest_gb()
        self._server.reply(Taken(seconds, num_tokens, peak_rss_since_reset_gb(), memory_gb, self.grad_norm))
        self.wait(num_tokens_seen)


def _rewards(environment: str) -> dict[str, Any]:
    """The arguments of TRL's trainer for the reward."""
    if not environment:
        return {"reward_funcs": token_sum}
    module, _, name = environment.partition(":")
    return {"environment_factory": getattr(importlib.import_module(module), name)}


def _given(trl: Any, inputs: Mapping[str, Any], owner: TRL) -> Any:
    tensors = {name: torch.tensor(values) for name, values in inputs.items()}

    class GivenGRPO(trl.GRPOTrainer):
        """TRL's trainer with given completions and advantages; the rest is its own."""

        def _generate_and_score_completions(self, _: object) -> dict[str, torch.Tensor]:
            return dict(tensors)

        def _get_grad_norm(self, *arguments: Any, **options: Any) -> Any:
            norm = super()._get_grad_norm(*arguments, **options)
            owner.grad_norm = float(norm)
            return norm

    return GivenGRPO


def step_callback(owner: TRL) -> TrainerCallback:
    """The callback by which the trainer of `owner` waits for calls."""

    class StepCallback(TrainerCallback):
        """Hands the count of tokens on."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Before the first step."""
            owner.wait(int(state.num_input_tokens_seen))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """After a step."""
            owner.answer(int(state.num_input_tokens_seen))

    return StepCallback()


def load_trl() -> tuple[Any, Any]:
    """The modules `trl` and `datasets`.

    Raises:
        MissingDependencyError: where they are not installed.
    """
    try:
        return importlib.import_module("trl"), importlib.import_module("datasets")
    except ImportError as error:
        raise MissingDependencyError(
            f"a benchmark against trl needs it ({error}); install it with `pip install 'tunesmith[trl]'`"
        ) from error


@contextmanager
def exported(model: str) -> Iterator[Path]:
    """A folder with the model that TRL can read, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_policy(ModelSection(name=model))
        yield save_final(loaded.model, loaded.tokenizer, Path(folder) / "model", ModelCard(model, "none"))


def fastest(
    first: TRLSettings, micro_batches: Iterable[int], say: Callable[[str], None], *, tries_eager: bool = True
) -> tuple[TRLSettings, dict[str, float]]:
    """The fastest variant of `first`, and the seconds of the second step of each variant that was tried.

    Every micro-batch is tried, then, with the fastest of them, eager attention.
    """

    def seconds(setting: TRLSettings) -> float:
        with setting.start() as process:
            found = [process.call("take").seconds for _ in range(2)][-1]
        say(f"  trl, {setting.attention}, micro-batch of {setting.micro_batch_size}: {found:.2f} s")
        return found

    tried = [(seconds(one), one) for one in (replace(first, micro_batch_size=size) for size in micro_batches)]
    if tries_eager:
        eager = replace(min(tried, key=lambda item: item[0])[1], attention="eager")
        tried.append((seconds(eager), eager))
    named = {f"{setting.attention}@{setting.micro_batch_size}": found for found, setting in tried}
    return min(tried, key=lambda item: item[0])[1], named


def alternate(
    ours: Buildable,
    theirs: TRLSettings,
    default: TRLSettings | None,
    warm: Callable[[Process], list[Taken]],
    options: Namespace,
    say: Say,
) -> tuple[dict[str, list[Taken]], dict[str, list[Taken]], dict[str, object]]:
    """(Answers of `warm` for `ours`, `trl`, and TRL with the settings `default` if given; steps in turns; load)."""
    alone: list[Taken] = []
    if default:
        with default.start() as process:
            alone = warm(process)
        say(f"  trl in its default precision: {alone[0].seconds:.2f} s")
    with Process("benchmarks.trl:Ours", ours, num_threads=theirs.num_threads) as us, theirs.start() as them:
        warmed = {"ours": warm(us), "trl": warm(them), "default": alone}
        sides = {"ours": lambda _: us.call("take"), "trl": lambda _: them.call("take")}
        done, load = in_turns(sides, options.rounds, say, round_line)
    return warmed, done, load


def round_line(done: Mapping[str, list[Taken]]) -> str:
    """Seconds of both sides in the newest round."""
    return f"{done['ours'][-1].seconds:.2f} s against {done['trl'][-1].seconds:.2f} s"


def pair_facts(
    done: Mapping[str, Sequence[Taken]], setting: TRLSettings, calibration: Mapping[str, float], name: str, prefix: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ratio, our median seconds as `name`, and our stages; TRL's seconds, setting and calibration), for JSON."""
    seconds = {side: [one.seconds for one in taken] for side, taken in done.items()}
    ours = {
        **paired(seconds["trl"], seconds["ours"]).facts("ratio"),
        name: statistics.median(seconds["ours"]),
        "stages": _stage_medians(done["ours"], prefix),
    }
    trl = {
        name: statistics.median(seconds["trl"]),
        "dtype": setting.dtype,
        "attention": setting.attention,
        "micro_batch_size": setting.micro_batch_size,
        "calibration_s": calibration,
    }
    return ours, trl


def _stage_medians(taken: Sequence[Taken], prefix: str) -> dict[str, float]:
    """Median seconds of each stage whose name in the metrics begins with `prefix`."""
    names = sorted({name for one in taken for name in one.stages_s if name.startswith(prefix)})
    return {
        name.removeprefix(prefix).removesuffix("_s"): statistics.median(one.stages_s.get(name, 0.0) for one in taken)
        for name in names
    }


def show_pair(label: str, figures: Mapping[str, Any], seconds: str, memory: str, ratio: str) -> None:
    """Print time, memory if compared, and stages beside TRL's; the last three name keys of `figures`."""
    trl = figures["trl"]
    print(f"{label:<10}{figures[seconds]:.2f} s against TRL's {trl[seconds]:.2f} s: {spread_text(figures)}")
    if ratio in figures:
        print(
            f"memory    {figures[memory]:.2f} GB, {figures[ratio]:.2f} of TRL's "
            f"{trl['default_precision'][memory]:.2f} GB in its default precision "
            f"({trl[memory]:.2f} GB with {trl['dtype']} weights)"
        )
    print(f"TRL       {trl['attention']} attention, micro-batch of {trl['micro_batch_size']}{load_warning(figures)}")
    for name, stage_s in figures["stages"].items():
        print(f"  {name:<24}{stage_s:8.3f} s")
