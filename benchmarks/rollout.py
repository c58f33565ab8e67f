"""`python -m benchmarks.rollout`: our engine against what transformers offers, on the same prompts, in alternation.

For each workload: greedy tokens are compared in float32; transformers is tried at every batch size and attention, and
keeps its fastest of each attention; then all contenders draw in turns, and each round gives one ratio.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from benchmarks.contenders import (
    Backend,
    Draw,
    Drawn,
    EngineSettings,
    LogpDifference,
    ModelSettings,
    Peak,
    Setting,
)
from benchmarks.equality import Equality, compare_greedy
from benchmarks.figures import Spread, paired, percentile_95
from benchmarks.machine import Load, machine_facts
from benchmarks.process import Process
from benchmarks.roofline import SHOWN_ROWS, MeasureRows, ProductRates, Rates, ideal, needed_rows
from benchmarks.rounds import Say, load_facts, noted_load
from benchmarks.workloads import NAMES, Workload, workload
from tunesmith.config.sections import ModelSection
from tunesmith.core.errors import InputError
from tunesmith.models.load import load_policy
from tunesmith.models.loaded import context_length
from tunesmith.runs.environment import usable_cores

BASELINES = ("transformers", "transformers-cb")
OURS = "tunesmith"
ATTENTIONS = ("sdpa", "eager")
BATCH_SIZES = (16, 32, 64, 128)
_CONTENDERS = "benchmarks.contenders"


@dataclass(frozen=True, slots=True)
class RolloutBench:
    """What to measure. `backend` and `num_slots` are of our engine; `quick` is a smoke run that says nothing."""

    model: str = "smollm2"
    against: tuple[str, ...] = ("transformers",)
    workloads: tuple[str, ...] = NAMES
    backend: Backend = "native"
    num_slots: int | None = None
    num_threads: int | None = None
    num_rounds: int = 5
    seed: int = 0
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """One contender's work in one round: the whole workload, and with a single new token (the prompts alone)."""

    whole: Drawn
    prefill: Drawn


@dataclass(slots=True)
class Entry:
    """A contender with its setting, and what it did."""

    label: str
    process: Process
    setting: Setting | None
    rounds: list[Round] = field(default_factory=list[Round])

    @property
    def tokens_per_s(self) -> list[float]:
        """New tokens per second in each round, prompts included in the time."""
        return [item.whole.num_tokens / item.whole.seconds for item in self.rounds]

    def facts(self, work: Workload) -> dict[str, object]:
        """Speeds: all in all, of the prompts (each token counted once, however often it is computed), of the rest."""
        lengths = [length for item in self.rounds for length in item.whole.lengths]
        return {
            "tokens_per_s": statistics.median(self.tokens_per_s),
            "prefill_tokens_per_s": statistics.median(
                work.num_prompt_tokens / item.prefill.seconds for item in self.rounds
            ),
            "decode_tokens_per_s": statistics.median(_decode_speed(item) for item in self.rounds),
            "seconds": statistics.median(item.whole.seconds for item in self.rounds),
            "mean_length": statistics.fmean(lengths),
            "p95_length": percentile_95(lengths),
        }


