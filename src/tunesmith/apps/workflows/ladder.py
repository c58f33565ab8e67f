"""`tunesmith ladder`: PPO and GRPO steps of a model at each level, in alternation, and optimal without each technique.

A level has to be faster and to compute the same. Gates compare each level with the baseline: log-probs, loss and
gradient of the same completions from the same weights, what some updates on them gain, and what a short run learns.
"""

import itertools
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tunesmith.apps.workflows.ladder_side import Learnt, Lesson, Taken, Worker
from tunesmith.base.config.algorithms.ppo import PPORecipe
from tunesmith.base.config.keys import leaves
from tunesmith.base.config.levels import LEVELS, TECHNIQUES, Level, Technique
from tunesmith.base.config.load import load_recipe, schema_of
from tunesmith.base.config.recipe import PolicyRecipe
from tunesmith.base.core.errors import TrainingError
from tunesmith.base.runs.environment import cpu_model, package_versions, usable_cores
from tunesmith.engine.models.load import compute_dtype
from tunesmith.learn.trainers.setup import Stopwatch

ALGORITHMS = ("ppo", "grpo")

PROMPTS = (
    "Question: A shop sells pens at three for two dollars and notebooks at four dollars each. Anna buys nine pens and "
    "two notebooks. How many dollars does she pay?\nAnswer: Nine pens are three times three pens, so",
    "Rewrite the sentence so that it sounds friendly, and keep its meaning: Send me the report by Friday.\nRewritten:",
    "The following is a review of a film by a viewer who liked the actors, but found the story too long and too easy "
    "to guess, and who would still watch it again with friends on a rainy evening.\nReview:",
    "Explain to a child of ten in two sentences why the sky is blue during the day and red in the evening.\nIn short,",
)
"""As long as instructions usually are, and of different lengths."""

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class LadderOptions:
    """Options of the ladder; `quick` takes tiny steps and runs, which show that all parts work, and no more."""

    model: str = "smollm2"
    rounds: int = 3
    quick: bool = False
    seed: int = 0

    @property
    def num_completions(self) -> int:
        """Completions of each prompt."""
        return 4 if self.quick else 8

    @property
    def num_tokens(self) -> int:
        """Tokens of each completion."""
        return 8 if self.quick else 32


@dataclass(frozen=True, slots=True)
class Gate:
    """A comparison of a level with the baseline, passed if the value is at most the bound."""

    name: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.value <= self.bound


@dataclass(frozen=True, slots=True)
class Contender:
    """A level, or a level without one technique, which is measured in turns with optimal."""

    level: Level
    without: Technique | None = None

    @property
    def name(self) -> str:
        """The level's name, or that of the technique that is missing."""
        return self.level if self.without is None else f"{self.level} without {self.without.name}"


LOWER = tuple(Contender(level) for level in LEVELS[:-1])
"""The levels below optimal."""

REDUCED = tuple(Contender("optimal", technique) for technique in TECHNIQUES if technique.level in LEVELS[2:])
"""Optimal without each technique of the two upper levels."""


@dataclass(slots=True)
class Measured:
    """The steps of each level, optimal's next to any contender; by contender the median ratio of its step time to that
    of optimal in the same round; peak memory and gates' figures by level. All of one algorithm.
    """

    taken: dict[Level, list[Taken]] = field(default_factory=dict[Level, list[Taken]])
    slowdown: dict[str, float] = field(default_factory=dict[str, float])
    peak_gb: dict[Level, float] = field(default_factory=dict[Level, float])
    learnt: dict[Level, Learnt] = field(default_factory=dict[Level, Learnt])
    run_gain: dict[Level, float] = field(default_factory=dict[Level, float])


def run_ladder(options: LadderOptions, say: Say) -> dict[str, Any]:
    """All figures, as `tunesmith ladder --json` prints them; `say` is given lines of progress.

    Raises:
        InputError: for a model that cannot be used.
        TrainingError: if a process ends, for example because memory runs out.
    """
    watch = Stopwatch()
    measured = measure(options, say)
    gates = [gate for algorithm, one in measured.items() for gate in gates_of(algorithm, one)]
    return {
        "levels": {level: level_figures(level, measured) for level in LEVELS},
        "techniques": [technique_figures(contender, measured) for contender in REDUCED],
        "gates": [{**asdict(gate), "passed": gate.passed} for gate in gates],
        "passed": all(gate.passed for gate in gates),
        "model": options.model,
        "quick": options.quick,
        "rounds": options.rounds,
        "minutes": watch.minutes,
        "workload": workload_of(options),
        "machine": {
            "cpu": cpu_model(),
            "cores": usable_cores(),
            "dtype": str(compute_dtype("auto")).removeprefix("torch."),
            "packages": package_versions(),
        },
    }


