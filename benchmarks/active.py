"""Votes that each choice of pairs (`live.selection`) needs, against random pairs: in the live loop, or of a fixed pool.

The live loop is driven in one process, so that no figure depends on the load of the machine: simulated raters vote on
what it offers, it learns from every so many votes, and after some updates the version and the base model continue
held-out openings, which the lexicon judges, ties half. Of the three raters each is right in 85 % of its votes, and one
takes the left answer in 30 % of them whatever it says. `votes` of a selection are those after which its win rate,
smoothed so that it does not fall, reaches what random pairs have after all votes. What is learnt says nothing about
people.

With `--pool hh`, `rmb` or `headlines` (repeatable) the votes are the labels of pairs that are there, of the folder that
TUNESMITH_DATA names, and the figure is the accuracy on other pairs of a reward model's heads on frozen features
(`benchmarks/active_pool.py`). `python -m benchmarks.active_picture FIGURES.json PICTURE.svg` draws its curves.
"""

import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from benchmarks.active_pool import POOLS, pool_curves
from benchmarks.common import Say, benchmark, head, print_table, run
from tunesmith.apps.workflows.live_raters import RaterTraits, verdict_of
from tunesmith.apps.workflows.live_simulation import hit
from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.config.load import load_recipe
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.seeds import derive
from tunesmith.collect.store.records import CampaignSettings, Verdict
from tunesmith.collect.store.runs import RunReader
from tunesmith.collect.store.votes import VoteStore
from tunesmith.engine.batch.rollout import Group
from tunesmith.learn.live.folder import open_folder
from tunesmith.learn.live.loop import Loop, build
from tunesmith.learn.rewards.builtin import SimulatedRater
from tunesmith.learn.trainers.signals import StopRequest

METHODS = ("random", "drts", "delta_ucb", "infomax", "d_optimal")
TRAITS = (RaterTraits(), RaterTraits(), RaterTraits(left_bias=0.3))

_SMOLLM2: dict[str, object] = {"live.votes_per_update": 32, "live.check.min_votes": 100}
_TINY: dict[str, object] = {
    "model.name": "tiny:llama",
    "model.dtype": "float32",
    "rollout.max_new_tokens": 6,
    "rollout.prompts_per_step": 8,
    "live.votes_per_update": 16,
    "live.pool": 8,
}

Curve = list[tuple[int, float]]
"""Votes, and the win rate of the version that has learnt from them."""


def curve(method: str, seed: int, options: Namespace, say: Say, **values: object) -> Curve:
    """The win rates of one run of the loop, whose recipe has `values` beside what is said here."""
    changed = {**(_TINY if options.quick else _SMOLLM2), **values}
    with tempfile.TemporaryDirectory() as place:
        given = {**changed, "live.dir": place, "live.selection.method": method, "run.seed": seed}
        given |= {"rollout.completions_per_prompt": options.completions, "prompts.source": "films"}
        cfg = load_recipe("live", recipe=None if options.quick else "live_smollm2", overrides=given).recipe
        assert isinstance(cfg, LiveRecipe)
        with open_folder(cfg) as folder, VoteStore.open(Path(place) / "votes.db", seed=seed) as store:
            loop = build(cfg, folder, StopRequest())
            loop.begin()
            with closing(RunReader.open(Path(place) / "runs.db")) as runs:
                return _voted(loop, store, runs, Measure(loop, options.pairs, seed), method, seed, options, say)


