"""`tunesmith live`: a policy learns from votes while they are given."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunesmith.apps.cli.options import DATABASE, flag, parse_known
from tunesmith.apps.cli.output import Output, reporting
from tunesmith.base.core.errors import InputError

if TYPE_CHECKING:
    from tunesmith.base.config.load import Overrides

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SMOLLM2 = "smollm2"
_RECIPE = "live_smollm2"


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """Learn from votes while they are given: draw pairs, read votes, and serve each update that passes its checks.

    People vote at `tunesmith serve --dir FOLDER`, which may start before or after. Ctrl-C ends; the next start goes on.
    Every key of the recipe is a flag too: --live.votes-per-update 16. `tunesmith recipes keys live` lists them.
    """

    dir: Annotated[Path, flag("Folder of votes and of the trainer.", "FOLDER")] = Path("live")
    database: Annotated[str | None, DATABASE] = None
    model: Annotated[str | None, flag("Hub id, folder, GGUF file, smollm2, scratch, tiny:FAMILY.", "ID")] = None
    prompts: Annotated[str | None, flag("File, folder or hub id with a `prompt` column, or films.", "SOURCE")] = None
    recipe: Annotated[str | None, flag("A recipe that comes with Tunesmith; live_smollm2 for smollm2.", "NAME")] = None
    config: Annotated[Path | None, flag("A recipe of your own, in YAML.", "FILE")] = None
    seed: Annotated[int | None, flag("Seed of everything that is drawn.", "N")] = None
    simulate: Annotated[
        int | None, flag("Serve the page too, let so many simulated raters vote, and compare at the end.", "N")
    ] = None
    duration: Annotated[str, flag("Of --simulate as a whole: 90s, 10m, 1h.", "TIME")] = "10m"
    accuracy: Annotated[float, flag("Share of a simulated rater's votes that are right.", "SHARE")] = 0.85
    left_bias: Annotated[float, flag("Share of them that take the left answer unseen.", "SHARE")] = 0.0
    conversations: Annotated[
        int, flag("Simulated raters talk in the arena so many times, and vote there; 0: they vote on pairs.", "N")
    ] = 0
    pace: Annotated[float, flag("Seconds that a simulated rater looks at a pair.", "SECONDS")] = 1.0
    versions: Annotated[int | None, flag("Simulated raters leave after so many versions.", "N")] = None
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def live(words: Sequence[str]) -> None:
    """Run `tunesmith live`."""
    options, unknown = parse_known(LiveOptions, words, "live")
    from tunesmith.base.config.load import parse_overrides

    overrides = parse_overrides("live", unknown)
    given = {"model": options.model, "prompts": options.prompts, "run.seed": options.seed}
    for key, value in {**given, "live.database": options.database}.items():
        if value is not None:
            overrides.put(key, value, key.rpartition(".")[2])
    if options.simulate and options.database is not None:
        raise InputError("simulated raters vote in a folder of their own; leave --database out")
    with reporting(as_json=options.json) as output:
        if options.simulate:
            _simulate(options, options.simulate, unknown, output)
        else:
            _train(options, overrides, output)


def seconds(text: str) -> float:
    """A time such as `90s`, `10m` or `1.5h` in seconds. Raises InputError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None:
        raise InputError(f"--duration is {text!r}; give a number with s, m or h, such as 90s or 10m")
    return float(found[1]) * _UNITS_S[found[2]]


def _train(options: LiveOptions, overrides: "Overrides", output: Output) -> None:
    from tunesmith.base.config.algorithms.live import LiveRecipe
    from tunesmith.base.config.load import load_recipe

    is_plain = options.recipe is None and options.config is None
    recipe = _RECIPE if is_plain and options.model in (None, _SMOLLM2) else options.recipe
    overrides.put("live.dir", str(options.dir), "dir")
    loaded = load_recipe(
        "live", recipe=recipe, file=options.config, overrides=overrides.values, origins=overrides.origins
    )
    assert isinstance(loaded.recipe, LiveRecipe)
    from tunesmith.learn.live import loop as live
    from tunesmith.observe.reports.text import count_of

    result = live.run(loaded.recipe, provenance=loaded.provenance)
    learnt = f"{count_of(result.votes, 'vote')} in {count_of(result.updates, 'update')}"
    output.say(f"version {result.serving} has learnt from {learnt}")
    output.say(f"folder   {options.dir}")
    if result.path:
        output.say(f"try it   tunesmith chat {result.path} --against base")
    output.finish({"folder": options.dir, **asdict(result)})


def _simulate(options: LiveOptions, num_raters: int, unknown: Sequence[str], output: Output) -> None:
    duration_s = seconds(options.duration)
    given = {name: getattr(options, name) for name in ("model", "prompts", "recipe", "config", "seed")}
    passed = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    from tunesmith.apps.workflows.live_raters import RaterTraits
    from tunesmith.apps.workflows.live_simulation import SimulationOptions, run_simulation

    result = run_simulation(
        SimulationOptions(
            options.dir,
            num_raters=num_raters,
            duration_s=duration_s,
            traits=RaterTraits(options.accuracy, options.left_bias, options.pace),
            trainer_words=[*passed, *unknown],
            seed=options.seed or 0,
            num_conversations=options.conversations,
            num_versions=options.versions,
        )
    )
    interval = f"{result.win_rate_low:.2f} to {result.win_rate_high:.2f}"
    output.say(f"win rate {result.win_rate:.2f} ({interval}) against the base model, {result.num_pairs} pairs")
    output.say(f"KL       {result.kl_per_sequence:.2f} nats per completion")
    output.say(f"votes    {result.votes} by {num_raters} simulated raters, {result.versions} versions")
    output.say(f"rater    {result.rater}; no person voted")
    output.finish(result.to_json())
