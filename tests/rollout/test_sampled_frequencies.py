"""Sampled tokens against the exact distribution, by chi-square; the oracle is transformers' own code.

Shape legend: V vocabulary.
"""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.tiny import EOS_ID, tiny_model
from tunesmith.engine.rollout.factory import open_engine

PROMPT = (*range(30, 60), 40, 41, 42)
NUM_DRAWN = 6000
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {10: 2.0, 11: -3.0, 12: float("-inf")}},
    "min_new_tokens": {"min_new_tokens": 2},
    "temperature top_p penalty": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.05},
    "top_k top_p min_p": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "all": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "logit_bias": {10: 2.0, 12: float("-inf")},
        "min_new_tokens": 2,
    },
}


@torch.no_grad()
def exact(loaded: LoadedModel, ids: tuple[int, ...], sampling: SamplingParams) -> torch.Tensor:
    """Probabilities of the token behind `ids`, in the order of processors that `generate` has."""
    ids_1S = torch.tensor([ids])
    logits_1V = loaded.model(ids_1S).logits[:, -1].double()
    for token, value in sampling.logit_bias.items():
        logits_1V[0, token] += value
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_new_tokens:
        logits_1V[0, EOS_ID] = float("-inf")
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(ids_1S, logits_1V)[0].softmax(-1)


def p_value(drawn: Counter[int], expected_V: torch.Tensor) -> float:
    """Of a chi-square test in which tokens that are expected less than five times are one bin."""
    total = drawn.total()
    counts_V = torch.zeros_like(expected_V)
    for token, count in drawn.items():
        counts_V[token] = count
    assert counts_V[expected_V == 0].sum() == 0, "a token was drawn that cannot be"
    often_V = expected_V * total >= 5
    observed = [*counts_V[often_V].tolist(), counts_V[~often_V].sum().item()]
    wanted = [*(expected_V[often_V] * total).tolist(), expected_V[~often_V].sum().item() * total]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    return 1.0 if len(wanted) < 2 else float(chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_tokens_are_drawn_as_often_as_they_should_be(backend: str, case: str) -> None:
    """The first token comes from the prompt's pass, the second from a decoding step."""
    loaded = tiny_model("llama")
    sampling = SamplingParams(max_new_tokens=2, seed=1, **CASES[case])  # type: ignore[arg-type]
    num_drawn = NUM_DRAWN if backend == "native" else NUM_DRAWN // 4
    engine = open_engine(loaded.model, loaded.tokenizer, backend=backend, num_slots=256, batch_size=256)  # type: ignore[arg-type]
    (group,) = engine.generate([Prompt("p", "", token_ids=PROMPT)], num_drawn, sampling)
    first = Counter(completion.token_ids[0] for completion in group.completions)
    assert p_value(first, exact(loaded, PROMPT, sampling)) > 1e-4
    likeliest, count = first.most_common(1)[0]
    second = Counter(
        completion.token_ids[1]
        for completion in group.completions
        if completion.token_ids[0] == likeliest and len(completion.token_ids) > 1
    )
    assert count > num_drawn / 259
    assert p_value(second, exact(loaded, (*PROMPT, likeliest), sampling)) > 1e-4


def test_the_test_sees_a_wrong_distribution() -> None:
    expected_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert p_value(Counter({0: 3000, 1: 1800, 2: 1200}), expected_V) > 0.9
    assert p_value(Counter({0: 3000, 1: 1500, 2: 1500}), expected_V) < 1e-4