class Measure:
    """Win rate of the loop's current version against the base model, on the held-out prompts."""

    def __init__(self, loop: Loop, num_pairs: int, seed: int) -> None:
        self._loop = loop
        self._judge = SimulatedRater()
        self._prompts = loop.offers.prompts.heldout
        self._num = -(-num_pairs // len(self._prompts))
        self._sampling = loop.offers.sampling("active", seed)
        self._base = self._scores(loop.offers.engine.generate(self._prompts, self._num, self._sampling))

    def win_rate(self) -> float:
        """The share of completions that the lexicon finds better than the base model's with the same seed."""
        drawn = self._scores(self._loop.offers.engine.generate(self._prompts, self._num, self._sampling))
        return statistics.fmean(hit(*pair) for pair in zip(self._base, drawn, strict=True))

    def _scores(self, groups: Sequence[Group]) -> list[float]:
        return [self._judge.score(group.prompt.content, one.text) for group in groups for one in group.completions]


def _voted(
    loop: Loop,
    store: VoteStore,
    runs: RunReader,
    measure: Measure,
    method: str,
    seed: int,
    options: Namespace,
    say: Say,
) -> Curve:
    campaign = store.set_campaign(CampaignSettings())
    raters = [store.add_rater(f"simulated {number}").rater.id for number in range(len(TRAITS))]
    draw, judge = random.Random(derive(seed, "raters")), SimulatedRater()
    found: Curve = []
    num_votes, next_measure = 0, options.every
    while num_votes < options.votes:
        number = num_votes % len(raters)
        store.ingest(campaign.id, runs.offers_after(store.reader.last_offer_id(campaign.id), 10_000))
        shown = store.next_presentations(raters[number], campaign.id)
        if not shown:
            loop.refill()
            continue
        answers = [{"text": text} for text in shown[0].answers]
        presentation = {"prompt": [{"text": shown[0].prompt, "role": None}], "answers": answers}
        verdict = cast(Verdict, verdict_of(presentation, TRAITS[number], draw, judge))
        store.vote(shown[0].token, raters[number], verdict)
        num_votes += 1
        loop.read_votes()
        if len(loop.memory.fresh) >= loop.cfg.live.votes_per_update:
            loop.update()
        elif len(loop.offers.open) < loop.cfg.live.pool:
            loop.refill()
        if num_votes >= next_measure:
            found.append((num_votes, measure.win_rate()))
            next_measure += options.every
            say(f"{method}, seed {seed}: {num_votes} votes, win rate {found[-1][1]:.3f}")
    return found


def votes_needed(found: Curve, target: float) -> float | None:
    """Votes after which the smoothed win rate reaches `target`, between two measurements in proportion; None: never.

    Smoothed by pooling neighbours until no rate is below the one before (isotonic regression), from 0.5 at 0 votes.
    """
    blocks: list[tuple[float, int]] = []
    for _, rate in [(0, 0.5), *found]:
        blocks.append((rate, 1))
        while len(blocks) > 1 and blocks[-1][0] < blocks[-2][0]:
            (last, num), (before, more) = blocks.pop(), blocks.pop()
            blocks.append(((last * num + before * more) / (num + more), num + more))
    rates = [rate for rate, num in blocks for _ in range(num)]
    votes = [0, *(number for number, _ in found)]
    for index, rate in enumerate(rates):
        if rate >= target:
            if index == 0 or rate == rates[index - 1]:
                return float(votes[index])
            share = (target - rates[index - 1]) / (rate - rates[index - 1])
            return votes[index - 1] + share * (votes[index] - votes[index - 1])
    return None


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """The curves of all selections, and the votes that each needs; of each pool, if any is named."""
    if options.every > options.votes:
        raise InputError(f"--every is {options.every}, above --votes, {options.votes}: nothing would be measured")
    methods = ["random", *(one for one in options.method or METHODS if one != "random")]
    seeds = range(options.seed, options.seed + options.seeds)
    if options.pool:
        sizes = ("model", "layers", "tokens", "pool_pairs", "heads", "beliefs", "round")
        about = head(options, "active", "quick", "votes", "every", *sizes)
        pools: dict[str, object] = {}
        for name in dict.fromkeys(options.pool):
            facts, curves = pool_curves(name, methods, seeds, options, say)
            pools[name] = {**facts, **compared(curves, by_seed=True)}
        return {**about, "pools": pools}
    curves = {method: [curve(method, seed, options, say) for seed in seeds] for method in methods}
    return {**head(options, "active", "quick", "votes", "completions", "pairs"), **compared(curves)}


def compared(curves: Mapping[str, Sequence[Curve]], *, by_seed: bool = False) -> dict[str, object]:
    """The votes that each selection needs for what random pairs have at the end, and their share of all votes.

    That is the mean over the seeds, with `by_seed` what each seed has, where each is judged on other pairs. Raises
    InputError for a curve without measurements.
    """
    if not all(one for found in curves.values() for one in found):
        raise InputError("nothing was measured: there are fewer pairs than --every says; lower it")
    # The end of random pairs by their last two measurements: each has an error of its own.
    targets = [statistics.fmean(rate for _, rate in one[-2:]) for one in curves["random"]]
    target = statistics.fmean(targets)
    targets = targets if by_seed else [target] * len(targets)
    num_votes = curves["random"][0][-1][0]
    facts: dict[str, object] = {"target": target}
    for method, found in curves.items():
        needed = [votes_needed(one, wanted) for one, wanted in zip(found, targets, strict=True)]
        ratios = [None if one is None else one / num_votes for one in needed]
        known = [one for one in ratios if one is not None]
        facts[method] = {
            "votes": needed,
            "votes_ratio": statistics.fmean(known) if len(known) == len(ratios) else None,
            "low": min(known, default=None),
            "high": max(known) if len(known) == len(ratios) else None,
            "curves": found,
        }
    return facts


def _show(facts: Mapping[str, Any]) -> None:
    for name, pool in facts.get("pools", {}).items():
        print(f"{name}: {pool['num_pairs']} pairs, longer wins {pool['longer_wins']:.3f}")
        _show(pool)
    if "pools" in facts:
        return
    methods = [method for method in METHODS if method in facts]
    text = lambda value: "not reached" if value is None else f"{value:.2f}"  # noqa: E731
    rows: list[list[str]] = []
    for method in methods:
        found = facts[method]
        end = statistics.fmean(one[-1][1] for one in found["curves"])
        rows.append([method, *(text(found[key]) for key in ("votes_ratio", "low", "high")), f"{end:.3f}"])
    print_table(["selection", "votes ratio", "low", "high", "at the end"], rows)


main = benchmark(
    measure,
    _show,
    "quick",
    "seed",
    "threads",
    model={"help": "model whose states are a pool's features; the live loop has its recipe's"},
    pool={"action": "append", "choices": POOLS, "help": "labels of a fixed pool, not the live loop; repeatable"},
    method={
        "action": "append",
        "choices": METHODS,
        "help": "a selection beside random pairs; repeatable. All if left out",
    },
    votes={"type": int, "default": 1400, "metavar": "N", "help": "votes of each run"},
    every={"type": int, "default": 100, "metavar": "N", "help": "votes between two measurements"},
    seeds={"type": int, "default": 3, "metavar": "N", "help": "runs with other seeds"},
    completions={
        "type": int,
        "default": 8,
        "metavar": "N",
        "help": "completions of a prompt, among which pairs are chosen",
    },
    pairs={"type": int, "default": 400, "metavar": "N", "help": "completions that are compared, about"},
    pool_pairs={"type": int, "default": 4000, "metavar": "N", "help": "pairs of a pool at most"},
    round={"type": int, "default": 50, "metavar": "N", "help": "labels of a pool that are asked for at once"},
    heads={"type": int, "default": 8, "metavar": "N", "help": "heads of the reward model of a pool"},
    beliefs={
        "choices": ("posterior", "heads"),
        "default": "posterior",
        "help": "what chooses in a pool: the live loop's posterior, or the reward model's heads",
    },
    layers={"type": int, "default": 8, "metavar": "N", "help": "lowest layers whose states are a pool's features"},
    tokens={
        "type": int,
        "default": 256,
        "metavar": "N",
        "help": "limit of a dialogue of a pool, which loses its beginning",
    },
)

if __name__ == "__main__":
    run("active")
