"""Flags and reports of `python -m benchmarks.rollout`, `step`, `update`, `kernels` and `gpu`."""

import json as json_text
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from tunesmith.cli.options import UseAppendAction, flag, parse
from tunesmith.cli.output import Output, as_plain, reporting, visible, wants_progress
from tunesmith.core import log
from tunesmith.core.errors import InputError, TunesmithError

_MODEL = flag("Hub id, folder, GGUF file, smollm2, tiny:<family>.", metavar="ID", shows_default=True)
_THREADS = flag("Threads of each process; all cores if left out.", metavar="N")
_ROUNDS = flag("Rounds in which every contender works once.", metavar="N", shows_default=True)
_QUICK = flag("A smoke run of few tokens; its figures say nothing.")
_OUT = flag("Write the figures to a file, for example benchmarks/rollout.json.", metavar="FILE.json")
_JSON = flag("Print one JSON object at the end.")
Backend = Literal["native", "transformers"]


@dataclass(frozen=True, kw_only=True)
class RolloutFlags:
    """Our rollout engine against what transformers offers, each in a process of its own, in alternation.

    Greedy tokens are compared first. Leave the machine alone meanwhile; with smollm2 on two cores it takes about an
    hour.
    """

    model: Annotated[str, _MODEL] = "smollm2"
    against: Annotated[str, flag("transformers, transformers-cb, or both.", metavar="A,B", shows_default=True)] = (
        "transformers"
    )
    workload: Annotated[tuple[str, ...], UseAppendAction, flag("plain, seed or shared; repeatable.", metavar="W")] = ()
    backend: Annotated[Backend, flag("Engine of our side.", shows_default=True)] = "native"
    slots: Annotated[int | None, flag("Sequences that our engine decodes at a time.", metavar="N")] = None
    threads: Annotated[int | None, _THREADS] = None
    rounds: Annotated[int, _ROUNDS] = 5
    seed: Annotated[int, flag("Seed of what is drawn.", metavar="N", shows_default=True)] = 0
    quick: Annotated[bool, _QUICK] = False
    out: Annotated[Path | None, _OUT] = None
    json: Annotated[bool, _JSON] = False


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """One whole GRPO step against one of TRL's: 4 prompts x 8 completions x 64 tokens, with a KL penalty.

    TRL works with bfloat16 weights, recomputes nothing and takes its fastest micro-batch. Leave the machine alone
    meanwhile; with smollm2 on two cores it takes about a quarter of an hour.
    """

    model: Annotated[str, _MODEL] = "smollm2"
    against: Annotated[Literal["trl"], flag("Whose step.", shows_default=True)] = "trl"
    backend: Annotated[Backend | None, flag("Engine of our side; the recipe's default if left out.")] = None
    micro_batch_size: Annotated[int | None, flag("Of our side; the recipe's default if left out.", metavar="N")] = None
    threads: Annotated[int | None, _THREADS] = None
    rounds: Annotated[int, _ROUNDS] = 5
    seed: Annotated[int, flag("Seed of what is drawn.", metavar="N", shows_default=True)] = 0
    quick: Annotated[bool, _QUICK] = False
    out: Annotated[Path | None, _OUT] = None
    json: Annotated[bool, _JSON] = False


@dataclass(frozen=True, kw_only=True)
class UpdateFlags:
    """The update of one GRPO step against TRL's, from the same completions: time, and memory above the resting state.

    ragged: 4 short prompts x 8 completions of 8 to 64 tokens; shared: 8 completions of a prompt of 256 tokens. Leave
    the machine alone meanwhile; with smollm2 on two cores it takes about a quarter of an hour.
    """

    model: Annotated[str, _MODEL] = "smollm2"
    against: Annotated[Literal["trl"], flag("Whose update.", shows_default=True)] = "trl"
    workload: Annotated[tuple[str, ...], UseAppendAction, flag("ragged or shared; repeatable.", metavar="W")] = ()
    micro_batch_size: Annotated[int | None, flag("Of our side; the recipe's default if left out.", metavar="N")] = None
    threads: Annotated[int | None, _THREADS] = None
    rounds: Annotated[int, _ROUNDS] = 5
    seed: Annotated[int, flag("Seed of what is learnt from.", metavar="N", shows_default=True)] = 0
    quick: Annotated[bool, _QUICK] = False
    out: Annotated[Path | None, _OUT] = None
    json: Annotated[bool, _JSON] = False


