"""TRL's DPO, KTO and SFT trainers with losses from packed log-probs.

Every loss and metric of these trainers is made from what the model returns for `fused_lm_head=True`: log-probs of the
labels, and entropy, mean logit and top-1 hits of the same positions. So only that call is answered by us.
"""

from typing import Any

from trl.trainer import dpo_trainer, kto_trainer, sft_trainer

from tunesmith.integrations.trl.model import LiveModels, PackedTrainer, unwrapped


class PackedLosses(PackedTrainer):
    """Mixin before `trl.SFTTrainer`: rows, padded or packed by TRL, are computed without padding."""

    needs_mean_logits = False
    """The trainer logs mean logits."""

    def start(self) -> None:
        """See `PackedTrainer.start`; a second call changes nothing."""
        if "live_models" in vars(self):
            return
        reason = self._unknown_output()
        if reason:
            self.live_models = LiveModels()
            self.live_models.say("log-probs", reason)
        else:
            super().start()

    def _unknown_output(self) -> str:
        """A result that the trainer asks of its policy and the packed pass lacks; empty if there is none."""
        if getattr(self, "use_weighting", False):
            return "use_weighting needs the sum of the squared probabilities of each token"
        config = unwrapped(self.model).config.get_text_config()
        if self.needs_mean_logits and getattr(config, "final_logit_softcapping", None) is not None:
            return "its metrics need the mean of capped logits, and so all of them"
        return ""


class FastPreference(PackedLosses):
    """Mixin before `trl.DPOTrainer` and `trl.KTOTrainer`: the prompt of several completions is computed once."""

    needs_mean_logits = True

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """TRL's log-probs of the reference, for `precompute_ref_log_probs`: within TRL's constructor."""
        self.start()
        return super().compute_ref_log_probs(model, inputs)


class SFTTrainer(PackedLosses, sft_trainer.SFTTrainer):
    """TRL's SFT trainer, faster: the same arguments, losses and metrics."""


class DPOTrainer(FastPreference, dpo_trainer.DPOTrainer):
    """TRL's DPO trainer, faster: the same arguments, losses and metrics."""


class KTOTrainer(FastPreference, kto_trainer.KTOTrainer):
    """TRL's KTO trainer, faster: the same arguments, losses and metrics."""
