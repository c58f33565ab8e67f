"""AdamW on float32 masters, with float32 gradient accumulation, clipping, a schedule, and refusal of non-finite steps.

A bfloat16 weight has 8 bits: an update below 1/256 of it rounds away. So each 16-bit parameter has a float32 master
that takes the update, and a float32 buffer that takes each micro-batch's gradient as soon as it is complete (summed in
`.grad` the small ones would round away likewise). A float32 parameter is its own master and sums in its own `.grad`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tunesmith.config.sections import OptimizerSection
from tunesmith.core.errors import CheckpointError, TrainingError
from tunesmith.models.heads import ScalarHead

_COUNTS = ("num_steps", "weight_version", "num_refused", "num_refused_in_row")

LOSS = "the loss"
"""Stands in `StepReport.bad_parameter` where the gradients are finite and the loss is not."""

_MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "num_updates": "step"}
"""Prefix of a tensor in `OptimizerState`, and its name in torch's AdamW."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Named parameters that share a peak learning rate and a weight decay."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did.

    `grad_norm`: before clipping; `learning_rate`: of the first group; `refused`: the step changed nothing, because the
    gradient of `bad_parameter`, the first such, holds NaN or infinity, or because the loss does (then `bad_parameter`
    is `LOSS`); `num_refused_in_row`: refused since a good one.
    """

    grad_norm: float
    learning_rate: float
    refused: bool
    bad_parameter: str | None
    num_refused_in_row: int

    @property
    def bad_part(self) -> str:
        """What was not finite, in words."""
        return LOSS if self.bad_parameter == LOSS else f"the gradient of {self.bad_parameter}"


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What a resumed run needs besides the weights: flat tensors for a safetensors file, and counts for a JSON file.

    Tensors: `exp_avg/<parameter>`, `exp_avg_sq/<parameter>`, `num_updates/<parameter>` (0-d), and `master/<parameter>`
    for 16-bit parameters. Scalars: `num_steps`, `weight_version`, `num_refused`, `num_refused_in_row`.
    """

    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, int]


def parameter_groups(modules: Sequence[nn.Module], section: OptimizerSection) -> list[ParameterGroup]:
    """The trainable parameters of `modules`, each once: matrices decay, vectors do not, heads have a rate of their own.

    Heads are every `ScalarHead` and a classifier's `score`. Of several modules, each puts its class name before the
    names of its parameters.
    """
    together = modules[0] if len(modules) == 1 else nn.ModuleDict({type(module).__name__: module for module in modules})
    heads = {
        id(parameter)
        for name, part in together.named_modules()
        if isinstance(part, ScalarHead) or name.rpartition(".")[2] == "score"
        for parameter in part.parameters()
    }
    sorted_in: dict[tuple[float, float], list[tuple[str, nn.Parameter]]] = {}
    head_rate = section.head_learning_rate or section.learning_rate
    for name, parameter in together.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = head_rate if id(parameter) in heads else section.learning_rate
        decay = section.weight_decay if parameter.ndim > 1 else 0.0
        sorted_in.setdefault((rate, decay), []).append((name, parameter))
    return [ParameterGroup(tuple(named), rate, decay) for (rate, decay), named in sorted_in.items()]


def schedule_factor(section: OptimizerSection, step: int, total_steps: int) -> float:
    """The share of the peak learning rate that step `step` (from 0) of `total_steps` takes; above 0 for all of them."""
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    progress = min(1.0, (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    match section.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))


