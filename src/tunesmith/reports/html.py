"""Writes the reports: one self-contained HTML file each, which needs no network and no server.

Model output is hostile until escaped: Jinja escapes all text, JSON inside script tags holds no `<`, and the page's
content security policy runs the two scripts whose hashes it names and nothing else.
"""

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tunesmith import __version__
from tunesmith.core.errors import MissingDependencyError
from tunesmith.reports import text
from tunesmith.reports.chart import DARK, LIGHT, Chart, dark_of_light
from tunesmith.reports.comparison_figures import calibration_chart, dumbbell, histogram
from tunesmith.reports.figures import TABLE_COLUMNS, curves
from tunesmith.reports.series import Row, number
from tunesmith.reports.views import (
    Facts,
    comparison_tiles,
    demo_goals,
    prompt_samples,
    read_run,
    run_tiles,
    step_samples,
    vote_views,
)


def write_run_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder from the files in it, and return its path.

    Reads recipe.yaml, environment.json, metrics.jsonl, samples.jsonl, findings.jsonl and result.json; each may be
    missing.
    Raises RunError if `run_dir` is no folder.
    """
    facts = read_run(run_dir)
    drawn = curves(facts.metrics)
    return _write(
        run_dir / "report.html",
        "run.html",
        drawn.all,
        title=facts.name,
        facts=facts,
        tiles=run_tiles(facts.metrics, facts.result),
        curves=drawn,
        metric_columns=TABLE_COLUMNS,
        steps=step_samples(facts.samples),
        findings=[
            tuple(str(row.get(name, "")) for name in ("step", "name", "severity", "message")) for row in facts.findings
        ],
        environment=text.flatten(facts.environment),
        result=text.flatten(facts.result),
    )


def write_comparison_report(
    path: Path, comparison: Facts, title: str, policy_metrics: Sequence[Row] = (), notes: Sequence[str] = ()
) -> Path:
    """Write the page of one comparison, `Comparison.to_json()`, to `path`, and return it.

    `policy_metrics`, rows of metrics.jsonl, show the training between the two; `notes` are sentences about it.
    """
    charts = _comparison_charts(comparison)
    policy_curves = curves(policy_metrics, prefix="policy-")
    return _write(
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
    (`num_train`, `num_heldout`, `num_ties`, `accuracy`, `examples`, and optionally `calibration`), `reward_metrics` and
    `policy_metrics` (rows of metrics.jsonl), `environment`, `rater`, and optionally `algorithm` (what trained the
    policy, by default PPO), `stages` (name -> seconds) and `command`.
    """
    comparison: Facts = demo.get("comparison") or {}
    votes: Facts = demo.get("votes") or {}
    reward_curves = curves(_rows(demo, "reward_metrics"), prefix="rm-")
    policy_curves = curves(_rows(demo, "policy_metrics"), prefix="policy-")
    charts = _comparison_charts(comparison)
    calibration = calibration_chart("calibration", votes.get("calibration") or ())
    stages: Mapping[str, Any] = demo.get("stages") or {}
    rater = str(demo.get("rater", "unknown"))
    # Figures of the comparison fill in what the result leaves out.
    result: Facts = {**comparison, **(demo.get("result") or {})}
    return _write(
        path,
        "demo.html",
        (*charts.values(), *reward_curves.all, *policy_curves.all, *([calibration] if calibration else [])),
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
        calibration=calibration,
        reward_curves=reward_curves,
        policy_curves=policy_curves,
        num_policy_steps=len(_rows(demo, "policy_metrics")),
        algorithm=str(demo.get("algorithm") or "PPO"),
        samples=prompt_samples(comparison.get("samples", ())),
        stages=[(name, seconds, _share(seconds, stages)) for name, seconds in stages.items()],
        environment=text.flatten(demo.get("environment") or {}),
        command=demo.get("command") or "tunesmith demo",
    )


def _comparison_charts(comparison: Facts) -> dict[str, Chart]:
    samples: Sequence[Row] = comparison.get("samples", ())
    before, after = ([sample.get(f"score_{side}") for sample in samples] for side in ("before", "after"))
    charts = {
        "prompts": dumbbell("prompts", "Each prompt, before and after", comparison.get("rows", ())),
        "scores": histogram("scores", "Scores of all completions", before, after),
    }
    return {name: chart for name, chart in charts.items() if chart}


def _rows(demo: Facts, key: str) -> Sequence[Row]:
    return demo.get(key) or ()


def _share(seconds: object, stages: Mapping[str, Any]) -> float:
    total = sum(value for value in stages.values() if isinstance(value, int | float))
    return float(seconds) / total if isinstance(seconds, int | float) and total else 0.0


def _write(path: Path, template: str, drawn: Sequence[Chart], **context: Any) -> Path:
    """Render `template` with the context of all pages to a temporary file and rename it to `path`."""
    environment = _environment()
    plotly = _plotly_source() if drawn else ""
    script = _template_source(environment, "charts.js")
    page = environment.get_template(template).render(
        **context,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        light=LIGHT,
        dark=DARK,
        style=Markup(_template_source(environment, "style.css")),
        plotly=Markup(plotly),
        script=Markup(script),
        script_hashes=[_hash(source) for source in (plotly, script) if source],
        chart_json=script_json({"dark": dark_of_light(), "charts": {chart.id: chart.figure for chart in drawn}}),
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


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tunesmith.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = environment.filters  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    filters |= {
        "decimal": text.decimal,
        "signed": text.signed,
        "score": text.score,
        "p_value": text.p_value,
        "percent": text.percent,
        "duration": text.duration,
    }
    return environment


def _template_source(environment: jinja2.Environment, name: str) -> str:
    """The raw text of a template file; the style sheet and the script are not rendered by Jinja."""
    loader = environment.loader
    assert loader is not None, "the environment is built with a PackageLoader"
    return loader.get_source(environment, name)[0]


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
