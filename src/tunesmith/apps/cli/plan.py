"""`tunesmith plan`: memory, parallelism, time and cost of a training on other hardware, without loading anything."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.apps.cli.options import check_ranges, flag, parse_known
from tunesmith.apps.cli.output import Output, reporting
from tunesmith.base.core.errors import InputError

if TYPE_CHECKING:
    from tunesmith.observe.planning.calibration import Calibration
    from tunesmith.observe.planning.planner import Change, Plan
    from tunesmith.observe.planning.workload import Workload


_KEYS = {
    "prompts": "rollout.prompts_per_step",
    "completions": "rollout.completions_per_prompt",
    "new_tokens": "rollout.max_new_tokens",
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Say what a training needs and takes on other hardware: memory of a rank, parallelism, time of a step, cost.

    Reads the config of the model alone. Every key of the recipe is also a flag: --rollout.num-slots 64.
    """

    model: Annotated[str, flag("A config.json, a folder with one, a hub id, llama-2-70b ...", "MODEL")] = ""
    from_run: Annotated[str, flag("A run: predict its step on more of its machines.", "RUN", "--from")] = ""
    dir: Annotated[Path, flag("Folder that holds the runs.", "FOLDER")] = Path("runs")
    hardware: Annotated[str, flag("h100, a100, v100, cpu, or a YAML file of rates.", "NAME")] = "h100"
    nodes: Annotated[int, flag("Nodes for the policy.", "N")] = 1
    gpus_per_node: Annotated[int | None, flag("Accelerators of a node (8), or ranks (those of the run).", "N")] = None
    critic_nodes: Annotated[int, flag("Further nodes for PPO's critic and the reward model.", "N")] = 0
    workers: Annotated[int, flag("Rollout workers beside the ranks; 0: the ranks draw.", "N")] = 0
    data_parallel: Annotated[bool, flag("Plan what Tunesmith trains itself: whole weights on each rank.")] = False
    algorithm: Annotated[str, flag("An algorithm of `tunesmith train`.", "NAME")] = "ppo"
    recipe: Annotated[Path | None, flag("A recipe of that algorithm.", "FILE.yaml")] = None
    prompts: Annotated[int | None, flag("Prompts of a step.", "N")] = None
    completions: Annotated[int | None, flag("Completions of a prompt.", "N")] = None
    prompt_tokens: Annotated[int, flag("Mean length of a prompt, or of a row.", "N")] = 256
    new_tokens: Annotated[int | None, flag("Limit of a completion.", "N")] = None
    mean_new_tokens: Annotated[int | None, flag("Mean length of a completion; else half of the limit.", "N")] = None
    price: Annotated[float | None, flag("Price of an accelerator for an hour.", "X")] = None
    json: Annotated[bool, flag("Print one JSON object.")] = False


def plan(words: Sequence[str]) -> None:
    """Run `tunesmith plan`."""
    options, keys = parse_known(PlanOptions, words, "plan")
    most = 1_000_000
    check_ranges(
        options,
        **dict.fromkeys(("nodes", "gpus_per_node"), (1, 4096)),
        **dict.fromkeys(("critic_nodes", "workers"), (0, 4096)),
        **dict.fromkeys(("prompts", "completions", "prompt_tokens", "new_tokens", "mean_new_tokens"), (1, most)),
        price=(0, inf),
    )
    from tunesmith.observe.planning.calibration import calibration_for
    from tunesmith.observe.planning.hardware import HARDWARE, read_hardware
    from tunesmith.observe.planning.planner import Planner
    from tunesmith.observe.planning.shape import read_shape
    from tunesmith.observe.planning.step_time import Cluster

    with reporting(as_json=options.json) as output:
        if options.from_run:
            _say_run(options, keys, output)
            return
        if not options.model:
            raise InputError("missing: --model, or --from with a run")
        hardware = read_hardware(options.hardware)
        if options.price is not None:
            hardware = replace(hardware, price_per_hour=options.price)
        cluster = Cluster(hardware, options.nodes, options.gpus_per_node or 8, options.critic_nodes)
        calibration = calibration_for(hardware.name if hardware == HARDWARE.get(hardware.name) else "")
        planner = Planner(read_shape(options.model), calibration.factors, options.data_parallel)
        work = _workload(options, keys)
        found = planner.best(work, cluster, options.workers)
        _say(found, work, planner.changes(found), calibration, output)


