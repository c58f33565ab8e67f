"""The whole decoding step in Triton, by the interpreter or on a GPU, against the same step in torch."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which comes with torch's builds for CUDA")

from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.native import Choice, Kernels
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.loaded import PreTrainedModel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.device import steps as device_steps
from tunesmith.engine.rollout.device.decode_step import DeviceModel, DrawSettings, Slots
from tunesmith.engine.rollout.device.steps import Buffers, DeviceSteps, shared_prefixes
from tunesmith.engine.rollout.kv_cache import KVCache, allocate_storage, copy_blocks
from tunesmith.engine.rollout.runner import cache_shape
from tunesmith.engine.rollout.sampler import NoiseKey
from tunesmith.engine.rollout.scheduler import PromptRequest, Run, Scheduler
from tunesmith.engine.rollout.sequence import Limits

DEVICE = torch.device("cuda" if os.environ.get("TUNESMITH_TEST_GPU") == "1" else "cpu")
NUM_SLOTS, WIDTH, MAX_STEPS = 6, 4, 3
PLAIN = SamplingParams(seed=0)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.2,
    min_new_tokens=3,
    logit_bias={5: -2.0, 9: float("-inf")},
    seed=0,
)


def visits(module: PreTrainedModel, choice: Choice, sampling: SamplingParams) -> list[list[Run]]:
    """What is drawn of four completions of a long prompt and one of a short one, visit by visit."""
    model = DeviceModel(module, Decoder(module, Kernels(choice)))
    cache = KVCache(40, max_tokens=WIDTH * 16, max_tables=2 * NUM_SLOTS)
    settings = DrawSettings.empty(model.decoder.architecture.head.sizes[0], 2 * NUM_SLOTS, DEVICE)
    slots = Slots.empty(NUM_SLOTS, WIDTH, MAX_STEPS, DEVICE)
    room = Buffers(cache, allocate_storage(cache_shape(model.decoder.architecture), 41, DEVICE), slots, settings)
    steps = DeviceSteps(model, room, None)
    steps.begin(sampling, frozenset({2, 7}), 0, [NoiseKey(7, 0), NoiseKey(9, 0)])
    scheduler = Scheduler(cache, lambda ids: "", num_slots=NUM_SLOTS)
    limits = Limits(5, sampling.min_new_tokens, stop_ids=frozenset({2, 7}))
    scheduler.add(
        [PromptRequest(0, tuple(5 + 7 * i % 200 for i in range(34)), 4, limits), PromptRequest(1, (9, 8), 1, limits)]
    )
    found: list[list[Run]] = []
    while (plan := scheduler.plan(MAX_STEPS)) is not None:
        copy_blocks(room.storage, plan.copies)
        if found and len(found) < 2:
            assert shared_prefixes(plan.sequences), "attention over a shared beginning is part of this test"
        drawn = steps.run(plan)
        steps.release(scheduler.accept(plan, drawn))
        found.append(drawn)
    return found


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("llama", EVERYTHING),
        *(pytest.param(family, PLAIN, marks=pytest.mark.nightly) for family in ("qwen3", "gemma2")),
    ],
)
def test_the_step_in_triton_draws_what_the_step_in_torch_draws(
    family: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_steps, "_LEAST_SAVED_BYTES", 0)  # the interpreter takes long for prompts that pay
    module = tiny_model(family, dtype=torch.float32).model.to(DEVICE)
    with torch.no_grad():  # random weights of the usual size let attention say next to nothing
        for parameter in module.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    ours, theirs = visits(module, "triton", sampling), visits(module, "torch", sampling)
    assert len(ours) == len(theirs) >= 3
    for mine, other in zip(ours, theirs, strict=True):
        assert [token_ids for token_ids, *_ in mine] == [token_ids for token_ids, *_ in other]
        for (_, *scores, _), (_, *expected, _) in zip(mine, other, strict=True):
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), rtol=1e-4, atol=1e-4)
