"""What the heads of a reward model save a policy from: PPO against a reward model of few votes, far from its start.

For each seed a simulated rater, which is wrong on a share of them, votes on pairs of the base model's continuations of
film openings; a reward model with several heads learns the votes; and PPO follows it, with the mean of the heads and
with a pessimistic one, until it is so many nats from the base model. After each step the policy continues held-out
openings, and the rater, without mistakes, says what they are worth. What is learnt says nothing about people.
"""

import random
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith.apps.workflows.algorithms import Examiner, Point
from tunesmith.apps.workflows.demo import NUM_COMPARED
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.recipe import PolicyRecipe, Recipe
from tunesmith.base.config.sections import PromptsSection
from tunesmith.base.core.seeds import derive
from tunesmith.base.runs.folder import read_jsonl
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.split import split_by_prompt
from tunesmith.collect.statistics.intervals import mean_interval
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.rewards.builtin import TIE_BELOW, SimulatedRater
from tunesmith.learn.trainers import run as training
from tunesmith.learn.trainers.api import Inputs, Listener, Wishes
from tunesmith.learn.trainers.rollouts import sampling_params

ACCURACY = 0.85
NUM_HELDOUT = 100
NUM_COMPLETIONS = 6
"""Completions of each held-out opening after a step."""

MEAN = "0"
"""The pessimism that others are compared with: the mean of the heads."""

_TINY = {"model.name": "tiny:llama", "model.dtype": "float32", "model.num_trainable_layers": None}


def recipe_of(algorithm: str, options: Namespace, folder: Path, seed: int, **values: object) -> Recipe:
    """The demo's recipe of `algorithm` with `values`, and what this benchmark changes."""
    values |= {"run.dir": str(folder), "run.seed": seed, **(_TINY if options.quick else {})}
    if algorithm == "reward" and options.quick:
        values["reward_model.num_layers"] = None
    if algorithm == "ppo":
        values |= {
            "optimizer.learning_rate": 2e-4,
            "optimizer.schedule": "constant",
            "ppo.kl.coef": 0.005,
            "ppo.kl.target": None,
            "ppo.kl.horizon": 10_000.0,
            "run.steps": options.steps,
        }
        if options.quick:
            values |= {"rollout.prompts_per_step": 6, "rollout.max_new_tokens": 6}
    return load_recipe(algorithm, recipe=f"demo_{algorithm}", overrides=values).recipe


def voted(
    policy: PolicyRecipe, openings: Sequence[Prompt], num: int, seed: int, *, by_length: bool = False
) -> list[Pair]:
    """`num` votes that are no ties, of a rater who is wrong on some, on two continuations of one of `openings` each.
    With `by_length` the longer one is better, for models that write no words.
    """
    loaded = load_policy(policy.model)
    engine = open_engine(loaded.model, loaded.tokenizer)
    rater, draw = SimulatedRater(), random.Random(derive(seed, "votes"))
    pairs: list[Pair] = []
    for number in range(20):
        chosen = [openings[draw.randrange(len(openings))] for _ in range(max(8, num))]
        rows = [Prompt(f"{number}-{place}", one.content) for place, one in enumerate(chosen)]
        sampling = sampling_params(policy.rollout, derive(seed, "votes", number))
        for group in engine.generate(rows, 2, sampling):
            texts = [one.text.replace("\x00", "") for one in group.completions]
            scores = [float(len(text)) if by_length else rater.score(str(group.prompt.content), text) for text in texts]
            if abs(scores[0] - scores[1]) >= TIE_BELOW and all(text.strip() for text in texts):
                better = int((scores[1] > scores[0]) == (draw.random() < ACCURACY))
                pairs.append(Pair(group.prompt, chosen=texts[better], rejected=texts[1 - better]))
        if len(pairs) >= num:
            break
    return pairs[:num]


class Followed(Listener):
    """Examines a policy after each step, and ends its training once it is `most_kl` nats from the base model."""

    def __init__(self, examiner: Examiner, most_kl: float, say: Say) -> None:
        self._examiner, self._most_kl, self._say = examiner, most_kl, say
        self.points: list[dict[str, float]] = []

    def begin(self, cfg: Recipe, learner: Any, folder: Path, first_step: int, num_steps: int) -> None:
        """Keep the engine that draws."""
        self._engine = learner.engine

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> Wishes:
        """Add a point: step, KL, the rater's score, and what the reward model says of its own step."""
        point: Point = self._examiner.examine(self._engine, step)
        names = {"spread": "/spread", "unfamiliar": "/unfamiliar", "proxy": "/mean_of_heads"}
        own = {
            name: value
            for name, end in names.items()
            for key, value in metrics.items()
            if key.startswith("rewards/") and key.endswith(end)
        }
        self.points.append({**asdict(point), **own})
        line = ", ".join(f"{name} {value:.2f}" for name, value in self.points[-1].items())
        self._say(line)
        return Wishes(stop=point.kl >= self._most_kl)


