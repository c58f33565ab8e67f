"""Our rollout engine against transformers on the same prompts, each in a process of its own, in alternation.

`--weights int8` has our side multiply in 8 bits; its baseline `native` is our engine in the model's dtype. The baseline
`undrafted` is our engine as our side has it, without guesses of the next tokens.

For each workload: greedy tokens are compared in float32, but for those of 8 bits; transformers is tried at every batch
size and attention, and keeps its fastest of each attention; then all contenders draw in turns, and each round gives one
ratio. Leave the machine alone meanwhile; with smollm2 on two cores it takes about an hour.
"""

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import (
    Say,
    Spread,
    benchmark,
    head,
    in_turns,
    load_warning,
    paired,
    print_table,
    run,
    spread_text,
)
from benchmarks.contenders import Engine, ModelSettings, Setting, Transformers
from benchmarks.llamacpp_engine import TYPES, LlamaCppSettings, llamacpp_program
from benchmarks.process import Process
from benchmarks.roofline import SHOWN_ROWS, Products, Rates, ideal_s, needed_rows
from benchmarks.vllm_engine import VARIABLES, VLLMSettings, vllm_python
from benchmarks.workloads import NAMES, Drawn, Workload, workload
from tunesmith.base.config.sections import ModelSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.weights import Weights
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.about import About
from tunesmith.engine.models.export import ModelCard, save_final
from tunesmith.engine.models.gguf_out.file import write_gguf
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.models.loaded import LoadedModel, context_length

NATIVE = "native"
UNDRAFTED = "undrafted"
STARTED_ONCE = ("vllm", "llamacpp")
"""Programs of others, which are started for all workloads."""
BASELINES = ("transformers", "transformers-cb", NATIVE, UNDRAFTED, *STARTED_ONCE)
OURS = "tunesmith"
ATTENTIONS = ("sdpa", "eager")
BATCH_SIZES = (16, 32, 64, 128)

NEAR_TIE = 1e-4
"""Two best logits of the reference that are closer than this are a near-tie: rounding decides."""

_MOST_GREEDY_COMPLETIONS = 4


