"""The end of a decoding step against a loop in Python, slot by slot; in torch and in Triton's interpreter."""

import importlib.util
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.base.core.errors import NativeUnavailableError
from tunesmith.engine.kernels.advance.api import advance
from tunesmith.engine.kernels.advance.torch_impl import POSITION, DrawnTokens, SlotState
from tunesmith.engine.kernels.native import Choice, Kernels

VOCABULARY, MAX_STEPS, NUM_SEEN = 11, 4, 6
has_triton = importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.usefixtures("kernel_device")
CHOICES = ["torch", pytest.param("triton", marks=pytest.mark.skipif(not has_triton, reason="needs Triton"))]


def states(num_slots: int, seed: int, *, has_seen: bool, has_values: bool) -> tuple[SlotState, DrawnTokens]:
    """Slots of all kinds: some rest, some are at their last token, some may not stop yet."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size or (num_slots,), generator=generator).to(dtype)

    numbers_S6 = integers(1000, torch.int64, num_slots, 6)
    numbers_S6[:, 1] = integers(NUM_SEEN, torch.int64)
    state = SlotState(
        token_S=integers(VOCABULARY, torch.int64),
        position_S=integers(50, torch.int32),
        left_S=integers(4, torch.int32),
        to_mask_S=integers(3, torch.int32) - 1,
        integers_S6=numbers_S6,
        drawn_SK4=torch.zeros(num_slots, MAX_STEPS + 1, 4),
        count_S=integers(MAX_STEPS, torch.int64),
        status_S=integers(2, torch.int32),
        is_stop_V=torch.rand(VOCABULARY, generator=generator) < 0.4,
        seen_RV=torch.rand(NUM_SEEN, VOCABULARY, generator=generator) < 0.2 if has_seen else None,
    )
    drawn = DrawnTokens(
        integers(VOCABULARY, torch.int64),
        torch.randn(num_slots, 2, generator=generator),
        integers(4, torch.int32),
        torch.randn(num_slots, generator=generator) if has_values else None,
    )
    return state, drawn


def one_by_one(state: SlotState, drawn: DrawnTokens) -> None:
    for s in range(len(state.token_S)):
        token, runs = int(drawn.token_S[s]), int(state.left_S[s]) > 0
        value = 0.0 if drawn.value_S is None else float(drawn.value_S[s])
        state.drawn_SK4[s, int(state.count_S[s])] = torch.tensor([token, *drawn.scores_S2[s].tolist(), value])
        if state.seen_RV is not None:
            state.seen_RV[int(state.integers_S6[s, 1]), token] = True
        if runs:
            state.count_S[s] += 1
            state.left_S[s] -= 1
            if state.status_S[s] == 0:
                state.status_S[s] = drawn.status_S[s]
        if bool(state.is_stop_V[token]) and state.to_mask_S[s] <= 0:
            state.left_S[s] = 0
        state.to_mask_S[s] -= 1
        if state.left_S[s] > 0:
            state.token_S[s] = token
            state.position_S[s] += 1
            state.integers_S6[s, POSITION] += 1


def copied(state: SlotState) -> SlotState:
    return replace(state, **{f.name: t.clone() for f in fields(state) if (t := getattr(state, f.name)) is not None})


@pytest.mark.parametrize("choice", CHOICES)
@settings(max_examples=20, deadline=None)
@given(
    num_slots=st.sampled_from([1, 3, 130]),
    seed=st.integers(0, 2**32 - 1),
    has_seen=st.booleans(),
    has_values=st.booleans(),
)
def test_each_slot_goes_on_or_ends_by_itself(
    choice: Choice, num_slots: int, seed: int, has_seen: bool, has_values: bool
) -> None:
    state, drawn = states(num_slots, seed, has_seen=has_seen, has_values=has_values)
    expected = copied(state)
    advance(state, drawn, kernels=Kernels(choice))
    one_by_one(expected, drawn)
    for field in fields(state):
        ours, theirs = getattr(state, field.name), getattr(expected, field.name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), field.name


@pytest.mark.parametrize("choice", CHOICES)
def test_views_of_more_slots_are_changed_in_place(choice: Choice) -> None:
    """A step of few slots works in the memory of all."""
    whole, drawn = states(7, 0, has_seen=True, has_values=True)
    others = ("is_stop_V", "seen_RV")
    part = replace(whole, **{f.name: getattr(whole, f.name)[:3] for f in fields(whole) if f.name not in others})
    before, expected = copied(whole), copied(part)
    few = DrawnTokens(*(None if t is None else t[:3] for t in (getattr(drawn, f.name) for f in fields(drawn))))  # type: ignore[arg-type]
    advance(part, few, kernels=Kernels(choice))
    one_by_one(expected, few)
    for field in fields(whole):
        assert torch.equal(getattr(part, field.name), getattr(expected, field.name)), field.name
        if field.name not in others:
            assert torch.equal(getattr(whole, field.name)[3:], getattr(before, field.name)[3:]), field.name


def test_there_is_no_native_kernel() -> None:
    state, drawn = states(4, 0, has_seen=False, has_values=False)
    with pytest.raises(NativeUnavailableError):
        advance(state, drawn, kernels=Kernels("native"))
