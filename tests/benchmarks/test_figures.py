"""Figures of the benchmarks: ratios, percentiles, equality, roofline, workloads; no process is started."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import common
from benchmarks.common import Spread, in_turns, paired
from benchmarks.rollout import greedy_workload, judge, percentile_95
from benchmarks.roofline import Rates, ideal_s, linear_weights, needed_rows
from benchmarks.step import OurStep, check_same_work
from benchmarks.trl import Taken, token_sum
from benchmarks.workloads import NAMES, instructions, workload
from tunesmith.base.core.errors import InputError
from tunesmith.engine.models.tiny import byte_tokenizer, tiny_model


def test_a_ratio_is_of_neighbours_in_time_not_of_medians():
    assert paired([10.0, 20.0, 60.0], [5.0, 20.0, 20.0]) == Spread(median=2.0, least=1.0, most=3.0)


def test_sides_work_in_turns_and_who_begins_changes():
    calls: list[str] = []
    sides = {name: lambda index, name=name: calls.append(f"{name}{index}") or index for name in "ab"}
    said: list[str] = []
    answers, load = in_turns(sides, 3, said.append, lambda done: str(done["b"][-1]))
    assert calls == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert answers == {"a": [0, 1, 2], "b": [0, 1, 2]} and set(load) == {"load_average", "other_busy_cores"}
    assert [line for line in said if "round" in line and "busy" not in line][-1] == "  round 3 of 3: 2"


def test_short_work_is_repeated_and_its_first_calls_are_left_out(monkeypatch: pytest.MonkeyPatch):
    now_s, calls = [0.0], [0]

    def work() -> None:
        calls[0] += 1
        now_s[0] += 100.0 if calls[0] == 1 else 0.5

    monkeypatch.setattr(common.time, "perf_counter", lambda: now_s[0])
    side = common.repeated(work, torch.device("cpu"), least_s=2.0)
    assert calls == [2]  # one that is slow once, one to learn how long the others take
    assert side(0) == 0.5
    assert calls == [2 + 4]


def test_the_95th_percentile_is_a_value_that_occurs():
    assert percentile_95(list(range(1, 101))) == 95
    assert percentile_95([7]) == 7


def test_there_are_sixteen_different_instructions():
    assert len(set(instructions())) == 16


@pytest.mark.parametrize(
    ("name", "prompts", "rows", "new"), [("plain", 64, 64, 64), ("seed", 16, 128, 128), ("shared", 1, 32, 32)]
)
def test_workloads_have_the_sizes_that_are_promised(name: str, prompts: int, rows: int, new: int):
    work = workload(name, byte_tokenizer(), None, quick=False)
    assert (len(work.prompt_ids), len(work.rows), work.sampling.max_new_tokens) == (prompts, rows, new)


def test_no_two_prompts_of_plain_share_a_beginning_that_an_engine_could_reuse():
    work = workload("plain", byte_tokenizer(), None, quick=False)
    assert {len(ids) for ids in work.prompt_ids} == {32}
    assert len({ids[:16] for ids in work.prompt_ids}) == 64


def test_seed_asks_chats_and_ends_where_the_model_ends():
    work = workload("seed", byte_tokenizer(), None, quick=True)
    assert "<|im_start|>user" in byte_tokenizer().decode(work.prompt_ids[0])
    assert not work.is_exact_length


def test_a_context_that_is_too_short_is_refused_with_a_way_out():
    with pytest.raises(InputError, match=r"544 positions.*--quick"):
        workload("shared", byte_tokenizer(), 256, quick=False)
    with pytest.raises(InputError, match="plain, seed, shared"):
        workload("plian", byte_tokenizer(), None, quick=False)


@pytest.mark.parametrize(
    ("found", "margin", "near_ties", "different"),
    [((1, 2, 3), 9.0, 0, 0), ((1, 5, 3), 9e-5, 1, 0), ((1, 5, 3), 2e-4, 0, 1), ((1, 2), 0.0, 0, 1)],
)
def test_a_difference_counts_where_the_reference_is_sure(
    found: tuple[int, ...], margin: float, near_ties: int, different: int
):
    result = judge([found], [(1, 2, 3)], lambda _: [9.0, margin, 0.0])
    assert (result["near_ties"], result["different"]) == (near_ties, different)


@pytest.mark.parametrize("name", NAMES)
def test_the_greedy_workload_may_end_early_on_both_sides(name: str):
    asked = greedy_workload(workload(name, byte_tokenizer(), None, quick=True))
    assert asked.sampling.temperature == 0
    assert not asked.is_exact_length


def test_the_roofline_counts_each_prompt_once_and_each_later_token_in_a_full_batch():
    work = workload("shared", byte_tokenizer(), None, quick=True)  # 1 prompt of 64 tokens, 4 completions
    times = {rows: float(rows) for rows in needed_rows(work)}
    rates = Rates(trunk_s=times, head_s=dict.fromkeys(times, 0.5), trunk_flop=2, head_flop=1)
    assert ideal_s(work, [1, 1, 1, 1], rates) == 64 + 0.5
    assert ideal_s(work, [8, 8, 8, 8], rates) == pytest.approx(64 + 0.5 + (4 + 0.5) * 28 / 4)
    assert rates.gflops(64) == pytest.approx(64 * 3 / 64.5 / 1e9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_the_roofline_has_every_weight_of_the_model_that_is_multiplied(family: str):
    model = tiny_model(family).model
    trunk, head = linear_weights(model)
    embedding = model.get_input_embeddings().weight
    positions = model.transformer.wpe.weight.numel() if family == "gpt2" else 0
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    tied = model.get_output_embeddings().weight is embedding
    assert sum(w.numel() for w in trunk) == matrices - embedding.numel() * (1 if tied else 2) - positions
    assert head.shape == embedding.shape


def test_both_sides_of_a_step_are_asked_for_the_same_work():
    settings = OurStep("tiny:llama", 8, 64, num_threads=1, dtype="bfloat16")
    ours = settings.recipe()
    theirs: dict[str, Any] = replace(settings.trl("folder"), micro_batch_size=8).config()
    assert ours.rollout.completions_per_prompt == theirs["num_generations"] == 8
    assert ours.rollout.max_new_tokens == ours.rollout.min_new_tokens == theirs["max_completion_length"] == 64
    assert theirs["generation_kwargs"] == {"min_new_tokens": 64}
    assert theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"] == 32
    assert ours.grpo.kl.coef == theirs["beta"] == 0.04
    assert ours.grpo.num_epochs == ours.grpo.num_minibatches == 1
    assert theirs["gradient_checkpointing"] is False


def test_the_reward_of_the_step_differs_between_completions():
    assert len(set(token_sum(completion_ids=[[1, 2], [3, 4], [5, 6]]))) == 3


def test_steps_of_different_size_are_no_comparison():
    with pytest.raises(Exception, match="10, 11 tokens"):
        check_same_work([Taken(1.0, 10), Taken(1.0, 11)])