def _say_run(options: PlanOptions, keys: Sequence[str], output: Output) -> None:
    """The plan of a recorded run on `--nodes` machines like its own."""
    from tunesmith.base.runs.listing import resolve_run
    from tunesmith.observe.planning.from_run import read_measured
    from tunesmith.observe.planning.planner import Planner

    allowed = {"from_run", "dir", "nodes", "gpus_per_node", "workers", "price", "json"}
    given = [f.name for f in fields(options) if f.name not in allowed and getattr(options, f.name) != f.default]
    if given or keys:
        name = keys[0] if keys else "--" + given[0].replace("_", "-")
        raise InputError(f"{name} is given with --from, which takes the work from the run; leave it out")
    run = read_measured(resolve_run(options.from_run, options.dir.expanduser()))
    cluster = run.cluster(options.nodes, options.gpus_per_node or run.ranks, options.workers)
    planner = Planner(run.shape, run.calibration.factors, data_parallel=True)
    found = planner.best(run.work, cluster, options.workers)
    output.say(f"a step of the run takes {run.step_s:.3g} s; on what is asked for:\n")
    _say(found, run.work, planner.changes(found), run.calibration, output)


def _workload(options: PlanOptions, keys: Sequence[str]) -> "Workload":
    """The work of a step, by the recipe, its `keys` that were given as flags, and the flags."""
    from tunesmith.base.config.load import load_recipe, parse_overrides
    from tunesmith.observe.planning.workload import workload_of

    overrides = parse_overrides(options.algorithm, keys)
    for name, path in _KEYS.items():
        if (value := getattr(options, name)) is not None:
            overrides.put(path, value, name.replace("_", "-"))
    recipe = load_recipe(
        options.algorithm, file=options.recipe, overrides=overrides.values, origins=overrides.origins
    ).recipe
    work = workload_of(recipe, options.prompt_tokens, options.mean_new_tokens)
    if work.mean_new_tokens > work.new_tokens:
        raise InputError(
            f"--mean-new-tokens is {options.mean_new_tokens}, more than {work.new_tokens}, the limit of a completion; "
            "lower it, or raise --new-tokens"
        )
    if options.critic_nodes and work.critic != "separate":
        raise InputError(
            f"--critic-nodes is {options.critic_nodes}, but {options.algorithm} has no critic of its own here; leave "
            "it out, or plan for ppo with --ppo.critic separate"
        )
    return work


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


_FITTED = {
    "micro_batch_size": "micro_batch_size",
    "checkpointed": "model.gradient_checkpointing",
    "slots": "rollout.num_slots",
}


def _layout(plan: "Plan") -> str:
    """Model, hardware and layout in words."""
    shape, cluster, layout = plan.shape, plan.cluster, plan.layout
    critic = f" + {cluster.critic_nodes} for the critic" if cluster.critic_nodes else ""
    lines = [
        f"{shape.num_parameters:,} parameters in {shape.num_layers} layers; on {cluster.nodes}{critic} x "
        f"{cluster.per_node} {cluster.hardware.name}",
        f"layout    {layout}" + f"; {layout.num_engines} engines of TP {layout.engine_tensor}" * plan.work.draws,
    ]
    if layout.num_parts > 1 or layout.shards_weights:
        lines.append("          of large trainers; --data-parallel plans what Tunesmith itself trains on GPUs")
    return "\n".join(lines)


def _say(
    plan: "Plan", given: "Workload", changes: Sequence["Change"], calibration: "Calibration", output: Output
) -> None:
    time = plan.time
    output.say(_layout(plan))
    fitted = {
        key: value for name, key in _FITTED.items() if (value := getattr(plan.work, name)) != getattr(given, name)
    }
    if fitted:
        output.say("to fit    " + ", ".join(f"{key} {value}" for key, value in fitted.items()))
    parts = list(dict.fromkeys(part for held in plan.memory.values() for part in held))
    rows = [[part, *(f"{held[part]:.3g}" if part in held else "-" for held in plan.memory.values())] for part in parts]
    totals = ["total", *(f"{sum(held.values()):.3g}" for held in plan.memory.values())]
    output.say("")
    output.table([["GB of a rank", *plan.memory], *rows, totals])
    output.say("")
    output.table(
        [["stage", "seconds", "share"]]
        + [[name, _seconds(s), f"{s / time.total_s:.0%}"] for name, s in [*time.stages.items(), ("step", time.total_s)]]
    )
    cost = plan.cost_per_step
    output.say(
        f"\ncost      {'unknown; give --price' if cost is None else f'{cost:.2f} a step, {1000 * cost:,.0f} for 1000'}"
    )
    output.say(f"accuracy  {calibration}")
    if changes:
        output.say("")
        output.table(
            [["change first", "seconds", "faster", "accelerators"]]
            + [
                [
                    change.what,
                    _seconds(change.step_s),
                    f"{time.total_s / change.step_s:.2f}x",
                    str(change.num_accelerators),
                ]
                for change in changes
            ]
        )
    output.finish(
        {
            "num_parameters": plan.shape.num_parameters,
            "layout": {**asdict(plan.layout), "num_engines": plan.layout.num_engines},
            "settings_to_fit": fitted,
            "memory_gb": plan.memory,
            "stages_s": time.stages,
            "step_s": time.total_s,
            "queue_share": time.queue_share,
            "cost_per_step": cost,
            "calibration": {"source": calibration.source, "error": calibration.error, "factors": calibration.factors},
            "changes": [asdict(change) for change in changes],
        }
    )
