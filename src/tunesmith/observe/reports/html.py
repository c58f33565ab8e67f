"""Writes the reports: one self-contained HTML file each, which needs no network and no server.

Model output is hostile until escaped: Jinja escapes all text, JSON inside script tags holds no `<`, and the page's
content security policy runs the two scripts whose hashes it names and nothing else.
"""

import base64
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tunesmith.base.core.errors import MissingDependencyError, RunError
from tunesmith.base.core.version import __version__
from tunesmith.base.runs.listing import number, read_object, read_rows
from tunesmith.observe.profiling.diagnosis import diagnose, verdict
from tunesmith.observe.profiling.facts import read_facts
from tunesmith.observe.reports import text
from tunesmith.observe.reports.algorithm_figures import equal_kl_chart, frontier_chart
from tunesmith.observe.reports.benchmark_figures import FILE as BENCHMARKS
from tunesmith.observe.reports.benchmark_figures import benchmark_tables
from tunesmith.observe.reports.chart import DARK, LIGHT, Chart, dark_of_light
from tunesmith.observe.reports.comparison_figures import dumbbell, histogram
from tunesmith.observe.reports.figures import TABLE_COLUMNS, curves
from tunesmith.observe.reports.ladder_figures import levels_chart, techniques_chart
from tunesmith.observe.reports.reward_figures import calibration_chart, sources_table
from tunesmith.observe.reports.text import Facts
from tunesmith.observe.reports.views import (
    cause_rows,
    comparison_tiles,
    demo_goals,
    prompt_samples,
    run_tiles,
    step_samples,
    vote_views,
)


