"""`tunesmith compare-algorithms`: PPO, GRPO, DPO and best-of-n from the same votes, at equal KL."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tunesmith.cli.options import flag, parse
from tunesmith.cli.output import reporting


@dataclass(frozen=True, kw_only=True)
class ComparisonFlags:
    """Train PPO, GRPO, DPO and best-of-n from the same votes, and compare their scores at equal KL to the base model.

    The votes come from a simulated rater of sentiment, as in `tunesmith demo`. It writes a page and its figures as
    JSON; every training is a run in the folder, so a comparison that was stopped or killed goes on with --resume.
    """

    model: Annotated[str, flag("Hub id, folder, GGUF file, smollm2, tiny:FAMILY.", "ID")] = "smollm2"
    seeds: Annotated[int, flag("Trainings of each algorithm; intervals need two.", "N")] = 3
    steps: Annotated[int, flag("Most steps of a training; four times as many of DPO's.", "N")] = 16
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], flag("Precision of all models.")] = "auto"
    quick: Annotated[bool, flag("Few openings and completions, to see that all parts work.")] = False
    out: Annotated[Path, flag("Folder for the comparison's folder.", "DIR")] = Path("runs")
    resume: Annotated[Path | None, flag("Go on with the comparison in this folder.", "FOLDER")] = None
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def compare_algorithms(words: Sequence[str]) -> None:
    """Run `tunesmith compare-algorithms`."""
    flags = parse(ComparisonFlags, words, "compare-algorithms")
    from tunesmith.config.comparison import ComparisonOptions, comparison_options

    options = comparison_options({k: v for k, v in asdict(flags).items() if k in ComparisonOptions.model_fields})
    from tunesmith.reports.algorithm_figures import equal_kl_chart
    from tunesmith.runs.listing import read_object
    from tunesmith.workflows.algorithms import go_on, run_comparison

    with reporting(as_json=flags.json) as output:
        folder = go_on(flags.resume.absolute()) if flags.resume else run_comparison(options, flags.out)
        facts = read_object(folder / "comparison.json")
        chart = equal_kl_chart(facts)
        output.say(f"{chart.title}\n")
        output.table([chart.columns, *chart.rows])
        output.say(f"\n{facts['said']}\nreport   {folder / 'report.html'}")
        output.finish({**facts, "run_dir": folder})
