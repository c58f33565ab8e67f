"""Accuracy counts right completions and right greedy answers, and its p-value is McNemar's."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from tunesmith.base.config.sections import ModelSection
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.load import load_policy
from tunesmith.engine.rollout.transformers_backend import TransformersEngine
from tunesmith.learn.evaluation import accuracy
from tunesmith.learn.rewards.scorer import Scorer

PROMPTS = [Prompt(f"p{i}", text) for i, text in enumerate(["The film", "A story", "Once more", "They said"])]
SAMPLING = SamplingParams(max_new_tokens=5, seed=3)


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    loaded = load_policy(ModelSection(name="tiny:llama", dtype="float32"))
    return TransformersEngine(loaded.model, loaded.tokenizer)


def low(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
    """Share of the tokens in the lower half of the vocabulary."""
    return [sum(token < 130 for token in ids) / len(ids) for ids in completion_ids]


def shares(groups: Sequence[Group]) -> list[list[float]]:
    return [low([completion.token_ids for completion in group.completions]) for group in groups]


def test_the_sampled_share_and_each_greedy_answer_can_be_counted_by_hand(engine: TransformersEngine) -> None:
    measured = accuracy.measure(engine, Scorer([low]), PROMPTS, SAMPLING, num_completions=3, correct_at=0.5, when="x")
    drawn = shares(engine.generate(PROMPTS, 3, SAMPLING))
    greedy = shares(engine.generate(PROMPTS, 1, dataclasses.replace(SAMPLING, temperature=0.0)))
    hits = [share >= 0.5 for group in drawn for share in group]
    assert 0 < sum(hits) < len(hits) == 12
    assert measured["accuracy_x"] == pytest.approx(sum(hits) / 12)
    assert measured["greedy_hits_x"] == [int(group[0] >= 0.5) for group in greedy]
    assert measured["greedy_x"] == sum(group[0] >= 0.5 for group in greedy) / 4


def test_a_reward_that_just_reaches_the_bound_is_right(engine: TransformersEngine) -> None:
    def half(completions: Sequence[str], **_: object) -> list[float]:
        return [0.5] * len(completions)

    for bound, share in ((0.5, 1.0), (0.5001, 0.0)):
        measured = accuracy.measure(
            engine, Scorer([half]), PROMPTS, SAMPLING, num_completions=2, correct_at=bound, when="x"
        )
        assert (measured["accuracy_x"], measured["greedy_x"]) == (share, share)


def test_a_completion_whose_reward_failed_is_not_right(engine: TransformersEngine) -> None:
    def fails_on_all_but_the_first(completions: Sequence[str], **_: object) -> list[float]:
        return [1.0] + [math.nan] * (len(completions) - 1)

    def fails_on_odd(completion_ids: Sequence[Sequence[int]], **_: object) -> list[float]:
        return [math.nan if sum(ids) % 2 else 0.0 for ids in completion_ids]

    drop = Scorer([fails_on_odd], on_error="drop")
    valid = drop.score(engine.generate(PROMPTS, 4, SAMPLING)).valid_PG
    measured = accuracy.measure(engine, drop, PROMPTS, SAMPLING, num_completions=4, correct_at=0.0, when="x")
    assert 0 < valid.float().mean().item() < 1
    assert measured["accuracy_x"] == pytest.approx(valid.float().mean().item())
    first = Scorer([fails_on_all_but_the_first], on_error="drop")
    assert accuracy.measure(engine, first, PROMPTS, SAMPLING, num_completions=2, correct_at=-1.0, when="x")[
        "accuracy_x"
    ] == pytest.approx(1 / 8)


def test_facts_and_figures_hold_before_and_after_and_the_exact_p_value() -> None:
    before = {"accuracy_before": 0.25, "greedy_before": 1 / 8, "greedy_hits_before": [1, 0, 0, 0, 0, 0, 0, 0]}
    after = {"accuracy_after": 0.75, "greedy_after": 6 / 8, "greedy_hits_after": [0, 1, 1, 1, 1, 1, 1, 0]}
    figures = accuracy.figures({**before, **after})
    # One pair lost and six won: P(at most 1 or at least 6 of 7 fair coins) = 2 (1 + 7) / 2^7.
    assert figures == {
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "greedy_before": 1 / 8,
        "greedy_after": 6 / 8,
        "p_value": pytest.approx(2 * (1 + 7) / 2**7),
        "num_heldout": 8,
    }


def test_what_was_not_measured_is_not_reported() -> None:
    assert accuracy.figures({}) == {}
    assert accuracy.figures({"accuracy_before": 0.5, "greedy_before": 1.0, "greedy_hits_before": [1]}) == {}


def test_measuring_draws_the_same_again_and_leaves_the_global_generator_alone(engine: TransformersEngine) -> None:
    state = torch.random.get_rng_state()
    first, again = (
        accuracy.measure(engine, Scorer([low]), PROMPTS, SAMPLING, num_completions=3, correct_at=0.5, when="x")
        for _ in range(2)
    )
    assert first == again
    assert torch.equal(torch.random.get_rng_state(), state)
