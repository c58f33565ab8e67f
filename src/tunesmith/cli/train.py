"""`tunesmith train`: one function for each algorithm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.cli.options import UseAppendAction, flag, parse_known
from tunesmith.cli.output import Output, reporting, wants_progress
from tunesmith.core.log import visible

if TYPE_CHECKING:
    from tunesmith.config.load import Resolved
    from tunesmith.trainers.setup import RunResult


@dataclass(frozen=True, kw_only=True)
class _TrainOptions:
    recipe: Annotated[str | None, flag("A recipe that comes with Tunesmith.", metavar="NAME")] = None
    config: Annotated[Path | None, flag("A recipe of your own, in YAML.", metavar="FILE")] = None
    model: Annotated[str | None, flag("Hub id, folder, GGUF file, smollm2, scratch, tiny:FAMILY.", metavar="ID")] = None
    steps: Annotated[str | None, flag("Training steps.", metavar="N")] = None
    seed: Annotated[str | None, flag("Seed of everything that is drawn.", metavar="N")] = None
    report_to: Annotated[
        tuple[str, ...], UseAppendAction, flag("tensorboard, wandb or trackio; repeatable.", metavar="TRACKER")
    ] = ()
    skip_bad: Annotated[bool, flag("Drop rows that cannot be used, and count them.")] = False
    dry_run: Annotated[bool, flag("Show config, size and a data sample; train and write nothing.")] = False
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


@dataclass(frozen=True, kw_only=True)
class _PolicyOptions(_TrainOptions):
    prompts: Annotated[
        str | None, flag("File, folder or hub id with a `prompt` column, films, or arithmetic.", metavar="SOURCE")
    ] = None
    reward: Annotated[
        tuple[str, ...],
        UseAppendAction,
        flag("./file.py:function, built-in or reward model; repeatable.", metavar="SOURCE"),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class PPOOptions(_PolicyOptions):
    """Train a policy by PPO against a reward.

    Every key of the recipe is a flag too: --optimizer.learning-rate 3e-5. `tunesmith recipes keys ppo` lists them.
    """


@dataclass(frozen=True, kw_only=True)
class GRPOOptions(_PolicyOptions):
    """Train a policy by GRPO against a reward: each completion is measured against the others of its prompt.

    Every key of the recipe is a flag too: --optimizer.learning-rate 3e-5. `tunesmith recipes keys grpo` lists them.
    """


@dataclass(frozen=True, kw_only=True)
class RewardOptions(_TrainOptions):
    """Train a reward model on preference pairs.

    Every key of the recipe is a flag too: --optimizer.learning-rate 3e-5. `tunesmith recipes keys reward` lists them.
    """

    pairs: Annotated[
        str | None, flag("File, folder or hub id with `chosen` and `rejected`, or with rankings.", metavar="SOURCE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class DPOOptions(_TrainOptions):
    """Train a policy on preference pairs directly, without a reward model: DPO, IPO, SimPO, ORPO, KTO and others.

    Every key of the recipe is a flag too: --dpo.loss ipo. `tunesmith recipes keys dpo` lists them.
    """

    pairs: Annotated[
        str | None,
        flag("File, folder or hub id with `chosen` and `rejected`, or for KTO with `label`.", metavar="SOURCE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SFTOptions(_TrainOptions):
    """Fine-tune a language model on demonstrations.

    Every key of the recipe is a flag too: --optimizer.learning-rate 3e-5. `tunesmith recipes keys sft` lists them.
    """

    demonstrations: Annotated[
        str | None,
        flag("File, folder or hub id with `prompt` and `completion`, `messages`, or `text`.", metavar="SOURCE"),
    ] = None


def ppo(words: Sequence[str]) -> None:
    """Run `tunesmith train ppo`."""
    _train_policy("ppo", *parse_known(PPOOptions, words, "train ppo"))


def grpo(words: Sequence[str]) -> None:
    """Run `tunesmith train grpo`."""
    _train_policy("grpo", *parse_known(GRPOOptions, words, "train grpo"))


def reward(words: Sequence[str]) -> None:
    """Run `tunesmith train reward`."""
    options, unknown = parse_known(RewardOptions, words, "train reward")
    _train("reward", options, {"model": options.model, "pairs": options.pairs}, unknown)


def dpo(words: Sequence[str]) -> None:
    """Run `tunesmith train dpo`."""
    options, unknown = parse_known(DPOOptions, words, "train dpo")
    _train("dpo", options, {"model": options.model, "pairs": options.pairs}, unknown)


def sft(words: Sequence[str]) -> None:
    """Run `tunesmith train sft`."""
    options, unknown = parse_known(SFTOptions, words, "train sft")
    _train("sft", options, {"model": options.model, "demonstrations": options.demonstrations}, unknown)


def _train_policy(algorithm: str, options: _PolicyOptions, unknown: Sequence[str]) -> None:
    given = {"model": options.model, "prompts": options.prompts, "reward": list(options.reward)}
    _train(algorithm, options, given, unknown)


def _train(algorithm: str, options: _TrainOptions, given: Mapping[str, object], unknown: Sequence[str]) -> None:
    with reporting(as_json=options.json) as output:
        resolved = _resolve(algorithm, options, given, unknown)
        if options.dry_run:
            _show(resolved, output)
        else:
            _run(resolved, output)


def _resolve(algorithm: str, options: _TrainOptions, given: Mapping[str, object], unknown: Sequence[str]) -> "Resolved":
    from tunesmith.config.load import FLAGS, load_recipe, parse_overrides

    overrides = parse_overrides(algorithm, unknown)
    short = {"steps": options.steps, "seed": options.seed, "report_to": list(options.report_to)}
    for name, value in {**given, **short}.items():
        if value is not None and value != []:
            path = FLAGS.get(name, name)
            overrides.values[path] = value
            overrides.origins[path] = f"command line --{name.replace('_', '-')}"
    if options.skip_bad:
        section = {"reward": "pairs", "dpo": "pairs", "sft": "demonstrations"}.get(algorithm, "prompts")
        path = f"{section}.skip_bad"
        overrides.values[path], overrides.origins[path] = True, "command line --skip-bad"
    return load_recipe(
        algorithm, recipe=options.recipe, file=options.config, overrides=overrides.values, origins=overrides.origins
    )


def _show(resolved: "Resolved", output: Output) -> None:
    """What `--dry-run` prints."""
    from tunesmith.config.yaml_text import to_yaml
    from tunesmith.trainers.preview import preview

    output.say(to_yaml(resolved.recipe, resolved.provenance))
    facts = preview(resolved.recipe)
    memory = ", ".join(f"{part} {size_gb:.2f}" for part, size_gb in facts.memory_gb.items())
    output.say(f"model    {facts.model}, {facts.num_parameters:,} parameters")
    output.say(f"memory   {sum(facts.memory_gb.values()):.2f} GB estimated: {memory}")
    output.say(f"data     {facts.num_items:,} items, for example:\n{visible(facts.sample)}")
    output.say("\ndry run: nothing was written")
    output.finish(
        {
            "recipe": resolved.recipe.model_dump(mode="json"),
            "provenance": resolved.provenance,
            "model": facts.model,
            "num_parameters": facts.num_parameters,
            "memory_gb": facts.memory_gb,
            "num_items": facts.num_items,
            "sample": facts.sample,
        }
    )


def _run(resolved: "Resolved", output: Output) -> None:
    from tunesmith.config.schema import DPORecipe, PPORecipe, RewardRecipe, SFTRecipe

    recipe, provenance, progress = resolved.recipe, resolved.provenance, wants_progress()
    if isinstance(recipe, RewardRecipe):
        from tunesmith.trainers import reward

        result = reward.run(recipe, provenance=provenance, progress=progress)
    elif isinstance(recipe, SFTRecipe):
        from tunesmith.trainers import sft

        result = sft.run(recipe, provenance=provenance, progress=progress)
    elif isinstance(recipe, DPORecipe):
        from tunesmith.trainers import dpo

        result = dpo.run(recipe, provenance=provenance, progress=progress)
    elif isinstance(recipe, PPORecipe):
        from tunesmith.trainers import ppo

        result = ppo.run(recipe, provenance=provenance, progress=progress)
    else:
        from tunesmith.trainers import grpo

        result = grpo.run(recipe, provenance=provenance, progress=progress)
    report(result, output)


def report(result: "RunResult", output: Output) -> None:
    """Say what a run came to; with `--json`, the summary's figures stand at the top of the object too."""
    summary = dict(result.summary)
    for name, value in summary.items():
        output.say(f"{name:<30} {value:.4g}" if isinstance(value, float) else f"{name:<30} {value}")
    output.say(f"\nrun      {result.run_dir}\nreport   {result.run_dir / 'report.html'}")
    if summary["algorithm"] == "reward":
        output.say(f"use it   tunesmith train ppo --reward {result.run_dir}")
    else:
        output.say(f"try it   tunesmith chat {result.run_dir} --against base")
    last = dict(result.metrics[-1]) if result.metrics else {}
    output.finish({**summary, "run_dir": result.run_dir, "summary": summary, "last_metrics": last})
