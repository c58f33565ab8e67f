"""The card of a model that leaves for the hub, from the records of its run. Paths and addresses are not told."""

import re
from collections.abc import Mapping
from pathlib import Path

from tunesmith.base.config.yaml_text import is_list, is_mapping
from tunesmith.base.core.version import __version__
from tunesmith.base.runs.listing import read_object, read_recipe, read_rows
from tunesmith.engine.models.about import About
from tunesmith.engine.models.adapter_folder import BASE_FILE
from tunesmith.engine.models.export import ModelCard, card_figures, hub_id, render_card
from tunesmith.observe.reports.benchmark_figures import FILE as BENCHMARKS
from tunesmith.observe.reports.benchmark_figures import benchmark_tables
from tunesmith.observe.reports.chart import Table
from tunesmith.observe.reports.text import count_of

_IN_8_BITS = "rounded to 8 bits; adapters on the base as it is, as PEFT loads them, give slightly other numbers"

_PATH = re.compile(r"(~|\.{1,2})?(/[^/\n]+){2,}|(~|\.{1,2})/[^/\n]+|[A-Za-z]:\\[^\n]+")
_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://\S*")


def published_card(
    run: Path,
    final: Path,
    about: About,
    name: str,
    *,
    is_classifier: bool,
    is_adapter: bool,
    tags: tuple[str, ...] = (),
) -> str:
    """The README.md of the repository `name` with the model in the folder `final` of a run."""
    return render_card(
        ModelCard(
            base_model=about.base,
            algorithm=about.algorithm,
            title=name.rpartition("/")[2],
            metrics=card_figures(final),
            recipe=_told(read_recipe(run)),
            root=about.root,
            license=about.license,
            datasets=[one for one in about.datasets if hub_id(one)],
            tags=tags,
            place=name,
            sections={"Training": _training(run, final, about), **_evaluation(run)},
        ),
        is_classifier=is_classifier,
        is_adapter=is_adapter,
    )


def _training(run: Path, final: Path, about: About) -> str:
    """A list of what the model was trained from, on, how and with."""
    packages = read_object(run / "environment.json").get("packages")
    version = packages.get("tunesmith") if is_mapping(packages) else None
    root = f"[{about.root}](https://huggingface.co/{about.root})" if about.root else f"`{about.base}`"
    own = f"`{about.base}`, itself trained from {root}" if about.root and about.base != about.root else root
    rows = {
        "Base model": own,
        "Base in training": _IN_8_BITS if read_object(final / BASE_FILE).get("is_int8") else "",
        "Licence": about.license or "that of the base model, which the records of the run do not name",
        "Algorithm": about.algorithm,
        "Data": ", ".join(f"`{one}`" for one in about.datasets) + _counted(run),
        "Rewards": ", ".join(f"`{one}`" for one in about.rewards),
        "Run": f"`{about.name}`",
        "Tunesmith": str(version or __version__),
    }
    return "\n".join(f"- {name}: {text}" for name, text in rows.items() if text)


def _counted(run: Path) -> str:
    """The number of rows, if data of a file were read."""
    tally = read_object(run / "data.json").get("tally")
    if not is_mapping(tally) or not isinstance(count := tally.get("num_used"), int):
        return ""
    return f" ({count_of(count, 'row')} used)"


def _evaluation(run: Path) -> dict[str, str]:
    """The tables of `tunesmith eval`."""
    tables = benchmark_tables(read_rows(run / BENCHMARKS))
    return {"Evaluation": "\n\n".join(map(_markdown, tables))} if tables else {}


def _markdown(table: Table) -> str:
    rows = [table.columns, tuple("---" for _ in table.columns), *table.rows]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"{table.caption}:", "", *lines])


def _told(values: Mapping[str, object]) -> dict[str, object]:
    """A recipe of which paths have their last part, and addresses are left out."""
    return {name: _public(value) for name, value in values.items()}


def _public(value: object) -> object:
    if is_mapping(value):
        return _told(value)
    if is_list(value):
        return [_public(one) for one in value]
    if not isinstance(value, str):
        return value
    if _ADDRESS.fullmatch(value):
        return "(an address)"
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if _PATH.fullmatch(value) else value