class _Slot:
    """A parameter and its master; a 16-bit one hands each finished gradient to the float32 `.grad` of its master."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.has_master = parameter.dtype in (torch.bfloat16, torch.float16)
        self.master = parameter.detach().float() if self.has_master else parameter
        self.handle = parameter.register_post_accumulate_grad_hook(self._collect) if self.has_master else None

    def _collect(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if self.master.grad is None:
            self.master.grad = parameter.grad.float()
        else:
            self.master.grad.add_(parameter.grad)
        parameter.grad = None


class MasterAdamW:
    """Decoupled-weight-decay Adam (Loshchilov and Hutter 2019) whose `step` either does all of its work or none.

    `weight_version` counts the changes of the weights: one for each step that was not refused and for each load. A
    reader that keeps a copy of the weights, such as a rollout engine, compares it with the version it has seen.
    """

    def __init__(
        self, modules: nn.Module | Sequence[nn.Module], section: OptimizerSection, *, total_steps: int
    ) -> None:
        groups = parameter_groups([modules] if isinstance(modules, nn.Module) else modules, section)
        if not groups:
            raise TrainingError("there is nothing to train: no parameter of the model requires a gradient")
        self._section = section
        self._total_steps = total_steps
        self._peaks = [group.learning_rate for group in groups]
        self._slots = [_Slot(name, parameter) for group in groups for name, parameter in group.parameters]
        masters = {id(slot.parameter): slot.master for slot in self._slots}
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [masters[id(parameter)] for _, parameter in group.parameters],
                    "lr": group.learning_rate,
                    "weight_decay": group.weight_decay,
                }
                for group in groups
            ],
            betas=section.betas,
            eps=section.eps,
            fused=True,
        )
        self.num_steps = 0
        self.weight_version = 0
        self.num_refused = 0
        self.num_refused_in_row = 0

    def step(self, max_norm: float | None = None, *, loss: float = 0.0) -> StepReport:
        """Clip the accumulated gradients to `max_norm` (default: the recipe's), update the weights, clear gradients.

        If a gradient, or the `loss` that it came from, is not finite, nothing but the gradients changes and the report
        says so.
        Raises TrainingError if there is no gradient at all.
        """
        used = [slot for slot in self._slots if slot.master.grad is not None]
        if not used:
            raise TrainingError("no parameter has a gradient; call backward on a loss before step")
        gradients = [slot.master.grad for slot in used if slot.master.grad is not None]
        grad_norm = _total_norm(gradients)
        learning_rate = self._set_learning_rates()
        bad_parameter = None if math.isfinite(grad_norm) else _first_bad(used)
        if bad_parameter is None and not math.isfinite(loss):
            bad_parameter = LOSS
        if bad_parameter is not None:
            self.num_refused += 1
            self.num_refused_in_row += 1
        else:
            limit = self._section.max_grad_norm if max_norm is None else max_norm
            if grad_norm > limit:
                clip_grads_with_norm_([slot.master for slot in used], limit, torch.tensor(grad_norm))
            self._adamw.step()
            self._write_weights(used)
            self.num_steps += 1
            self.weight_version += 1
            self.num_refused_in_row = 0
        self.zero_grad()
        return StepReport(grad_norm, learning_rate, bad_parameter is not None, bad_parameter, self.num_refused_in_row)

    @property
    def num_trained(self) -> int:
        """Numbers that are trained."""
        return sum(slot.parameter.numel() for slot in self._slots)

    def zero_grad(self) -> None:
        """Forget the accumulated gradients and free their memory."""
        for slot in self._slots:
            slot.master.grad = None
            slot.parameter.grad = None

    def close(self) -> None:
        """Take the hooks off the parameters, so that another optimizer can have them."""
        for slot in self._slots:
            if slot.handle is not None:
                slot.handle.remove()

    def state_dict(self) -> OptimizerState:
        """The state as it stands; its tensors are the live ones, so write or copy them before the next step."""
        tensors: dict[str, torch.Tensor] = {}
        for slot in self._slots:
            if slot.has_master:
                tensors[f"master/{slot.name}"] = slot.master
            for key, name in _MOMENTS.items():
                if moments := self._adamw.state.get(slot.master):
                    tensors[f"{key}/{slot.name}"] = moments[name]
        return OptimizerState(
            {key: tensor.detach() for key, tensor in tensors.items()}, {name: getattr(self, name) for name in _COUNTS}
        )

    def load_state_dict(self, state: OptimizerState) -> None:
        """Take over a state and go on as the run that wrote it would have; load the weights first.

        16-bit weights are set from their masters. `weight_version` moves to a number that was not in use before.
        Raises CheckpointError, with nothing changed, if the state belongs to other parameters.
        """
        self._require_match(state)
        for slot in self._slots:
            if slot.has_master:
                slot.master.copy_(state.tensors[f"master/{slot.name}"])
            moments = {name: state.tensors.get(f"{key}/{slot.name}") for key, name in _MOMENTS.items()}
            self._adamw.state.pop(slot.master, None)
            if moments["step"] is not None:
                device = slot.master.device
                self._adamw.state[slot.master] = {
                    name: tensor.detach().to(device, torch.float32, copy=True)
                    for name, tensor in moments.items()
                    if tensor is not None
                }
        self._write_weights(self._slots)
        self.zero_grad()
        self.num_steps = state.scalars["num_steps"]
        self.num_refused = state.scalars["num_refused"]
        self.num_refused_in_row = state.scalars["num_refused_in_row"]
        version = state.scalars["weight_version"]
        # Version 0 is the weights as they were loaded, in every run.
        self.weight_version = 0 if version == self.weight_version == 0 else max(version, self.weight_version + 1)

    def _set_learning_rates(self) -> float:
        factor = schedule_factor(self._section, self.num_steps, self._total_steps)
        for group, peak in zip(self._adamw.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return self._peaks[0] * factor

    @torch.no_grad()
    def _write_weights(self, slots: Sequence[_Slot]) -> None:
        for slot in slots:
            if slot.has_master:
                slot.parameter.copy_(slot.master)

    def _require_match(self, state: OptimizerState) -> None:
        shapes = {f"{key}/{slot.name}": slot.master.shape for slot in self._slots for key in ("exp_avg", "exp_avg_sq")}
        shapes |= {f"num_updates/{slot.name}": torch.Size() for slot in self._slots}
        masters = {f"master/{slot.name}": slot.master.shape for slot in self._slots if slot.has_master}
        missing = sorted((masters.keys() - state.tensors.keys()) | (set(_COUNTS) - state.scalars.keys()))
        strange = sorted(key for key, t in state.tensors.items() if (shapes | masters).get(key) != t.shape)
        if missing or strange:
            raise CheckpointError(
                "the optimizer state belongs to another model or dtype "
                f"(missing: {missing[:3]}; not fitting: {strange[:3]}); resume with the recipe of the checkpoint"
            )


def _total_norm(gradients: list[torch.Tensor]) -> float:
    """The global norm; if its squares overflow float32, taken in float64, so that large but finite gradients pass."""
    norm = float(get_total_norm(gradients))
    if math.isfinite(norm):
        return norm
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def _first_bad(slots: Sequence[_Slot]) -> str:
    for slot in slots:
        if slot.master.grad is not None and not bool(slot.master.grad.isfinite().all()):
            return slot.name
    return slots[0].name