@dataclass(frozen=True, slots=True)
class Round:
    """One contender's work in one round: the whole workload, and with a single new token (the prompts alone)."""

    whole: Drawn
    prefill: Drawn

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, prompts included in the time."""
        return self.whole.num_tokens / self.whole.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens behind the first ones, by the time that the whole took longer than the prompts."""
        num_decoded = self.whole.num_tokens - len(self.whole.lengths)
        return num_decoded / max(1e-9, self.whole.seconds - self.prefill.seconds)


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender with its setting."""

    process: Process
    setting: Setting | None = None

    def draw(self, work: Workload, seed: int) -> Drawn:
        """The completions of `work`."""
        return self.process.call("draw", work, seed, setting=self.setting)

    def peak_gb(self, work: Workload, seed: int) -> float:
        """Peak memory of one more draw: settings of one process are told apart, and calibration does not count."""
        self.process.call("peak")
        self.draw(work, seed)
        return self.process.call("peak")


def measure(options: Namespace, say: Say) -> dict[str, object]:
    """All figures of the benchmark.

    Raises:
        InputError: for an unknown workload, baseline, model or number, before anything is measured.
    """
    against = [name.strip() for name in options.against.split(",") if name.strip()]
    unknown = [name for name in against if name not in BASELINES]
    if unknown or not against:
        raise InputError(f"there is no baseline {', '.join(unknown) or 'given'}; there are {', '.join(BASELINES)}")
    loaded = load_policy(ModelSection(name=options.model, dtype=options.dtype))
    context = context_length(loaded.model)
    works = [workload(name, loaded.tokenizer, context, quick=options.quick) for name in options.workload or NAMES]
    model = ModelSettings(
        options.model, options.dtype, options.threads, options.backend, options.slots, options.weights
    )
    compares = options.weights == "model"
    facts: dict[str, dict[str, object]] = {}
    with ExitStack() as stack:
        started = {"vllm": _start_vllm(stack, loaded, model, say)} if "vllm" in against else {}
        if "llamacpp" in against:
            started |= _start_llamacpp(stack, loaded, model)
        for work in works:
            say(f"{work.name}: {len(work.prompt_ids)} prompts x {work.num_completions}")
            greedy = _greedy(work, replace(model, dtype="float32")) if compares and work.name in NAMES else {}
            if greedy:
                say("  greedy: {sequences} sequences, {near_ties} near-ties, {different} different".format(**greedy))
            facts[work.name] = _measured(work, model, (against, started), greedy, options, say)
    return {
        **head(options, "rollout", "model", "quick", "backend", "weights"),
        "workloads": facts,
        "logp_diff_max": max(figures["logp_diff_max"] for figures in facts.values()),  # type: ignore[type-var]
    }


def greedy_workload(work: Workload) -> Workload:
    """`work` drawn greedily, ending where the model ends; a few completions of each prompt, which must all be equal."""
    return replace(
        work,
        num_completions=min(work.num_completions, _MOST_GREEDY_COMPLETIONS),
        sampling=SamplingParams(work.sampling.max_new_tokens, temperature=0.0),
        is_exact_length=False,
    )


def _greedy(work: Workload, model: ModelSettings) -> dict[str, Any]:
    """Greedy tokens of our engine against those of `model.generate`, in float32.

    In bfloat16 two correct programs part within some tens of tokens, wherever the best two logits are closer than the
    precision; float32 leaves only near-ties, which are counted apart.
    """
    wanted = greedy_workload(work)
    single = replace(wanted, num_completions=1)
    reference = Transformers(model)  # in this process: neither time nor memory counts here
    setting = Setting("sdpa", batch_size=len(single.rows))
    expected = reference.draw(single, 0, keeps_tokens=True, setting=setting).tokens
    found = Engine(model).draw(wanted, 0, keeps_tokens=True).tokens
    repeated = [tokens for tokens in expected for _ in range(wanted.num_completions)]
    return judge(found, repeated, lambda row: reference.margins(wanted.rows[row], repeated[row]))


def judge(
    found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], margins: Callable[[int], Sequence[float]]
) -> dict[str, Any]:
    """Sequences compared; how many part at a near-tie, or differ; the largest margin of those that differ.

    `margins(row)` is the lead of the reference's best logit at each token. A sequence counts once: behind the first
    different token the two no longer continue the same text.
    """
    num_near_ties, different = 0, []
    for row, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if tuple(ours) == tuple(theirs):
            continue
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        margin = float("inf") if place is None else margins(row)[place]  # one is the beginning of the other
        if margin < NEAR_TIE:
            num_near_ties += 1
        else:
            different.append(margin)
    return {
        "sequences": len(wanted),
        "near_ties": num_near_ties,
        "different": len(different),
        "largest_margin": max(different, default=0.0),
    }


def _start(name: str, model: ModelSettings) -> Process:
    contender = "Engine" if name in (OURS, NATIVE, UNDRAFTED) else "Transformers"
    settings = replace(model, weights="model") if name == NATIVE else replace(model, drafts=name != UNDRAFTED)
    return Process(f"benchmarks.contenders:{contender}", settings, num_threads=model.num_threads)


def _start_vllm(stack: ExitStack, loaded: LoadedModel, model: ModelSettings, say: Say) -> Entry:
    """vLLM in a process of the Python that has it, closed with `stack`. Raises InputError if none is named."""
    python = vllm_python()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
    save_final(loaded.model, loaded.tokenizer, folder, ModelCard(model.name, "none"))
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    settings = VLLMSettings(str(folder), dtype, min(1024, context_length(loaded.model) or 1024))
    start = Process(
        "benchmarks.vllm_engine:VLLM", settings, num_threads=model.num_threads, variables=VARIABLES, python=python
    )
    entry = Entry(stack.enter_context(start))
    say("vLLM is ready")
    return entry


def _start_llamacpp(stack: ExitStack, loaded: LoadedModel, model: ModelSettings) -> dict[str, Entry]:
    """llama.cpp with the weights in 16 and in 8 bits, closed with `stack`. Raises InputError if it is not there."""
    llamacpp_program()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    save_final(loaded.model, loaded.tokenizer, folder / "model", ModelCard(model.name, "none"))
    entries: dict[str, Entry] = {}
    for kind in TYPES:
        file = folder / f"{kind}.gguf"
        write_gguf(folder / "model", file, kind, About(model.name))
        settings = LlamaCppSettings(str(file), model.num_threads)
        start = Process("benchmarks.llamacpp_engine:LlamaCpp", settings, num_threads=model.num_threads)
        entries[f"llamacpp-{kind}"] = Entry(stack.enter_context(start))
    return entries


def _measured(
    work: Workload,
    model: ModelSettings,
    against: tuple[Sequence[str], Mapping[str, Entry]],
    greedy: Mapping[str, Any],
    options: Namespace,
    say: Say,
) -> dict[str, object]:
    """Figures of one workload."""
    others, calibration = dict[str, Entry](), dict[str, float]()
    with ExitStack() as stack:
        ours = Entry(stack.enter_context(_start(OURS, model)))
        products = Products(model)
        for name in (name for name in against[0] if name not in STARTED_ONCE):
            started = stack.enter_context(_start(name, model))
            others |= _calibrated(name, started, work, options, calibration, say)
        for entry in against[1].values():
            entry.draw(replace(work, sampling=replace(work.sampling, max_new_tokens=2)), options.seed)  # warm
        others |= against[1]
        ours.draw(work, options.seed)  # warm, as the others are by now
        entries = {OURS: ours, **others}
        prompts_only = replace(work, sampling=replace(work.sampling, max_new_tokens=1), is_exact_length=True)

        def one_round(entry: Entry) -> Callable[[int], Round]:
            return lambda index: Round(*(entry.draw(w, options.seed + 1 + index) for w in (work, prompts_only)))

        sides: dict[str, Callable[[int], Any]] = {label: one_round(entry) for label, entry in entries.items()}
        sides["products"] = lambda _: products.rates(needed_rows(work))
        rounds, load = in_turns(
            sides,
            options.rounds,
            say,
            lambda done: ", ".join(f"{label} {done[label][-1].tokens_per_s:.0f} tokens/s" for label in entries),
        )
        peaks_gb = dict.fromkeys(entries, 0.0)
        if not options.no_memory:
            peaks_gb = {label: entry.peak_gb(work, options.seed) for label, entry in entries.items()}
        difference = ours.process.call("logp_difference", work, options.seed)
    generating = [label for label, entry in others.items() if entry.setting and entry.setting.way == "generate"]
    fastest = max(generating or others, key=lambda label: statistics.median(_speeds(rounds[label])))
    ratios = {label: paired(_speeds(rounds[OURS]), _speeds(rounds[label])).facts("ratio") for label in others}
    fastest_products, torch_products = (
        _roofline(work, rounds[OURS], [rates[index] for rates in rounds["products"]]) for index in (0, 1)
    )
    return {
        **ratios[fastest],
        "against": fastest,
        **({"vllm_ratio": ratios["vllm"]} if "vllm" in others else {}),
        "ratios": ratios,
        **_figures(work, rounds[OURS]),
        "roofline_share": fastest_products["share"],
        "roofline": {**fastest_products, "torch_products": torch_products},
        **({"greedy_equal": greedy["different"] == 0, "greedy": greedy} if greedy else {}),
        "logp_diff_max": difference,
        "peak_rss_gb": peaks_gb[OURS],
        "contenders": {label: {**_figures(work, rounds[label]), "peak_rss_gb": peaks_gb[label]} for label in others},
        "calibration_tokens_per_s": calibration,
        "rounds": options.rounds,
        "load": load,
    }


def _calibrated(
    name: str, process: Process, work: Workload, options: Namespace, calibration: dict[str, float], say: Say
) -> dict[str, Entry]:
    """One entry for each attention, at the batch size at which it was fastest; every speed goes into `calibration`."""
    if name in (NATIVE, UNDRAFTED):
        process.call("draw", work, options.seed, setting=None)  # warm
        return {name: Entry(process)}
    entries: dict[str, Entry] = {}
    num_rows = len(work.rows)
    way = "generate" if name == "transformers" else "continuous"
    sizes = [num_rows]  # continuous batching takes all rows at once
    if way == "generate":  # a batch that holds all rows is the largest that differs
        sizes = [size for size in BATCH_SIZES if size < num_rows] + [min(num_rows, BATCH_SIZES[-1])]
        sizes = (options.batch_size or sizes) if work.name in NAMES else [num_rows]
    seed, brief = options.seed, replace(work, sampling=replace(work.sampling, max_new_tokens=2))
    Entry(process, Setting("sdpa", sizes[-1], way)).draw(brief, seed)  # the first call warms up
    for attention in ATTENTIONS:
        speeds: dict[int, float] = {}
        for size in sizes:
            drawn = Entry(process, Setting(attention, size, way)).draw(work, seed)
            speeds[size] = drawn.num_tokens / drawn.seconds
            calibration[f"{name}-{attention}@{size}"] = speeds[size]
        best = max(speeds, key=lambda size: speeds[size])
        entries[f"{name}-{attention}@{best}"] = Entry(process, Setting(attention, best, way))
        say(f"  {name}, {attention}: fastest at a batch of {best}, {speeds[best]:.0f} tokens/s")
    return entries


def _speeds(rounds: Sequence[Round]) -> list[float]:
    return [item.tokens_per_s for item in rounds]


def _figures(work: Workload, rounds: Sequence[Round]) -> dict[str, object]:
    """Speeds: all in all, of the prompts (each token counted once, however often it is computed), of the rest."""
    lengths = [length for item in rounds for length in item.whole.lengths]
    token_ms = statistics.median(1e3 * len(work.rows) / item.decode_tokens_per_s for item in rounds)
    return {
        "tokens_per_s": statistics.median(_speeds(rounds)),
        "prefill_tokens_per_s": statistics.median(work.num_prompt_tokens / item.prefill.seconds for item in rounds),
        "decode_tokens_per_s": statistics.median(item.decode_tokens_per_s for item in rounds),
        "seconds": statistics.median(item.whole.seconds for item in rounds),
        "mean_length": statistics.fmean(lengths),
        "p95_length": percentile_95(lengths),
        **({} if work.name in NAMES else {"token_ms": token_ms}),
    }


def percentile_95(values: Sequence[int]) -> int:
    """The smallest value that 95 % of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1]


