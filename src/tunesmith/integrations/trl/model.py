"""Log-probs of TRL's trainers by our packed forward pass: on the live module, with gradients to its own parameters.

TRL computes log-probs by `model(**inputs, labels=labels, fused_lm_head=True)`. The call passes DDP, autocast and PEFT
on its way to the transformers module, and `install` replaces what that module does with it, so that all of them keep
their effect. A call or a module that we do not know is computed by TRL, and the reason is logged once.

Shape legend: B rows and S columns of TRL's batch, R runs of tokens, L tokens of the longest run, N labelled tokens,
H hidden.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import FusedCausalLMOutput

from tunesmith.base.core.log import Once, get_logger
from tunesmith.base.core.system import keep_freed_memory
from tunesmith.engine.kernels.logprob.head import head_logp_entropy, head_scores
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.architecture import UnsupportedArchitecture
from tunesmith.engine.models.decoder import Decoder
from tunesmith.engine.models.fingerprint import fingerprint, parts_of, same_parts
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedModel
from tunesmith.engine.models.logprob import trunk_states
from tunesmith.integrations.trl.optimizer import FusedOptimizer

_NUM_KNOWN = 4
"""Descriptions kept: the policy with and without its adapters, the reference, and one more."""

_IGNORED = {
    *("use_cache", "return_dict", "num_items_in_batch"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),  # which repeat position_ids
}
"""Arguments of a call that do not change the log-probs."""


class LiveModels:
    """The live modules of one trainer as language models, described again when a module has changed.

    `kept_bytes`: see `Decoder`.
    """

    def __init__(self, kept_bytes: int = 0) -> None:
        self._kept_bytes = kept_bytes
        self._kernels = Kernels()
        self._once = Once(get_logger(__name__))
        self._known: list[tuple[list[object], LanguageModel | str]] = []

    def get(self, model: nn.Module) -> LanguageModel | None:
        """`model`, perhaps wrapped by DDP or PEFT, with the flat decoder; None if it has to be computed by TRL.

        Under autocast weights of several dtypes are one. The reason for None is logged once.
        """
        reason = objection(model)
        found = reason or self._described(unwrapped(model))
        if isinstance(found, str):
            self.say("log-probs", found)
            return None
        return found

    def say(self, what: str, reason: str) -> None:
        """Log once that `what` is left to TRL, and why."""
        self._once.warning(f"Tunesmith leaves {what} to TRL: {reason}")

    def _described(self, module: PreTrainedModel) -> LanguageModel | str:
        parts = [torch.is_autocast_enabled("cpu"), *parts_of(module)]
        for known, found in self._known:
            if same_parts(known, parts):
                return found
        try:
            decoder = Decoder(module, self._kernels, kept_bytes=self._kept_bytes)
            found = LanguageModel(module, decoder, self._kernels)
        except UnsupportedArchitecture as error:
            found = str(error)
        self._known = [(parts, found), *self._known[: _NUM_KNOWN - 1]]
        return found


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers module inside of DDP, torch.compile and PEFT; adapters stay in its layers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def objection(model: nn.Module) -> str:
    """A property of `model` that only its own forward pass computes; empty if there is none."""
    module = unwrapped(model)
    if not isinstance(module, PreTrainedModel):
        return f"the model is a {type(module).__name__}, which is none of transformers"
    if any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values()):
        return "its PEFT adapter learns a prompt"
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu":
            return f"the model is on {parameter.device}; the packed forward pass is for CPUs"
        if isinstance(parameter, DTensor) or hasattr(parameter, "ds_id"):
            return f"{name} is divided among processes"
    for name, part in module.named_modules():
        has_hooks = part._forward_hooks or part._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        if isinstance(part, FullyShardedDataParallel):
            return f"{name} is divided among processes"
        if part is not module and "forward" in part.__dict__:
            return f"the forward of {name} was replaced"
        if has_hooks and not isinstance(part, nn.Linear | nn.Embedding):
            return f"{name or type(part).__name__} has forward hooks"
        if has_hooks and hasattr(part, "neftune_noise_alpha"):
            return "neftune_noise_alpha adds noise to the embeddings of padded rows"
        if part.training and _dropout(part) and "lora_dropout" not in name:
            return f"{name} has a dropout of {_dropout(part):g}; set it to 0 (in GRPOConfig: disable_dropout=True)"
    return ""


def drops_in_adapters(module: nn.Module) -> bool:
    """True if LoRA adapters have dropout, so that two passes differ."""
    return any("lora_dropout" in name and _dropout(part) for name, part in module.named_modules())


def _dropout(part: nn.Module) -> float:
    share = part.p if isinstance(part, nn.Dropout) else getattr(part, "attention_dropout", 0.0)
    return share if isinstance(share, float) else 0.0


def install(
    model: nn.Module,
    models: LiveModels,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
    temperature: float = 1.0,
) -> None:
    """Answer calls of `model` with `fused_lm_head=True` by the packed forward pass; all other calls stay as they are.

    `autocast` is the accelerator's, `temperature` that of TRL's own fused head. `log_sum_sq_probs` and `aux_loss` are
    None, and `is_top1` at a temperature other than 1.
    """
    module = unwrapped(model)
    original = module.forward

    @functools.wraps(getattr(original, "__func__", original))
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs)
        with autocast():
            found = "it is called with positional arguments" if args else _scores(models, self, kwargs, temperature)
        if isinstance(found, str):
            if found:
                models.say("log-probs", found)
            return original(*args, fused_lm_head=True, **kwargs)
        return found

    module.forward = MethodType(forward, module)


def _scores(
    models: LiveModels, module: PreTrainedModel, inputs: dict[str, Any], temperature: float
) -> FusedCausalLMOutput | str:
    """The result of TRL's fused head, or why TRL has to compute it; an empty text if the reason was logged."""
    given = {name: value for name, value in inputs.items() if value is not None and name not in _IGNORED}
    ids_BS, labels_BS = given.pop("input_ids", None), given.pop("labels", None)
    mask_BS, positions_BS = given.pop("attention_mask", None), given.pop("position_ids", None)
    if given.pop("output_router_logits", False) or given or ids_BS is None or labels_BS is None:
        return f"it is called with {', '.join(sorted(given)) or 'router logits, or without ids or labels'}"
    model = models.get(module)
    if model is None or model.decoder is None:
        return ""
    found = labelled_tokens(ids_BS, labels_BS, mask_BS, positions_BS)
    if isinstance(found, str):
        return found
    if reason := too_long(model.decoder, found.lengths_R):
        return reason
    hidden_NH = trunk_states(module, model.decoder, found.ids_RL, found.lengths_R, found.row_N, found.position_N)
    layer, is_top_N = model.decoder.output, None
    if temperature == 1:
        scores = head_scores(hidden_NH, layer, found.chosen_N, kernels=model.kernels)
        logp_N, entropy_N, is_top_N = scores.logp_N, scores.entropy_N, scores.is_top_N
    else:
        logp_N, entropy_N = head_logp_entropy(hidden_NH, layer, found.chosen_N, temperature, kernels=model.kernels)
    mean_N = None
    if layer.softcap is None:  # the mean of all logits is the logit of the mean weight
        bias = 0.0 if layer.bias_V is None else layer.bias_V.detach().float().mean()
        mean_weight_H = layer.weight_VH.detach().mean(0, dtype=torch.float32)
        mean_N = (hidden_NH.detach().float() @ mean_weight_H + bias) / temperature
    label_mask = labels_BS[:, 1:] != -100
    num_items = inputs.get("num_items_in_batch")
    return FusedCausalLMOutput(
        loss=-logp_N.sum() / (label_mask.sum() if num_items is None else num_items),
        log_probs=found.spread(logp_N, ids_BS),
        entropy=found.spread(entropy_N, ids_BS),
        mean_logits=None if mean_N is None else found.spread(mean_N, ids_BS),
        is_top1=None if is_top_N is None else found.spread(is_top_N, ids_BS),
        label_mask=label_mask,
    )


