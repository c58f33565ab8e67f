"""`tunesmith compare`, `compare-algorithms`, `eval` and `eval reward`: two policies, algorithms at equal KL, standard
benchmarks, a reward model.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from tunesmith.apps.cli.chat import base_of
from tunesmith.apps.cli.options import (
    EnvironmentFlags,
    Positional,
    check_ranges,
    environment_of,
    flag,
    parse,
    parse_with_environment,
)
from tunesmith.apps.cli.output import reporting, wants_progress
from tunesmith.base.config.judge import is_judge, judge_settings
from tunesmith.base.config.sections import RewardSource, Truncate
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.system import keep_freed_memory


@dataclass(frozen=True, kw_only=True)
class CompareOptions(EnvironmentFlags):
    """Compare two models on the same prompts with the same seeds, judged by one scorer.

    With an environment or tools both are given the same tasks, and judged by what the environment gives, unless a
    scorer is named. Its settings are flags too: --environment.max-turns 3.
    """

    before: Annotated[str, flag("Model or run folder, or base: what the run --after began with.", "A")]
    after: Annotated[str, flag("Model or run folder that is judged.", "B")]
    prompts: Annotated[str, flag("JSONL with a `prompt` column, or films.", "FILE")]
    scorer: Annotated[str | None, flag("./file.py:function, built-in or reward model.", "SOURCE", "--reward")] = None
    pessimism: Annotated[
        str, flag("Of a reward model with heads: times of their spread to take off, or `worst`.", "X")
    ] = "0"
    num_completions: Annotated[int, flag("Completions of each prompt.", "N", "-n")] = 8
    max_new_tokens: Annotated[int, flag("Limit of a completion, or of a turn.", "N")] = 32
    seed: Annotated[int, flag("Seed of both models.", "N")] = 0
    trust_remote_code: Annotated[bool, flag("Run code that the models bring along.")] = False
    html: Annotated[Path | None, flag("Write the comparison as a page too.", "FILE.html")] = None
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def compare(words: Sequence[str]) -> None:
    """Run `tunesmith compare`."""
    options, overrides = parse_with_environment(CompareOptions, words, "compare")
    check_ranges(options, num_completions=(1, inf), max_new_tokens=(1, inf))
    if options.html and options.html.exists():
        raise InputError(f"{options.html} exists and is kept; give another name to --html")
    environment, scorer = environment_of(overrides), _scorer_of(options)
    before = base_of(Path(options.after).expanduser()) if options.before == "base" else options.before
    from tunesmith.apps.workflows.evaluation import run_comparison
    from tunesmith.engine.batch.rollout import SamplingParams
    from tunesmith.learn.evaluation.tables import comparison_table
    from tunesmith.observe.reports.html import write_comparison_report

    with reporting(as_json=options.json) as output:
        comparison = run_comparison(
            before,
            options.after,
            options.prompts,
            scorer,
            environment=environment,
            sampling=SamplingParams(max_new_tokens=options.max_new_tokens, seed=options.seed),
            num_completions=options.num_completions,
            trust_remote_code=options.trust_remote_code,
        )
        if options.html:
            title = f"{before} and {options.after}"
            write_comparison_report(options.html, comparison.to_json(), title=title)
        output.say(comparison_table(comparison))
        if options.html:
            output.say(f"page     {options.html}")
        output.finish(comparison.to_json())


def _scorer_of(options: CompareOptions) -> RewardSource | None:
    """The scorer with its pessimism, if one is named. Raises InputError for a pessimism that cannot be used."""
    given = options.pessimism
    try:
        pessimism: float | Literal["worst"] = "worst" if given == "worst" else float(given)
    except ValueError:
        pessimism = -1.0
    if pessimism != "worst" and not 0 <= pessimism < inf:
        raise InputError(f"--pessimism is {given}; give a number from 0 on, or worst")
    if options.scorer is not None:
        if is_judge(options.scorer):
            judge_settings(options.scorer)
        return RewardSource(source=options.scorer, pessimism=pessimism)
    if pessimism != 0:
        raise InputError(f"--pessimism is {given}, but no reward model is named; name it with --scorer")
    return None


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
    from tunesmith.base.config.comparison import ComparisonOptions, comparison_options

    options = comparison_options({k: v for k, v in asdict(flags).items() if k in ComparisonOptions.model_fields})
    from tunesmith.apps.workflows.algorithms import go_on, run_comparison
    from tunesmith.base.runs.listing import read_object
    from tunesmith.observe.reports.algorithm_figures import equal_kl_chart

    with reporting(as_json=flags.json) as output:
        folder = go_on(flags.resume.absolute()) if flags.resume else run_comparison(options, flags.out)
        facts = read_object(folder / "comparison.json")
        chart = equal_kl_chart(facts)
        output.say(f"{chart.title}\n")
        output.table([chart.columns, *chart.rows])
        output.say(f"\n{facts['said']}\nreport   {folder / 'report.html'}")
        output.finish({**facts, "run_dir": folder})


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """Ask a model lm-eval's tasks, and the model that it was trained from: what the training cost in ability.

    Figures and questions are those of lm-eval, computed by Tunesmith's engine. Those of a run are kept in its folder
    and shown in its report. `tunesmith eval reward` and `eval judge` measure reward models and judges.
    """

    run: Annotated[str, Positional, flag("Run folder, hub id, folder, GGUF file, smollm2.", "RUN")]
    tasks: Annotated[str, flag("Tasks, groups, tags or patterns, between commas: arc_easy,gsm8k.", "A,B")]
    include_path: Annotated[Path | None, flag("Folder with YAML files of further tasks.", "FOLDER")] = None
    against: Annotated[
        str | None, flag("Model before, or base: what the run began with, which is asked anyway.", "ID")
    ] = None
    alone: Annotated[bool, flag("Ask a run alone, not what it began with.")] = False
    num_fewshot: Annotated[int | None, flag("Examples before each question; else as the task says.", "N")] = None
    limit: Annotated[int | None, flag("The first questions of each task alone.", "N")] = None
    chat: Annotated[bool, flag("Ask in the model's chat template.")] = False
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], flag("Precision of the models.")] = "auto"
    seed: Annotated[int, flag("Seed of tasks that sample.", "N")] = 0
    runs_code: Annotated[bool, flag("Allow tasks that execute what the model wrote.")] = False
    trust_remote_code: Annotated[bool, flag("Run code that the models bring along.")] = False
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def benchmarks(words: Sequence[str]) -> None:
    """Run `tunesmith eval`."""
    options = parse(BenchmarkOptions, words, "eval")
    check_ranges(options, num_fewshot=(0, inf), limit=(1, inf))
    names = tuple(dict.fromkeys(name for part in options.tasks.split(",") if (name := part.strip())))
    if not names:
        raise InputError("--tasks names none; give some between commas, such as --tasks arc_easy,gsm8k")
    if options.include_path is not None and not options.include_path.expanduser().is_dir():
        raise InputError(f"--include-path is {options.include_path}, which is no folder; give one with YAML files")
    if options.alone and options.against is not None:
        raise InputError("--alone and --against are given; one of them says what there is to compare with")
    from tunesmith.base.runs.listing import is_run

    run = Path(options.run).expanduser()
    before = options.against
    if before == "base" or (before is None and is_run(run) and not options.alone):
        before = base_of(run)
    from tunesmith.apps.workflows.benchmarks import TaskSettings, keep, run_benchmarks
    from tunesmith.observe.reports.benchmark_figures import benchmark_table

    keep_freed_memory()
    with reporting(as_json=options.json) as output:
        found = run_benchmarks(
            options.run,
            before,
            TaskSettings(
                names,
                options.include_path and options.include_path.expanduser(),
                options.num_fewshot,
                options.limit,
                options.chat,
                options.runs_code,
            ),
            dtype=options.dtype,
            seed=options.seed,
            trust_remote_code=options.trust_remote_code,
            shows_progress=wants_progress(),
        )
        table = benchmark_table(found.to_json())
        output.say(f"{table.caption}\n")
        output.table([table.columns, *table.rows])
        report = keep(run, found) if is_run(run) else None
        if report:
            output.say(f"\nreport   {report}")
        output.finish({**found.to_json(), "report": report})


@dataclass(frozen=True, kw_only=True)
class RewardEvalOptions:
    """Judge a reward model on pairs that it was not trained on: accuracy, calibration, length bias.

    Baselines: the longer one wins, and a Bradley-Terry model on TF-IDF fitted on other pairs.
    """

    run: Annotated[str | None, Positional, flag("Run folder, folder or hub id of a reward model.", "RUN")] = None
    model: Annotated[str | None, flag("The same, by name.", "RUN")] = None
    pairs: Annotated[str | None, flag("Source of pairs; by default those that the run held out.", "SOURCE")] = None
    label: Annotated[str | None, flag("Of a classifier with several labels: the reward's.", "NAME")] = None
    skip_bad: Annotated[bool, flag("Drop rows that cannot be used, and count them.")] = False
    truncate: Annotated[
        Truncate | None,
        flag("Where pairs that are too long are cut; by default as the run says, or nowhere."),
    ] = None
    micro_batch_size: Annotated[int, flag("Sequences in one pass.", "N")] = 16
    num_bins: Annotated[int, flag("Bins of the calibration.", "N")] = 10
    json: Annotated[bool, flag("Print one JSON object at the end.")] = False


def reward(words: Sequence[str]) -> None:
    """Run `tunesmith eval reward`."""
    options = parse(RewardEvalOptions, words, "eval reward")
    check_ranges(options, micro_batch_size=(1, inf), num_bins=(1, inf))
    model = options.run or options.model
    if model is None or (options.run and options.model):
        raise InputError("give one reward model: `tunesmith eval reward RUN`")
    from tunesmith.apps.workflows.evaluation import evaluate_reward
    from tunesmith.learn.evaluation.tables import reward_table

    with reporting(as_json=options.json) as output:
        found = evaluate_reward(
            model,
            options.pairs,
            label=options.label,
            skip_bad=options.skip_bad,
            truncate=options.truncate,
            micro_batch_size=options.micro_batch_size,
            num_bins=options.num_bins,
        )
        output.say(reward_table(found.quality))
        output.say(f"\npairs    {found.source}\nTF-IDF   fitted on {found.train_source}")
        output.finish(found.to_json())
