"""TRL's reward trainer with a packed trunk.

Shape legend: B rows, S columns, H hidden, K labels.
"""

import functools
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from trl.trainer import reward_trainer

from tunesmith.base.config.sections import ModelSection
from tunesmith.engine.models.heads import last_tokens
from tunesmith.engine.models.language_model import TrunkDecoder
from tunesmith.engine.models.logprob import length_mask, trunk_states
from tunesmith.integrations.trl.model import LiveModels, PackedTrainer, objection, too_long, unwrapped

_READ = {"input_ids", "attention_mask"}
_IGNORED = {"use_cache", "return_dict", "margin"}
"""Arguments of a call that do not change the logits; TRL passes the margin of its loss to the model."""


class FastReward(PackedTrainer):
    """Mixin before `trl.RewardTrainer`: no padding is computed, what both sides of a pair begin with is computed once,
    and of the scores only those of the last tokens.
    """

    def start(self) -> None:
        """Prepare for calls of the classifier; a second call changes nothing."""
        if "live_models" not in vars(self):
            self.live_models = LiveModels()
            self._trunks = TrunkDecoder(ModelSection())

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss. Within it, the classifier inside of DDP and PEFT is computed packed, where that is known."""
        if self.args.torch_compile:
            self.live_models.say("rewards", "torch_compile is on")
            return super().compute_loss(*args, **kwargs)
        module: Any = unwrapped(self.model)
        original, own = module.forward, vars(module).get("forward")

        @functools.wraps(original)
        def forward(*positional: Any, **inputs: Any) -> Any:
            with self.accelerator.autocast():
                found = _logits(self.model, self._trunks, inputs) if not positional else "it is called by position"
            if isinstance(found, str):
                self.live_models.say("rewards", found)
                return original(*positional, **inputs)
            return SequenceClassifierOutputWithPast(logits=found)  # type: ignore[arg-type]

        module.forward = forward
        try:
            return super().compute_loss(*args, **kwargs)
        finally:
            del module.forward
            if own is not None:
                module.forward = own


def _logits(model: nn.Module, trunks: TrunkDecoder, inputs: dict[str, Any]) -> torch.Tensor | str:
    """logits_BK as the classifier's own forward gives them, or why it has to: those of the last token of each row that
    is not the padding token. If that is the end-of-sequence token, the token before it counts, as in transformers.
    """
    unknown = sorted(name for name, x in inputs.items() if x is not None and name not in _READ | _IGNORED)
    ids_BS, mask_BS = inputs.get("input_ids"), inputs.get("attention_mask")
    if unknown or ids_BS is None or mask_BS is None:
        return f"the model is called with {', '.join(unknown)}" if unknown else "a call has no ids or no mask"
    if reason := objection(model):
        return reason
    module: Any = unwrapped(model)
    decoder, pad_id = trunks.get(module.base_model), module.config.get_text_config().pad_token_id
    if decoder is None or pad_id is None or not hasattr(module, "score"):
        return f"{type(module).__name__} is no classifier on a trunk that the decoder computes"
    lengths_B, num_columns = mask_BS.sum(1), ids_BS.shape[1]
    last_B = last_tokens(ids_BS, torch.full_like(lengths_B, num_columns), pad_id)
    if not torch.equal(mask_BS.bool(), length_mask(lengths_B, num_columns)) or bool((last_B >= lengths_B).any()):
        return "its rows are not padded on the right"
    if reason := too_long(decoder, last_B + 1):
        return reason
    # Chosen and rejected, the halves of a batch, become neighbours.
    row_B = torch.arange(len(ids_BS), device=ids_BS.device)
    order_B = row_B if len(row_B) % 2 else row_B.view(2, -1).t().flatten()
    hidden_BH = trunk_states(module, decoder, ids_BS[order_B], last_B[order_B] + 1, row_B, last_B[order_B])
    logits_BK = module.score(hidden_BH)[order_B.argsort()]
    # Of a model under autocast, accelerate gives the outputs in float32.
    return logits_BK.float() if torch.is_autocast_enabled(ids_BS.device.type) else logits_BK


class RewardTrainer(FastReward, reward_trainer.RewardTrainer):
    """TRL's reward trainer, faster: the same arguments, losses and metrics."""