@dataclass(slots=True)
class Measured:
    """All rounds of one workload."""

    work: Workload
    ours: Entry
    others: list[Entry]
    rates: list[ProductRates]
    loads: list[Load]
    equality: Equality
    calibration: Mapping[str, float]
    logp_diff_max: float
    peaks_gb: Mapping[str, float]

    def to_json(self) -> dict[str, object]:
        """Figures of the workload. The ratio without a name is to `generate` at its fastest."""
        generate = [entry for entry in self.others if entry.setting and entry.setting.way == "generate"]
        fastest = max(generate or self.others, key=lambda entry: statistics.median(entry.tokens_per_s))
        roofline = self._roofline([rates.fastest for rates in self.rates])
        of_torch = self._roofline([rates.torch for rates in self.rates])
        return {
            **self._ratio(fastest).facts("ratio"),
            "against": fastest.label,
            "ratios": {entry.label: self._ratio(entry).facts("ratio") for entry in self.others},
            **self.ours.facts(self.work),
            "roofline_share": roofline["share"],
            "roofline": {**roofline, "torch_products": of_torch},
            "greedy_equal": self.equality.is_equal,
            "greedy": {
                "sequences": self.equality.num_sequences,
                "near_ties": self.equality.num_near_ties,
                "different": self.equality.num_different,
                "largest_margin": self.equality.largest_margin,
            },
            "logp_diff_max": self.logp_diff_max,
            "peak_rss_gb": self.peaks_gb[OURS],
            "contenders": {
                entry.label: {**entry.facts(self.work), "peak_rss_gb": self.peaks_gb[entry.label]}
                for entry in self.others
            },
            "calibration_tokens_per_s": dict(self.calibration),
            "rounds": len(self.ours.rounds),
            "load": load_facts(self.loads),
        }

    def _roofline(self, rates: Sequence[Rates]) -> dict[str, object]:
        """Time of the products alone, and our share of it, with the rates of each round."""
        ideals_s = [
            ideal(self.work, item.whole.lengths, rate).seconds
            for item, rate in zip(self.ours.rounds, rates, strict=True)
        ]
        shares = [ideal_s / item.whole.seconds for ideal_s, item in zip(ideals_s, self.ours.rounds, strict=True)]
        return {
            "share": statistics.median(shares),
            "ideal_s": statistics.median(ideals_s),
            "gflops": {str(count): statistics.median(rate.gflops(count) for rate in rates) for count in SHOWN_ROWS},
        }

    def _ratio(self, entry: Entry) -> Spread:
        return paired(self.ours.tokens_per_s, entry.tokens_per_s)


def run_rollout_bench(options: RolloutBench, say: Say = lambda _: None) -> dict[str, object]:
    """All figures of the benchmark as plain numbers and text; `say` gets a line now and then.

    Raises:
        InputError: for an unknown workload, baseline, model or number, before anything is measured.
    """
    works = _checked(options)
    num_threads = options.num_threads or usable_cores()
    torch.set_num_threads(num_threads)
    model = ModelSettings(options.model, "auto", num_threads)
    facts: dict[str, dict[str, object]] = {}
    differences = []
    for work in works:
        say(f"{work.name}: {len(work.prompt_ids)} prompts x {work.num_completions}")
        measured = _measure(options, work, model, say)
        facts[work.name] = measured.to_json()
        differences.append(measured.logp_diff_max)
    return {
        "bench": "rollout",
        "model": options.model,
        "quick": options.quick,
        "backend": options.backend,
        "machine": machine_facts(),
        "workloads": facts,
        "logp_diff_max": max(differences),
    }


