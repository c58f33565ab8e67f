"""Kernels that are usable on their own, each by its name: `from tunesmith.kernels import Kernels, gae`.

A name's module is loaded on its first use; `docs/kernels.md` has examples. The code is in `engine/kernels/`.
"""

import importlib
from typing import Any

_HOME = {
    "Kernels": "native",
    "KeyMask": "masked_softmax.torch_impl",
    "NoiseKeys": "sample.torch_impl",
    "OutputLayer": "logprob.head",
    "PolicyTerms": "policy_loss.records",
    "PolicyTokens": "policy_loss.records",
    "PreferenceBatch": "preference.torch_impl",
    "SampleSettings": "sample.torch_impl",
    "chosen_logp_entropy": "logprob.api",
    "gae": "gae.api",
    "head_logp_entropy": "logprob.head",
    "iterative_tuning": "preference.api",
    "process_user_preference": "preference.api",
    "sample": "sample.api",
    "select_and_update": "preference.api",
    "update_in_place": "preference.api",
}
"""Public names, and the modules of `engine.kernels` that define them."""


def __getattr__(name: str) -> Any:
    """The function or class of this name, from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"tunesmith.engine.kernels.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names, sorted."""
    return sorted(_HOME)
