"""`tunesmith compare-algorithms`: PPO, GRPO, DPO and best-of-n from the same votes, compared at equal KL.

1. Votes and a reward model as in `tunesmith demo`, once. DPO learns from the votes, the others from the reward model.
2. Each algorithm trains from the base model, with each seed. After every step (DPO: every fourth) the policy continues
   openings that nothing was trained on: the rater's mean score and the KL to the base are a point of its curve. A
   training ends once its KL is beyond the last target.
3. The score at 2, 4 and 6 nats is read off each curve, and an interval is computed over the seeds.

Every training is a run in the comparison's folder, so a comparison that was killed goes on where it was.
"""

import gc
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from tunesmith.apps.workflows.demo import NUM_COMPARED, DemoOptions, Stage, collect_votes, demo_algorithms, few_prompts
from tunesmith.base.config.algorithms.reward import RewardRecipe
from tunesmith.base.config.comparison import COMPARISON, ComparisonOptions, read_comparison
from tunesmith.base.config.load import load_recipe
from tunesmith.base.config.recipe import PolicyRecipe, Recipe
from tunesmith.base.config.schema import SPECS
from tunesmith.base.config.sections import PromptsSection, RewardSource
from tunesmith.base.core.seeds import derive
from tunesmith.base.runs.folder import RunFolder, read_jsonl
from tunesmith.base.runs.listing import is_run, number, read_object
from tunesmith.base.runs.lock import RunLock
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.prompts import load_prompts
from tunesmith.collect.data.split import split_by_prompt
from tunesmith.collect.statistics.intervals import mean_interval
from tunesmith.engine.batch.pack import pack
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.evaluation.compare import summed_logps
from tunesmith.learn.rewards.scorer import Scorer
from tunesmith.learn.trainers.api import Listener, Wishes
from tunesmith.learn.trainers.resume import resume
from tunesmith.learn.trainers.rollouts import sampling_params
from tunesmith.learn.trainers.run import run
from tunesmith.learn.trainers.setup import prepare, say
from tunesmith.observe.reports.html import write_algorithms_report

TARGETS = (2.0, 4.0, 6.0)
"""KL to the base model in nats per completion at which the algorithms are compared."""

NUM_COMPLETIONS = 6
"""Completions of each opening in an evaluation."""

DPO_STEPS = 4
"""Steps of DPO for each step of the others: it draws nothing, and learns from about four openings at a time. It is
evaluated as often as they are.
"""

_SETTINGS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        # The KL shall grow through all targets in few steps, so it is held less than in the demo; yet by three nats at
        # most between evaluations, as a rule, so that the scores at the targets are not read off long lines.
        "ppo": {"optimizer.learning_rate": 2e-4, "ppo.kl.coef": 0.02, "ppo.kl.target": None},
        "grpo": {"optimizer.learning_rate": 2e-4, "grpo.kl.coef": 0.01, "grpo.kl.target": None},
        "dpo": {"optimizer.learning_rate": 1e-4, "pairs.heldout_source": ""},
    }
)
"""Changes to the shipped recipes, besides a constant learning rate: a training may end before its last step."""

_SETTINGS_OF_OTHERS: Mapping[str, object] = MappingProxyType({"optimizer.learning_rate": 1e-4})


@dataclass(frozen=True, slots=True)
class Point:
    """A policy after `step` steps: KL to the base in nats per completion, and the rater's mean score."""

    step: int
    kl: float
    score: float