def too_long(decoder: Decoder, lengths_B: torch.Tensor) -> str:
    """Why rows of these lengths cannot be packed; empty if they can. Rotary positions of transformers have no end."""
    context = decoder.architecture.context_length
    return f"a row is longer than the model's context of {context} tokens" if int(lengths_B.max()) > context else ""


@dataclass(frozen=True, slots=True)
class LabelledTokens:
    """The labelled tokens of a batch, and the runs of tokens that predict them, without padding.

    `ids_RL` is right padded and sorted, so that runs with a common prefix are neighbours; run r has `lengths_R[r]`
    tokens. The state at (`row_N`, `position_N`) predicts token `chosen_N`, which is at `place_N` of the flat result.
    """

    ids_RL: torch.Tensor
    lengths_R: torch.Tensor
    row_N: torch.Tensor
    position_N: torch.Tensor
    chosen_N: torch.Tensor
    place_N: torch.Tensor

    def spread(self, value_N: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
        """`[B, S - 1]` with the values at their places, zero elsewhere."""
        num_rows, num_columns = ids_BS.shape
        flat = value_N.new_zeros(num_rows * (num_columns - 1)).index_put((self.place_N,), value_N)
        return flat.view(num_rows, num_columns - 1)


def labelled_tokens(
    ids_BS: torch.Tensor,
    labels_BS: torch.Tensor,
    mask_BS: torch.Tensor | None,
    positions_BS: torch.Tensor | None,
) -> LabelledTokens | str:
    """The labelled tokens of a batch in TRL's form, or why they cannot be packed.

    A row is padded on any side; with positions it may hold several sequences, each of which begins at position 0.
    Labels of -100, and that of a row's first column, are left out. Runs without labels are left out too.
    """
    num_columns = ids_BS.shape[1]
    if mask_BS is not None and mask_BS.shape != ids_BS.shape:
        return f"its attention mask has the shape {tuple(mask_BS.shape)}"
    index_X = torch.arange(ids_BS.numel())
    valid_X = torch.ones_like(index_X).bool() if mask_BS is None else mask_BS.bool().flatten()
    column_X = index_X % num_columns
    starts_X = valid_X & ((column_X == 0) | ~valid_X.roll(1))
    position_X = None if positions_BS is None else positions_BS.expand_as(ids_BS).flatten()
    if position_X is not None:
        starts_X |= valid_X & (position_X == 0)
    elif int(starts_X.sum()) > len(ids_BS):
        return "its attention mask has gaps"
    run_X = (starts_X.cumsum(0) - 1).clamp(min=0)
    start_R = starts_X.nonzero()[:, 0]
    scored_X = (labels_BS.flatten() != -100) & (column_X > 0)
    if not bool(scored_X.any()):
        return "a batch has no labelled token"
    offset_X = index_X - start_R[run_X]
    if position_X is not None and not torch.equal(position_X[valid_X], offset_X[valid_X]):
        return "its positions do not count the tokens of each sequence"
    if not bool((valid_X & (offset_X > 0))[scored_X].all()):
        return "a label has no token before it"
    index_N = scored_X.nonzero()[:, 0]
    # The state after a run's last labelled token predicts nothing, so the run ends before that token.
    lengths_R = torch.zeros_like(start_R).scatter_reduce(0, run_X[index_N], offset_X[index_N], "amax")
    ids_X = ids_BS.flatten()
    runs = [ids_X[start : start + length] for start, length in zip(start_R.tolist(), lengths_R.tolist(), strict=True)]
    order = sorted((run for run in range(len(runs)) if len(runs[run])), key=lambda run: runs[run].tolist())
    rank_R = torch.zeros_like(start_R)
    rank_R[order] = torch.arange(len(order))
    return LabelledTokens(
        pad_sequence([runs[run] for run in order], batch_first=True),
        lengths_R[order],
        rank_R[run_X[index_N]],
        offset_X[index_N] - 1,
        labels_BS.flatten()[index_N],
        index_N - index_N // num_columns - 1,
    )


class Twin:
    """A copy of a live model in another dtype, from which the engine draws: what autocast makes of it, once a step."""

    def __init__(self, live: LanguageModel, dtype: torch.dtype) -> None:
        self._live = live.module
        # The new parameters are made first, so that the copy never holds those of the live model.
        memo = {id(one): nn.Parameter(one.detach().to(dtype), one.requires_grad) for one in self._live.parameters()}
        module: PreTrainedModel = copy.deepcopy(self._live, memo).eval()  # type: ignore[arg-type]
        self.model = LanguageModel(module, Decoder(module, live.kernels), live.kernels)
        self._made_of = fingerprint(self._live, kernels=live.kernels)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights and buffers that changed."""
        now = fingerprint(self._live, kernels=self.model.kernels)
        targets = {**dict(self.model.module.named_parameters()), **dict(self.model.module.named_buffers())}
        for name, source in (*self._live.named_parameters(), *self._live.named_buffers()):
            if now.tensors[name] != self._made_of.tensors[name]:
                targets[name].data.copy_(source)
        self._made_of = now


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, without dropout; each part goes back to the mode it was in."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


if TYPE_CHECKING:
    _Trainer = Any  # a mixin's methods are those of the TRL trainer after it
else:
    _Trainer = object


class PackedTrainer(FusedOptimizer, _Trainer):
    """Mixin before a TRL trainer, which keeps everything but the computation of log-probs and the optimizer.

    A mixin with options of its own takes them in `start`, which also runs for a trainer that existed before. With
    gradient checkpointing the last layers whose activations fit in `kept_activations_mb` MiB are not computed again.
    With `keeps_freed_memory` the process does not give freed memory back: see `core.system.keep_freed_memory`.
    """

    kept_activations_mb: int = 512
    keeps_freed_memory: bool = True
    live_models: LiveModels

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start()

    def start(self) -> None:
        """Install the packed forward pass in the policy and in its reference."""
        self.live_models = LiveModels(self.kept_activations_mb * 2**20)
        if self.keeps_freed_memory:
            keep_freed_memory()
        if self.args.torch_compile:
            self.live_models.say("log-probs", "torch_compile is on")
            return
        temperature = float(getattr(self, "temperature", 1.0))
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                install(model, self.live_models, autocast=self.accelerator.autocast, temperature=temperature)
