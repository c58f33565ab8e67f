"""Accuracy that each ingredient gives a reward model on a source of preferences that it was not trained on.

Four sources: HH-RLHF helpful, half of RMB's scenarios, UltraFeedback, and edited headlines (SemEval-2020 task 7), of
the folder that TUNESMITH_DATA names. With each ingredient a reward model is trained on all of them, and on all but one
for each source that is left out, on which it is then judged: beside "longer wins", TF-IDF fitted on the same training
pairs, and where the longer answer lost. `one_source` is trained on HH-RLHF alone and judged on the others. Rows that
begin with `noisy` have 30 % of the labels to train on flipped; what is judged by is never flipped.

A row takes five trainings of SmolLM2, each of up to 45 minutes on two cores: give --row, --left-out and
--only-left-out to make some. `mix_recipe` has the settings of the recipe `reward_mix`.
Figures are from one seed; intervals are over prompts.
"""

import csv
import gzip
import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith import train
from tunesmith.base.config.sections import PairsSection
from tunesmith.base.core.seeds import derive
from tunesmith.base.schema.records import Pair, Prompt
from tunesmith.collect.data.pairs import load_preferences, write_pairs
from tunesmith.collect.data.rows import BadRows
from tunesmith.collect.data.sources import data_path
from tunesmith.collect.data.split import prompt_key, split_by_prompt

HH = "hh"
FILES = {
    HH: "data:preference/hh-rlhf.helpful-*.test.jsonl.gz",
    "rmb": "data:preference/rmb.helpful.half.jsonl.gz",
    "ultrafeedback": "data:preference/ultrafeedback.1k.jsonl.gz",
}
HEADLINES = "headlines"
SOURCES = (*FILES, HEADLINES)

ONE = "one_source"
NOISY = "noisy"
ROWS: Mapping[str, Mapping[str, object]] = {
    ONE: {},
    "mix": {},
    "mix_left": {"pairs.truncate": "left"},
    "mix_balanced": {"reward_model.length": "balanced"},
    "mix_expert": {"reward_model.length": "expert"},
    "mix_post_hoc": {"reward_model.length": "post_hoc"},
    "mix_smoothing": {"reward_model.label_smoothing": 0.1},
    "mix_average": {"reward_model.average_from": 0.7},
    "mix_heads": {"reward_model.heads.count": 8},
    "mix_committee": {"reward_model.heads.count": 8, "reward_model.committee.confidence": 0.8},
    "mix_recipe": {
        "reward_model.length": "balanced",
        "reward_model.label_smoothing": 0.1,
        "reward_model.average_from": 0.7,
    },
    "noisy": {},
    "noisy_committee": {"reward_model.heads.count": 8, "reward_model.committee.confidence": 0.7},
    "noisy_smoothing": {"reward_model.label_smoothing": 0.3},
}
"""The settings that each row of the result changes in the plain training on all sources."""

TRUNCATE = "both"
FLIPPED = 0.3
_HELDOUT = 0.15


