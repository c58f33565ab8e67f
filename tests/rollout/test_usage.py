"""Figures of a rollout, counted by hand. Every step takes one second of a clock of the test's own."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tunesmith.base.core.trace import span, trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout import scheduler as scheduler_module
from tunesmith.engine.rollout.device.engine import DeviceEngine
from tunesmith.engine.rollout.kv_cache import KVCache
from tunesmith.engine.rollout.native_engine import NativeEngine
from tunesmith.engine.rollout.scheduler import PromptRequest, Run, Scheduler
from tunesmith.engine.rollout.sequence import Limits
from tunesmith.engine.rollout.transformers_backend import TransformersEngine
from tunesmith.engine.rollout.usage import Usage

Draw = Callable[..., Usage]
FIGURES = ("decode_steps", "prefill_tokens", "shared_tokens", "slots_used", "tail_s", "starved_s")


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """A function: the usage after completions of the given lengths, of prompts of `prompt_tokens` tokens each."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def drawn(
        lengths: tuple[int, ...], *, num_slots: int, prompt_tokens: int = 3, num_blocks: int = 100, max_steps: int = 1
    ) -> Usage:
        cache = KVCache(num_blocks, max_tokens=64, max_tables=2 * num_slots)
        scheduler = Scheduler(cache, lambda ids: "", num_slots=num_slots)
        scheduler.add(
            PromptRequest(index, (index,) * prompt_tokens, 1, Limits(length)) for index, length in enumerate(lengths)
        )
        while (plan := scheduler.plan(max_steps)) is not None:
            runs: list[Run] = []
            for place, sequence in enumerate(plan.drawn):
                num_drawn = min(sequence.num_left, plan.num_steps) if place < len(plan.sequences) else 1
                runs.append(([9] * num_drawn, [-1.0] * num_drawn, [-1.0] * num_drawn, []))
            clock.now_s += 1.0
            scheduler.accept(plan, runs)
            clock.now_s += 100.0  # between two steps, which is not decoding
        assert sorted(len(one.token_ids) for one in scheduler.finished) == sorted(lengths)
        return scheduler.usage

    return drawn


def test_two_slots_and_three_completions(draw: Draw) -> None:
    """The first tokens come from the prompts; then 2 2 2 1 2 slots are in use: in the fourth step the third prompt is
    computed beside the first completion.
    """
    usage = draw((6, 4, 2), num_slots=2)
    assert (usage.num_steps, usage.decode_s, usage.slot_s) == (5, 5.0, 9.0)
    assert usage.prefill_tokens == 9
    assert (usage.tail_s, usage.starved_s) == (0.0, 0.0)


def test_a_single_long_completion_is_the_tail(draw: Draw) -> None:
    usage = draw((7, *[3] * 7), num_slots=8)
    assert (usage.num_steps, usage.slot_s) == (6, 2 * 8 + 4 * 1)
    assert usage.tail_s == 4.0
    assert draw((7, 3, 3, 3), num_slots=4).tail_s == 0.0, "one of four slots is a quarter, and not fewer"


def test_while_others_wait_there_is_no_tail(draw: Draw) -> None:
    """A cache for a single sequence: eight slots, of which one is used, and the last completion waits for nothing."""
    usage = draw((20,) * 3, num_slots=8, prompt_tokens=20, num_blocks=3)
    assert (usage.num_steps, usage.slot_s) == (3 * 19, 3 * 19)
    assert usage.starved_s == 2 * 19
    assert usage.tail_s == 19


def test_a_device_that_draws_several_tokens_counts_those_it_drew(draw: Draw) -> None:
    """Two visits of four steps: completions of 9 and 3 tokens draw 4 + 2, then 4 + 0."""
    usage = draw((9, 3), num_slots=2, max_steps=4)
    assert usage.num_steps == 8
    assert (usage.decode_s, usage.slot_s) == (2.0, 6 / 4 + 4 / 4)


@pytest.mark.parametrize("backend", ["native", "device", "transformers"])
def test_every_engine_adds_its_figures_to_the_stage(backend: str) -> None:
    """Two prompts of 33 tokens, of which 32 are common, with two completions of five tokens each."""
    loaded = tiny_model("llama")
    model = language_model(loaded.model, Kernels())
    engine = {
        "native": lambda: NativeEngine(model, loaded.tokenizer),
        "device": lambda: DeviceEngine(model, loaded.tokenizer),
        "transformers": lambda: TransformersEngine(loaded.model, loaded.tokenizer),
    }[backend]()
    prompts = [Prompt(str(last), "", token_ids=(*range(10, 42), last)) for last in (50, 51)]
    with trace() as record, span("rollout"):
        engine.generate(prompts, 2, SamplingParams(max_new_tokens=5, min_new_tokens=5, seed=0))
    found = {name: record.metrics().get(f"rollout/{name}") for name in FIGURES}
    computed = 2 * 66 if backend == "transformers" else 33 + 1
    expected = {"decode_steps": 4, "prefill_tokens": computed, "shared_tokens": 132 - computed, "tail_s": 0.0}
    expected |= {"slots_used": pytest.approx(1.0), "starved_s": None if backend == "transformers" else 0.0}
    assert found == expected


def test_batches_of_transformers_wait_for_their_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four completions three are drawn first, then one: 4 + 4 steps with three slots and with one in use."""
    loaded = tiny_model("llama")
    ticks = iter(range(1000))
    monkeypatch.setattr(
        "tunesmith.engine.rollout.transformers_backend.time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    )
    engine = TransformersEngine(loaded.model, loaded.tokenizer, batch_size=3)
    with trace() as record, span("rollout"):
        engine.generate([Prompt("a", "The film")], 4, SamplingParams(max_new_tokens=5, min_new_tokens=5, seed=0))
    metrics = record.metrics()
    assert metrics["rollout/decode_steps"] == 8
    assert metrics["rollout/slots_used"] == (4 * 3 + 4 * 1) / (8 * 3)


def test_without_decoding_there_is_no_share_of_slots() -> None:
    loaded = tiny_model("llama")
    engine = NativeEngine(language_model(loaded.model, Kernels()), loaded.tokenizer)
    with trace() as record, span("rollout"):
        engine.generate([Prompt("a", "The film")], 2, SamplingParams(max_new_tokens=1, seed=0))
    assert record.metrics()["rollout/decode_steps"] == 0
    assert "rollout/slots_used" not in record.metrics()
