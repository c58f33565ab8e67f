"""Settings that keep their place on the device from call to call, and the draw by them."""

import importlib.util

import pytest
import torch

from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.sample.api import sample
from tunesmith.engine.kernels.sample.torch_impl import LogitBias, NoiseKeys, SampleSettings, Seen
from tunesmith.engine.rollout.device.decode_step import DrawForm, DrawSettings, draw

VOCABULARY, NUM_ROWS = 50, 7
SAMPLING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.02,
    repetition_penalty=1.3,
    min_new_tokens=2,
    logit_bias={3: -1.5, 8: float("-inf"), 11: 0.5},
)


def test_settings_of_an_earlier_call_are_gone() -> None:
    given = DrawSettings.empty(VOCABULARY, 0, torch.device("cpu"))
    given.fill(SAMPLING, frozenset({2, 5}))
    assert given.is_stop_V.nonzero()[:, 0].tolist() == [2, 5]
    assert given.bias_V.nonzero()[:, 0].tolist() == [3, 8, 11]
    given.fill(SamplingParams(temperature=0.5, logit_bias={4: 1.0}), frozenset({6}))
    assert given.is_stop_V.nonzero()[:, 0].tolist() == [6]
    assert given.bias_V.nonzero()[:, 0].tolist() == [4]
    assert given.settings_4.tolist() == [0.5, 1.0, 0.0, 1.0]


def test_the_form_says_what_a_call_needs_and_no_numbers() -> None:
    stops = frozenset({2})
    assert DrawForm.from_sampling(SamplingParams(), stops) == DrawForm(False, False, False, False, True)
    assert DrawForm.from_sampling(SAMPLING, stops) == DrawForm(True, True, True, True, True)
    assert DrawForm.from_sampling(SAMPLING, frozenset()) == DrawForm(True, True, True, False, True)
    assert not DrawForm.from_sampling(SAMPLING, frozenset(range(9))).few_stops
    assert DrawForm.from_sampling(SamplingParams(top_p=0.5), stops) == DrawForm.from_sampling(
        SamplingParams(top_k=3, temperature=0.1), stops
    )


def test_it_draws_as_the_sampler_does_by_the_same_settings() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BV = 2 * torch.randn(NUM_ROWS, VOCABULARY, generator=generator)
    stop_ids, to_mask_B = frozenset({2, 5, 30}), torch.tensor([0, 2, 1, 0, -1, 1, 0], dtype=torch.int32)
    given = DrawSettings.empty(VOCABULARY, 4, torch.device("cpu"))
    given.fill(SAMPLING, stop_ids)
    given.seen_RV.copy_(torch.rand(given.seen_RV.shape, generator=generator) < 0.3)
    integers_B6 = torch.randint(0, 4, (NUM_ROWS, 6), generator=generator)
    integers_B6[:, 0] = SAMPLING.top_k
    forbidden = dict.fromkeys(stop_ids, float("-inf"))
    settings = SampleSettings(
        *(torch.full((NUM_ROWS,), SAMPLING.temperature, dtype=torch.float64), integers_B6[:, 0].contiguous()),
        torch.full((NUM_ROWS,), SAMPLING.top_p, dtype=torch.float64),
        torch.full((NUM_ROWS,), SAMPLING.min_p, dtype=torch.float64),
        torch.full((NUM_ROWS,), SAMPLING.repetition_penalty, dtype=torch.float64),
        LogitBias.of([{**SAMPLING.logit_bias, **(forbidden if left > 0 else {})} for left in to_mask_B.tolist()]),
    )
    keys = NoiseKeys(*(integers_B6[:, column].contiguous() for column in range(2, 6)))
    seen = Seen(given.seen_RV, integers_B6[:, 1].contiguous())
    expected = sample(logits_BV, settings, keys, seen=seen, kernels=Kernels("torch"))
    token_B, scores_B2, status_B = draw(
        logits_BV, integers_B6, to_mask_B, given, DrawForm.from_sampling(SAMPLING, stop_ids), Kernels("torch")
    )
    assert torch.equal(token_B, expected.token_B) and not status_B.any()
    assert torch.equal(scores_B2, torch.stack((expected.logp_B, expected.raw_logp_B), -1))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("num_stops", [3, 20])
@pytest.mark.parametrize("bias", [{}, {4: 1.0}])
def test_stop_ids_that_may_not_come_yet_are_masked_alike_in_triton(num_stops: int, bias: dict[int, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BV = torch.randn(40, VOCABULARY, generator=generator)
    stop_ids = frozenset(range(10, 10 + num_stops))
    logits_BV[:, 10 : 10 + num_stops] += 3
    sampling = SamplingParams(min_new_tokens=2, logit_bias=bias)
    given = DrawSettings.empty(VOCABULARY, 0, torch.device("cpu"))
    given.fill(sampling, stop_ids)
    integers_B6 = torch.zeros(40, 6, dtype=torch.int64)
    integers_B6[:, 4] = torch.arange(40)
    to_mask_B = torch.arange(40, dtype=torch.int32) % 2
    form = DrawForm.from_sampling(sampling, stop_ids)
    ours, theirs = (
        draw(logits_BV, integers_B6, to_mask_B, given, form, Kernels(choice)) for choice in ("triton", "torch")
    )
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5)
    is_stop_B = given.is_stop_V[ours[0]]
    assert not is_stop_B[1::2].any() and is_stop_B[::2].any()