def headlines(place: Path) -> list[Pair]:
    """The pairs of two edits of a headline, of which people found one funnier."""
    pairs: list[Pair] = []
    with gzip.open(place, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["label"] == "0":
                continue
            texts = [_edited(row[f"original{side}"], row[f"edit{side}"]) for side in (1, 2)]
            better = int(row["label"]) - 1
            prompt = row["original1"].replace("<", "").replace("/>", "")
            if texts[0] != texts[1]:
                pairs.append(Pair(Prompt(row["id"], f"A joke on: {prompt}\n"), texts[better], texts[1 - better]))
    return pairs


def _edited(original: str, edit: str) -> str:
    start, end = original.index("<"), original.index("/>")
    return f"{original[:start]}{edit}{original[end + 2 :]}"


def read(name: str, most: int | None, seed: int) -> list[Pair]:
    """The pairs of a source, at most `most`, those of prompts that `seed` draws."""
    if name == HEADLINES:
        pairs = headlines(data_path("data:preference/humicroedit.train.csv.gz"))
    else:
        section = PairsSection(source=FILES[name], skip_bad=True)
        rows = load_preferences(FILES[name], section, BadRows(skip=True))
        pairs = [row for row in rows if isinstance(row, Pair)]
    order = sorted(range(len(pairs)), key=lambda place: (derive(seed, "drawn", prompt_key(pairs[place])), place))
    return [pairs[place] for place in sorted(order[:most])]


def written(name: str, pairs: Sequence[Pair], folder: Path, seed: int, *, flips: bool) -> str:
    """A file of the pairs, those of held-out prompts marked; of the others with `flips` a share the wrong way round."""
    heldout = {prompt_key(pair) for pair in split_by_prompt(pairs, _HELDOUT, seed).heldout}
    rows: list[Pair] = []
    for place, pair in enumerate(pairs):
        is_heldout = prompt_key(pair) in heldout
        columns = {"heldout": is_heldout}
        row = replace(pair, prompt=Prompt(f"{name} {place}", pair.prompt.content, columns))
        if flips and not is_heldout and derive(seed, "flip", name, place) < FLIPPED * 2**63:
            row = replace(row, chosen=pair.rejected, rejected=pair.chosen)
        rows.append(row)
    path = folder / f"{name}{'_flipped' if flips else ''}.jsonl"
    write_pairs(path, rows)
    return str(path)


def trained(
    learnt: Mapping[str, str], judged: Mapping[str, str], changes: Mapping[str, object], options: Namespace
) -> dict[str, Any]:
    """The quality of a reward model that is trained on the files `learnt`, also on those `judged`."""
    size: dict[str, object] = {"model": options.model, "reward_model.num_layers": options.layers}
    if options.quick:
        size = {"model": "tiny:llama", "model.dtype": "float32", "pairs.max_tokens": 96}
    with tempfile.TemporaryDirectory() as folder:
        done = train.reward(
            **{
                "pairs.sources": [{"name": name, "source": path} for name, path in learnt.items()],
                "pairs.heldout_sources": [{"name": name, "source": path} for name, path in judged.items()],
                "pairs.heldout_fraction": 0.0,
                "pairs.skip_bad": True,
                "pairs.max_tokens": options.tokens,
                "pairs.truncate": TRUNCATE,
                "reward_model.pairs_per_step": 16,
                "reward_model.micro_batch_size": 8,
                "optimizer.learning_rate": 1e-4,
                "optimizer.head_learning_rate": 1e-3,
                "optimizer.warmup_steps": 2 if options.quick else 20,
                "optimizer.schedule": "linear",
                "evaluation.judge": True,
                "run.dir": folder,
                "run.checkpoint_every": 0,
                "run.seed": options.seed,
                **size,
                **changes,
            },
            progress=False,
        )
        found: dict[str, Any] = json.loads((done.run_dir / "reward_quality.json").read_text())
        return found


def of_row(
    row: str, left_out: Sequence[str], files: Callable[[str, bool], str], options: Namespace, say: Say
) -> dict[str, Any]:
    """The figures of one row: held-out pairs of all sources with nothing left out (not with --only-left-out), and each
    source that is left out.
    """
    changes, flips = ROWS[row], row.startswith(NOISY)
    of_all = (HH,) if row == ONE else SOURCES
    found: dict[str, Any] = {"held_out": {}, "left_out": {}}
    if not options.only_left_out or row == ONE:
        whole = trained(
            {name: files(name, flips) for name in of_all},
            {name: files(name, False) for name in SOURCES if name not in of_all},
            changes,
            options,
        )
        figures = {one["name"]: _figures(one) for one in whole.get("sources") or [{"name": HH, **whole}]}
        found["held_out"] = {name: one for name, one in figures.items() if name in of_all}
        found["left_out"] = {name: one for name, one in figures.items() if name not in of_all}
        say(f"{row}: " + ", ".join(f"{name} {one['accuracy']:.3f}" for name, one in figures.items()))
    for name in left_out if row != ONE else ():
        others = [other for other in of_all if other != name]
        quality = trained(
            {other: files(other, flips) for other in others}, {name: files(name, False)}, changes, options
        )
        (own,) = (one for one in quality["sources"] if one["name"] == name)
        found["left_out"][name] = _figures(own)
        say(f"{row} without {name}: {found['left_out'][name]}")
    lost = [one["accuracy_shorter"] for one in found["left_out"].values() if one["accuracy_shorter"] is not None]
    gains = [one["accuracy"] - one["longer_wins"] for one in found["left_out"].values()]
    found["above_longer_wins"] = {"least": min(gains, default=None), "num_by_0.03": sum(gain >= 0.03 for gain in gains)}
    found["where_longer_lost"] = fmean(lost) if lost else None
    return found


def _figures(one: Mapping[str, Any]) -> dict[str, Any]:
    names = ("accuracy", "accuracy_low", "accuracy_high", "longer_wins", "tfidf", "num_pairs")
    return {name: one.get(name) for name in (*names, "num_shorter", "accuracy_shorter", "shorter_low", "shorter_high")}


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """A row for each ingredient; files are written once."""
    most = 24 if options.quick else options.pairs
    left_out = options.left_out or (SOURCES[1:2] if options.quick else SOURCES)
    with tempfile.TemporaryDirectory() as folder:
        pairs = {name: read(name, most, options.seed) for name in SOURCES}
        paths: dict[tuple[str, bool], str] = {
            (name, flips): written(name, pairs[name], Path(folder), options.seed, flips=flips)
            for name in SOURCES
            for flips in (False, True)
        }
        rows = {
            row: of_row(row, left_out, lambda name, flips: paths[name, flips], options, say)
            for row in options.row or ROWS
        }
    about = head(options, "reward_mix", "quick", "model", "layers", "tokens", "pairs", "seed")
    about["truncate"] = TRUNCATE
    return {**about, "num_pairs": {name: len(found) for name, found in pairs.items()}, "rows": rows}


def _show(facts: Mapping[str, Any]) -> None:
    table: list[list[str]] = []
    for row, found in facts["rows"].items():
        for kind in ("held_out", "left_out"):
            for name, one in found[kind].items():
                numbers = [one[key] for key in ("accuracy", "longer_wins", "tfidf", "accuracy_shorter")]
                table.append([row, kind, name, *("" if n is None else f"{n:.3f}" for n in numbers)])
    print_table(["row", "pairs", "source", "accuracy", "longer wins", "TF-IDF", "where the longer lost"], table)


main = benchmark(
    measure,
    _show,
    "quick",
    "model",
    "seed",
    row={"action": "append", "choices": list(ROWS), "help": "one ingredient; repeatable. All if left out"},
    left_out={"action": "append", "choices": list(SOURCES), "help": "one source to leave out; repeatable. All"},
    only_left_out={"action": "store_true", "help": "no training on all sources: only those with one left out"},
    layers={"type": int, "default": 8, "metavar": "N", "help": "lowest layers that the reward model keeps"},
    tokens={"type": int, "default": 384, "metavar": "N", "help": "limit of a dialogue; see pairs.truncate"},
    pairs={"type": int, "default": 4000, "metavar": "N", "help": "pairs of each source at most"},
)

if __name__ == "__main__":
    run("reward_mix")