def measure(options: LadderOptions, say: Say) -> dict[str, Measured]:
    """Figures of each algorithm: every contender in turns with optimal, which cancels out slow changes of the machine.

    Few processes live at a time, because textbook code needs much memory.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rounds = {
            algorithm: Rounds(algorithm, options, stack.enter_context(Worker(PROMPTS)), folder)
            for algorithm in ALGORITHMS
        }
        for contenders in (*([level] for level in LOWER), REDUCED):
            compete(contenders, rounds.values(), say)
        for one in rounds.values():
            one.finish()
    return {algorithm: one.found for algorithm, one in rounds.items()}


def compete(contenders: Iterable[Contender], rounds: Collection["Rounds"], say: Say) -> None:
    """All that some contenders have to do, one after the other in the same process."""
    with Worker(PROMPTS) as worker:
        for contender, one in itertools.product(contenders, rounds):
            one.take(contender, worker)
            slowdown = one.found.slowdown[contender.name]
            say(f"{one.algorithm}: {contender.name} takes {slowdown:.2f} times as long as optimal")


class Rounds:
    """The steps of one algorithm. `optimal` is the process that all contenders alternate with."""

    def __init__(self, algorithm: str, options: LadderOptions, optimal: Worker, folder: Path) -> None:
        self.algorithm = algorithm
        self.found = Measured()
        self._options = options
        self._optimal = optimal
        optimal.call("build", recipe(algorithm, Contender("optimal"), options))
        self._lesson = Lesson(optimal.call("draw"), (), folder / f"{algorithm}.safetensors", num_updates=8)

    def take(self, contender: Contender, worker: Worker) -> None:
        """Build the contender in the process `worker`, let it learn the lesson if it is a level, and measure it."""
        worker.call("build", recipe(self.algorithm, contender, self._options))
        if contender.without is None:
            self._learn(contender.level, worker)
        steps = self._steps(contender.name, worker)
        if contender.without is None:
            self.found.taken[contender.level] = steps
            self._note(contender.level, worker)

    def finish(self) -> None:
        """Note what is left of optimal.

        Raises:
            TrainingError: steps had different numbers of tokens, so that their times cannot be compared.
        """
        self._note("optimal", self._optimal)
        check_same_work(self.found)

    def _learn(self, level: Level, worker: Worker) -> None:
        """The lesson at a level, and after the baseline, whose log-probs and gradients are compared with, at optimal,
        which has made no step yet.
        """
        if level == "baseline":
            self._lesson = replace(self._lesson, logps=worker.call("logps", self._lesson.groups))
        self.found.learnt[level] = worker.call("learn", self._lesson)
        if level == "baseline":
            self.found.learnt["optimal"] = self._optimal.call("learn", self._lesson)

    def _steps(self, name: str, worker: Worker) -> list[Taken]:
        """Steps of a contender, in turns with optimal; who begins changes, because processors warm up and throttle."""
        sides = (self._optimal, worker)
        taken: list[list[Taken]] = [[], []]
        for side in sides if "optimal" not in self.found.taken else (worker,):
            side.call("step", 0)  # touches new memory, and compiles
        for index in range(self._options.rounds):
            for place in (0, 1) if index % 2 else (1, 0):
                taken[place].append(sides[place].call("step", index + 1))
        best, own = taken
        ratios = [one.seconds / other.seconds for one, other in zip(own, best, strict=True)]
        self.found.slowdown[name] = statistics.median(ratios)
        self.found.taken.setdefault("optimal", []).extend(best)
        return own

    def _note(self, level: Level, worker: Worker) -> None:
        self.found.peak_gb[level] = worker.call("peak_gb")
        if self.algorithm == "grpo":
            self.found.run_gain[level] = worker.call("train", *short_run(level, self._options))


def recipe(algorithm: str, contender: Contender, options: LadderOptions) -> PolicyRecipe:
    """The recipe of a contender."""
    values: dict[str, object] = {
        "model": options.model,
        "level": contender.level,
        "reward": ["unique_chars"],
        "rollout.prompts_per_step": len(PROMPTS),
        "rollout.completions_per_prompt": options.num_completions,
        "rollout.max_new_tokens": options.num_tokens,
        "rollout.min_new_tokens": options.num_tokens,
        "optimizer.learning_rate": 1e-4,
        "run.seed": options.seed,
        "run.steps": 1000,
    }
    if contender.without is not None:
        known = {key.path for key in leaves(schema_of(algorithm))}
        values |= {key: value for key, value in contender.without.without.items() if key in known}
    return _policy_recipe(algorithm, values)


def short_run(level: Level, options: LadderOptions) -> tuple[PolicyRecipe, Sequence[str]]:
    """A run that learns much in seconds at any level, and its prompts."""
    values: dict[str, object] = {
        "model": "tiny:llama",
        "level": level,
        "reward": ["unique_chars"],
        "rollout.prompts_per_step": 4,
        "rollout.completions_per_prompt": 8,
        "rollout.max_new_tokens": 8,
        "optimizer.learning_rate": 5e-3,
        "run.steps": 10 if options.quick else 30,
        "run.checkpoint_every": 0,
        "run.sample_every": 1000,
        "run.measure": False,
    }
    return _policy_recipe("grpo", values), PROMPTS


def _policy_recipe(algorithm: str, values: Mapping[str, object]) -> PolicyRecipe:
    origins = dict.fromkeys(values, "ladder")  # a technique may be left out where it has no effect
    loaded = load_recipe(algorithm, overrides=values, origins=origins).recipe
    assert isinstance(loaded, PolicyRecipe)
    return loaded


def check_same_work(found: Measured) -> None:
    """Raise TrainingError unless all steps had the same number of tokens: their times could not be compared."""
    counts = {taken.num_tokens for steps in found.taken.values() for taken in steps}
    if len(counts) > 1:
        raise TrainingError(
            f"the steps had {', '.join(map(str, sorted(counts)))} tokens, so they cannot be compared; this is a defect "
            "of the ladder: completions have a fixed length"
        )


def step_seconds(name: str, measured: Mapping[str, Measured]) -> list[float]:
    """Seconds of a step of each algorithm: the median of optimal's times the contender's slowdown."""
    return [
        statistics.median(taken.seconds for taken in one.taken["optimal"]) * one.slowdown.get(name, 1.0)
        for one in measured.values()
    ]


def level_figures(level: Level, measured: Mapping[str, Measured]) -> dict[str, float]:
    """Figures of a PPO and a GRPO step together: medians over the rounds, and the larger peak of memory."""
    seconds = step_seconds(level, measured)
    steps = [one.taken[level] for one in measured.values()]
    shares = [statistics.median(taken.cpu_util for taken in part) for part in steps]
    waits = [taken.gil_wait_ms for part in steps for taken in part if taken.gil_wait_ms is not None]
    return {
        "step_s": sum(seconds),
        "ratio": sum(step_seconds("baseline", measured)) / sum(seconds),
        **{f"{name}_s": part_s for name, part_s in zip(measured, seconds, strict=True)},
        "tokens_per_s": sum(part[0].num_tokens for part in steps) / sum(seconds),
        "cpu_util": sum(share * part_s for share, part_s in zip(shares, seconds, strict=True)) / sum(seconds),
        **({"gil_wait": statistics.median(waits)} if waits else {}),
        "peak_memory_gb": max(one.peak_gb[level] for one in measured.values()),
    }


def technique_figures(contender: Contender, measured: Mapping[str, Measured]) -> dict[str, object]:
    """The ratio to the baseline that optimal reaches without a technique."""
    assert contender.without is not None
    baseline_s, without_s = (sum(step_seconds(name, measured)) for name in ("baseline", contender.name))
    return {
        "name": contender.without.name,
        "level": contender.without.level,
        "ratio_without": baseline_s / without_s,
        **{f"{algorithm}_slowdown": one.slowdown[contender.name] for algorithm, one in measured.items()},
        "without": dict(contender.without.without),
    }


def gates_of(algorithm: str, found: Measured) -> list[Gate]:
    """The gates of the three upper levels; float32 is compared by its rounding, 16-bit weights by theirs."""
    base = found.learnt["baseline"]
    gates: list[Gate] = []
    for level in LEVELS[1:]:
        is_coarse = level != "basic" and compute_dtype("auto").itemsize == 2
        learnt, name = found.learnt[level], f"{algorithm} {level}"
        gates += [
            Gate(f"{name}: log-probs, nats", learnt.logp_difference, 0.05 if is_coarse else 1e-3),
            Gate(f"{name}: loss", abs(learnt.loss - base.loss), 0.02 if is_coarse else 1e-4),
            Gate(f"{name}: gradient, relative", learnt.gradient_distance, 0.3 if is_coarse else 1e-3),
            Gate(f"{name}: gain of updates, relative", abs(learnt.gain / base.gain - 1), 0.3 if is_coarse else 0.02),
        ]
        if found.run_gain:
            missing = 1 - found.run_gain[level] / found.run_gain["baseline"]
            gates.append(Gate(f"{name}: reward gained less by a short run, relative", max(0.0, missing), 0.25))
    return gates


def workload_of(options: LadderOptions) -> dict[str, object]:
    """The size of a step, for the page."""
    ppo = recipe("ppo", Contender("optimal"), options)
    assert isinstance(ppo, PPORecipe)
    return {
        "algorithms": list(ALGORITHMS),
        "prompts": len(PROMPTS),
        "completions_per_prompt": options.num_completions,
        "new_tokens": options.num_tokens,
        "ppo_epochs": ppo.ppo.num_epochs,
        "reward": "unique_chars",
        "kl_to_reference": True,
    }
