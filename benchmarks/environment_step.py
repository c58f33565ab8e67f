"""The step of `benchmarks.environments`: GRPO with a slow environment, our trainer against TRL's, in alternation.

Both have the same environment class, whose tool is asynchronous, so that TRL makes at least the calls of one trajectory
at once, and those of the next after them; the same model, which a short SFT taught to call it three times and then to
answer; and TRL's own Qwen 2.5 template, because TRL calls tools for templates that it knows alone.
"""

import asyncio
import importlib.resources
import math
import random
import statistics
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, cast

from benchmarks.common import Say, in_turns, paired
from benchmarks.process import Process
from benchmarks.trl import LEARNING_RATE, MANY_STEPS, TRLSettings, round_line
from tunesmith import train
from tunesmith.base.config.algorithms.grpo import GRPORecipe
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.load import compute_dtype, load_policy
from tunesmith.engine.models.tool_messages import schema_of
from tunesmith.learn.trainers import setup
from tunesmith.learn.trainers.api import Inputs
from tunesmith.learn.trainers.grpo import GRPO
from tunesmith.learn.trainers.rollouts import PolicyTask

TURNS, NEW_TOKENS, GROUP = 4, 40, 4
MEDIAN_S, SIGMA = 0.2, 1.25
PLACES = ("hall", "attic", "garden", "kitchen", "cellar", "stable")


class House:
    """A house to look around in: three places, each of which takes its time."""

    _numbers: ClassVar[Iterator[int]] = count()

    def reset(self, **row: object) -> None:
        """Begin anew; the times are those of this trajectory."""
        self._number = next(House._numbers)
        self._draw = random.Random(self._number)

    async def look(self, place: str) -> str:
        """Look into a place.

        Args:
            place: Which one.
        """
        await asyncio.sleep(min(5.0, MEDIAN_S * math.exp(SIGMA * self._draw.gauss(0, 1))))
        return f"Nothing in the {place}."

    def get_reward(self) -> float:
        """A number that differs within a group: a group of equal rewards would be left out by us."""
        return (self._number * 37 % 101) / 101


def conversation(number: int) -> list[dict[str, Any]]:
    """What the model is to do: look into three places, then say that it is done."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Search house {number}."}]
    for place in random.Random(number).sample(PLACES, 3):
        call = {"type": "function", "function": {"name": "look", "arguments": {"place": place}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "look", "content": f"Nothing in the {place}."})
    return [*messages, {"role": "assistant", "content": "Done."}]


@contextmanager
def taught(model: str, steps: int) -> Iterator[Path]:
    """A folder with the model that calls the tool, gone afterwards."""
    template = importlib.resources.files("trl").joinpath("chat_templates/qwen2_5.jinja").read_text()
    with TemporaryDirectory() as folder:
        loaded = load_policy(model)
        loaded.tokenizer.chat_template = template
        base = save_final(loaded.model, loaded.tokenizer, Path(folder) / "base", ModelCard(model, "none"))
        tools = [schema_of(House.look)]
        run = train.sft(
            model=str(base),
            demonstrations=[{"messages": conversation(number), "tools": tools} for number in range(8 * steps)],
            steps=steps,
            progress=False,
            **{
                "run.dir": folder,
                "sft.demonstrations_per_step": 8,
                "optimizer.learning_rate": 3e-4,
                "model.num_trainable_layers": 10,
            },
        )
        yield run.run_dir / "final"


@dataclass(frozen=True, slots=True)
class OurEnvironmentStep:
    """Our trainer on `num_prompts` prompts, with `GROUP` trajectories each."""

    folder: str
    num_prompts: int
    num_threads: int
    dtype: str
    seed: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Prompts of both sides."""
        return [{"prompt": conversation(number)[:1]} for number in range(self.num_prompts)]

    def build(self) -> tuple[GRPO, PolicyTask]:
        """The learner before its first step, and its task."""
        cfg = GRPORecipe.model_validate(
            {
                "model": {"name": self.folder, "dtype": self.dtype},
                "rollout": {
                    "prompts_per_step": self.num_prompts,
                    "completions_per_prompt": GROUP,
                    "max_new_tokens": NEW_TOKENS,
                    "temperature": 0.5,
                },
                "environment": {"max_turns": TURNS},
                "reward": [{"source": "environment"}],
                "grpo": {"kl": {"coef": 0.0}},
                "optimizer": {"learning_rate": LEARNING_RATE},
                "run": {"seed": self.seed, "num_threads": self.num_threads, "steps": MANY_STEPS},
            }
        )
        task = PolicyTask(GRPO, cfg, Inputs(prompts=self.rows, environment_factory=House), setup.prepare(cfg))
        return cast(GRPO, task.build()), task

    def trl(self) -> TRLSettings:
        """TRL's settings for the same work, with all rows in one micro-batch."""
        num_rows = self.num_prompts * GROUP
        arguments = {
            "num_generations": GROUP,
            "max_completion_length": TURNS * (NEW_TOKENS + 20),
            "max_tool_calling_iterations": TURNS - 1,
            "temperature": 0.5,
            "beta": 0.0,
            "seed": self.seed,
        }
        dtype = str(compute_dtype(self.dtype)).removeprefix("torch.")
        prompts = [row["prompt"] for row in self.rows]
        environment = "benchmarks.environment_step:House"
        return TRLSettings(
            self.folder,
            prompts,
            num_rows,
            self.num_threads,
            min(16, num_rows),
            dtype,
            arguments,
            environment=environment,
        )


def measure_step(options: Namespace, say: Say) -> dict[str, object]:
    """Seconds of a step of both sides, and their ratio."""
    num_prompts = 2 if options.quick else options.trajectories // GROUP
    with taught(options.model, 4 if options.quick else 40) as folder:
        ours = OurEnvironmentStep(str(folder), num_prompts, options.threads, options.dtype, options.seed)
        theirs = ours.trl()
        with Process("benchmarks.trl:Ours", ours, num_threads=options.threads) as us, theirs.start() as them:
            for process in (us, them):
                process.call("take")  # the first step builds primitives and touches memory for the first time
            sides = {"ours": lambda _: us.call("take"), "trl": lambda _: them.call("take")}
            done, load = in_turns(sides, options.rounds, say, round_line)
    seconds = {side: [one.seconds for one in taken] for side, taken in done.items()}
    return {
        "trajectories": num_prompts * GROUP,
        "ours_s": statistics.median(seconds["ours"]),
        "trl_s": statistics.median(seconds["trl"]),
        **paired(seconds["trl"], seconds["ours"]).facts("ratio"),
        "ours_stages": {name: value for name, value in sorted(done["ours"][-1].stages_s.items()) if "time/" in name},
        "tokens": {side: [one.num_tokens for one in taken] for side, taken in done.items()},
        "load": load,
    }
