"""Kernels compiled for older processors of the same family give what the definitions give."""

import platform
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import drawn
from preference_cases import batch_of, exact
from tunesmith.engine.kernels import native as compiled
from tunesmith.engine.kernels.adamw.api import adamw, sums_of_squares
from tunesmith.engine.kernels.adamw.torch_impl import AdamWSettings, FloatMoments, ParameterUpdate
from tunesmith.engine.kernels.attention.api import attend_packed
from tunesmith.engine.kernels.attention.records import AttentionSettings, Rope
from tunesmith.engine.kernels.gated.api import activate, gated, softcap
from tunesmith.engine.kernels.linear_int8.api import linear as int8_linear
from tunesmith.engine.kernels.linear_int8.api import pack as pack_int8
from tunesmith.engine.kernels.logprob.api import chosen_logp_entropy
from tunesmith.engine.kernels.masked_softmax.api import masked_softmax
from tunesmith.engine.kernels.masked_softmax.torch_impl import KeyMask
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.kernels.preference.api import update_in_place
from tunesmith.engine.kernels.rms_norm.api import add_rms_norm
from tunesmith.engine.kernels.sample.api import sample
from tunesmith.engine.kernels.sample.torch_impl import NoiseKeys, SampleSettings

normal = partial(drawn.normal, scale=2.0)


@pytest.fixture(scope="module", params=["x86-64", "x86-64-v3"])
def portable(request, require) -> Kernels:
    """Kernels without AVX-512, and without AVX; the cache knows them by their flags."""
    require("c++", "g++", "clang++")
    if platform.machine() != "x86_64":
        pytest.skip("these are levels of x86-64")
    kernels = Kernels("native")
    with pytest.MonkeyPatch.context() as patch:
        flags = tuple(flag.replace("native", request.param) for flag in compiled.FLAGS)
        patch.setattr(compiled, "FLAGS", flags)
        normalized = ("rms_norm", "masked_softmax", "logprob", "attention", "attention_gradient")
        for op in ("sample", "gated", "linear", "linear_int8", "preference", "adamw", *normalized):
            assert kernels.library(op, torch.device("cpu")) is not None
    return kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_definition(dtype: torch.dtype, portable: Kernels):
    x, y, weight = normal(70, 45).to(dtype), normal(70, 45, seed=1).to(dtype), normal(45, seed=2).to(dtype)
    ids = torch.arange(70) % 45
    works = {
        "rms_norm": lambda x, y, weight, kernels: add_rms_norm(x, y, weight, 1e-5, kernels=kernels).normed_RH,
        "rms_norm, offset": lambda x, y, weight, kernels: (
            add_rms_norm(x, y, weight, 1e-5, offset=1.0, kernels=kernels).normed_RH
        ),
        "silu": lambda x, y, weight, kernels: gated(x, y, "silu", kernels=kernels) + 0 * weight,
        "gelu": lambda x, y, weight, kernels: activate(x, "gelu_tanh", kernels=kernels) + 0 * y + 0 * weight,
        "softcap": lambda x, y, weight, kernels: softcap(x, 3.0, kernels=kernels) + 0 * y + 0 * weight,
        "softmax": lambda x, y, weight, kernels: (
            masked_softmax(x[None, None, :45], scale=0.5, mask=KeyMask(causal=True), kernels=kernels)[0, 0]
            + 0 * (x[45:].sum() + y.sum() + weight.sum())
        ),
        "logprob": lambda x, y, weight, kernels: (
            torch.stack(chosen_logp_entropy(x, ids, 0.7, kernels=kernels)).sum() + 0 * y + 0 * weight
        ),
    }
    for name, work in works.items():
        found, expected = (
            _with_gradients(partial(work, kernels=kernels), x, y, weight) for kernels in (portable, Kernels("torch"))
        )
        for ours, theirs in zip(found, expected, strict=True):
            scale = float(theirs.abs().max())
            rtol = 2e-6 if dtype == torch.float32 else 2**-6
            torch.testing.assert_close(ours, theirs, atol=rtol * max(1.0, scale), rtol=rtol, msg=partial(_named, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients_are_those_of_the_definition(dtype: torch.dtype, portable: Kernels):
    settings = AttentionSettings(num_heads=4, num_kv_heads=2, head_dim=32, scale=32**-0.5, softcap=5.0)
    inputs = [normal(60, width, seed=seed).to(dtype) for seed, width in enumerate((128, 64, 64))]
    angle_PF = torch.arange(40)[:, None] * 0.8 ** torch.arange(16)
    rope = Rope(angle_PF.cos(), angle_PF.sin())
    found, expected = (
        _with_gradients(lambda *qkv, on=on: attend_packed(*qkv, rope, [40, 20], settings, kernels=on), *inputs)
        for on in (portable, Kernels("torch"))
    )
    for ours, theirs in zip(found, expected, strict=True):
        tolerance = (1e-5 if dtype == torch.float32 else 2**-6) * max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_an_optimizer_step_and_the_norm_of_a_gradient_are_those_of_the_definition(portable: Kernels):
    gradient = normal(300, 7).bfloat16()
    found, expected = (
        ParameterUpdate(gradient, normal(300, 7, seed=1), None, FloatMoments(*torch.zeros(2, 300, 7)), 3, 1e-2, 0.1)
        for _ in range(2)
    )
    found, expected = (replace(one, weight=one.master.bfloat16()) for one in (found, expected))
    adamw([found], AdamWSettings(0.9, 0.95, 1e-8), 0.5, kernels=portable)
    adamw([expected], AdamWSettings(0.9, 0.95, 1e-8), 0.5, kernels=Kernels("torch"))
    torch.testing.assert_close(found.master, expected.master, atol=1e-6, rtol=1e-6)
    assert torch.equal(found.weight, found.master.bfloat16())
    assert sums_of_squares([gradient], kernels=portable) == pytest.approx([gradient.double().square().sum().item()])


def test_draws_are_those_of_the_definition_and_scored_to_the_bit(portable: Kernels):
    logits_BV, zero_B, row_B = normal(200, 1000), torch.zeros(200, dtype=torch.int64), torch.arange(200)
    chosen, keys = SampleSettings.same(200, top_p=0.9, top_k=50), NoiseKeys(zero_B, row_B, zero_B, zero_B)
    found = sample(logits_BV, chosen, keys, kernels=portable)
    expected = sample(logits_BV, chosen, keys, kernels=Kernels("torch"))
    assert (found.token_B == expected.token_B).float().mean() > 0.99
    logp_N, _ = chosen_logp_entropy(logits_BV, found.token_B, 1.0, kernels=portable)
    assert torch.equal(logp_N, found.raw_logp_B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 512), (5000, 512), (5000, 333)])
