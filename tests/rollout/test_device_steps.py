"""Decoding steps that nobody watches: what rests or has ended changes nothing that belongs to another."""

import pytest
import torch

from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.device.decode_step import (
    PREFIX_MEMBERS,
    DeviceModel,
    DrawForm,
    DrawSettings,
    Slots,
    Step,
    decode_step,
)
from tunesmith.engine.rollout.device.steps import Buffers, DeviceSteps, Prefix, shared_prefixes
from tunesmith.engine.rollout.kv_cache import KVCache, allocate_storage, copy_blocks
from tunesmith.engine.rollout.runner import cache_shape
from tunesmith.engine.rollout.sampler import NoiseKey
from tunesmith.engine.rollout.scheduler import PromptRequest, Scheduler
from tunesmith.engine.rollout.sequence import Limits, Sequence

CPU = torch.device("cpu")
NUM_SLOTS, WIDTH, MAX_STEPS, VOCABULARY = 8, 4, 5, 259
SAMPLING = SamplingParams(temperature=0.9, repetition_penalty=1.1, seed=0)


def room_of(model: DeviceModel) -> Buffers:
    cache = KVCache(30, max_tokens=WIDTH * 16, max_tables=2 * NUM_SLOTS)
    slots = Slots.empty(NUM_SLOTS, WIDTH, MAX_STEPS, CPU)
    settings = DrawSettings.empty(model.decoder.architecture.head.sizes[0], 2 * NUM_SLOTS, CPU)
    return Buffers(cache, allocate_storage(cache_shape(model.decoder.architecture), 31), slots, settings)


def model_of(dtype: torch.dtype = torch.float32) -> DeviceModel:
    module = tiny_model("llama", dtype=dtype).model
    return DeviceModel(module, Decoder(module, Kernels()))


def begun(model: DeviceModel, room: Buffers, num_rows: int, new: int) -> tuple[DeviceSteps, Scheduler]:
    """Steps and a scheduler with completions of two prompts that have drawn their first tokens."""
    steps = DeviceSteps(model, room, None)
    steps.begin(SAMPLING, frozenset({2}), 0, [NoiseKey(7, 0), NoiseKey(9, 0)])
    scheduler = Scheduler(room.cache, lambda ids: "", num_slots=NUM_SLOTS)
    limits = Limits(new, stop_ids=frozenset({2}))
    scheduler.add([PromptRequest(0, tuple(range(5, 25)), num_rows, limits), PromptRequest(1, (9, 8, 7), 1, limits)])
    plan = scheduler.plan(MAX_STEPS)
    assert plan is not None and len(plan.drawn) == num_rows + 1
    scheduler.accept(plan, steps.run(plan))
    return steps, scheduler


def test_steps_behind_the_end_change_nothing() -> None:
    model = model_of()
    room = room_of(model)
    steps, scheduler = begun(model, room, num_rows=3, new=4)
    plan = scheduler.plan(MAX_STEPS)
    assert plan is not None and plan.num_steps == 3
    copy_blocks(room.storage, plan.copies)
    steps.run(plan)
    slots = room.slots.first(4)
    assert slots.left_S.tolist() == [0] * 4 and slots.count_S.max() == 3
    kept = {name: getattr(slots, name).clone() for name in ("token_S", "position_S", "count_S", "integers_S6")}
    drawn_S34, storage = slots.drawn_SK4[:, :3].clone(), room.storage.clone()
    form = DrawForm.from_sampling(SAMPLING, frozenset({2}))
    for _ in range(3):
        decode_step(slots, Step(model, room.storage, room.settings, form, False, None))
    assert all(torch.equal(getattr(slots, name), tensor) for name, tensor in kept.items())
    used = (slots.count_S[:, None] > torch.arange(3))[..., None]
    assert torch.equal(slots.drawn_SK4[:, :3] * used, drawn_S34 * used)
    torch.testing.assert_close(room.storage, storage, rtol=1e-5, atol=1e-6)


def test_slots_without_completions_write_into_the_scratch_block_alone() -> None:
    model = model_of()
    room = room_of(model)
    steps, scheduler = begun(model, room, num_rows=4, new=30)  # five run, in a step of eight
    before = room.storage.clone()
    plan = scheduler.plan(MAX_STEPS)
    assert plan is not None and len(plan.sequences) == 5
    copy_blocks(room.storage, plan.copies)
    copy_blocks(before, plan.copies)
    steps.run(plan)
    changed = ((room.storage != before).any(-1)).any(0).any(0).nonzero()[:, 0].tolist()
    positions = [range(start, start + plan.num_steps) for start in plan.decode.positions]
    own = {
        int(room.cache.block_tables[row, position // 16])
        for row, of_row in zip(plan.decode.table_rows, positions, strict=True)
        for position in of_row
    }
    assert set(changed) == own | {room.scratch_block}


def test_the_step_is_the_same_for_more_slots() -> None:
    """A completion's tokens do not depend on the size of the step, which a graph is captured for."""
    model = model_of(torch.float64)
    drawn = []
    for num_rows in (2, 6):
        room = room_of(model)
        steps, scheduler = begun(model, room, num_rows, new=20)
        plan = scheduler.plan(MAX_STEPS)
        assert plan is not None
        copy_blocks(room.storage, plan.copies)
        drawn.append([token_ids for token_ids, *_ in steps.run(plan)])
    assert drawn[0][:2] == drawn[1][:2] and drawn[0][-1] == drawn[1][-1]


@pytest.mark.parametrize(
    ("lengths", "counts", "expected"),
    [
        ((200,), (4,), [Prefix((0, 1, 2, 3), 192)]),
        ((200,), (1,), []),  # nobody to share with
        ((15,), (8,), []),  # no whole block
        ((128, 500), (5, 4), [Prefix((0, 1, 2, 3, 4), 128), Prefix((5, 6, 7, 8), 496)]),
        ((300,), (PREFIX_MEMBERS + 1,), [Prefix(tuple(range(PREFIX_MEMBERS)), 288)]),  # one alone reads for itself
    ],
)
def test_completions_of_a_prompt_share_its_whole_blocks(
    lengths: tuple[int, ...], counts: tuple[int, ...], expected: list[Prefix]
) -> None:
    rows = [
        Sequence(request, sample, (5,) * length, Limits(8), lambda ids: "")
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True))
        for sample in range(count)
    ]
    assert shared_prefixes(rows) == expected
