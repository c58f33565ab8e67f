"""Opens the rollout engine that a recipe or a command asks for."""

from collections.abc import Callable
from typing import Literal

from torch import nn

from tunesmith.core.errors import InputError
from tunesmith.core.log import get_logger
from tunesmith.kernels.native import Kernels
from tunesmith.models.language_model import LanguageModel, language_model
from tunesmith.models.loaded import PreTrainedModel, PreTrainedTokenizerBase
from tunesmith.rollout.device.engine import DeviceEngine
from tunesmith.rollout.engine import Engine
from tunesmith.rollout.native_engine import NativeEngine
from tunesmith.rollout.transformers_backend import TransformersEngine

_log = get_logger(__name__)

Backend = Literal["native", "transformers"]


def open_engine(
    model: PreTrainedModel | LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    backend: Backend = "native",
    weight_version: Callable[[], int] = lambda: 0,
    batch_size: int = 64,
    num_slots: int = 128,
    kv_cache_mb: int | None = None,
    value_head: nn.Module | None = None,
) -> Engine:
    """An engine that draws from `model`'s own weights, and stamps `weight_version()` on what it draws.

    `batch_size` is of `transformers`; `num_slots`, the completions that are drawn at a time, and `kv_cache_mb` are of
    `native`. None takes as much cache as a request needs. With `value_head`, a native engine records the values of
    states. On a GPU `native` is the device engine. A model of a family that is not known (`models/architecture.py`) is
    drawn from by transformers, which is said in the log.

    Raises:
        InputError: for an unknown backend or a number below 1.
    """
    if backend not in ("native", "transformers"):
        raise InputError(f"rollout backend {backend!r} is unknown; choose native or transformers")
    for name, value in (("batch_size", batch_size), ("num_slots", num_slots), ("kv_cache_mb", kv_cache_mb)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; give at least 1")
    if backend == "native":
        known = model if isinstance(model, LanguageModel) else language_model(model, Kernels())
        if known.decoder is not None:
            return NativeEngine(
                known,
                tokenizer,
                weight_version=weight_version,
                num_slots=num_slots,
                kv_cache_mb=kv_cache_mb,
                value_head=value_head,
            )
        if known.output is not None:
            return DeviceEngine(
                known.module,
                tokenizer,
                kernels=known.kernels,
                weight_version=weight_version,
                num_slots=num_slots,
                kv_cache_mb=kv_cache_mb,
                value_head=value_head,
            )
        _log.info("the rollout engine is transformers, which is slower: %s", known.reason)
    module = model.module if isinstance(model, LanguageModel) else model
    return TransformersEngine(module, tokenizer, weight_version=weight_version, batch_size=batch_size)
