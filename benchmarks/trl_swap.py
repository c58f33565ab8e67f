"""The same scripts on TRL and with one import changed: time and memory of a step, first losses, learning curves.

The scripts are in `benchmarks/swap`; their settings are TRL's own, so that it recomputes activations. Steps of GRPO (4
prompts x 8 completions x 64 tokens), DPO, SFT and Reward (16 rows of 2 to 60 words) alternate, each side in a process
of its own, in float32 and in TRL's default, bfloat16 by autocast. The first losses are those of training in float32 on
given completions. With --curves each side trains a tiny model with three seeds; curves agree if the means of their
whole and of their last quarter differ by less than chance would let them in 99 of 100 cases, by the seeds' own spread.
Leave the machine alone meanwhile; with smollm2 on two cores it takes about an hour, the curves ten minutes more.
"""

import random
import re
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from benchmarks.common import Say, benchmark, head, in_turns, load_warning, paired, run, spread_text
from benchmarks.process import Process
from benchmarks.step import check_same_work
from benchmarks.trl import MANY_STEPS, TRL, Memory, Taken, exported, load_trl, round_line, step_callback
from tunesmith.base.core.errors import InputError

OURS = "tunesmith.integrations.trl"
SCRIPTS = {"grpo": "arithmetic", "dpo": "preference", "sft": "demonstrations", "reward": "reward"}
PRECISIONS: Mapping[str, Mapping[str, object]] = {"float32": {"bf16": False}, "bfloat16": {"bf16": True}}
CURVES: Mapping[str, tuple[str, int, float]] = {
    "arithmetic": ("reward", 60, 3e-3),
    "sentiment": ("reward", 60, 3e-3),
    "preference": ("rewards/margins", 60, 1e-3),
}
"""Figure, steps and learning rate of each curve."""

_SEEDS = (0, 1, 2)
_LOSS_STEPS = 3
_CHANCE = 4.6  # Student's t, 99 %, 4 degrees of freedom: the means of two times three seeds
_THINGS = ("day", "food", "film", "town", "room", "book", "song", "trip")
_WORDS = {
    "chosen": ("good", "fine", "lovely", "great", "warm", "happy"),
    "rejected": ("bad", "awful", "poor", "cold", "sad", "dull"),
}


