"""AdamW on float32 masters, with float32 gradient accumulation, clipping, a schedule, and refusal of non-finite steps.

A bfloat16 weight has 8 significant bits: an update below 1/256 of it rounds away. So each 16-bit parameter has a
float32 master that takes the update, and gradients of micro-batches are summed in float32; the first is kept in its own
dtype until there is a second. A float32 parameter is its own master and sums in its own `.grad`. A step is two passes
over memory: the norm, which also detects non-finite gradients, then clipping, moments, master and weight
(`engine/kernels/adamw`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.base.config.sections import OptimizerSection
from tunesmith.base.core.errors import CheckpointError, ConfigError, TrainingError
from tunesmith.engine.distributed.ranks import announce_backward
from tunesmith.engine.kernels.adamw.api import adamw
from tunesmith.engine.kernels.adamw.torch_impl import CODED, AdamWSettings
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.slots import Slots, parameter_groups

_COUNTS = ("num_steps", "weight_version", "num_refused", "num_refused_in_row")
LOSS = "the loss"
"""`StepReport.bad_parameter` if the gradients are finite and the loss is not."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one step.

    `grad_norm`: before clipping; `learning_rate`: of the first group; `refused`: nothing was updated, because the
    gradient of `bad_parameter` (the first of several) or the loss (`LOSS`) is not finite; `num_refused_in_row`: since
    the last good step; `loss_scale`: of float16 weights, else None; `overflowed`: the loss scale was too large, so it
    was halved and the step skipped, which is not a failure.
    """

    grad_norm: float
    learning_rate: float
    refused: bool
    bad_parameter: str | None
    num_refused_in_row: int
    loss_scale: float | None = None
    overflowed: bool = False

    @property
    def bad_part(self) -> str:
        """The non-finite part, for messages."""
        return LOSS if self.bad_parameter == LOSS else f"the gradient of {self.bad_parameter}"


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Optimizer state of a checkpoint: flat tensors for a safetensors file, and counts for a JSON file.

    Tensors: `exp_avg/<parameter>`, `exp_avg_sq/<parameter>`, `num_updates/<parameter>` (0-d), and `master/<parameter>`
    for 16-bit parameters. 8-bit moments are codes (uint8), with `exp_avg_scale/<parameter>` and
    `exp_avg_sq_scale/<parameter>`. Scalars: `num_steps`, `weight_version`, `num_refused`, `num_refused_in_row`, and for
    float16 weights `loss_scale` and `num_since_rescale`.
    """

    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, float]


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) with float32 masters; a step is applied completely or not at all.

    `weight_version` counts changes of the weights: each step that was not refused, and each load. A rollout engine
    compares it with the version of its packed copy. With float16 weights call `scaled(loss).backward()`. With
    `exact_sums` gradients of micro-batches are added up without rounding, in any order (`slots.Part`).
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module],
        section: OptimizerSection,
        *,
        total_steps: int,
        kernels: Kernels | None = None,
        exact_sums: bool = False,
    ) -> None:
        groups = parameter_groups([modules] if isinstance(modules, nn.Module) else modules, section)
        if not groups:
            raise TrainingError("there is nothing to train: no parameter of the model requires a gradient")
        self._section = section
        self._total_steps = total_steps
        self._kernels = kernels or Kernels()
        self._coded = section.state == "int8"
        self._settings = AdamWSettings(*section.betas, section.eps, section.fused)
        self._slots = Slots(groups, self._kernels, exact=exact_sums)
        if self._coded and any(slot.is_divided for slot in self._slots):
            raise ConfigError(
                "optimizer.state is int8, whose blocks would lie on several ranks with scale.shard: parameters; set "
                "one of them back"
            )
        is_float16 = any(slot.parameter.dtype == torch.float16 for slot in self._slots)
        if is_float16 and exact_sums:
            raise ConfigError(
                "scale.reduction: exact has no range for scaled float16 gradients; train in another dtype"
            )
        self._scale = LossScale(section.loss_scale, section.loss_scale_window) if is_float16 else None
        self._was_scaled = False
        self.num_steps = 0
        self.weight_version = 0
        self.num_refused = 0
        self.num_refused_in_row = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on: times the loss scale for float16 weights, else the loss itself."""
        self._was_scaled = True
        announce_backward()
        return loss if self._scale is None else loss * self._scale.value

    def step(self, max_norm: float | None = None, *, loss: float = 0.0) -> StepReport:
        """Clip the accumulated gradients to `max_norm` (default: the recipe's), update the weights, clear gradients.

        If a gradient, or the `loss` that it came from, is not finite, nothing but the gradients changes and the report
        says so. `loss` is the one without the loss scale.
        Raises TrainingError if there is no gradient at all, or if it did not come from `scaled` though it had to.
        """
        if self._scale is not None and not self._was_scaled and any(slot.gradient is not None for slot in self._slots):
            raise TrainingError("float16 weights need a scaled loss; call optimizer.scaled(loss).backward()")
        loss, found = self._slots.summed_gradients(loss)
        sums = self._slots.sums_of_squares(found)
        if not sums:
            raise TrainingError("no parameter has a gradient; call backward on a loss before step")
        loss_scale = 1.0 if self._scale is None else self._scale.value
        grad_norm = math.sqrt(sum(total for _, total in sums)) / loss_scale
        factor = schedule_factor(self._section, self.num_steps, self._total_steps)
        bad_parameter = next((name for name, total in sums if not math.isfinite(total)), None)
        overflowed = (
            bad_parameter is not None and math.isfinite(loss) and self._scale is not None and self._scale.lower()
        )
        if bad_parameter is None and not math.isfinite(loss):
            bad_parameter = LOSS
        refused = bad_parameter is not None and not overflowed
        if refused:
            self.num_refused += 1
            self.num_refused_in_row += 1
        elif not overflowed:
            limit = self._section.max_grad_norm if max_norm is None else max_norm
            clip = min(1.0, limit / (grad_norm + 1e-6)) / loss_scale
            updates = [slot.update(gradient, factor, coded=self._coded) for slot, gradient in found]
            adamw([one for one in updates if one.master.numel()], self._settings, clip, kernels=self._kernels)
            self._slots.send_weights()
            self._note_update()
        self.zero_grad()
        return StepReport(
            grad_norm=grad_norm,
            learning_rate=self._slots[0].peak * factor,
            refused=refused,
            bad_parameter=bad_parameter,
            num_refused_in_row=self.num_refused_in_row,
            loss_scale=None if self._scale is None else loss_scale,
            overflowed=overflowed,
        )

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments of all parameters."""
        return moment_bytes(sum(slot.parameter.numel() for slot in self._slots), self._section)

    def zero_grad(self) -> None:
        """Free the accumulated gradients."""
        self._was_scaled = False
        for slot in self._slots:
            slot.forget_gradient()

    def close(self) -> None:
        """Remove the hooks from the parameters, so that another optimizer can use them."""
        for slot in self._slots:
            if slot.handle is not None:
                slot.handle.remove()

    def state_dict(self) -> OptimizerState:
        """The state, with the live tensors: write or copy them before the next step.

        With several ranks these are the parts that this one holds, as `engine/distributed/shards.py` writes them.
        """
        scalars: dict[str, float] = {name: getattr(self, name) for name in _COUNTS}
        if self._scale is not None:
            scalars |= {"loss_scale": self._scale.value, "num_since_rescale": self._scale.num_good}
        return OptimizerState(self._slots.state(), scalars)

    @torch.no_grad()
    def load_state_dict(
        self, state: OptimizerState, read: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    ) -> None:
        """Restore a state, so that the run continues exactly; load the weights first.

        16-bit weights are set from their masters. With `read` the tensors of `state` are meta tensors, and `read` fills
        those of `state_dict`. `weight_version` moves to a number that was not in use before.
        Raises CheckpointError, with nothing changed, if the state belongs to other parameters.
        """
        state = OptimizerState(self._slots.own_state(state.tensors), state.scalars)
        self._require_match(state)
        by_slot: dict[str, dict[str, torch.Tensor]] = {slot.name: {} for slot in self._slots}
        for key, tensor in state.tensors.items():
            prefix, _, name = key.partition("/")
            by_slot[name][prefix] = tensor
        for slot in self._slots:
            if read is None:
                slot.restore(by_slot[slot.name], coded=self._coded)
            else:
                slot.begin_restore(by_slot[slot.name], coded=self._coded)
        if read is not None:
            held = self._slots.state()
            read(held)
            for slot in self._slots:
                slot.num_updates = int(held.get(f"num_updates/{slot.name}", 0))
        self.zero_grad()
        scalars = {name: int(state.scalars[name]) for name in _COUNTS}
        self.num_steps = scalars["num_steps"]
        self.num_refused = scalars["num_refused"]
        self.num_refused_in_row = scalars["num_refused_in_row"]
        if self._scale is not None and "loss_scale" in state.scalars:
            self._scale.value = float(state.scalars["loss_scale"])
            self._scale.num_good = int(state.scalars["num_since_rescale"])
        version = scalars["weight_version"]
        # Version 0 is the weights as they were loaded, in every run.
        self.weight_version = 0 if version == self.weight_version == 0 else max(version, self.weight_version + 1)

    def _note_update(self) -> None:
        if self._scale is not None:
            self._scale.note_update()
        self.num_steps += 1
        self.weight_version += 1
        self.num_refused_in_row = 0

    def _require_match(self, state: OptimizerState) -> None:
        missing = set(_COUNTS) - state.scalars.keys()
        allowed: dict[str, torch.Tensor] = {}
        for slot in self._slots:
            if not slot.parameter.numel():  # another pipeline stage has it
                continue
            moments = slot.expected_moments(coded=self._coded)
            masters = {f"master/{slot.name}": slot.parameter} if slot.has_master else {}
            missing |= masters.keys() - state.tensors.keys()
            if moments.keys() & state.tensors.keys():  # a parameter that never had a gradient has none
                missing |= moments.keys() - state.tensors.keys()
            allowed |= {**masters, **moments}
        strange = sorted(key for key, tensor in state.tensors.items() if not _is_like(tensor, allowed.get(key)))
        if missing or strange:
            raise CheckpointError(
                "the optimizer state belongs to another model or dtype "
                f"(missing: {sorted(missing)[:3]}; not fitting: {strange[:3]}); resume with the checkpoint's recipe"
            )


def moment_bytes(num_trained: int, section: OptimizerSection) -> int:
    """Bytes of the two moments of `num_trained` numbers."""
    return 8 * num_trained if section.state == "float32" else 2 * (num_trained + 4 * -(-num_trained // CODED))


def _is_like(tensor: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """The same shape, and both codes or both numbers."""
    if expected is None:
        return False
    return tensor.shape == expected.shape and tensor.is_floating_point() == expected.is_floating_point()


def schedule_factor(section: OptimizerSection, step: int, total_steps: int) -> float:
    """The share of the peak learning rate at `step` (from 0) of `total_steps`, above 0: a linear warm-up, then a decay.

    `cosine`: Loshchilov and Hutter 2017, eq. 5; `warmup_stable_decay`: Hu et al. 2024 (arXiv 2404.06395), section 4.
    """
    begin = section.warmup_steps
    if step < begin:
        return (step + 1) / begin
    if section.schedule == "constant":
        return 1.0
    if section.schedule == "warmup_stable_decay":
        begin = max(begin, total_steps - round(section.decay_share * total_steps))
    progress = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if section.schedule == "cosine" else 1.0 - progress
    return section.min_ratio + (1.0 - section.min_ratio) * share


class LossScale:
    """A power of two that keeps float16 gradients in range (Micikevicius et al. 2018, arXiv 1710.03740).

    `value` is halved by each overflow, and doubled after `window` updates without one.
    """

    _LARGEST = 2.0**24

    def __init__(self, initial: float, window: int) -> None:
        self.value = initial
        self.num_good = 0
        self._window = window

    def lower(self) -> bool:
        """Halve the scale; False if it is 1 already: then the gradients themselves are not finite."""
        if self.value <= 1.0:
            return False
        self.value, self.num_good = max(1.0, self.value / 2), 0
        return True

    def note_update(self) -> None:
        """Count a good update; double the scale after `window` in a row."""
        self.num_good += 1
        if self.num_good >= self._window:
            self.value, self.num_good = min(self._LARGEST, 2 * self.value), 0
