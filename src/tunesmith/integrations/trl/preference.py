"""TRL's DPO and KTO trainers with packed policies and references."""

from trl.trainer import dpo_trainer, kto_trainer

from tunesmith.integrations.trl.packed import PackedLosses


class FastDPO(PackedLosses):
    """Mixin before `trl.DPOTrainer`: the prompt of chosen and rejected completion is computed once."""

    needs_mean_logits = True


class FastKTO(PackedLosses):
    """Mixin before `trl.KTOTrainer`."""

    needs_mean_logits = True


class DPOTrainer(FastDPO, dpo_trainer.DPOTrainer):
    """TRL's DPO trainer, faster: the same arguments, losses and metrics."""


class KTOTrainer(FastKTO, kto_trainer.KTOTrainer):
    """TRL's KTO trainer, faster: the same arguments, losses and metrics."""