def write_run_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder from the files in it, and return its path.

    Reads recipe.yaml, environment.json, metrics.jsonl, samples.jsonl, findings.jsonl, benchmarks.jsonl,
    reward_quality.json and result.json; each may be missing.
    Raises RunError if `run_dir` is no folder.
    """
    if not run_dir.is_dir():
        raise RunError(
            f"run folder {run_dir} does not exist; give one that `tunesmith train` or `tunesmith demo` wrote"
        )
    files = [run_dir / name for name in ("metrics.jsonl", "samples.jsonl", "findings.jsonl")]
    metrics, samples, findings = (read_rows(file) for file in files)
    num_lines = sum(1 for file in files for line in _text(file).split("\n") if line.strip())
    drawn = curves(metrics)
    diagnosis = diagnose(read_facts(run_dir))
    result = read_object(run_dir / "result.json")
    quality = read_object(run_dir / "reward_quality.json")
    calibration = calibration_chart(quality)
    return write_page(
        run_dir / "report.html",
        "run.html",
        (*drawn.all, *([calibration] if calibration else [])),
        calibration=calibration,
        sources=sources_table(quality),
        title=run_dir.resolve().name,
        recipe=_text(run_dir / "recipe.yaml"),
        num_steps=len(metrics),
        # Lines that are no JSON object, as one that a crash cut off.
        num_unreadable=num_lines - len(metrics) - len(samples) - len(findings),
        tiles=run_tiles(metrics, result),
        curves=drawn,
        verdict=verdict(diagnosis),
        causes=cause_rows(diagnosis),
        metric_columns=TABLE_COLUMNS,
        steps=step_samples(samples),
        benchmarks=benchmark_tables(read_rows(run_dir / BENCHMARKS)),
        findings=[
            tuple(str(row.get(name, "")) for name in ("step", "name", "severity", "message")) for row in findings
        ],
        environment=text.flatten(read_object(run_dir / "environment.json")),
        result=text.flatten(result),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def write_comparison_report(
    path: Path, comparison: Facts, title: str, policy_metrics: Sequence[Facts] = (), notes: Sequence[str] = ()
) -> Path:
    """Write the page of one comparison, `Comparison.to_json()`, to `path`, and return it.

    `policy_metrics`, rows of metrics.jsonl, show the training between the two; `notes` are sentences about it.
    """
    charts = _comparison_charts(comparison)
    policy_curves = curves(policy_metrics, prefix="policy-")
    return write_page(
        path,
        "comparison.html",
        (*charts.values(), *policy_curves.all),
        policy_curves=policy_curves,
        notes=notes,
        title=title,
        comparison=comparison,
        tiles=comparison_tiles(comparison),
        charts=charts,
        samples=prompt_samples(comparison.get("samples", ())),
        sampling=text.flatten(comparison.get("sampling") or {}),
    )


def write_demo_report(path: Path, demo: Facts) -> Path:
    """Write the demo's page to `path`, and return it.

    `demo` holds `result` (what `tunesmith demo --json` prints), `comparison` (`Comparison.to_json()`), `votes`
    (`num_train`, `num_heldout`, `num_ties`, `accuracy`, `examples`), `reward_metrics` and `policy_metrics` (rows of
    metrics.jsonl), `environment`, `rater`, `algorithm` (what trained the policy) and `command`.
    """
    comparison: Facts = demo.get("comparison") or {}
    votes: Facts = demo.get("votes") or {}
    policy_metrics: Sequence[Facts] = demo.get("policy_metrics") or ()
    reward_curves = curves(demo.get("reward_metrics") or (), prefix="rm-")
    policy_curves = curves(policy_metrics, prefix="policy-")
    charts = _comparison_charts(comparison)
    rater = str(demo.get("rater", "unknown"))
    # Figures of the comparison fill in what the result leaves out.
    result: Facts = {**comparison, **(demo.get("result") or {})}
    return write_page(
        path,
        "demo.html",
        (*charts.values(), *reward_curves.all, *policy_curves.all),
        title="Before and after",
        result=result,
        accuracy=number(votes.get("accuracy", result.get("reward_model_accuracy"))),
        gain=(number(result.get("mean_after")) or 0.0) - (number(result.get("mean_before")) or 0.0),
        comparison=comparison,
        votes=votes,
        examples=vote_views(votes.get("examples") or ()),
        rater=rater.removeprefix("simulated:").strip(),
        is_simulated="simulated" in rater.lower(),
        goals=demo_goals(result),
        charts=charts,
        reward_curves=reward_curves,
        policy_curves=policy_curves,
        num_policy_steps=len(policy_metrics),
        algorithm=str(demo.get("algorithm") or "PPO"),
        samples=prompt_samples(comparison.get("samples", ())),
        environment=text.flatten(demo.get("environment") or {}),
        command=demo.get("command") or "tunesmith demo",
    )


def write_ladder_report(path: Path, facts: Facts) -> Path:
    """Write the page of `tunesmith ladder` to `path`, and return it; `facts` is what its `--json` prints."""
    charts = (levels_chart(facts), techniques_chart(facts))
    return write_page(
        path,
        "ladder.html",
        charts,
        title="The ladder",
        facts=facts,
        charts=charts,
        gates=[
            (str(gate["name"]), text.decimal(gate["value"], 4), text.decimal(gate["bound"], 4), gate["passed"])
            for gate in facts["gates"]
        ],
        settings=[
            (str(row["name"]), str(row["level"]), "; ".join(f"{k}: {v}" for k, v in row["without"].items()))
            for row in facts["techniques"]
        ],
        workload=text.flatten(facts["workload"]),
        machine=text.flatten(facts["machine"]),
    )


def write_algorithms_report(path: Path, facts: Facts) -> Path:
    """Write the page of `tunesmith compare-algorithms` to `path`, and return it; `facts` is its `comparison.json`."""
    charts = (equal_kl_chart(facts), frontier_chart(facts))
    return write_page(path, "algorithms.html", charts, title="Algorithms at equal KL", facts=facts, charts=charts)


def _comparison_charts(comparison: Facts) -> dict[str, Chart]:
    samples: Sequence[Facts] = comparison.get("samples", ())
    before, after = ([sample.get(f"score_{side}") for sample in samples] for side in ("before", "after"))
    charts = {
        "prompts": dumbbell("prompts", "Each prompt, before and after", comparison.get("rows", ())),
        "scores": histogram("scores", "Scores of all completions", before, after),
    }
    return {name: chart for name, chart in charts.items() if chart}


def write_page(path: Path, template: str, drawn: Sequence[Chart], **context: Any) -> Path:
    """Render `template` with the context of all pages to a temporary file and rename it to `path`."""
    plotly = _plotly_source() if drawn else ""
    script = _template_source("charts.js")
    page = (
        _environment()
        .get_template(template)
        .render(
            **context,
            version=__version__,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            light=LIGHT,
            dark=DARK,
            style=Markup(_template_source("style.css")),
            plotly=Markup(plotly),
            script=Markup(script),
            script_hashes=[_hash(source) for source in (plotly, script) if source],
            chart_json=script_json({"dark": dark_of_light(), "charts": {chart.id: chart.figure for chart in drawn}}),
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    # A lone surrogate has no UTF-8 form; it becomes a question mark.
    aside.write_bytes(page.encode("utf-8", errors="replace"))
    aside.replace(path)
    return path


def script_json(value: Any) -> Markup:
    """`value` as JSON that is safe inside a script tag: it cannot end the tag or start a comment."""
    encoded = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        encoded = encoded.replace(char, f"\\u{ord(char):04x}")
    return Markup(encoded)


@functools.cache  # which keeps the compiled templates
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tunesmith.observe.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (text.decimal, text.signed, text.score, text.p_value, text.percent, text.duration)
    environment.filters.update({filter.__name__: filter for filter in shown})  # pyright: ignore[reportUnknownMemberType]
    return environment


def _template_source(name: str) -> str:
    """The text of a template file that Jinja does not render: the style sheet and the script."""
    return resources.files("tunesmith.observe.reports").joinpath("templates", name).read_text(encoding="utf-8")


def _plotly_source() -> str:
    """Plotly's JavaScript, which its Python wheel carries."""
    file = resources.files("plotly") / "package_data" / "plotly.min.js"
    if not file.is_file():
        raise MissingDependencyError(
            "the installed plotly holds no plotly.min.js; reinstall it with `pip install plotly`"
        )
    return file.read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
