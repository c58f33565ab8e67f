"""`tunesmith train ALGORITHM`, for each algorithm of `config.schema.SPECS`, and `tunesmith resume`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from tunesmith.apps.cli.options import EnvironmentFlags, Positional, UseAppendAction, flag, parse_known
from tunesmith.apps.cli.output import Output, reporting, wants_progress
from tunesmith.base.core.log import visible

if TYPE_CHECKING:
    from tunesmith.base.config.load import Resolved
    from tunesmith.learn.trainers.setup import RunResult


@dataclass(frozen=True, kw_only=True)
class _TrainOptions:
    recipe: Annotated[str | None, flag("A recipe that comes with Tunesmith.", "NAME")] = None
    config: Annotated[Path | None, flag("A recipe of your own, in YAML.", "FILE")] = None
    model: Annotated[str | None, flag("Hub id, folder, GGUF file, smollm2, scratch, tiny:FAMILY.", "ID")] = None
    level: Annotated[str | None, flag("Settings: baseline, basic, advanced or optimal.", "LEVEL")] = None
    steps: Annotated[str | None, flag("Training steps.", "N")] = None
    seed: Annotated[str | None, flag("Seed of everything that is drawn.", "N")] = None
    report_to: Annotated[
        tuple[str, ...], UseAppendAction, flag("tensorboard, wandb or trackio; repeatable.", "TRACKER")
    ] = ()
    run_id: Annotated[
        str | None, flag("End of the run's name; a run that has it and a checkpoint is resumed.", "ID")
    ] = None
    skip_bad: Annotated[bool, flag("Drop rows that cannot be used, and count them.")] = False
    dry_run: Annotated[bool, flag("Show config, size and a data sample; train and write nothing.")] = False
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


@dataclass(frozen=True, kw_only=True)
class _PromptsOptions(EnvironmentFlags, _TrainOptions):
    prompts: Annotated[
        str | None, flag("File, folder or hub id with a `prompt` column, films, or arithmetic.", "SOURCE")
    ] = None
    reward: Annotated[
        tuple[str, ...],
        UseAppendAction,
        flag("./file.py:function, built-in or reward model; repeatable.", "SOURCE"),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class _PairsOptions(_TrainOptions):
    pairs: Annotated[
        str | None,
        flag("File, folder or hub id with `chosen` and `rejected`, with rankings, or with `label`.", "SOURCE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class _DemonstrationsOptions(_TrainOptions):
    demonstrations: Annotated[
        str | None,
        flag("File, folder or hub id with `prompt` and `completion`, `messages`, or `text`.", "SOURCE"),
    ] = None


_OPTIONS: Mapping[str, type[_TrainOptions]] = MappingProxyType(
    {"prompts": _PromptsOptions, "pairs": _PairsOptions, "demonstrations": _DemonstrationsOptions}
)
"""Options of an algorithm, by the section of its recipe that names its data."""


def train(algorithm: str, words: Sequence[str]) -> None:
    """Run `tunesmith train ALGORITHM`."""
    options, unknown = parse_train(algorithm, words)
    with reporting(as_json=options.json) as output:
        resolved = resolve(algorithm, options, unknown)
        if options.dry_run:
            _show(resolved, output)
        else:
            from tunesmith.engine.distributed.launch import leads
            from tunesmith.learn.trainers.resume import start_or_resume

            result = start_or_resume(resolved, run_id=options.run_id, progress=wants_progress())
            if leads():
                report(result, output)


def parse_train(algorithm: str, words: Sequence[str]) -> tuple[_TrainOptions, list[str]]:
    """The flags of `tunesmith train ALGORITHM` in `words`, and the words of its recipe's keys."""
    from tunesmith.base.config.schema import SPECS

    schema = SPECS[algorithm].recipe
    doc = (
        f"{schema.__doc__}\n\nEvery key of the recipe is also a flag: --optimizer.learning-rate 3e-5. "
        f"`tunesmith recipes keys {algorithm}` lists them."
    )
    options_type = type("Options", (_OPTIONS[_data_section(algorithm)],), {"__doc__": doc})
    return parse_known(options_type, words, f"train {algorithm}")


def _data_section(algorithm: str) -> str:
    from tunesmith.base.config.schema import SPECS

    return SPECS[algorithm].recipe.data_section()


def resolve(algorithm: str, options: _TrainOptions, unknown: Sequence[str]) -> "Resolved":
    """The recipe that flags, keys and files give."""
    from tunesmith.base.config.load import FLAGS, load_recipe, parse_overrides

    data = _data_section(algorithm)
    overrides = parse_overrides(algorithm, unknown)
    for name in ("model", data, "reward", "environment", "tools", "level", "steps", "seed", "report_to"):
        value = getattr(options, name, None)
        if value not in (None, ()):
            flag = name.replace("_", "-")
            overrides.put(FLAGS.get(name, name), [*value] if name in ("reward", "tools", "report_to") else value, flag)
    if options.skip_bad:
        overrides.put(f"{data}.skip_bad", True, "skip-bad")
    return load_recipe(
        algorithm, recipe=options.recipe, file=options.config, overrides=overrides.values, origins=overrides.origins
    )


