"""`tunesmith ladder`: a PPO and a GRPO step at each level of optimisation, on this machine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

from tunesmith.apps.cli.options import check_ranges, flag, parse
from tunesmith.apps.cli.output import as_plain, reporting, wants_progress
from tunesmith.base.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class LadderFlags:
    """Measure a PPO and a GRPO step at each level, from textbook code to all optimisations, and what each one is worth.

    Gates check that every level computes and learns the same. Leave the machine alone meanwhile; with smollm2 on two
    cores it takes about a quarter of an hour.
    """

    model: Annotated[str, flag("Hub id, folder, GGUF file, smollm2, tiny:FAMILY.", "ID")] = "smollm2"
    rounds: Annotated[int, flag("Steps of each level, in turns.", "N")] = 3
    seed: Annotated[int, flag("Seed of everything that is drawn.", "N")] = 0
    quick: Annotated[bool, flag("Tiny steps, to see that all parts work; figures say nothing.")] = False
    out: Annotated[Path, flag("Page to write; the figures go beside it as .json.", "FILE.html")] = Path("ladder.html")
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def ladder(words: Sequence[str]) -> None:
    """Run `tunesmith ladder`."""
    flags = parse(LadderFlags, words, "ladder")
    check_ranges(flags, rounds=(1, inf))
    if flags.out.suffix != ".html" or not flags.out.absolute().parent.is_dir():
        raise InputError(f"--out is {flags.out}; give a file that ends in .html, in a folder that exists")
    from tunesmith.apps.workflows.ladder import LadderOptions, run_ladder
    from tunesmith.learn.trainers.setup import say
    from tunesmith.observe.reports.html import write_ladder_report
    from tunesmith.observe.reports.ladder_figures import levels_chart, techniques_chart

    with reporting(as_json=flags.json) as output:
        options = LadderOptions(flags.model, flags.rounds, flags.quick, flags.seed)
        facts = run_ladder(options, lambda line: say(line, enabled=wants_progress()))
        figures = flags.out.with_suffix(".json")
        figures.write_text(json.dumps(as_plain(facts), indent=1) + "\n", encoding="utf-8")
        write_ladder_report(flags.out, facts)
        for chart in (levels_chart(facts), techniques_chart(facts)):
            output.say(chart.title)
            output.table([chart.columns, *chart.rows])
            output.say("")
        for gate in facts["gates"]:
            state = "passed" if gate["passed"] else "FAILED"
            output.say(f"{state}  {gate['name']}: {gate['value']:.3g}, at most {gate['bound']:g}")
        output.say(f"\npage     {flags.out}\nfigures  {figures}")
        output.finish({**facts, "page": flags.out, "figures": figures})
