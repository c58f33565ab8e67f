"""Cases of `benchmarks.kernels` that work on the tokens of a batch: GAE, policy loss, upload.

Shapes: B sequences, T completion tokens.
"""

from dataclasses import fields, replace

import torch

from benchmarks.kernel_case import Case, Setting, error_of
from tunesmith.algorithms.kl import penalty
from tunesmith.algorithms.policy_loss import surrogate
from tunesmith.batch.upload import Uploader
from tunesmith.kernels.gae import torch_impl as gae_torch
from tunesmith.kernels.gae.api import gae
from tunesmith.kernels.native import Kernels
from tunesmith.kernels.policy_loss.api import fused_policy_loss
from tunesmith.kernels.policy_loss.records import PolicyTerms, PolicyTokens

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
        exact = gae_torch.gae(reward_BT[rows].double().cpu(), value_BT[rows].cpu(), mask_BT[rows].cpu(), *arguments[3:])
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
    """Clipped loss of 64 x 512 tokens with its KL term and gradient in one Triton kernel, against autograd in torch."""
    shape = (setting.sized(64, 4, 4096), setting.sized(512, 32, 2048))
    logp_BT = -setting.normal(*shape).abs()
    tokens = PolicyTokens(
        logp_BT.requires_grad_(),
        logp_BT.detach() + 0.2 * setting.normal(*shape, stream=1),
        setting.normal(*shape, stream=2),
        _mask(setting, shape),
        logp_BT.detach() + 0.2 * setting.normal(*shape, stream=3),
    )
    terms = PolicyTerms(kl="k3", kl_coef=0.05)
    kernels = Kernels(setting.choice)
    count = float(tokens.mask_BT.sum())

    def plain(of: PolicyTokens = tokens) -> list[torch.Tensor]:
        assert of.reference_logp_BT is not None
        kl_BT = penalty(terms.kl, of.logp_BT, of.reference_logp_BT, of.mask_BT)
        loss = (surrogate(of, terms)[0] + terms.kl_coef * kl_BT).sum() / count
        return [loss, *torch.autograd.grad(loss, of.logp_BT)]

    def ours() -> list[torch.Tensor]:
        fused = fused_policy_loss(tokens, terms, count, kernels=kernels)
        return plain() if fused is None else [fused[0], *torch.autograd.grad(fused[0], tokens.logp_BT)]

    def error() -> float:
        wide = {f.name: getattr(tokens, f.name) for f in fields(tokens) if f.name not in ("mask_BT", "entropy_BT")}
        wide = {name: value.detach().double() for name, value in wide.items()}
        wide["logp_BT"].requires_grad_()
        return error_of(zip(ours(), plain(replace(tokens, **wide)), strict=True))

    return Case(
        ours=ours,
        plain=plain,
        max_error=error,
        tolerance=1e-5,
        num_bytes=logp_BT.numel() * (4 * 4 + 1 + 4),  # read four numbers and the mask, write a gradient
        device=setting.device,
        size=f"{shape[0]} sequences x {shape[1]} tokens, with gradients",
        against="the same by autograd in torch",
        picked=kernels.picked("policy_loss", logp_BT),
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