class Examiner:
    """Draws completions of held-out openings, and measures the rater's mean score and the KL to the base model."""

    def __init__(self, openings: Sequence[Prompt], policy: PolicyRecipe, num: int) -> None:
        loaded = load_policy(policy.model)
        self.base = language_model(loaded.model)
        self.tokenizer = loaded.tokenizer
        self._openings, self._num = openings, num
        self._sampling = sampling_params(policy.rollout, derive(0, "examine"))
        self._scorer = Scorer([RewardSource(source="sentiment")], policy_tokenizer=loaded.tokenizer)
        self._base_logps = summed_logps(self.base)

    def examine(self, engine: Engine, step: int) -> Point:
        """The point of the policy that `engine` draws from, after `step` steps; step 0 is the base model itself."""
        groups = engine.generate(self._openings, self._num, self._sampling)
        score = self._scorer.score(groups).metrics()["reward"]
        if step == 0:
            return Point(0, 0.0, score)
        own = pack(groups, pad_id=0).raw_logp_BT.double().sum().item()  # as the engine recorded them
        base = sum(self._base_logps(groups, self._sampling.temperature))
        return Point(step, (own - base) / (len(groups) * self._num), score)


class Curve(Listener):
    """Evaluates a policy as it is trained, writes `curve.jsonl` into its run, has a checkpoint saved each time, and
    ends the run once the KL is beyond the last target.
    """

    def __init__(self, examiner: Examiner, every: int) -> None:
        self._examiner, self._every = examiner, every

    def begin(self, cfg: Recipe, learner: Any, folder: Path, first_step: int, num_steps: int) -> None:
        """Open the engine; points after the checkpoint of a resumed run are removed, and measured again."""
        self._folder, self._num_steps = RunFolder(folder), num_steps
        points = [point for point in read_curve(folder) if point.step <= first_step]
        self._folder.write_rows("curve.jsonl", [asdict(point) for point in points])
        self._is_done = any(point.kl >= TARGETS[-1] for point in points)
        self._engine = (
            learner.engine
            if SPECS[cfg.algorithm].draws
            else open_engine(learner.policy, learner.tokenizer, weight_version=lambda: learner.optimizer.weight_version)
        )

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> Wishes:
        """Evaluate if that is due."""
        if self._is_done or (step != self._num_steps and step % self._every):
            return Wishes(stop=self._is_done)
        point = self._examiner.examine(self._engine, step)
        self._folder.append("curve.jsonl", [asdict(point)])
        self._is_done = point.kl >= TARGETS[-1]
        say(f"step {step}: score {point.score:.3f} at {point.kl:.2f} nats", enabled=True)
        return Wishes(save=True, stop=self._is_done)


def read_curve(run: Path) -> list[Point]:
    """The evaluations of the training in the folder `run`, without that of the base model."""
    return [Point(**row) for row in read_jsonl(run / "curve.jsonl")]  # type: ignore[arg-type]


def run_comparison(options: ComparisonOptions, out: Path) -> Path:
    """Compare the algorithms in a new folder below `out`; returns it, with `comparison.json` and `report.html`."""
    chosen = {"algorithm": COMPARISON, "model": {"name": options.model}, "comparison": options.model_dump()}
    folder = RunFolder.create(out.absolute(), "compare-algorithms", chosen)
    return go_on(folder.path)


def go_on(path: Path) -> Path:
    """Do what is left of the comparison in the folder `path`, and return it.

    Raises:
        RunError: if it holds no comparison, or another process works in it.
        StoppedError: after a signal, once a checkpoint of the training is written.
    """
    options = read_comparison(path)
    with RunLock(path):
        folder = RunFolder(path)
        split = split_by_prompt(_openings(options), 0.0, 0, num_heldout=NUM_COMPARED)
        votes = _stage(options, folder)
        prepare(votes.policy_recipe)
        if not (path / "prompts.jsonl").is_file():
            collect_votes(votes, split.train)
            _write_prompts(path / "prompts.jsonl", split.train)
            gc.collect()
        say("\n[3/5] a reward model learns from the votes", enabled=True)
        judge = trained(votes.reward_recipe, path)
        gc.collect()
        examiner = Examiner(split.heldout, votes.policy_recipe, 2 if options.quick else NUM_COMPLETIONS)
        if not (path / "base.json").is_file():
            base = examiner.examine(open_engine(examiner.base, examiner.tokenizer), 0)
            folder.write_json("base.json", asdict(base))
        curves = _train_all(options, path, judge, examiner)
        facts = {**comparison_facts(options, curves), **_run_facts(judge)}
        folder.write_json("comparison.json", facts)
        write_algorithms_report(path / "report.html", facts)
        folder.write_json("result.json", {name: facts[name] for name in ("said", "accuracy", "minutes")})
    return path


