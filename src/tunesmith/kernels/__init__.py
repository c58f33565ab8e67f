"""Kernels: one folder for each operation, its definition in torch and the same in C++ or Triton, built when used.

What is usable on its own is found here by its name and loaded when asked for: `from tunesmith.kernels import
select_and_update`. A function named as its folder is in that folder: `from tunesmith.kernels.gae.api import gae`.
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
    "head_logp_entropy": "logprob.head",
    "iterative_tuning": "preference.api",
    "process_user_preference": "preference.api",
    "select_and_update": "preference.api",
    "update_in_place": "preference.api",
}
"""Public names, and the modules below this one that define them."""


def __getattr__(name: str) -> Any:
    """The function or class of this name, from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names, sorted."""
    return sorted(_HOME)
