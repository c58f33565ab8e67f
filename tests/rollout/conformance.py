"""What a server must do to be an engine; each function is one promise, for whatever `RemoteEngine` it is given."""

import pytest
import torch

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import Group, SamplingParams
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.rollout.remote.engine import RemoteEngine

PROMPTS = [
    Prompt("text", "Once upon a time"),
    Prompt("ids", "", token_ids=tuple(range(40, 90))),
    Prompt("one", "", token_ids=(7,)),
]
BOUND = 2e-3
"""Nats between two correct computations in float32, with room for another library."""


def trained_logps(loaded: LoadedModel, group: Group, index: int, temperature: float = 1.0) -> torch.Tensor:
    """The trainer's log-probs of a completion."""
    ids = [*group.prompt_token_ids, *group.completions[index].token_ids]
    with torch.no_grad():
        scores = token_logps(
            language_model(loaded.model),
            torch.tensor([ids]),
            torch.tensor([len(ids)]),
            prompt_lengths_B=torch.tensor([len(group.prompt_token_ids)]),
            temperature=temperature,
        )
    return scores.logp_BT[0]


def log_probs_are_the_trainers(engine: RemoteEngine, loaded: LoadedModel) -> None:
    for temperature in (1.0, 0.7):
        sampling = SamplingParams(max_new_tokens=12, temperature=temperature, seed=1)
        for group in engine.generate(PROMPTS, 2, sampling):
            for index, one in enumerate(group.completions):
                assert one.raw_logps == one.logps
                expected = trained_logps(loaded, group, index, temperature)
                assert torch.tensor(one.logps).sub(expected).abs().max() < BOUND


def prompts_go_in_as_ids_and_groups_keep_their_order(engine: RemoteEngine, loaded: LoadedModel) -> None:
    groups = engine.generate(PROMPTS, 3, SamplingParams(max_new_tokens=5, seed=2))
    assert [group.prompt for group in groups] == PROMPTS
    assert groups[1].prompt_token_ids == tuple(range(40, 90))
    assert all(len(group.completions) == 3 for group in groups)
    assert len({one.token_ids for one in groups[0].completions}) > 1, "the samples of a prompt differ"


def a_seed_repeats_and_another_does_not(engine: RemoteEngine, loaded: LoadedModel) -> None:
    def tokens(seed: int, prompts: list[Prompt]) -> list[list[tuple[int, ...]]]:
        groups = engine.generate(prompts, 2, SamplingParams(max_new_tokens=8, seed=seed))
        return [[one.token_ids for one in group.completions] for group in groups]

    whole = tokens(3, PROMPTS)
    assert tokens(3, PROMPTS) == whole
    assert tokens(3, PROMPTS[1:]) == whole[1:], "whatever else is drawn"
    assert tokens(4, PROMPTS) != whole
    twins = tokens(3, [PROMPTS[0], Prompt("twin", PROMPTS[0].content)])
    assert twins[0] == whole[0] and twins[1] != twins[0]


def stop_tokens_end_a_completion_and_are_kept(engine: RemoteEngine, loaded: LoadedModel) -> None:
    (group,) = engine.generate(PROMPTS[:1], 1, SamplingParams(max_new_tokens=16, seed=5))
    drawn = group.completions[0].token_ids
    stop = drawn[len(drawn) // 2]
    sampling = SamplingParams(max_new_tokens=16, stop_token_ids=(stop,), seed=5)
    (stopped,) = engine.generate(PROMPTS[:1], 1, sampling)
    one = stopped.completions[0]
    assert one.finish_reason == "stop" and one.token_ids == drawn[: drawn.index(stop) + 1]
    assert group.completions[0].finish_reason == "length" or drawn[-1] == 2


def least_lengths_and_filters_are_obeyed(engine: RemoteEngine, loaded: LoadedModel) -> None:
    sampling = SamplingParams(max_new_tokens=8, min_new_tokens=8, logit_bias={2: 100.0}, seed=1)
    (group,) = engine.generate(PROMPTS[:1], 2, sampling)
    assert all(len(one.token_ids) == 8 and 2 not in one.token_ids[:7] for one in group.completions)
    sampling = SamplingParams(max_new_tokens=8, temperature=0.8, top_p=0.5, seed=1)
    for group in engine.generate(PROMPTS, 2, sampling):
        for index, one in enumerate(group.completions):
            raw, drawn_from = torch.tensor(one.raw_logps), torch.tensor(one.logps)
            # Another library's sums of a row may depend on the rows that are computed with it.
            assert raw.sub(trained_logps(loaded, group, index, 0.8)).abs().max() < BOUND
            assert bool((drawn_from >= raw - BOUND).all()) and float((drawn_from - raw).max()) > 0.1
    (greedy,) = engine.generate(PROMPTS[:1], 1, SamplingParams(max_new_tokens=6, temperature=0, seed=1))
    (filtered,) = engine.generate(PROMPTS[:1], 1, SamplingParams(max_new_tokens=6, top_k=1, seed=9))
    assert greedy.completions[0].token_ids == filtered.completions[0].token_ids


def changed_weights_are_drawn_from(engine: RemoteEngine, loaded: LoadedModel) -> None:
    sampling = SamplingParams(max_new_tokens=10, seed=6)
    before = engine.generate(PROMPTS, 1, sampling)
    saved = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    try:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
        log_probs_are_the_trainers(engine, loaded)
        after = engine.generate(PROMPTS, 1, sampling)
        assert [g.completions[0].token_ids for g in after] != [g.completions[0].token_ids for g in before]
    finally:
        loaded.model.load_state_dict(saved)
    again = engine.generate(PROMPTS, 1, sampling)
    assert [g.completions[0].token_ids for g in again] == [g.completions[0].token_ids for g in before]


PROMISES = [
    log_probs_are_the_trainers,
    prompts_go_in_as_ids_and_groups_keep_their_order,
    a_seed_repeats_and_another_does_not,
    stop_tokens_end_a_completion_and_are_kept,
    least_lengths_and_filters_are_obeyed,
    changed_weights_are_drawn_from,
]

every_promise = pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