@dataclass(frozen=True, slots=True)
class Script:
    """A script of `benchmarks/swap` with the trainers of `module`, on a model, rows and arguments of its config."""

    name: str
    module: str
    model: str
    rows: Sequence[Mapping[str, str]]
    num_threads: int
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    draws: bool = True

    def trainer(self, folder: str) -> Any:
        """The trainer that the script makes."""
        load_trl()
        torch.set_num_threads(self.num_threads)
        path = Path(__file__).parent / "swap" / f"{self.name}.py"
        names: dict[str, Any] = {"__name__": self.name}
        exec(compile(swapped(path.read_text(), self.module), str(path), "exec"), names)
        settings = {"output_dir": folder, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        settings |= {"use_cpu": not torch.cuda.is_available()}
        return names["trainer"](self.model, list(self.rows), **settings, **self.arguments)


def swapped(source: str, module: str) -> str:
    """A script with its trainer imported from `module`."""
    changed, count = re.subn(r"from trl import (\w+), (\w+)", rf"from trl import \1\nfrom {module} import \2", source)
    if count != 1:
        raise InputError(f"a script has {count} lines `from trl import <config>, <trainer>`; it must have one")
    return changed


class Steps(TRL):
    """A trainer that waits for a call before each step."""

    def __init__(self, script: Script) -> None:
        self.grad_norm, self._memory = 0.0, Memory()
        self._folder = tempfile.TemporaryDirectory()
        self._trainer = script.trainer(self._folder.name)
        self._trainer.add_callback(step_callback(self))


class History:
    """Whole trainings; without draws, GRPO's completions are given."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def train(self, seed: int, saved: str | None = None) -> list[dict[str, float]]:
        """What the trainer logged after each step."""
        script = replace(self._script, arguments={**self._script.arguments, "seed": seed, "logging_steps": 1})
        with tempfile.TemporaryDirectory() as folder:
            trainer = script.trainer(folder)
            if not script.draws:
                trainer._generate_single_turn = MethodType(_given, trainer)
            trainer.train()
            if saved:
                trainer.save_model(saved)
            return [entry for entry in trainer.state.log_history if "loss" in entry]


def _given(trainer: Any, prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
    """Completions of many lengths, some of them right; the same for the same prompts."""
    draw = random.Random(str(prompt_ids))
    texts = [f"{draw.randrange(9)}{' and one' * draw.randrange(12)}" for _ in prompt_ids]
    return [trainer.processing_class(text)["input_ids"] for text in texts], None


def rows_of(name: str, longest: int) -> list[dict[str, str]]:
    """Data of a script; completions of 2 to `longest` words."""
    if name == "arithmetic":
        return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    if name == "sentiment":
        return [{"prompt": f"The {thing} was"} for thing in _THINGS]
    draw = random.Random(0)

    def text(kind: str) -> str:
        return "".join(f" {draw.choice(_WORDS[kind])}" for _ in range(draw.randint(2, longest)))

    kinds = {"completion": "chosen"} if name == "demonstrations" else {"chosen": "chosen", "rejected": "rejected"}
    return [{"prompt": "The day was", **{key: text(kind) for key, kind in kinds.items()}} for _ in range(128)]


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures.

    Raises:
        InputError: an unknown model or algorithm, or TRL is not installed.
        TrainingError: the two did not work on the same number of tokens.
    """
    load_trl()
    chosen = options.algorithm or list(SCRIPTS)
    if unknown := set(chosen) - set(SCRIPTS):
        raise InputError(f"there is no algorithm {', '.join(sorted(unknown))}; give {', '.join(SCRIPTS)}")
    precisions = options.precision or list(PRECISIONS)
    steps: dict[str, object] = {}
    losses: dict[str, object] = {}
    with exported(options.model) as folder:
        for name in chosen:
            rows = rows_of(SCRIPTS[name], 8 if options.quick else 60)
            script = Script(SCRIPTS[name], "trl", str(folder), rows, options.threads)
            losses[name] = _losses(script, options, say)
            if name == "grpo":
                length = 8 if options.quick else 64
                drawn = {"max_completion_length": length, "generation_kwargs": {"min_new_tokens": length}}
                script = replace(script, arguments=drawn)
            steps[name] = {precision: _ratio(script, precision, options, say) for precision in precisions}
    return {
        **head(
            options, "trl_swap", "model", "quick", "rounds", packages=("torch", "transformers", "trl", "accelerate")
        ),
        "steps": steps,
        "first_losses": losses,
        "curves": _curves(options, say) if options.curves else None,
    }


def _ratio(script: Script, precision: str, options: Namespace, say: Say) -> dict[str, object]:
    """Time and memory of a step of both sides."""
    say(f"{script.name}, {precision}")
    many = {"max_steps": MANY_STEPS, "logging_strategy": "no", **PRECISIONS[precision], **script.arguments}
    theirs = replace(script, arguments=many)
    with _process("Steps", theirs) as them, _process("Steps", replace(theirs, module=options.ours)) as us:
        for process in (them, us, them, us):  # the first steps build primitives and touch memory for the first time
            process.call("take")
        sides = {"ours": lambda _: us.call("take"), "trl": lambda _: them.call("take")}
        done, load = in_turns(sides, options.rounds, say, round_line)
    taken: Mapping[str, list[Taken]] = done
    if script.name == "arithmetic":
        check_same_work([*taken["ours"], *taken["trl"]])
    seconds = {side: [one.seconds for one in steps] for side, steps in taken.items()}
    peaks_gb = {side: max(one.peak_gb for one in steps) for side, steps in taken.items()}
    return {
        **paired(seconds["trl"], seconds["ours"]).facts("ratio"),
        "step_s": statistics.median(seconds["ours"]),
        "trl_step_s": statistics.median(seconds["trl"]),
        "peak_rss_gb": peaks_gb["ours"],
        "trl_peak_rss_gb": peaks_gb["trl"],
        "peak_rss_ratio": peaks_gb["ours"] / peaks_gb["trl"],
        "load": load,
    }


def _losses(script: Script, options: Namespace, say: Say) -> dict[str, object]:
    """Losses and gradient norms of the first steps, and how far the first ones are apart."""
    given = replace(script, arguments={"max_steps": _LOSS_STEPS, **PRECISIONS["float32"]}, draws=False)
    trl, ours = (_histories(replace(given, module=module), _SEEDS[:1])[0] for module in ("trl", options.ours))
    figures: dict[str, Any] = {}
    for key in ("loss", "grad_norm"):
        figures |= {key: [entry[key] for entry in ours], f"trl_{key}": [entry[key] for entry in trl]}
        figures[f"{key}_difference"] = abs(ours[0][key] - trl[0][key])
    say(f"{script.name}: first losses differ by {figures['loss_difference']:.1e}")
    return figures


def _curves(options: Namespace, say: Say) -> dict[str, object]:
    """Learning curves of both sides on a tiny model, for each seed, and whether they agree."""
    found: dict[str, object] = {}
    with exported("tiny:llama") as folder, tempfile.TemporaryDirectory() as reward_model:
        script = Script("reward", "trl", str(folder), rows_of("reward", 8), options.threads)
        with _process("History", replace(script, arguments={"max_steps": 60, "learning_rate": 3e-3})) as process:
            process.call("train", 0, reward_model)
        for name, (figure, num_steps, learning_rate) in CURVES.items():
            arguments = {"max_steps": 4 if options.quick else num_steps, "learning_rate": learning_rate}
            arguments |= PRECISIONS["float32"]
            if name != "preference":
                arguments["max_completion_length"] = 4 if name == "arithmetic" else 16
            if name == "sentiment":
                arguments["reward_model"] = reward_model
            script = replace(script, name=name, rows=rows_of(name, 8), arguments=arguments)
            curves = {
                side: [[entry[figure] for entry in history] for history in _histories(one, _SEEDS)]
                for side, one in {"trl": script, "ours": replace(script, module=options.ours)}.items()
            }
            found[name] = {"figure": figure, **agreement(curves["ours"], curves["trl"]), **curves}
            say(f"{name}: curves agree: {agreement(curves['ours'], curves['trl'])}")
    return found


def agreement(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> dict[str, object]:
    """Whether curves of three seeds of each side differ no more than by chance, and by how much."""
    facts: dict[str, Any] = {}
    quarter = -max(1, len(ours[0]) // 4)
    for part, start in {"whole": 0, "last_quarter": quarter}.items():
        means = [[statistics.fmean(curve[start:]) for curve in side] for side in (ours, theirs)]
        variance = sum(statistics.variance(of_seeds) / len(of_seeds) for of_seeds in means)
        difference = abs(statistics.fmean(means[0]) - statistics.fmean(means[1]))
        facts[part] = {"difference": difference, "most_by_chance": max(_CHANCE * variance**0.5, 1e-6)}
    first, last = (statistics.fmean(statistics.fmean(curve[part]) for curve in theirs) for part in _ends(quarter))
    agree = all(part["difference"] <= part["most_by_chance"] for part in facts.values())
    return {"agree": agree, "trl_rises_by": last - first, **facts}


def _ends(quarter: int) -> tuple[slice, slice]:
    return slice(None, -quarter), slice(quarter, None)


def _process(target: str, script: Script) -> Process:
    return Process(f"benchmarks.trl_swap:{target}", script, num_threads=script.num_threads)


def _histories(script: Script, seeds: Sequence[int]) -> list[list[dict[str, float]]]:
    with _process("History", script) as process:
        return [process.call("train", seed) for seed in seeds]


def show(facts: Mapping[str, Any]) -> None:
    """Print a line for each figure."""
    for name, precisions in facts["steps"].items():
        for precision, row in precisions.items():
            print(
                f"{name:<7}{precision:<9}{row['step_s']:.2f} s against TRL's {row['trl_step_s']:.2f} s: "
                f"{spread_text(row)}; memory {row['peak_rss_ratio']:.2f} of TRL's {row['trl_peak_rss_gb']:.2f} GB"
                f"{load_warning(row)}"
            )
    for name, row in facts["first_losses"].items():
        print(f"{name:<7}first losses differ by {row['loss_difference']:.1e}")
    for name, row in (facts["curves"] or {}).items():
        print(f"{name}: learning curves {'agree' if row['agree'] else 'DIFFER'} within noise over {len(_SEEDS)} seeds")


main = benchmark(
    measure,
    show,
    *("model", "threads", "rounds", "quick"),
    algorithm={"action": "append", "metavar": "A", "help": f"one of {', '.join(SCRIPTS)}; repeatable"},
    precision={"action": "append", "choices": list(PRECISIONS), "help": "of the steps; both if left out"},
    ours={"default": OURS, "metavar": "MODULE", "help": "whose trainers are compared with TRL's"},
    curves={"action": "store_true", "help": "learning curves as well"},
)


if __name__ == "__main__":
    run("trl_swap")