def test_votes_select_and_update_as_defined(shape: tuple[int, int], dtype: torch.dtype, portable: Kernels):
    batch, start_N = batch_of(*shape, dtype=dtype, share_of_ties=0.1), torch.zeros(shape[1])
    out_BN, weights_N = torch.empty_like(batch.outputs_a_BN), start_N.clone()
    update_in_place(batch, weights_N, scale=0.01, out_BN=out_BN, kernels=portable)
    expected = exact(batch, start_N, 0.01)
    assert torch.equal(out_BN, expected.selected_BN.to(dtype))
    torch.testing.assert_close(weights_N.double(), expected.weights_N, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_8_bits_are_those_of_the_definition(dtype: torch.dtype, portable: Kernels):
    """With AVX2 by other instructions, and without it in torch."""
    x, weight, bias = normal(13, 333).to(dtype), normal(70, 333, seed=1).to(dtype), normal(70, seed=2).to(dtype)
    found = int8_linear(x, pack_int8(weight, kernels=portable), bias)
    expected = int8_linear(x, pack_int8(weight, kernels=Kernels("torch")), bias)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=torch.finfo(dtype).eps)


@pytest.mark.slow
def test_kernels_for_aarch64_compile_and_give_what_the_definitions_give(tmp_path: Path):
    """In emulation, with a cross compiler; a sample of the kernels is called, all are compiled."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    flags = [flag for flag in compiled.FLAGS if flag not in ("-march=native", "-shared")]
    include = f"-I{Path(compiled.__file__).parent}"
    objects: list[Path] = []
    for source in (*Path(compiled.__file__).parent.glob("*/cpu.cpp"), Path(__file__).with_name("portable_check.cpp")):
        objects.append(tmp_path / f"{source.parent.name}.o")
        subprocess.run([compiler, *flags, include, "-c", str(source), "-o", str(objects[-1])], check=True)
    program = str(tmp_path / "check")
    subprocess.run([compiler, "-static", "-fopenmp", *map(str, objects), "-o", program], check=True)
    done = subprocess.run([emulator, program], capture_output=True, text=True, check=False)
    assert done.stdout == "0 wrong\n", done.stdout[-2000:]


def _with_gradients(work, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = work(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def _named(name: str, message: str) -> str:
    return f"{name}: {message}"