def _checked(options: RolloutBench) -> list[Workload]:
    unknown = [name for name in options.against if name not in BASELINES]
    if unknown:
        raise InputError(f"there is no baseline {unknown[0]!r}; there are {', '.join(BASELINES)}")
    for name, value in (("rounds", options.num_rounds), ("threads", options.num_threads), ("slots", options.num_slots)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; give at least 1")
    if not options.against or not options.workloads:
        raise InputError("give at least one workload and one baseline")
    loaded = load_policy(ModelSection(name=options.model))
    context = context_length(loaded.model)
    return [workload(name, loaded.tokenizer, context, quick=options.quick) for name in options.workloads]


def _measure(options: RolloutBench, work: Workload, model: ModelSettings, say: Say) -> Measured:
    equality = _equality(options, work, replace(model, dtype="float32"))
    say(
        f"  greedy: {equality.num_sequences} sequences, {equality.num_near_ties} near-ties, "
        f"{equality.num_different} different"
    )
    with ExitStack() as stack:

        def start(target: str, settings: object) -> Process:
            return stack.enter_context(Process(target, settings, num_threads=model.num_threads))

        ours = Entry(OURS, start(*_engine(options, model)), None)
        gemm = start("benchmarks.roofline:serve_gemm", model)
        others: list[Entry] = []
        calibration: dict[str, float] = {}
        for name in options.against:
            process = start(f"{_CONTENDERS}:serve_transformers", model)
            others += _calibrated(name, process, work, options, calibration, say)
        ours.process.ask(Draw(work, options.seed))  # warm, as the others are by now
        entries = [ours, *others]
        for process in {id(entry.process): entry.process for entry in entries}.values():
            process.ask(Peak())
        rates, loads = _rounds(entries, gemm, work, options, say)
        peaks_gb = {entry.label: _peak(entry, work, options) for entry in entries}
        difference = ours.process.ask(LogpDifference(work, options.seed))
    return Measured(work, ours, others, rates, loads, equality, calibration, difference, peaks_gb)


def _engine(options: RolloutBench, model: ModelSettings) -> tuple[str, EngineSettings]:
    return f"{_CONTENDERS}:serve_engine", EngineSettings(model, options.backend, options.num_slots)


def _equality(options: RolloutBench, work: Workload, model: ModelSettings) -> Equality:
    target, settings = _engine(options, model)
    with (
        Process(target, settings, num_threads=model.num_threads) as ours,
        Process(f"{_CONTENDERS}:serve_transformers", model, num_threads=model.num_threads) as reference,
    ):
        return compare_greedy(ours, reference, work)


def _calibrated(
    name: str, process: Process, work: Workload, options: RolloutBench, calibration: dict[str, float], say: Say
) -> list[Entry]:
    """One entry for each attention, at the batch size at which it was fastest; every speed goes into `calibration`."""
    entries: list[Entry] = []
    num_rows = len(work.rows)
    # A batch that holds all rows is the largest that differs; continuous batching takes all rows at once.
    sizes = [size for size in BATCH_SIZES if size < num_rows] + [min(num_rows, BATCH_SIZES[-1])]
    way = "generate" if name == "transformers" else "continuous"
    process.ask(Draw(work, options.seed, setting=Setting("sdpa", sizes[-1], way)))  # the first call warms up
    for attention in ATTENTIONS:
        speeds: dict[int, float] = {}
        for size in sizes if way == "generate" else [num_rows]:
            drawn: Drawn = process.ask(Draw(work, options.seed, setting=Setting(attention, size, way)))
            speeds[size] = drawn.num_tokens / drawn.seconds
            calibration[f"{name}-{attention}@{size}"] = speeds[size]
        best = max(speeds, key=lambda size: speeds[size])
        entries.append(Entry(f"{name}-{attention}@{best}", process, Setting(attention, best, way)))
        say(f"  {name}, {attention}: fastest at a batch of {best}, {speeds[best]:.0f} tokens/s")
    return entries


def _rounds(
    entries: Sequence[Entry], gemm: Process, work: Workload, options: RolloutBench, say: Say
) -> tuple[list[ProductRates], list[Load]]:
    """Every contender draws once in each round; who begins changes from round to round."""
    prompts_only = replace(work, sampling=replace(work.sampling, max_new_tokens=1), is_exact_length=True)
    rates: list[ProductRates] = []
    loads: list[Load] = []
    for index in range(options.num_rounds):
        loads.append(noted_load(say))
        seed = options.seed + 1 + index
        first = index % len(entries)
        for entry in [*entries[first:], *entries[:first]]:
            whole = entry.process.ask(Draw(work, seed, setting=entry.setting))
            prefill = entry.process.ask(Draw(prompts_only, seed, setting=entry.setting))
            entry.rounds.append(Round(whole, prefill))
        rates.append(gemm.ask(MeasureRows(needed_rows(work))))
        speeds = ", ".join(f"{entry.label} {entry.tokens_per_s[-1]:.0f}" for entry in entries)
        say(f"  round {index + 1} of {options.num_rounds}, tokens/s: {speeds}")
    return rates, loads


def _peak(entry: Entry, work: Workload, options: RolloutBench) -> float:
    """Peak memory of one more draw: settings of one process are told apart, and calibration does not count."""
    entry.process.ask(Peak())
    entry.process.ask(Draw(work, options.seed, setting=entry.setting))
    return entry.process.ask(Peak())


def _decode_speed(item: Round) -> float:
    """Tokens behind the first ones, by the time that the whole took longer than the prompts."""
    return (item.whole.num_tokens - len(item.whole.lengths)) / max(1e-9, item.whole.seconds - item.prefill.seconds)


if __name__ == "__main__":
    from benchmarks.cli import main  # imports this module under its own name: a worker unpickles what is sent to it

    sys.exit(main(["rollout", *sys.argv[1:]]))