def _show(resolved: "Resolved", output: Output) -> None:
    """Print the resolved recipe, the estimate, a data sample and its tokens; raise DataError if a run would."""
    from tunesmith.base.config.effects import ineffective
    from tunesmith.base.config.yaml_text import to_yaml
    from tunesmith.learn.trainers.estimate import fit_of
    from tunesmith.learn.trainers.run import preview
    from tunesmith.observe.reports.text import count_of, duration, memory_size

    output.say(to_yaml(resolved.recipe, resolved.provenance))
    facts = preview(resolved.recipe)
    parts = ", ".join(f"{part} {memory_size(size_gb)}" for part, size_gb in facts.memory_gb.items())
    output.say(f"model    {facts.model}, {facts.num_parameters:,} parameters")
    fit = fit_of(sum(facts.memory_gb.values()))
    output.say(f"memory   {memory_size(sum(facts.memory_gb.values()))} estimated {fit}: {parts}")
    output.say("by stage " + ", ".join(f"{stage} {memory_size(size_gb)}" for stage, size_gb in facts.stage_gb.items()))
    output.say(f"time     about {duration(facts.seconds)} for {count_of(facts.num_steps, 'step')}")
    if facts.least_seconds is not None:
        output.say(
            f"one turn {duration(facts.least_seconds)}, if all trajectories end with a first turn of full length"
        )
        output.say(f"assumed  {facts.assumed}")
    held_out = f", {facts.num_heldout:,} held out" if facts.num_heldout else ""
    output.say(f"data     {count_of(facts.num_items, 'item')} to train on{held_out}, for example:")
    output.say(visible(facts.sample))
    if facts.server:
        output.say(visible(facts.server))
    for one in ineffective(resolved.recipe, resolved.provenance):
        output.say(f"no effect: {one.problem}")
    output.say("\ntokens that are sampled, scored and trained")
    for name, text in facts.tokens.facts:
        output.say(visible(f"  {name:<12} {text}"))
    output.say("\ndry run: nothing was written")
    output.finish(
        {
            "recipe": resolved.recipe.model_dump(mode="json"),
            "provenance": resolved.provenance,
            **asdict(facts),
        }
    )
    facts.tokens.check()


def report(result: "RunResult", output: Output) -> None:
    """Print the summary of a run; with `--json`, its figures are also at the top level of the object."""
    from tunesmith.base.config.schema import trains_reward_model

    summary = dict(result.summary)
    for name, value in summary.items():
        output.say(f"{name:<30} {value:.4g}" if isinstance(value, float) else f"{name:<30} {value}")
    output.say(f"\nrun      {result.run_dir}\nreport   {result.run_dir / 'report.html'}")
    if trains_reward_model(summary["algorithm"]):
        output.say(f"use it   tunesmith train ppo --reward {result.run_dir}")
    else:
        output.say(f"try it   tunesmith chat {result.run_dir} --against base")
    last = dict(result.metrics[-1]) if result.metrics else {}
    output.finish({**summary, "run_dir": result.run_dir, "summary": summary, "last_metrics": last})


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Continue a run from its newest intact checkpoint, exactly: the same weights, metrics and tokens follow.

    The learning rate, the number of steps, alarms and logging may change: --optimizer.learning-rate 3e-5. Any other
    difference is refused and printed.
    """

    run: Annotated[Path, Positional, flag("Folder of the run.", "RUN")]
    steps: Annotated[str | None, flag("Steps of the whole run, those already done included.", "N")] = None
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def resume(words: Sequence[str]) -> None:
    """Run `tunesmith resume`."""
    options, unknown = parse_known(ResumeOptions, words, "resume")
    from tunesmith.base.config.load import parse_overrides, read_algorithm
    from tunesmith.engine.distributed.launch import leads
    from tunesmith.learn.trainers.resume import checked_folder
    from tunesmith.learn.trainers.resume import resume as resume_run

    with reporting(as_json=options.json) as output:
        run_dir = checked_folder(options.run)
        overrides = parse_overrides(read_algorithm(run_dir / "recipe.yaml"), unknown)
        if options.steps is not None:
            overrides.put("run.steps", options.steps, "steps")
        result = resume_run(run_dir, overrides=overrides.values, origins=overrides.origins, progress=wants_progress())
        if leads():
            report(result, output)