@dataclass(frozen=True, kw_only=True)
class KernelsFlags:
    """Each kernel against the plain way in torch, alternating, after its result is compared with the definition's.

    `copy` is the share of the bandwidth of a copy: the time to copy the bytes that the operation must move over the
    time that it takes. Leave the machine alone meanwhile; it takes some minutes.
    """

    op: Annotated[
        tuple[str, ...], UseAppendAction, flag("One operation; repeatable. All if left out.", metavar="OP")
    ] = ()
    device: Annotated[Literal["cpu", "cuda"], flag("Where tensors lie.", shows_default=True)] = "cpu"
    threads: Annotated[int | None, _THREADS] = None
    rounds: Annotated[int, _ROUNDS] = 7
    seed: Annotated[int, flag("Seed of what is drawn.", metavar="N", shows_default=True)] = 0
    quick: Annotated[bool, _QUICK] = False
    out: Annotated[Path | None, _OUT] = None
    json: Annotated[bool, _JSON] = False


@dataclass(frozen=True, kw_only=True)
class GpuFlags:
    """The whole table of a GPU: kernels, engine and update, beside torch, torch.compile and Liger, and their ceilings.

    Rows are written to --out one by one, and a second start goes on where the first ended. A row that fails is listed,
    with its error in the file, and tried again by the next start. Needs the GPU for itself.
    """

    out: Annotated[Path, flag("Folder for gpu.json and a file for each row.", metavar="DIR")]
    row: Annotated[tuple[str, ...], UseAppendAction, flag("One row; repeatable. All if left out.", metavar="ROW")] = ()
    device: Annotated[Literal["cuda", "cpu"], flag("cpu only with --quick.", shows_default=True)] = "cuda"
    minutes: Annotated[float, flag("No row begins that would end later.", metavar="N", shows_default=True)] = 8.0
    seed: Annotated[int, flag("Seed of what is drawn.", metavar="N", shows_default=True)] = 0
    again: Annotated[bool, flag("Measure rows that are finished once more.")] = False
    quick: Annotated[bool, flag("A smoke run on tiny sizes; its figures say nothing.")] = False
    json: Annotated[bool, _JSON] = False


def rollout(words: Sequence[str]) -> None:
    """Run `python -m benchmarks.rollout`."""
    flags = parse(RolloutFlags, words, "bench rollout")
    _check_out(flags.out)
    from benchmarks.rollout import RolloutBench, run_rollout_bench
    from benchmarks.workloads import NAMES

    options = RolloutBench(
        model=flags.model,
        against=tuple(name.strip() for name in flags.against.split(",") if name.strip()),
        workloads=flags.workload or NAMES,
        backend=flags.backend,
        num_slots=flags.slots,
        num_threads=flags.threads,
        num_rounds=flags.rounds,
        seed=flags.seed,
        quick=flags.quick,
    )
    with reporting(as_json=flags.json) as output:
        facts = run_rollout_bench(options, _say)
        _write(flags.out, facts, output)
        for name, figures in _mappings(facts["workloads"]).items():
            _show_workload(name, figures, output)
        output.say(f"\nlargest difference to the trainer's log-probs: {facts['logp_diff_max']:g} nats")
        output.finish(facts)


def step(words: Sequence[str]) -> None:
    """Run `python -m benchmarks.step`."""
    flags = parse(StepFlags, words, "bench step")
    _check_out(flags.out)
    from benchmarks.step import StepBench, run_step_bench

    options = StepBench(
        model=flags.model,
        against=flags.against,
        backend=flags.backend,
        micro_batch_size=flags.micro_batch_size,
        num_threads=flags.threads,
        num_rounds=flags.rounds,
        seed=flags.seed,
        quick=flags.quick,
    )
    with reporting(as_json=flags.json) as output:
        facts = run_step_bench(options, _say)
        _write(flags.out, facts, output)
        _show_step(facts, output)
        output.finish(facts)


