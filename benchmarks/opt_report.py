"""Profiles of a decoding step and of an update, before and after our kernels: `docs/dev/opt_report.md` and its picture.

    python -m benchmarks.opt_report --out docs/dev

measures on this machine, a GPU if torch sees one, and writes `<out>/opt_report.md` (the prose of docs/dev/opt_report.md
with new tables), `<out>/images/timeline.svg` and `<out>/opt_report.json`; with `--out docs/dev` the JSON goes to
benchmarks/. Before: every kernel is torch's (`Kernels("torch")`); after: what `auto` picks. The model has the shape of
SmolLM2-135M and random weights. `--quick` is a smoke run on a tiny one. On a GPU the bars are what the host does.

Shape legend: B sequences, T completion tokens.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import record_function
from transformers import AutoModelForCausalLM, LlamaConfig
from tunesmith.trainers.objective import Weights, objective_of

from benchmarks.machine import machine_facts
from benchmarks.measure import ROOT
from benchmarks.opt_picture import Pair, picture, table
from benchmarks.opt_profile import PART_NAMES, STEP, Profile, RecordedKernels, profiled, profiled_between
from tunesmith.batch.pack import PolicyBatch, Sequences
from tunesmith.batch.rollout import SamplingParams
from tunesmith.config.algorithm_sections import GRPOSection
from tunesmith.config.rollout_sections import ImportanceSection
from tunesmith.config.sections import OptimizerSection
from tunesmith.core.system import keep_freed_memory
from tunesmith.kernels.native import Choice
from tunesmith.models.language_model import LanguageModel, language_model
from tunesmith.models.logprob import length_mask, token_logps
from tunesmith.models.optimizer import MasterAdamW
from tunesmith.models.tiny import byte_tokenizer
from tunesmith.rollout.factory import open_engine
from tunesmith.schema.records import Prompt

_DRAW = "tunesmith.rollout.sampler:Sampler.draw"
"""A decoding step lasts from one draw to the next."""

_SHORT, _LONG, _PROFILED = 2, 8, 5
"""New tokens: the time of a step is what the longer call takes longer. The profile is of the step behind draw 3."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model; sequences and tokens of their prompts; tokens of a completion that is learnt; timed repeats."""

    config: LlamaConfig
    num_sequences: int
    prompt_tokens: int
    learnt_tokens: int
    num_repeats: int


def sizes_of(quick: bool) -> Sizes:
    """SmolLM2-135M's shape; or a tiny one."""
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True}
    if quick:
        config = LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **special,
        )
        return Sizes(config, 4, 8, 8, 1)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        **special,
    )
    return Sizes(config, 32, 32, 64, 3)