def _openings(options: ComparisonOptions) -> Sequence[Prompt]:
    return load_prompts("films", PromptsSection())[:: 5 if options.quick else 1]


def _stage(options: ComparisonOptions, folder: RunFolder) -> Stage:
    """The demo's stage, which collects the votes. Its reward model learns from the votes' files."""
    reward = recipe_of("reward", options, folder.path)
    policy = recipe_of("ppo", options, folder.path)
    assert isinstance(reward, RewardRecipe)
    assert isinstance(policy, PolicyRecipe)
    return Stage(DemoOptions(quick=options.quick, dtype=options.dtype), folder, reward, policy)


def recipe_of(
    algorithm: str, options: ComparisonOptions, folder: Path, seed: int = 0, judge: Path | None = None
) -> Recipe:
    """The recipe of one training of the comparison in `folder`; `judge` is the run of the reward model."""
    shipped = "dpo_demo" if algorithm == "dpo" else f"demo_{algorithm}"
    values: dict[str, object] = {
        "model.name": options.model,
        "model.dtype": options.dtype,
        "run.name": algorithm if algorithm == "reward" else f"{algorithm}-seed{seed}",
        "run.dir": str(folder),
        "run.seed": seed,
    }
    if algorithm != "reward":
        values |= {"optimizer.schedule": "constant", **_SETTINGS.get(algorithm, _SETTINGS_OF_OTHERS)}
    if options.model != "smollm2":  # the recipes count the layers of this one
        values["model.num_trainable_layers"] = None
        if algorithm == "reward":
            values["reward_model.num_layers"] = None
    if algorithm in ("reward", "dpo"):
        # A completion may hold what is no text, such as a NUL character.
        values |= {"pairs.source": str(folder / "votes.jsonl"), "pairs.skip_bad": True}
    else:
        values |= {"prompts.source": str(folder / "prompts.jsonl"), "reward": [{"source": str(judge or "")}]}
    if algorithm == "reward":
        values["pairs.heldout_source"] = str(folder / "heldout_votes.jsonl")
        values["pairs.heldout_fraction"] = 0.1  # the default, not that of the demo's recipe, which holds out its own
    else:
        values["run.steps"] = options.steps * (DPO_STEPS if algorithm == "dpo" else 1)
    if options.quick and algorithm not in ("reward", "dpo"):
        values |= few_prompts(algorithm)
    return load_recipe(algorithm, recipe=shipped, overrides=values).recipe


def titles() -> dict[str, str]:
    """The title of each algorithm that is compared, by its name: DPO, and all that the demo has a recipe for."""
    others = {name: SPECS[name].title.partition(" (")[0] for name in demo_algorithms() if name not in _SETTINGS}
    return {name: name.upper() for name in _SETTINGS} | others


def _train_all(options: ComparisonOptions, path: Path, judge: Path, examiner: Examiner) -> dict[str, list[list[Point]]]:
    """The curves of each algorithm, one for each seed; a seed of all algorithms before the next seed."""
    base = Point(**json.loads((path / "base.json").read_text(encoding="utf-8")))
    title_of = titles()
    curves: dict[str, list[list[Point]]] = {algorithm: [] for algorithm in title_of}
    for seed in range(options.seeds):
        for place, (algorithm, title) in enumerate(title_of.items(), 1 + seed * len(title_of)):
            count = f"{place} of {options.seeds * len(title_of)}"
            say(f"\n[4/5] {title} with seed {seed}, training {count}", enabled=True)
            curve = Curve(examiner, DPO_STEPS if algorithm == "dpo" else 1)
            folder = trained(recipe_of(algorithm, options, path, seed, judge), path, curve)
            curves[algorithm].append([base, *read_curve(folder)])
            gc.collect()
    return curves