def update(words: Sequence[str]) -> None:
    """Run `python -m benchmarks.update`."""
    flags = parse(UpdateFlags, words, "bench update")
    _check_out(flags.out)
    from benchmarks.update import WORKLOADS, UpdateBench, run_update_bench

    options = UpdateBench(
        model=flags.model,
        against=flags.against,
        workloads=flags.workload or tuple(WORKLOADS),
        micro_batch_size=flags.micro_batch_size,
        num_threads=flags.threads,
        num_rounds=flags.rounds,
        seed=flags.seed,
        quick=flags.quick,
    )
    with reporting(as_json=flags.json) as output:
        facts = run_update_bench(options, _say)
        _write(flags.out, facts, output)
        for name, figures in _mappings(facts["workloads"]).items():
            _show_update(name, figures, output)
        output.finish(facts)


def kernels(words: Sequence[str]) -> None:
    """Run `python -m benchmarks.kernels`."""
    flags = parse(KernelsFlags, words, "bench kernels")
    _check_out(flags.out)
    from benchmarks.kernels import CASES, KernelBench, run_kernel_bench

    options = KernelBench(
        ops=flags.op or tuple(CASES),
        num_threads=flags.threads,
        num_rounds=flags.rounds,
        seed=flags.seed,
        device=flags.device,
        quick=flags.quick,
    )
    with reporting(as_json=flags.json) as output:
        facts = run_kernel_bench(options, _say)
        _write(flags.out, facts, output)
        _show_kernels(_mappings(facts["kernels"]), output)
        output.finish(facts)


def gpu(words: Sequence[str]) -> None:
    """Run `python -m benchmarks.gpu`."""
    flags = parse(GpuFlags, words, "bench gpu")
    from benchmarks.cli_gpu import show
    from benchmarks.gpu import ROWS, GpuBench, run_gpu_bench

    options = GpuBench(
        out=flags.out,
        rows=flags.row or tuple(ROWS),
        device=flags.device,
        minutes=flags.minutes,
        seed=flags.seed,
        again=flags.again,
        quick=flags.quick,
    )
    with reporting(as_json=flags.json) as output:
        facts = run_gpu_bench(options, _say)
        show(facts, output)
        output.say(f"written to {flags.out / 'gpu.json'}")
        output.finish(facts)


def _say(line: str) -> None:
    if wants_progress():
        sys.stderr.write(line + "\n")


def _check_out(out: Path | None) -> None:
    """An hour of measuring must not end at a folder that is missing."""
    if out and (out.is_dir() or not out.parent.is_dir()):
        raise InputError(f"{out} cannot be written: give a file in a folder that exists to --out")


