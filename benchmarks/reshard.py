"""Weights of a scratch model that two ranks move from pipeline stages to tensor parallel slices and back.

`moves`: for each move its seconds, and on the fullest rank the growth of its resident memory's peak: `peak_share` is
what it held plus that growth, over its larger share of the weights. `allowed_share` is 1.3 plus one layer.
`engine`: a step of a run that draws by tensor parallel ranks and trains in stages, with the engine's packed weights and
its cache `kept` during the update, or `unloaded` for it: seconds of both moves and of the first token, and the resident
memory of a rank during the update, less that before the first step. Every process has one thread.
"""

import statistics
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.common import (
    Say,
    benchmark,
    load_facts,
    load_warning,
    machine_facts,
    measure_load,
    print_table,
    run,
    seconds_of,
)
from tunesmith.base.config.scale_sections import ScaleSection
from tunesmith.base.runs.environment import peak_rss_since_reset_gb, reset_peak_rss
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.distributed.group import TensorGroup
from tunesmith.engine.distributed.launch import ranks_of
from tunesmith.engine.distributed.ranks import gathered, rank
from tunesmith.engine.distributed.reshard import reshard, shape_of
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.layouts import Division, layout_of, parts_of
from tunesmith.engine.models.tensor_parallel import tensor_parallel
from tunesmith.engine.models.tiny import scratch_model
from tunesmith.engine.rollout.factory import open_engine

STAGES, SLICES = Division(stages=2), Division(tensor=2)


class Weights:
    """The weights of this rank, moved between divisions."""

    def __init__(self, options: Namespace) -> None:
        torch.set_num_threads(1)
        sizes = {"hidden_size": options.width, "intermediate_size": 3 * options.width}
        self.loaded = scratch_model(num_hidden_layers=options.layers, **sizes)
        self.model = language_model(self.loaded.model)
        assert self.model.decoder is not None
        self.parts = parts_of(self.loaded.model, self.model.decoder.architecture)
        self.tensors = dict(self.loaded.model.named_parameters())
        self.layout = layout_of(self.parts, Division(copies=2))

    @property
    def num_bytes(self) -> int:
        """What this rank holds."""
        return sum(4 * torch.Size(shape_of(piece)).numel() for piece in self.layout[rank()].values())

    @property
    def layer_bytes(self) -> int:
        """One layer."""
        return sum(4 * torch.Size(part.shape).numel() for part in self.parts if part.layers == (0,))

    def move(self, division: Division) -> None:
        """Move them."""
        layout = layout_of(self.parts, division)
        reshard(self.tensors, self.layout, layout)
        self.layout = layout


def moves(options: Namespace) -> list[dict[str, float]]:
    """The figures of each move, on the fullest rank."""
    weights, found = Weights(options), list[dict[str, float]]()
    weights.move(STAGES)
    for index in range(2 * options.rounds):
        held = weights.num_bytes
        reset_peak_rss()
        before = peak_rss_since_reset_gb()
        seconds = seconds_of(lambda index=index: weights.move((SLICES, STAGES)[index % 2]))
        share = max(held, weights.num_bytes)
        grown = 1e9 * (peak_rss_since_reset_gb() - before)
        own = {"peak_share": (held + grown) / share, "allowed_share": 1.3 + weights.layer_bytes / share}
        of_ranks = gathered([own])
        worst = max(of_ranks, key=lambda one: one["peak_share"] - one["allowed_share"])
        found.append({"seconds": seconds, **worst, "share_mb": share / 1e6})
    return found


def steps(options: Namespace, *, unloads: bool) -> dict[str, float]:
    """Medians of a step, on the fullest rank."""
    weights = Weights(options)
    version = [0]
    divided = tensor_parallel(weights.model, TensorGroup(2))
    engine = open_engine(divided, weights.loaded.tokenizer, weight_version=lambda: version[0], kv_cache_mb=256)
    weights.move(STAGES)
    reset_peak_rss()
    before, found = peak_rss_since_reset_gb(), list[list[float]]()
    prompts = [Prompt(str(number), f"The film number {number}") for number in range(8)]
    for _ in range(options.rounds):
        to_slices = seconds_of(lambda: weights.move(SLICES))
        first = seconds_of(lambda: engine.generate(prompts, 8, SamplingParams(max_new_tokens=1, seed=0)))
        to_stages = seconds_of(lambda: weights.move(STAGES))
        if unloads:
            engine.unload()
        reset_peak_rss()
        held_mb = max(gathered([1e3 * (peak_rss_since_reset_gb() - before)]))
        version[0] += 1
        found.append([to_slices + to_stages, first, held_mb])
    names = ("moves_s", "first_token_s", "extra_mb")
    return dict(zip(names, map(statistics.median, zip(*found[1:] or found, strict=True)), strict=True))


def all_of(options: Namespace) -> dict[str, Any]:
    """All figures; both ranks call it."""
    engine = {name: steps(options, unloads=name == "unloaded") for name in ("kept", "unloaded")}
    return {"moves": moves(options), "engine": engine}


def measure(options: Namespace, say: Say) -> Mapping[str, object]:
    """The figures."""
    if options.quick:
        options.width, options.layers = 64, 4
    say("two ranks: stages to slices and back")
    plain = Namespace(width=options.width, layers=options.layers, rounds=options.rounds)
    load = measure_load()
    with ranks_of(ScaleSection(ranks=2), partial(all_of, plain)):
        figures = all_of(plain)
    return {"width": options.width, "layers": options.layers, **figures, "load": load_facts([load]), **machine_facts()}


def show(facts: Mapping[str, Any]) -> None:
    """Print the figures."""
    rows = [[f"{number:.3f}" for number in one.values()] for one in facts["moves"]]
    print_table(list(facts["moves"][0]), rows)
    print_table(
        ["engine", *facts["engine"]["kept"]],
        [[name, *(f"{number:.3f}" for number in one.values())] for name, one in facts["engine"].items()],
    )
    print(load_warning(facts))


main = benchmark(
    measure,
    show,
    *("rounds", "quick"),
    width={"type": int, "default": 512, "metavar": "N", "help": "hidden size of the model"},
    layers={"type": int, "default": 8, "metavar": "N", "help": "its layers"},
)


if __name__ == "__main__":
    run("reshard")