def trained(recipe: Recipe, folder: Path, listener: Listener | None = None) -> Path:
    """The run of `recipe` in `folder`: one that has ended, else resumed, else new. Its checkpoints are removed."""
    found = next((run for run in sorted(folder.glob(f"*-{recipe.run.name}-*")) if is_run(run)), None)
    if found is None:
        found = run(recipe, listener=listener).run_dir
    elif not (found / "result.json").is_file():
        resume(found, listener=listener)
    shutil.rmtree(found / "checkpoints", ignore_errors=True)
    return found


def comparison_facts(options: ComparisonOptions, curves: Mapping[str, Sequence[Sequence[Point]]]) -> dict[str, Any]:
    """The curves, and the scores at each target with their mean and 95 % interval over the seeds, by algorithm."""
    title_of = titles()
    algorithms = {
        name: {
            "title": title_of[name],
            "curves": [[asdict(point) for point in curve] for curve in of_seeds],
            "at": [_at(target, of_seeds) for target in TARGETS],
        }
        for name, of_seeds in curves.items()
    }
    facts = {"options": options.model_dump(), "targets": TARGETS, "algorithms": algorithms}
    return {**facts, "said": conclusion(algorithms)}


def _at(target: float, curves: Sequence[Sequence[Point]]) -> dict[str, Any]:
    values = [score_at(curve, target) for curve in curves]
    reached = [value for value in values if value is not None]
    low, high = mean_interval(reached) if len(reached) > 1 else (None, None)
    mean = fmean(reached) if reached else None
    return {"kl": target, "scores": values, "num_reached": len(reached), "mean": mean, "low": low, "high": high}


def score_at(curve: Sequence[Point], kl: float) -> float | None:
    """The score where `curve` first reaches `kl`, by a straight line between the evaluations before and after; None if
    it does not get there.
    """
    for before, after in pairwise(curve):
        if before.kl <= kl <= after.kl and before.kl < after.kl:
            return before.score + (kl - before.kl) / (after.kl - before.kl) * (after.score - before.score)
    return None


def conclusion(algorithms: Mapping[str, Any]) -> str:
    """One sentence: the best algorithm at the largest KL that every seed of two algorithms reached."""
    for place in reversed(range(len(TARGETS))):
        found = {row["title"]: row["at"][place] for row in algorithms.values()}
        whole = {name: at for name, at in found.items() if at["num_reached"] == len(at["scores"])}
        if len(whole) > 1:
            first, second = sorted(whole, key=lambda name: -whole[name]["mean"])[:2]
            best, next_ = whole[first], whole[second]
            sure = best["low"] is not None and best["low"] > next_["high"]
            return (
                f"At {TARGETS[place]:g} nats {first} has the highest score, {best['mean']:.2f}, before {second} with "
                f"{next_['mean']:.2f}; their intervals {'do not overlap' if sure else 'overlap or are not known'}."
            )
    return "No KL was reached by every seed of two algorithms; train with more steps."


def _run_facts(judge: Path) -> dict[str, float | None]:
    """Accuracy of the reward model and numbers of votes; the minutes of all trainings, those before a stop included."""
    result = read_object(judge / "result.json")
    minutes = [number(read_object(file).get("minutes")) for file in judge.parent.glob("*/result.json")]
    names = {"accuracy": "eval/accuracy", "num_heldout_votes": "eval/num_pairs", "num_votes": "num_pairs"}
    return {name: number(result.get(key)) for name, key in names.items()} | {"minutes": sum(filter(None, minutes))}


def _write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write the file of the openings, all of it or nothing: if it is there, the votes are."""
    aside = path.with_suffix(".new")
    aside.write_text("".join(json.dumps({"prompt": one.content}) + "\n" for one in prompts), encoding="utf-8")
    aside.replace(path)