def _write(out: Path | None, facts: Mapping[str, object], output: Output) -> None:
    if out is None:
        return
    try:
        out.write_text(json_text.dumps(as_plain(facts), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}") from error
    output.say(f"written to {out}")


def _show_workload(name: str, figures: Mapping[str, Any], output: Output) -> None:
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=None, pad_edge=False)
    for column in ("", "tok/s", "prefill", "decode", "length", "GB", "ratio", "min-max"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    table.add_row("tunesmith", *_speeds(figures), "", "")
    ratios = _mappings(figures["ratios"])
    for label, contender in _mappings(figures["contenders"]).items():
        ratio = ratios[label]
        spread = f"{ratio['ratio_min']:.2f}-{ratio['ratio_max']:.2f}"
        table.add_row(label, *_speeds(contender), f"{ratio['ratio_median']:.2f}x", spread)
    output.say("")
    output.say(table)
    greedy = figures["greedy"]
    output.say(
        "tok/s: new tokens; prefill: prompt tokens, each counted once; length: mean/p95; ratio: of tunesmith's tok/s\n"
        f"greedy tokens in float32: {greedy['different']} of {greedy['sequences']} sequences differ, "
        f"{greedy['near_ties']} part at a near-tie\n"
        f"roofline: {figures['roofline_share']:.0%} of what the matrix products alone would reach"
        f"{_load(figures)}"
    )


def _speeds(figures: Mapping[str, Any]) -> tuple[str, ...]:
    speeds = (figures[name] for name in ("tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s"))
    lengths = f"{figures['mean_length']:.0f}/{figures['p95_length']}"
    return (*(f"{speed:.0f}" for speed in speeds), lengths, f"{figures['peak_rss_gb']:.2f}")


def _show_step(facts: Mapping[str, Any], output: Output) -> None:
    trl = facts["trl"]
    output.say(
        f"step      {facts['step_s']:.2f} s against TRL's {trl['step_s']:.2f} s: {facts['ratio_median']:.2f}x "
        f"({facts['ratio_min']:.2f}-{facts['ratio_max']:.2f})\n"
        f"memory    {facts['peak_rss_gb']:.2f} GB, {facts['peak_rss_ratio']:.2f} of TRL's "
        f"{trl['default_precision']['peak_rss_gb']:.2f} GB in its default precision "
        f"({trl['peak_rss_gb']:.2f} GB with {trl['dtype']} weights)\n"
        f"TRL       {trl['attention']} attention, micro-batch of {trl['micro_batch_size']}{_load(facts)}"
    )
    for name, seconds in facts["stages"].items():
        output.say(f"  {name:<24}{seconds:8.3f} s")


def _show_update(name: str, figures: Mapping[str, Any], output: Output) -> None:
    trl = figures["trl"]
    output.say(
        f"{name:<10}{figures['update_s']:.2f} s against TRL's {trl['update_s']:.2f} s: {figures['ratio_median']:.2f}x "
        f"({figures['ratio_min']:.2f}-{figures['ratio_max']:.2f})\n"
        f"memory    {figures['memory_gb']:.2f} GB above rest, {figures['memory_ratio']:.2f} of TRL's "
        f"{trl['default_precision']['memory_gb']:.2f} GB in its default precision "
        f"({trl['memory_gb']:.2f} GB with {trl['dtype']} weights)\n"
        f"TRL       {trl['attention']} attention, micro-batch of {trl['micro_batch_size']}{_load(figures)}"
    )
    for stage, seconds in figures["stages"].items():
        output.say(f"  {stage:<24}{seconds:8.3f} s")


def _show_kernels(kernels: Mapping[str, Mapping[str, Any]], output: Output) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("", "ratio", "min-max", "ms", "copy", "memory", "error"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for op, figures in kernels.items():
        memory = figures.get("memory_ratio")
        table.add_row(
            op,
            f"{figures['ratio_median']:.2f}x",
            f"{figures['ratio_min']:.2f}-{figures['ratio_max']:.2f}",
            f"{figures['ours_ms']:.3g}",
            f"{figures['copy_share']:.0%}",
            "" if memory is None else f"{memory:.2f}",
            f"{figures['max_error']:.1e}",
        )
    output.say(table)
    for op, figures in kernels.items():
        output.say(f"{op} ({figures['picked']}): {figures['size']}; against {figures['against']}{_load(figures)}")


def _load(figures: Mapping[str, Any]) -> str:
    busy = figures["load"]["other_busy_cores"]["cores_max"]
    return "" if busy <= 0.25 else f"\nnot to be trusted: other programs kept up to {busy:.1f} cores busy"


def _mappings(value: object) -> dict[str, dict[str, Any]]:
    return cast("dict[str, dict[str, Any]]", value)


COMMANDS = {"rollout": rollout, "step": step, "update": update, "kernels": kernels, "gpu": gpu}


def main(words: Sequence[str]) -> int:
    """The exit code of a benchmark, named by the first word: 0, 2 for bad input, 1 for other errors."""
    log.configure(verbose=False, quiet="--quiet" in words)
    try:
        COMMANDS[words[0]]([word for word in words[1:] if word != "--quiet"])
        return 0
    except TunesmithError as error:
        sys.stderr.write(f"error: {visible(str(error))}\n")
        return error.exit_code
    except SystemExit as exit_:  # help was printed
        return exit_.code if isinstance(exit_.code, int) else 0
