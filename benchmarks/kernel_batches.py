"""Cases of `benchmarks.kernels` that work on the tokens of a batch: GAE, policy loss, segment sums, upload.

Shapes: B sequences, T completion tokens, S segments.
"""

from dataclasses import fields, replace

import torch

from benchmarks.kernel_case import Case, Setting, error_of
from tunesmith.batch.upload import Uploader
from tunesmith.kernels.gae import torch_impl as gae_torch
from tunesmith.kernels.gae.api import gae
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.policy_loss import torch_impl as policy_torch
from tunesmith.kernels.policy_loss.api import policy_loss
from tunesmith.kernels.policy_loss.records import PolicyTerms, PolicyTokens
from tunesmith.kernels.segment_sum.api import segment_sum

_CHECKED_ROWS = 64
"""Rows that are compared with the loop over tokens, which takes long."""


def gae_case(setting: Setting) -> Case:
    """Advantages and returns of 64 sequences of up to 512 tokens, against the loop over columns in torch."""
    shape = (setting.sized(64, 4, 512), setting.sized(512, 32, 1024))
    reward_BT, value_BT = setting.normal(*shape), setting.normal(*shape, stream=1)
    mask_BT = _mask(setting, shape)
    arguments = (reward_BT, value_BT, mask_BT, 1.0, 0.95)
    kernels = Kernels(setting.choice)

    def error() -> float:
        rows = slice(0, _CHECKED_ROWS)
        exact = gae_torch.gae_loop(reward_BT[rows], value_BT[rows], mask_BT[rows], *arguments[3:])
        found = gae(*arguments, kernels=kernels)
        return error_of(zip((x[rows].cpu() for x in found), exact, strict=True))

    return Case(
        ours=lambda: gae(*arguments, kernels=kernels),
        plain=lambda: gae_torch.gae(*arguments),
        max_error=error,
        tolerance=1e-5,
        num_bytes=mask_BT.numel() * (4 * 4 + 1),
        device=setting.device,
        size=f"{shape[0]} sequences x {shape[1]} tokens",
        against="the loop over columns in torch",
        picked=kernels.picked("gae", reward_BT),
        compiles=False,
    )


def policy_loss_case(setting: Setting) -> Case:
    """Clipped loss with KL and entropy terms of 64 x 512 tokens, statistics and gradient, against autograd in torch."""
    shape = (setting.sized(64, 4, 4096), setting.sized(512, 32, 2048))
    logp_BT = -setting.normal(*shape).abs()
    tokens = PolicyTokens(
        logp_BT.requires_grad_(),
        logp_BT.detach() + 0.2 * setting.normal(*shape, stream=1),
        setting.normal(*shape, stream=2),
        _mask(setting, shape),
        logp_BT.detach() + 0.2 * setting.normal(*shape, stream=3),
        setting.normal(*shape, stream=4).abs().requires_grad_(),
    )
    terms = PolicyTerms(kl="k3", kl_coef=0.05, entropy_coef=0.01)
    kernels = Kernels(setting.choice)
    count = float(tokens.mask_BT.sum())

    def gradients(loss: torch.Tensor, of: PolicyTokens) -> tuple[torch.Tensor, ...]:
        assert of.entropy_BT is not None
        return torch.autograd.grad(loss, (of.logp_BT, of.entropy_BT))

    def ours(of: PolicyTokens = tokens) -> list[torch.Tensor]:
        loss, sums = policy_loss(of, terms, count, count, kernels=kernels)
        return [loss, *gradients(loss, of), *(getattr(sums, field.name) / count for field in fields(sums))]

    def plain(of: PolicyTokens = tokens) -> list[torch.Tensor]:
        loss, sums = policy_torch.policy_loss(of, terms, count, count)
        return [loss, *gradients(loss, of), *(getattr(sums, field.name) / count for field in fields(sums))]

    def error() -> float:
        wide = {f.name: getattr(tokens, f.name).detach().double() for f in fields(tokens) if f.name != "mask_BT"}
        wide |= {name: wide[name].requires_grad_() for name in ("logp_BT", "entropy_BT")}
        return error_of(zip(ours(), plain(replace(tokens, **wide)), strict=True))

    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        tolerance=1e-5,
        num_bytes=logp_BT.numel() * (5 * 4 + 1 + 2 * 4),  # read five numbers and the mask, write two gradients
        device=setting.device,
        size=f"{shape[0]} sequences x {shape[1]} tokens, with gradients",
        against="the same by autograd in torch",
        picked=kernels.picked("policy_loss", logp_BT),
    )


def segment_sum_case(setting: Setting) -> Case:
    """Sums of 4,096 sequences within a million tokens, against index_add over the number of each token's sequence."""
    num_segments, mean = setting.sized(4096, 16, 32768), setting.sized(256, 8, 1024)
    lengths_S = setting.whole(2 * mean, num_segments)
    offset_S1 = torch.cat((lengths_S.new_zeros(1), lengths_S.cumsum(0)))
    values_T = setting.normal(int(offset_S1[-1]))
    segment_T = torch.arange(num_segments, device=setting.device).repeat_interleave(lengths_S)
    kernels = Kernels(setting.choice)

    def by_index(values_T: torch.Tensor) -> torch.Tensor:
        return values_T.new_zeros(num_segments).index_add_(0, segment_T, values_T)

    return Case(
        ours=lambda: segment_sum(values_T, offset_S1, kernels=kernels),
        plain=lambda: by_index(values_T),
        max_error=lambda: error_of([(segment_sum(values_T, offset_S1, kernels=kernels), by_index(values_T.double()))]),
        tolerance=1e-5,
        num_bytes=4 * len(values_T) + 12 * num_segments,
        device=setting.device,
        size=f"{len(values_T)} tokens in {num_segments} sequences",
        against="index_add",
        picked=kernels.picked("segment_sum", values_T),
    )


def upload_case(setting: Setting) -> Case:
    """The nine fields of a PPO batch of 64 x 512 tokens, against a copy of each."""
    cpu = replace(setting, device=torch.device("cpu"))
    shape = (setting.sized(64, 4), setting.sized(512, 16))
    fields_ = [cpu.whole(50_000, *shape), cpu.whole(shape[1], shape[0]), _mask(cpu, shape)]
    fields_ += [cpu.normal(*shape, stream=stream) for stream in range(6)]
    uploader = Uploader(setting.device)

    def error() -> float:
        received = [tensor.cpu() for tensor in uploader.tensors(fields_)]
        return error_of((found.double(), sent.double()) for found, sent in zip(received, fields_, strict=True))

    return Case(
        ours=lambda: uploader.tensors(fields_),
        plain=lambda: [field.to(setting.device, copy=True) for field in fields_],
        max_error=error,
        tolerance=0.0,
        num_bytes=2 * sum(tensor.numel() * tensor.element_size() for tensor in fields_),
        device=setting.device,
        size=f"{len(fields_)} fields of {shape[0]} x {shape[1]}",
        against="field by field",
        picked="one pinned copy" if setting.device.type == "cuda" else "one copy, not pinned",
        compiles=False,
        by_wall=True,
    )


def _mask(setting: Setting, shape: tuple[int, int]) -> torch.Tensor:
    """Right-padded rows, half full to full."""
    length_B1 = shape[1] // 2 + setting.whole(shape[1] // 2 + 1, shape[0], 1, stream=9)
    return torch.arange(shape[1], device=setting.device) < length_B1