def followed(options: Namespace, seed: int, folder: Path, say: Say) -> dict[str, dict[str, Any]]:
    """The trainings of one seed, by their pessimism: the points of each, and the step of the finding, if there is."""
    openings = load_prompts("films", PromptsSection())
    split = split_by_prompt(openings, 0.0, 0, num_heldout=NUM_COMPARED)
    plain = recipe_of("ppo", options, folder, seed)
    assert isinstance(plain, PolicyRecipe)
    votes = partial(voted, plain, seed=seed, by_length=options.quick)
    pairs, heldout = votes(split.train[::2], options.votes), votes(split.train[1::2], NUM_HELDOUT)
    section = {"heads.count": options.heads, "pairs_per_step": 20, "micro_batch_size": 20, "num_epochs": 3}
    reward = recipe_of(
        "reward", options, folder, seed, **{f"reward_model.{name}": value for name, value in section.items()}
    )
    judge = training.run(reward, Inputs(pairs=pairs, heldout_pairs=heldout), progress=False)
    say(f"seed {seed}: {judge.summary}")
    examiner = Examiner(split.heldout, plain, 1 if options.quick else NUM_COMPLETIONS)
    found: dict[str, dict[str, Any]] = {}
    for pessimism in dict.fromkeys((MEAN, *(options.pessimism or ("1", "worst")))):
        say(f"seed {seed}, pessimism {pessimism}")
        value = pessimism if pessimism == "worst" else float(pessimism)
        source = {"source": str(judge.run_dir / "final"), "pessimism": value}
        listener = Followed(examiner, options.kl, say)
        cfg = recipe_of("ppo", options, folder, seed, reward=[source])
        ended = training.run(cfg, Inputs(prompts=split.train), progress=False, listener=listener)
        told = [row["step"] for row in read_jsonl(ended.run_dir / "findings.jsonl") if row["name"] == "unfamiliar"]
        found[pessimism] = {"points": listener.points, "finding_step": told[0] if told else None}
    return found | {"judge": {"accuracy": judge.summary.get("eval/accuracy"), "spread": judge.summary.get("spread")}}


def figures(of_seeds: Sequence[Mapping[str, Any]], pessimism: str) -> dict[str, Any]:
    """The rater's score at the end, less that with the mean of the heads, with their means and intervals over seeds."""
    last = [one[pessimism]["points"][-1] for one in of_seeds]
    gains = [end["score"] - one[MEAN]["points"][-1]["score"] for one, end in zip(of_seeds, last, strict=True)]
    low, high = mean_interval(gains) if len(gains) > 1 else (None, None)
    scores = [[point["score"] for point in one[pessimism]["points"]] for one in of_seeds]
    return {
        "score": fmean(end["score"] for end in last),
        "best_score": fmean(map(max, scores)),
        "kl": fmean(end["kl"] for end in last),
        "steps": fmean(end["step"] for end in last),
        "gain": fmean(gains),
        "gain_low": low,
        "gain_high": high,
        "finding_steps": [one[pessimism]["finding_step"] for one in of_seeds],
        "best_steps": [1 + values.index(max(values)) for values in scores],
    }


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All seeds, one after the other."""
    of_seeds: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.seeds):
        with tempfile.TemporaryDirectory() as place:
            of_seeds.append(followed(options, seed, Path(place), say))
    kinds = [name for name in of_seeds[0] if name != "judge"]
    return {
        **head(options, "pessimism", "quick", "seed", "seeds", "votes", "heads", "kl", "steps"),
        "pessimism": {kind: figures(of_seeds, kind) for kind in kinds},
        "trainings": of_seeds,
    }


def _show(facts: Mapping[str, Any]) -> None:
    columns = ("score", "best_score", "kl", "steps", "gain", "gain_low", "gain_high", "finding_steps", "best_steps")
    rows = [
        [kind, *(str(found[name]) if isinstance(found[name], list) else f"{found[name] or 0:.3g}" for name in columns)]
        for kind, found in facts["pessimism"].items()
    ]
    print_table(["pessimism", *columns], rows)


main = benchmark(
    measure,
    _show,
    "quick",
    "seed",
    seeds={"type": int, "default": 3, "metavar": "N", "help": "seeds, from --seed on, each with votes of its own"},
    votes={"type": int, "default": 200, "metavar": "N", "help": "votes that a reward model learns"},
    heads={"type": int, "default": 8, "metavar": "N", "help": "heads of a reward model"},
    kl={"type": float, "default": 20.0, "metavar": "NATS", "help": "KL to the base model at which a training ends"},
    steps={"type": int, "default": 40, "metavar": "N", "help": "most steps of a training"},
    pessimism={"action": "append", "metavar": "X", "help": "beside 0; repeatable. 1 and worst if left out"},
)

if __name__ == "__main__":
    run("pessimism")
