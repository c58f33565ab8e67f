"""The worker's side: an engine of its own over the published weights, which answers messages."""

import time
from collections.abc import Callable

import torch
from torch import nn

from tunesmith.base.core.errors import TunesmithError
from tunesmith.base.core.system import keep_freed_memory
from tunesmith.base.core.trace import span, trace
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.fingerprint import fingerprint_of
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.rollout import weight_check
from tunesmith.engine.rollout.native_engine import Native, NativeEngine
from tunesmith.engine.rollout.workers import weights
from tunesmith.engine.rollout.workers.messages import (
    Draw,
    Drawn,
    Failed,
    Handle,
    Load,
    Loaded,
    Message,
    Refused,
    Reply,
    Setup,
    Tensors,
    Unload,
    Unloaded,
)


class Worker:
    """Answers one message at a time; `fetch` gives the tensors that were published under a handle.

    Raises:
        OSError: from `fetch`, if they are gone.
    """

    def __init__(self, setup: Setup, fetch: Callable[[Handle], Tensors]) -> None:
        torch.set_num_threads(setup.num_threads)
        keep_freed_memory()
        self._setup, self._fetch = setup, fetch
        self._parameters: dict[str, nn.Parameter] = {}
        self._shared: set[str] = set()
        self._kernels = Kernels(setup.kernels)  # type: ignore[arg-type]
        self._names: dict[str, list[str]] = {}  # of the parameters of each part that is loaded, by its digest
        self._edition = 0
        self._engine: NativeEngine | None = None
        self._is_drawing = False

    def interrupt(self) -> None:
        """End the draw that runs, if any; for a signal's handler."""
        if self._is_drawing:
            raise KeyboardInterrupt

    def answer(self, message: Message) -> Reply:
        """The reply to `message`; errors other than Tunesmith's end the worker."""
        try:
            match message:
                case Load():
                    return self._load(message)
                case Draw():
                    return self._draw(message)
                case Unload():
                    if self._engine is not None:
                        self._engine.unload()
                    return Unloaded()
        except TunesmithError as error:
            return Failed(error)

    @torch.no_grad()
    def _load(self, message: Load) -> Reply:
        self._edition = 0  # until all is proven
        for part in message.parts:
            if part.digest in self._names:
                continue
            try:
                tensors = self._fetch(part.handle)
            except OSError:
                return Refused()  # newer ones were published meanwhile
            for name, tensor in tensors.items():
                self._take(name, tensor, part.is_frozen)
            self._names = {digest: names for digest, names in self._names.items() if not set(names) & tensors.keys()}
            self._names[part.digest] = list(tensors)
        own = fingerprint_of(self._parameters, kernels=self._kernels)
        found = tuple(own.digest(self._names[part.digest]) for part in message.parts)
        if found != tuple(part.digest for part in message.parts):
            self._names = {}
            return Loaded(message.edition, found, False, ())
        self._edition = message.edition
        engine = self._engine = self._engine or self._open()
        # Packs the weights, and checks that the packed ones reproduce the decoder's log-probs.
        is_exact = engine.is_exact
        return Loaded(message.edition, found, is_exact, tuple(weight_check.trained_logps(self._decoder).tolist()))

    def _take(self, name: str, tensor: torch.Tensor, is_frozen: bool) -> None:
        """Have the bytes of `tensor` as the parameter `name`. Frozen ones stay in the memory that all workers of the
        machine share, which nobody may write to.
        """
        own = self._parameters.setdefault(name, nn.Parameter(tensor, requires_grad=False))
        if is_frozen:
            own.data = tensor
            self._shared.add(name)
        elif name in self._shared or own.data_ptr() == tensor.data_ptr():
            own.data = tensor.clone()
            self._shared.discard(name)
        else:
            own.copy_(tensor)

    def _open(self) -> NativeEngine:
        setup = self._setup
        module, tokenizer, value_head = weights.unpickled(setup.skeleton, self._parameters)
        model = language_model(module, self._kernels)
        assert model.decoder is not None, "the engine refuses other models"
        self._decoder = model.decoder
        return NativeEngine(
            model,
            tokenizer,
            weight_version=lambda: self._edition,
            num_slots=setup.num_slots,
            kv_cache_mb=setup.kv_cache_mb,
            value_head=value_head,
            settings=Native(setup.weights, setup.drafts),
            is_trained=setup.is_trained,
        )

    def _draw(self, message: Draw) -> Reply:
        if self._engine is None or message.edition != self._edition:
            return Refused()
        prompts = [Prompt(str(index), "", token_ids=ids) for index, ids in enumerate(message.prompt_ids)]
        start_s = time.perf_counter()
        try:
            self._is_drawing = True
            with trace() as work, span("lease"):
                groups = self._engine.generate(prompts, message.n, message.sampling, keys=message.keys)
            self._is_drawing = False
        except KeyboardInterrupt:
            return Refused()
        finally:
            self._is_drawing = False
        return Drawn(tuple(group.completions for group in groups), work, time.perf_counter() - start_s)
