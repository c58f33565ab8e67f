"""Requests that no engine can serve are refused in one place, with what is allowed."""

import math
from dataclasses import replace

import pytest

from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.sample.torch_impl import SMALLEST_TEMPERATURE, SampleSettings
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.engine import GenerationInterrupted, check_prompt_lengths, check_request
from tunesmith.engine.rollout.factory import open_engine

PROMPTS = [Prompt("a", "text")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; allow at least 1"),
        ({"min_new_tokens": 65}, "min_new_tokens is 65; it must lie between 0 and max_new_tokens, 64"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must lie in \(0, 1\], where 1 is off"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-7}, r"temperature is 1e-07; it must be 0 \(greedy\) or at least 1e-06, and finite"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, r"top_k is -1; it must be 0 \(off\) or more"),
        ({"min_p": 1.0}, "min_p is 1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"stop_strings": "END"}, "stop strings are given as the one text 'END'; give a tuple of texts"),
        ({"stop_strings": ("END", 7)}, "7 is no stop string"),
        ({"stop_strings": ("",)}, "'' is no stop string"),
        ({"stop_token_ids": ("END",)}, "'END' is no stop id; give token ids, whole numbers from 0 up"),
        ({"stop_token_ids": "END"}, "stop_token_ids is 'END'; give a tuple of token ids, and texts as stop_strings"),
        ({"stop_token_ids": 7}, "stop_token_ids is 7"),
        ({"stop_token_ids": (-1,)}, "-1 is no stop id"),
        ({"stop_token_ids": (True,)}, "True is no stop id"),
        ({"stop_token_ids": (260,)}, r"stop_token_ids names token id 260; ids must lie in \[0, 259\)"),
        ({"logit_bias": {7: math.nan}}, "logit_bias of token 7 is nan; give a finite number, or -inf to forbid it"),
        ({"logit_bias": {7: math.inf}}, "logit_bias of token 7 is inf"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is for 'a'; its keys must be token ids"),
        ({"logit_bias": {7: "a"}}, "logit_bias of token 7 is 'a'"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias is for -1"),
        ({"logit_bias": [7]}, r"logit_bias is \[7\]; give a mapping of token ids to numbers"),
        ({"logit_bias": {300: 1.0}}, "logit_bias names token id 300"),
        ({"logit_bias": dict.fromkeys(range(259), -math.inf)}, "logit_bias forbids all 259 tokens"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_request(PROMPTS, 1, replace(SamplingParams(), **change), vocabulary_size=259)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.0},
        {"temperature": SMALLEST_TEMPERATURE},
        {"stop_strings": ("END", "\n"), "stop_token_ids": (0, 258), "min_new_tokens": 64},
        {"logit_bias": {0: -math.inf, 258: 3}, "min_p": 0.5, "repetition_penalty": 0.5},
    ],
)
def test_good_settings_pass_and_the_sampler_takes_them(change: dict[str, object]) -> None:
    sampling = replace(SamplingParams(), **change)  # type: ignore[arg-type]
    check_request(PROMPTS, 1, sampling, vocabulary_size=259)
    SampleSettings.same(
        1,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        bias=sampling.logit_bias,
    )


def test_no_prompts_and_no_completions_are_refused() -> None:
    with pytest.raises(InputError, match="no prompts were given"):
        check_request([], 1, SamplingParams())
    with pytest.raises(InputError, match="n is 0; ask for at least 1"):
        check_request(PROMPTS, 0, SamplingParams())


@pytest.mark.parametrize(
    ("prompt", "length", "message"),
    [
        (Prompt("p", ""), 0, "prompt p is empty"),
        (Prompt("p", "x"), 9, "prompt p has 9 tokens and 8 are to be drawn, but the model's context holds 16"),
        (Prompt("p", "x", token_ids=(1, 50)), 2, r"prompt p holds token id 50; ids must lie in \[0, 50\)"),
        (Prompt("p", "x", token_ids=(-1,)), 1, "prompt p holds token id -1"),
    ],
)
def test_prompts_that_the_model_cannot_read_are_refused_by_name(prompt: Prompt, length: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_prompt_lengths([prompt], [length], 50, 16, 8)


def test_an_interrupt_is_a_ctrl_c_that_holds_what_is_finished() -> None:
    assert issubclass(GenerationInterrupted, KeyboardInterrupt)
    assert GenerationInterrupted([]).groups == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "vllm"}, "rollout backend 'vllm' is unknown; choose native, transformers or a record Native"),
        ({"num_slots": 0}, "num_slots is 0; give at least 1"),
        ({"kv_cache_mb": 0}, "kv_cache_mb is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_an_engine_that_cannot_be_is_not_opened(options: dict[str, object], message: str) -> None:
    loaded = tiny_model("llama")
    with pytest.raises(InputError, match=message):
        open_engine(loaded.model, loaded.tokenizer, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_each_backend_opens_and_draws(backend: str) -> None:
    loaded = tiny_model("llama")
    engine = open_engine(loaded.model, loaded.tokenizer, backend=backend, weight_version=lambda: 4)  # type: ignore[arg-type]
    (group,) = engine.generate(PROMPTS, 2, SamplingParams(max_new_tokens=3, seed=0))
    assert group.weight_version == 4
    assert [len(completion.raw_logps) for completion in group.completions] == [
        len(completion.token_ids) for completion in group.completions
    ]
