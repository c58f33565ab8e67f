"""The rollout engine for a model, from arguments or from a recipe."""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from torch import nn

from tunesmith.base.config.scale_sections import SamplingScaleSection
from tunesmith.base.config.sections import RolloutSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.core.log import get_logger
from tunesmith.engine.distributed.ranks import num_ranks, stages
from tunesmith.engine.models.language_model import FullForward, LanguageModel, language_model
from tunesmith.engine.models.loaded import PreTrainedModel, PreTrainedTokenizerBase
from tunesmith.engine.models.optimizer import MasterAdamW
from tunesmith.engine.rollout.device.engine import DeviceEngine
from tunesmith.engine.rollout.divided import DividedEngine
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.native_engine import Native, NativeEngine
from tunesmith.engine.rollout.remote.connection import VLLM
from tunesmith.engine.rollout.remote.engine import RemoteEngine
from tunesmith.engine.rollout.transformers_backend import TransformersEngine
from tunesmith.engine.rollout.workers.ahead import Ahead, AheadEngine
from tunesmith.engine.rollout.workers.engine import WorkerEngine, Workers

_log = get_logger(__name__)

Backend = Literal["native", "transformers"]


def open_engine(
    model: PreTrainedModel | LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    backend: Backend | Native | VLLM | Workers = "native",
    weight_version: Callable[[], int] = lambda: 0,
    batch_size: int = 64,
    num_slots: int = 128,
    kv_cache_mb: int | None = None,
    value_head: nn.Module | None = None,
) -> Engine:
    """An engine that draws from `model`'s weights as they are at each call of `generate`, however they were changed.

    Threads that call it take turns. A call from within a call is an error, and so is a change of weights meanwhile.

    Args:
        model: A causal language model of the transformers library.
        tokenizer: Its tokenizer; prompts of messages need a chat template.
        backend: "native": continuous batching over a paged key/value cache; on a GPU the device engine. A model with an
            unknown part (`engine/models/reader.py`) falls back to "transformers", with a line in the log.
            A record `Native` has settings of it. "transformers": `model.generate`. A record `VLLM`: vLLM, in this
            process or a server. A record `Workers`: the native engine in other processes, on a CPU.
        weight_version: Called once per `generate`; a number that is stamped on every group.
        batch_size: Sequences at a time (transformers).
        num_slots: Completions decoded, or asked of a server, at a time (native, vLLM).
        kv_cache_mb: Budget of the key/value cache in MiB (native). None: what a request needs, up to a share of memory.
        value_head: Maps hidden states `[R, H]` to values `[R]`, recorded as `Completion.values` (native).

    Raises:
        InputError: an unknown backend, a number below 1, or workers for what they cannot draw.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        >>> engine = open_engine(model, AutoTokenizer.from_pretrained(folder))
        >>> (group,) = engine.generate([Prompt("p1", "Once upon a time")], 4, SamplingParams(max_new_tokens=32, seed=0))
        >>> [completion.text for completion in group.completions]  # four texts
    """
    _check(backend, batch_size=batch_size, num_slots=num_slots, kv_cache_mb=kv_cache_mb)
    trained = model if isinstance(model, LanguageModel) else language_model(model)
    if isinstance(backend, VLLM):
        return RemoteEngine(trained, tokenizer, backend, weight_version=weight_version, num_slots=num_slots)
    if backend != "transformers":
        # A recipe may train by another forward pass, which says nothing about the engine.
        known = trained if trained.decoder is not None else language_model(trained.module, trained.kernels)
        if engine := _own_engine(known, backend, is_trained=known is trained):
            return engine(
                known,
                tokenizer,
                weight_version=weight_version,
                num_slots=num_slots,
                kv_cache_mb=kv_cache_mb,
                value_head=value_head,
            )
    return TransformersEngine(trained.module, tokenizer, weight_version=weight_version, batch_size=batch_size)


def _own_engine(
    model: LanguageModel, backend: Literal["native"] | Native | Workers, *, is_trained: bool
) -> Callable[..., Engine] | None:
    """The class of the engine of ours that draws this model, with its own settings; None if transformers must.

    Raises:
        InputError: that engine has no workers, or no products in 8 bits.
    """
    weights = "model" if backend == "native" else backend.weights
    if isinstance(model.backend, FullForward):
        if isinstance(backend, Workers) or weights != "model":
            asked = "workers draw by" if isinstance(backend, Workers) else f"weights are {weights}, which needs"
            raise InputError(f"{asked} the native engine, which cannot draw this model: {model.backend.reason}")
        _log.info("the rollout engine is transformers, which is slower: %s", model.backend.reason)
        return None
    if isinstance(backend, Workers):
        return partial(WorkerEngine, workers=backend, is_trained=is_trained)
    if model.decoder is not None:
        settings = Native() if backend == "native" else backend
        return partial(NativeEngine, settings=settings, is_trained=is_trained)
    if weights != "model":
        raise InputError(f"weights are {weights}, which the engine of a GPU has not; leave them out")
    return DeviceEngine


def engine_for(
    cfg: RolloutSection,
    policy: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Callable[[], MasterAdamW],
    value_head: nn.Module | None = None,
    scale: SamplingScaleSection | None = None,
    ahead: Ahead | None = None,
) -> Engine:
    """The engine that a recipe's sections name, on the weights that `optimizer()` changes; it may draw `ahead`."""
    workers = Workers.of(scale, cfg.own_weights, drafts=cfg.drafts) if scale is not None and scale.workers else None
    if workers and num_ranks() > 1:
        raise InputError(
            f"scale.workers is {workers.count}, but {num_ranks()} ranks draw already; set one of them back"
        )

    def weight_version() -> int:
        return optimizer().weight_version

    part = None if policy.decoder is None else policy.decoder.part
    if stages() is not None and cfg.backend != "native":
        raise InputError(f"rollout.backend is {cfg.backend}, but only native draws with scale.pipeline")
    engine = open_engine(
        policy if part is None else part.drawing,
        tokenizer,
        backend=VLLM.of(cfg) if cfg.backend == "vllm" else workers or own_backend(cfg),
        weight_version=weight_version,
        batch_size=cfg.batch_size,
        num_slots=cfg.num_slots,
        kv_cache_mb=cfg.kv_cache_mb,
        value_head=value_head,
    )
    if ahead is not None and ahead.staleness and isinstance(engine, WorkerEngine):
        return AheadEngine(engine, ahead, weight_version)
    if num_ranks() == 1:
        return engine
    return DividedEngine(engine, None if part is None else lambda: part.refresh(weight_version()))


def own_backend(cfg: RolloutSection) -> Literal["transformers"] | Native:
    """The engine of this process that a recipe's section names; the native one where it names vLLM."""
    return "transformers" if cfg.backend == "transformers" else Native(cfg.own_weights, cfg.drafts)


def _check(backend: object, **numbers: int | None) -> None:
    if not (isinstance(backend, Native | VLLM | Workers) or backend in get_args(Backend)):
        raise InputError(
            f"rollout backend {backend!r} is unknown; choose native, transformers or a record Native, VLLM or Workers"
        )
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; give at least 1")
