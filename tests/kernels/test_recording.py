"""Recorded calls of native kernels: repeated for other values and fewer rows they have the bits of direct calls."""

from collections.abc import Callable

import pytest
import torch

from drawn import normal
from tunesmith.base.core.errors import InputError
from tunesmith.engine.kernels.attention.api import attend
from tunesmith.engine.kernels.attention.records import AttentionSettings, Places
from tunesmith.engine.kernels.gated.api import gated
from tunesmith.engine.kernels.linear.api import linear, pack
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.recording import Recording
from tunesmith.engine.kernels.rms_norm.api import add_rms_norm

Compute = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def layer(native: Kernels) -> Compute:
    """A norm, a norm of each half, a product, a gate and a residual stream."""
    weight_H, weight_D = normal(32, seed=1), normal(16, seed=2)
    weight = pack(normal(64, 32, seed=3), 1024, kernels=native)

    def compute(x_RH: torch.Tensor) -> torch.Tensor:
        first = add_rms_norm(x_RH, None, weight_H, 1e-5, kernels=native)
        heads_RKD = add_rms_norm(first.normed_RH.unflatten(1, (2, 16)), None, weight_D, 1e-5, kernels=native).normed_RH
        gate_RH, up_RH = linear(heads_RKD.flatten(1), weight, None).split_with_sizes((32, 32), -1)
        inner_RH = gated(gate_RH, up_RH, "silu", kernels=native)
        return add_rms_norm(inner_RH, first.sum_RH, weight_H, 1e-5, kernels=native).normed_RH

    return compute


def recorded(compute: Compute, x_RH: torch.Tensor) -> tuple[Recording, torch.Tensor]:
    with Recording(len(x_RH)) as recording:
        out_RH = compute(x_RH)
    return recording, out_RH


def test_other_values_fewer_rows_and_threads_give_the_bits_of_direct_calls(layer: Compute) -> None:
    x_RH, num_threads = normal(8, 32), torch.get_num_threads()
    expected_RH = layer(x_RH)
    recording, out_RH = recorded(layer, x_RH)
    assert torch.equal(out_RH, expected_RH) and not recording.problem
    try:
        for seed, num_rows in enumerate((8, 3, 1, 5), 1):
            torch.set_num_threads(1 + seed % 2)
            x_RH.copy_(normal(8, 32, seed=seed))
            recording.replay(num_rows)
            assert torch.equal(out_RH[:num_rows], layer(x_RH[:num_rows].clone()))
    finally:
        torch.set_num_threads(num_threads)


def test_memory_is_used_again_once_the_last_view_has_gone(native: Kernels) -> None:
    x_RH, weight_H = normal(8, 32), normal(32, seed=1)

    def norm() -> torch.Tensor:
        return add_rms_norm(x_RH, None, weight_H, 1e-5, kernels=native).normed_RH

    with Recording(8):
        first_RH = norm()
        place = first_RH.data_ptr()
        half_RD = first_RH.split_with_sizes((16, 16), -1)[1]
        del first_RH
        second_RH = norm()
        assert second_RH.data_ptr() != place
        del half_RD
        assert norm().data_ptr() == place


def test_a_weight_that_a_recording_reads_outlives_its_parameter(native: Kernels) -> None:
    parameter = torch.nn.Parameter(normal(32, seed=1), requires_grad=False)
    x_RH, before_H = normal(8, 32), parameter.data.clone()
    recording, out_RH = recorded(lambda x_RH: add_rms_norm(x_RH, None, parameter, 1e-5, kernels=native).normed_RH, x_RH)
    parameter.data = torch.zeros(32)
    recording.replay(8)
    assert torch.equal(out_RH, add_rms_norm(x_RH, None, before_H, 1e-5, kernels=native).normed_RH)


@pytest.mark.parametrize(
    ("change", "name"), [(lambda x_RH: x_RH + 1, "aten.add.Tensor"), (lambda x_RH: x_RH.mul_(2), "aten.mul_.Tensor")]
)
def test_an_operation_of_torch_is_the_problem(change: Compute, name: str, layer: Compute) -> None:
    recording, _ = recorded(lambda x_RH: layer(change(x_RH.clone()[:4])), normal(8, 32))
    assert recording.problem == "aten.clone.default"
    recording, _ = recorded(lambda x_RH: layer(change(x_RH)), normal(8, 32))
    assert recording.problem == name


def test_a_place_outside_of_the_cache_is_an_error_of_the_replay_too(native: Kernels) -> None:
    settings = AttentionSettings(num_heads=1, num_kv_heads=1, head_dim=16, scale=0.25)
    cache_2NW, q_TX = torch.zeros(2, 4, 16 * 16), normal(4, 16)
    positions_T, tables_RN = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)[:, None].contiguous()
    places = Places(positions_T, torch.arange(4, dtype=torch.int32), tables_RN)
    with Recording(4) as recording:
        attend(q_TX, q_TX, q_TX, None, places, cache_2NW, settings, kernels=native)
    recording.replay(4)
    positions_T[2] = 16
    with pytest.raises(InputError, match="a position is negative, or outside of the block tables"):
        recording.replay(4)


def test_calls_are_recorded_inside_of_the_block_only(layer: Compute) -> None:
    x_RH = normal(8, 32)
    recording, out_RH = recorded(layer, x_RH)
    kept_RH = out_RH.clone()
    layer(normal(8, 32, seed=7))
    recording.replay(8)
    assert torch.equal(out_RH, kept_RH)
