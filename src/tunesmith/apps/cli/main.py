"""The entry point: finds the command, runs it, and turns errors into one message and an exit code."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from tunesmith.base.config.keys import did_you_mean
from tunesmith.base.core import log
from tunesmith.base.core.errors import InputError, TunesmithError
from tunesmith.base.core.extras import naming_extras
from tunesmith.base.core.log import visible
from tunesmith.base.core.version import __version__

COMMANDS: Mapping[str, tuple[str, str]] = {
    "demo": ("demo:demo", "The whole loop on a real 135M model: votes, reward model, PPO or GRPO, before and after."),
    "sentiment": ("demo:sentiment", "Film reviews: SFT, reward model, PPO, and a judge of its own."),
    "live": ("live:live", "Learn from votes while they are given, next to `tunesmith serve`."),
    "resume": ("train:resume", "Continue a run from its newest checkpoint."),
    "generate": ("generate:generate", "Let a model continue prompts."),
    "chat": ("chat:chat", "Talk to a run or a model, optionally side by side with another one."),
    "compare": ("evaluate:compare", "Compare two models on the same prompts, judged by a scorer."),
    "compare-algorithms": (
        "evaluate:compare_algorithms",
        "Compare PPO, GRPO, DPO and best-of-n from the same votes at equal KL.",
    ),
    "eval": ("evaluate:benchmarks", "Standard benchmarks by lm-eval, before and after a training."),
    "eval reward": ("evaluate:reward", "Judge a reward model: accuracy, calibration, length bias."),
    "eval judge": ("judge:evaluate", "Measure how far a judge, a model with a rubric, agrees with people."),
    "judge vote": ("judge:vote", "Let a judge vote on stored pairs, as a machine."),
    "votes import": ("votes:import_", "Put pairs before raters, or take over votes made elsewhere."),
    "votes export": ("votes:export", "Write votes as JSONL, Parquet, a datasets folder or Argilla records."),
    "votes stats": ("votes:stats", "Count votes; agreement and bias of raters."),
    "votes select": ("votes_select:select", "Choose the pairs that raters are asked about next: those that say most."),
    "votes prune": ("votes:prune", "Remove stored answers, feedback and usage that are older than some days."),
    "votes audit": ("votes:audit", "Print who did what: keys, settings, imports, exports, deletions."),
    "users export": ("users:export", "Write what is stored of one person to a file."),
    "users delete": ("users:delete", "Remove what is stored of one person."),
    "serve": ("serve:serve", "Open the pages where people vote, and watch training."),
    "studio": ("serve:studio", "Open the pages of all runs: list, metrics, diagnosis, samples, recipe."),
    "watch": ("serve:watch", "Watch a run of any trainer in the browser, live."),
    "diagnose": ("profile:diagnose", "Say why a run is slow, and what to change."),
    "export": ("export:export", "Copy the trained model of a run to a folder of its own."),
    "push": ("push:push", "Upload the trained model of a run to the Hugging Face hub."),
    "profile": ("profile:profile", "Record a few steps: timeline, operators, flame graph; compare two."),
    "runs ls": ("runs:ls", "List runs, newest first."),
    "runs show": ("runs:show", "Show a run: recipe, metrics, findings, checkpoints, how to go on."),
    "runs rm": ("runs:rm", "Remove runs, or their checkpoints alone."),
    "recipes ls": ("recipes:ls", "List the recipes that come with Tunesmith."),
    "recipes show": ("recipes:show", "Print a recipe."),
    "recipes cp": ("recipes:cp", "Copy a recipe to a file of your own."),
    "recipes keys": ("recipes:keys", "List every key of a recipe, with its default."),
    "convert trl-config": ("trl:convert", "Turn a config of TRL's command line into a recipe."),
    "validate": ("recipes:validate", "Check recipes and list all that is wrong with them."),
    "ladder": ("ladder:ladder", "Measure a step at each level of optimisation, and what each technique is worth."),
    "plan": ("plan:plan", "Say what a training needs on other hardware: memory, parallelism, time, cost."),
    "trl-check": ("trl:check", "Say what of a script for TRL becomes faster by another import."),
    "doctor": ("doctor:doctor", "Say what this machine has and what is missing."),
}
"""Command -> (`module:function` in this folder, called with the words after the name; one line of help)."""

_BENCHMARKS = (
    "benchmarks are not part of the package: run `python -m benchmarks.<name>` in a clone of the repository, "
    "where <name> is rollout, step, update, kernels or gpu"
)

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells count it."""

EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE."""

_HELP = """\
usage: tunesmith COMMAND [OPTIONS]

Tunesmith {version}: from human votes to a better language model.

commands:
{commands}

`tunesmith COMMAND --help` explains a command. Everywhere: -v, --verbose; --quiet; --json where a command reports.
Start with `tunesmith demo`.
"""


@cache
def commands() -> dict[str, tuple[str, str]]:
    """`COMMANDS` with a `train` command for each algorithm, whose help is the first line of its recipe's docstring."""
    from tunesmith.base.config.schema import SPECS

    train = {f"train {name}": ("train:train", str(spec.recipe.__doc__)) for name, spec in SPECS.items()}
    names = list(COMMANDS)
    place = names.index("live")
    return {**{n: COMMANDS[n] for n in names[:place]}, **train, **{n: COMMANDS[n] for n in names[place:]}}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command in `argv`: 0, 2 for bad input, 1 for other errors, 130 after Ctrl-C."""
    words, is_verbose, is_quiet = _split_global_flags(list(sys.argv[1:] if argv is None else argv))
    log.configure(verbose=is_verbose, quiet=is_quiet)
    log.escape_what_cannot_be_encoded()
    try:
        with naming_extras():
            code = _dispatch(words)
        sys.stdout.flush()
        return code
    except TunesmithError as error:
        if is_verbose:
            traceback.print_exc()
        sys.stderr.write(f"error: {visible(str(error))}\n")
        return error.exit_code
    except SystemExit as exit_:
        # Help was printed.
        return exit_.code if isinstance(exit_.code, int) else 0
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has gone. Without this, Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help(commands()))
        return 0
    if words[0] in ("--version", "-V"):
        sys.stdout.write(f"tunesmith {__version__}\n")
        return 0
    is_static = words[0] in {name.partition(" ")[0] for name in COMMANDS}
    table = COMMANDS if is_static else commands()  # which imports the schema of recipes
    command, rest = _find(words, table)
    module, _, function = table[command][0].partition(":")
    run: Callable[..., None] = getattr(importlib.import_module(f"tunesmith.apps.cli.{module}"), function)
    run(*([command.removeprefix("train ")] if command.startswith("train ") else []), rest)
    return 0


def _find(words: Sequence[str], commands: Mapping[str, tuple[str, str]]) -> tuple[str, Sequence[str]]:
    """The command that `words` begin with, and the words behind it; InputError with the nearest name if none."""
    if " ".join(words[:2]) in commands:
        return " ".join(words[:2]), words[2:]
    if words[0] in commands:
        return words[0], words[1:]
    if words[0] == "bench":
        raise InputError(_BENCHMARKS)
    group = {name.partition(" ")[2]: name for name in commands if name.startswith(words[0] + " ")}
    if not group:
        names = dict.fromkeys(name.partition(" ")[0] for name in commands)
        raise InputError(
            f"there is no command {words[0]!r}{did_you_mean(words[0], names)}; there are {', '.join(names)}"
        )
    if len(words) > 1 and words[1] in ("-h", "--help"):
        sys.stdout.write(_help({name: commands[name] for name in group.values()}))
        raise SystemExit(0)
    given = (
        f"there is no `{words[0]} {words[1]}`{did_you_mean(words[1], group)}"
        if len(words) > 1
        else "one word is missing"
    )
    raise InputError(f"{given}; there are {', '.join(f'`tunesmith {name}`' for name in group.values())}")


def _help(commands: Mapping[str, tuple[str, str]]) -> str:
    width = max(map(len, commands))
    return _HELP.format(
        version=__version__, commands="\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in commands.items())
    )


def _split_global_flags(words: list[str]) -> tuple[list[str], bool, bool]:
    """`words` without the global flags, whether verbose, whether quiet."""
    verbose, quiet = {"-v", "--verbose"}, {"-q", "--quiet"}
    rest = [word for word in words if word not in verbose | quiet]
    return rest, bool(verbose & set(words)), bool(quiet & set(words))