def _roofline(work: Workload, rounds: Sequence[Round], rates: Sequence[Rates]) -> dict[str, Any]:
    """Time of the products alone, and our share of it, with the rates of each round."""
    ideals_s = [ideal_s(work, item.whole.lengths, rate) for item, rate in zip(rounds, rates, strict=True)]
    shares = [seconds / item.whole.seconds for seconds, item in zip(ideals_s, rounds, strict=True)]
    return {
        "share": Spread.of(shares).median,
        "ideal_s": Spread.of(ideals_s).median,
        "gflops": {str(count): statistics.median(rate.gflops(count) for rate in rates) for count in SHOWN_ROWS},
    }


def show(facts: Mapping[str, Any]) -> None:
    """Print a table for each workload."""
    keys = ("tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")
    for name, figures in facts["workloads"].items():
        rows: list[Sequence[str]] = []
        for label, one in {OURS: figures, **figures["contenders"]}.items():
            speeds = [*(f"{one[key]:.0f}" for key in keys), f"{one['token_ms']:.0f}" if "token_ms" in one else ""]
            lengths = f"{one['mean_length']:.0f}/{one['p95_length']}"
            ratio = "" if label == OURS else spread_text(figures["ratios"][label])
            rows.append((label, *speeds, lengths, f"{one['peak_rss_gb']:.2f}", ratio))
        print()
        print_table((name, "tok/s", "prefill", "decode", "ms", "length", "GB", "ratio (min-max)"), rows)
        print(
            "tok/s: new tokens; prefill: prompt tokens, each counted once; ms: from a token of a sequence to its next; "
            "length: mean/p95; ratio: of tunesmith's tok/s"
        )
        if "greedy" in figures:
            print(
                "greedy tokens in float32: {different} of {sequences} sequences differ, "
                "{near_ties} part at a near-tie".format(**figures["greedy"])
            )
        share = f"{figures['roofline_share']:.0%}"
        print(f"roofline: {share} of what the matrix products alone would reach{load_warning(figures)}")
    print(f"\nlargest difference to the trainer's log-probs: {facts['logp_diff_max']:g} nats")


main = benchmark(
    measure,
    show,
    *("model", "dtype", "workload", "threads", "rounds", "seed", "quick"),
    against={"default": "transformers", "metavar": "A,B", "help": f"of {', '.join(BASELINES)}"},
    workload={"help": "plain, seed, shared, or batch1 to batch256; repeatable. The first three if left out"},
    batch_size={"type": int, "action": "append", "metavar": "N", "help": "rows to try of generate; repeatable"},
    no_memory={"action": "store_true", "help": "leave out the peak of memory, which is one more draw of each"},
    backend={"choices": ("native", "transformers"), "default": "native", "help": "engine of our side"},
    weights={"choices": get_args(Weights), "default": "model", "help": "products of our side"},
    slots={"type": int, "metavar": "N", "help": "sequences that our engine decodes at a time"},
)


if __name__ == "__main__":
    run("rollout")