class Work:
    """A random model with one choice of kernels, an engine that draws from it, and an optimizer that changes it."""

    def __init__(self, sizes: Sizes, choice: Choice, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(sizes.config, dtype=torch.bfloat16).eval().to(device)
        module.config.use_cache = False
        self.model: LanguageModel = language_model(module, RecordedKernels(choice))
        self.optimizer = MasterAdamW(module, OptimizerSection(), total_steps=10**6, kernels=self.model.kernels)
        self._engine = open_engine(self.model, byte_tokenizer())
        draw = torch.Generator().manual_seed(0)
        ids_BS = torch.randint(3, 259, (sizes.num_sequences, sizes.prompt_tokens), generator=draw)
        self._prompts = [Prompt(str(row), "", token_ids=tuple(ids)) for row, ids in enumerate(ids_BS.tolist())]

    def generate(self, new_tokens: int) -> None:
        """Draw `new_tokens` for each prompt."""
        with record_function(STEP):
            self._engine.generate(self._prompts, 1, SamplingParams(new_tokens, seed=0))

    def update(self, batch: PolicyBatch) -> None:
        """One update of GRPO, as `trainers.grpo` takes it: forward pass, loss, backward pass, optimizer."""
        sequences = batch.sequences
        num_tokens = float(sequences.num_tokens)
        weights = Weights(num_tokens, num_tokens, kl_coef=0.0)
        with record_function(STEP):
            objective = objective_of(GRPOSection(), ImportanceSection(), batch, weights, is_single=True)
            new = token_logps(
                self.model,
                sequences.ids_BS,
                sequences.lengths_B,
                prompt_lengths_B=sequences.prompt_lengths_B,
            )
            loss = objective.of(new.logp_BT, new.entropy_BT).loss
            self.optimizer.scaled(loss).backward()
            self.optimizer.step(loss=loss.item())

    def batch(self) -> PolicyBatch:
        """Random completions of half to all of `learnt_tokens`, with random advantages."""
        sizes, draw = self._sizes, torch.Generator().manual_seed(1)
        shape = (sizes.num_sequences, sizes.prompt_tokens + sizes.learnt_tokens)
        ids_BS = torch.randint(sizes.config.vocab_size, shape, generator=draw)
        length_B = torch.randint(
            sizes.learnt_tokens // 2, sizes.learnt_tokens + 1, (sizes.num_sequences,), generator=draw
        )
        length_B[0] = sizes.learnt_tokens
        mask_BT = length_mask(length_B, sizes.learnt_tokens)
        advantage_BT = torch.randn(mask_BT.shape, generator=draw) * mask_BT
        logp_BT = torch.full(mask_BT.shape, -10.0) * mask_BT
        prompt_B = torch.full((sizes.num_sequences,), sizes.prompt_tokens)
        tensors = (ids_BS, length_B + prompt_B, prompt_B, mask_BT, logp_BT, logp_BT, advantage_BT)
        ids_BS, length_B, prompt_B, mask_BT, logp_BT, _, advantage_BT = (one.to(self._device) for one in tensors)
        sequences = Sequences(ids_BS, length_B, prompt_B, mask_BT, logp_BT, logp_BT)
        return PolicyBatch(sequences, logp_BT, logp_BT, advantage_BT)


def measured(sizes: Sizes, device: torch.device) -> list[Pair]:
    """The decoding step and the update, both ways; those without the profiler in turns."""
    works = [Work(sizes, choice, device) for choice in ("torch", "auto")]
    for work in works:
        work.generate(_SHORT)
    steps = [[] for _ in works]
    for _ in range(sizes.num_repeats):
        for seconds, work in zip(steps, works, strict=True):
            longer = _seconds(lambda work=work: work.generate(_LONG)) - _seconds(
                lambda work=work: work.generate(_SHORT)
            )
            seconds.append(longer / (_LONG - _SHORT))
    drawn = [profiled_between(lambda work=work: work.generate(_PROFILED), _DRAW, first=3) for work in works]
    batches = [work.batch() for work in works]
    updates = [[] for _ in works]
    for _ in range(1 + sizes.num_repeats):  # the first one is slower, and left out
        for seconds, work, batch in zip(updates, works, batches, strict=True):
            seconds.append(_seconds(lambda work=work, batch=batch: work.update(batch)))
    learnt = [
        profiled(lambda work=work, batch=batch: work.update(batch)) for work, batch in zip(works, batches, strict=True)
    ]
    num_tokens = batches[0].sequences.num_tokens
    which = "One decoding step"
    if None in drawn:  # steps that the host does not see, as those of a CUDA graph, are profiled together
        drawn = [profiled(lambda work=work: work.generate(_PROFILED)) for work in works]
        which = f"{_PROFILED} decoding steps"
    return [
        _pair(f"{which} of {sizes.num_sequences} sequences", [one for one in drawn if one], steps),
        _pair(f"One update on {num_tokens:,} completion tokens", learnt, [seconds[1:] for seconds in updates]),
    ]


def _pair(title: str, profiles: Sequence[Profile], seconds: Sequence[Sequence[float]]) -> Pair:
    before_s, after_s = (statistics.median(one) for one in seconds)
    return Pair(title, profiles[0], profiles[1], before_s, after_s)


def _seconds(work: Callable[[], object]) -> float:
    _wait()
    start_s = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start_s


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def with_tables(prose: str, parts: dict[str, str]) -> str:
    """The prose with what stands between the marks of each part replaced.

    Raises:
        ValueError: a mark is missing.
    """
    for name, text in parts.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(prose):
            raise ValueError(f"the report has no marks {begin} and {end}")
        prose = pattern.sub(lambda _, text=text, begin=begin, end=end: f"{begin}\n\n{text}\n\n{end}", prose)
    return prose


def machine_line(facts: dict[str, object]) -> str:
    """On what the figures were taken."""
    versions = facts["packages"]
    assert isinstance(versions, dict)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{facts['num_threads']} thread(s)"
    command = "`python -m benchmarks.opt_report --out docs/dev`"
    return f"Measured on {facts['device']}, {where}, torch {versions['torch']}, by {command}."


def summary(pairs: Sequence[Pair]) -> str:
    """What changed, in two sentences."""
    return "\n".join(
        f"- {pair.title}: {pair.before.num_calls():,} operator calls before, {pair.after.num_calls():,} after; "
        f"{1e3 * pair.seconds_before:,.1f} ms before, {1e3 * pair.seconds_after:,.1f} ms after, "
        f"{pair.seconds_before / pair.seconds_after:.1f} times as fast."
        for pair in pairs
    )


def figures(pairs: Sequence[Pair], facts: dict[str, object]) -> dict[str, object]:
    """Everything that the tables show, for JSON."""

    def side(profile: Profile, seconds: float) -> dict[str, object]:
        parts = {name: {"calls": profile.num_calls(name), "ms": profile.milliseconds(name)} for name in PART_NAMES}
        return {
            "calls": profile.num_calls(),
            "launches": profile.num_launches,
            "profile_ms": profile.wall_us / 1e3,
            "between_calls_ms": profile.between_ms,
            "seconds": seconds,
            "parts": parts,
        }

    steps = {
        name: {"before": side(pair.before, pair.seconds_before), "after": side(pair.after, pair.seconds_after)}
        for name, pair in zip(("decode", "update"), pairs, strict=True)
    }
    return {"steps": steps, "machine": facts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; writes the report, its picture and its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dev")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = measured(sizes_of(options.quick), device)
    facts = machine_facts()
    out: Path = options.out.resolve()
    (out / "images").mkdir(parents=True, exist_ok=True)
    (out / "images" / "timeline.svg").write_text(picture(pairs), encoding="utf-8")
    prose = (ROOT / "docs" / "dev" / "opt_report.md").read_text(encoding="utf-8")
    parts = {
        "machine": machine_line(facts),
        "summary": summary(pairs),
        "decode": table(pairs[0]),
        "update": table(pairs[1]),
    }
    (out / "opt_report.md").write_text(with_tables(prose, parts), encoding="utf-8")
    json_folder = ROOT / "benchmarks" if out == ROOT / "docs" / "dev" else out
    (json_folder / "opt_report.json").write_text(json.dumps(figures(pairs, facts), indent=1) + "\n", encoding="utf-8")
    print(parts["machine"], parts["summary"], parts["decode"], parts["update"], sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
