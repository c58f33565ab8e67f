"""The plain engine returns what was sampled, with the log-probs it was sampled by."""

from dataclasses import replace

import pytest
import torch

from tunesmith.batch.pack import pack
from tunesmith.batch.rollout import SamplingParams
from tunesmith.core.errors import InputError
from tunesmith.models.logprob import token_logps
from tunesmith.models.tiny import FAMILIES, tiny_model
from tunesmith.rollout.transformers_backend import TransformersEngine
from tunesmith.schema.records import Prompt

PROMPTS = [Prompt("a", "The film"), Prompt("b", "x"), Prompt("c", ({"role": "user", "content": "Hello?"},))]


def _engine(family: str = "llama", **kwargs: object) -> TransformersEngine:
    loaded = tiny_model(family)
    return TransformersEngine(loaded.model, loaded.tokenizer, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_training_forward(family: str) -> None:
    loaded = tiny_model(family)
    groups = TransformersEngine(loaded.model, loaded.tokenizer).generate(
        PROMPTS, 3, SamplingParams(max_new_tokens=7, temperature=0.7, seed=1)
    )
    batch = pack(groups, pad_id=0)
    with torch.no_grad():
        scores = token_logps(
            loaded.model, batch.ids_BS, batch.lengths_B, prompt_lengths_B=batch.prompt_lengths_B, temperature=0.7
        )
    engine = [logp for group in groups for completion in group.completions for logp in completion.logps]
    torch.testing.assert_close(scores.logp_BT[batch.mask_BT], torch.tensor(engine), atol=2e-5, rtol=0)


def test_same_seed_gives_the_same_completions_and_another_seed_others() -> None:
    engine, sampling = _engine(), SamplingParams(max_new_tokens=8, seed=3)
    first, again = engine.generate(PROMPTS, 2, sampling), engine.generate(PROMPTS, 2, sampling)
    assert first == again
    assert engine.generate(PROMPTS, 2, replace(sampling, seed=4)) != first


def test_generation_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    _engine().generate(PROMPTS, 1, SamplingParams(max_new_tokens=4, seed=9))
    assert torch.equal(torch.rand(1), expected)


def test_groups_keep_the_order_of_prompts_across_batches() -> None:
    groups = _engine(batch_size=2).generate(PROMPTS, 3, SamplingParams(max_new_tokens=4, seed=0))
    assert [group.prompt.id for group in groups] == ["a", "b", "c"]
    assert [len(group.completions) for group in groups] == [3, 3, 3]


def test_greedy_ignores_the_seed_and_equals_generate() -> None:
    loaded = tiny_model("qwen2")
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    greedy = SamplingParams(max_new_tokens=10, temperature=0.0, seed=1)
    (group,) = engine.generate([Prompt("a", "The film")], 1, greedy)
    assert engine.generate([Prompt("a", "The film")], 1, replace(greedy, seed=2)) == [group]
    ids = torch.tensor([group.prompt_token_ids])
    expected = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
    assert group.completions[0].token_ids == tuple(expected[0, ids.shape[1] :].tolist())


def test_an_end_of_sequence_token_ends_a_completion_and_is_kept_in_the_ids() -> None:
    loaded = tiny_model("llama")
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    sampling = SamplingParams(max_new_tokens=200, temperature=3.0, seed=0)
    completions = engine.generate([Prompt("a", "x")], 8, sampling)[0].completions
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped, "with 259 near-uniform tokens and 200 draws some completion must end"
    eos = loaded.tokenizer.eos_token_id
    for completion in stopped:
        assert completion.token_ids[-1] == eos
        assert eos not in completion.token_ids[:-1]
        assert len(completion.logps) == len(completion.token_ids)


def test_stop_token_ids_and_min_new_tokens_are_obeyed() -> None:
    loaded = tiny_model("llama")
    engine = TransformersEngine(loaded.model, loaded.tokenizer)
    stops = tuple(range(3, 259))
    (group,) = engine.generate([Prompt("a", "x")], 4, SamplingParams(max_new_tokens=6, stop_token_ids=stops, seed=0))
    assert all(len(completion.token_ids) == 1 for completion in group.completions)
    (group,) = engine.generate([Prompt("a", "x")], 4, SamplingParams(max_new_tokens=6, min_new_tokens=6, seed=0))
    assert all(len(completion.token_ids) == 6 for completion in group.completions)


def test_top_k_of_one_is_greedy_and_its_log_prob_is_zero() -> None:
    engine = _engine()
    (greedy,) = engine.generate([PROMPTS[0]], 1, SamplingParams(max_new_tokens=5, temperature=0.0))
    (top_one,) = engine.generate([PROMPTS[0]], 1, SamplingParams(max_new_tokens=5, top_k=1, seed=5))
    assert top_one.completions[0].token_ids == greedy.completions[0].token_ids
    assert top_one.completions[0].logps == (0.0,) * 5


def test_prompt_token_ids_are_taken_as_they_are() -> None:
    prompt = Prompt("cut", "text that would encode differently", token_ids=(40, 41))
    (group,) = _engine().generate([prompt], 1, SamplingParams(max_new_tokens=2, seed=0))
    assert group.prompt_token_ids == (40, 41)


def test_groups_carry_the_weight_version_and_the_model_returns_to_its_mode() -> None:
    loaded = tiny_model("llama")
    loaded.model.train()
    engine = TransformersEngine(loaded.model, loaded.tokenizer, weight_version=lambda: 5)
    (group,) = engine.generate([PROMPTS[0]], 1, SamplingParams(max_new_tokens=2, seed=0))
    assert group.weight_version == 5
    assert loaded.model.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.0}, "min_p is 1.0"),
        ({"min_new_tokens": 65}, "min_new_tokens is 65"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"max_new_tokens": 10**7}, "context holds"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _engine().generate([PROMPTS[0]], 1, replace(SamplingParams(), **change))  # type: ignore[arg-type]


def test_no_prompts_no_completions_and_foreign_ids_are_refused() -> None:
    engine, sampling = _engine(), SamplingParams(max_new_tokens=2)
    with pytest.raises(InputError, match="no prompts"):
        engine.generate([], 1, sampling)
    with pytest.raises(InputError, match="n is 0"):
        engine.generate(PROMPTS, 0, sampling)
    with pytest.raises(InputError, match="token id 999"):
        engine.generate([Prompt("e", "x", token_ids=(999,))], 1, sampling)
