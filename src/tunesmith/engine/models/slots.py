"""The parameters of an optimizer, each with its master and its moments, of which a rank holds a share.

With several ranks (`distributed/`) every rank has all weights, and the masters and moments of the elements that it owns
(ZeRO stage 1, Rajbhandari et al. 2020, arXiv 1910.02054): gradients are summed in float32 on the rank that owns them,
which updates its elements and sends the new weights to the others. A parameter that is divided itself
(`engine/models/sharding.py`) has its gradient summed and divided before, and its elements are updated where they are.
"""

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, product

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from tunesmith.base.config.sections import OptimizerSection
from tunesmith.engine.distributed import ranks
from tunesmith.engine.distributed.shards import Elements
from tunesmith.engine.distributed.shares import local, own_part, ranges_of
from tunesmith.engine.kernels.adamw.api import add_gradient, sums_of_squares
from tunesmith.engine.kernels.adamw.torch_impl import CODED, CodedMoments, Moments, ParameterUpdate, zero_moments
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.heads import ScalarHead


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Named parameters that share a peak learning rate and a weight decay."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    learning_rate: float
    weight_decay: float


def parameter_groups(modules: Sequence[nn.Module], section: OptimizerSection) -> list[ParameterGroup]:
    """The trainable parameters of `modules`: matrices decay, vectors do not, heads have their own learning rate.

    Heads are every `ScalarHead` and a classifier's `score`. With several modules, names begin with the module's class.
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


_GRID = 2.0**-50
"""Gradients of micro-batches are rounded to multiples of this, where sums are exact."""

_RANGE = 2.0**12
"""Limit of an exact sum: multiples of `_GRID` then fit into 63 bits."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's share of a parameter, and the sum of its gradients.

    `own` are the elements, in the order of memory, whose master and moments are held; None for all of them. With
    `exact` the gradient of each micro-batch is rounded to a fixed grid and added as 64-bit integers, so that neither
    the order of the sum nor the number of ranks changes a bit of it.
    """

    own: range | None = None
    exact: bool = False


class Slot:
    """A parameter, its master and its moments; gradients of 16-bit parameters and exact ones are moved from `.grad`."""

    def __init__(self, name: str, parameter: nn.Parameter, group: ParameterGroup, kernels: Kernels, part: Part) -> None:
        self.name = name
        self.parameter = parameter
        self.own = part.own
        self.is_divided = isinstance(parameter, DTensor)
        self._exact = part.exact
        self._bound = 0.0  # of the magnitude of any sum of the gradients so far
        self.peak = group.learning_rate
        self.weight_decay = group.weight_decay
        self.has_master = parameter.dtype in (torch.bfloat16, torch.float16)
        weight = local(parameter) if self.is_divided else self.part(parameter.detach())
        self.master = weight.float() if self.has_master else weight
        self.moments: Moments | None = None
        self.num_updates = 0
        self.handle = None
        if self.has_master or part.exact:
            # Torch keeps hooks where the garbage collector does not look: a cycle through one would never be freed.
            self.handle = parameter.register_post_accumulate_grad_hook(partial(Slot._collect, weakref.proxy(self)))
            weakref.finalize(self, self.handle.remove)
        self._kernels = kernels
        self._held: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor | None:
        """The accumulated gradient: float32, the weight's dtype after a single backward pass, or int64 if exact."""
        if self.has_master or self._exact:
            return self._held
        return None if self.parameter.grad is None else local(self.parameter.grad)

    @property
    def bound(self) -> float | None:
        """A bound of the magnitudes of an exact gradient, 0 of others; None without a gradient."""
        return None if self.gradient is None else self._bound

    def own_gradient(self, total: torch.Tensor, bound: float) -> torch.Tensor:
        """`total`, the sum over all ranks of the elements held here, as numbers; NaN where an exact sum may not fit."""
        if not self._exact:
            return total
        if not bound < _RANGE:
            return torch.full_like(total, torch.nan, dtype=self.master.dtype)
        return (total.double() * _GRID).to(self.master.dtype)

    def gradient_of(self, part: range) -> torch.Tensor:
        """The elements `part` of this rank's gradient, in the dtype of the sum; zeros if this rank computed none."""
        dtype = torch.int64 if self._exact else self.master.dtype
        if self.gradient is None:
            return self.master.new_zeros(len(part), dtype=dtype)
        return self.gradient.reshape(-1)[part.start : part.stop].to(dtype)

    def add(self, gradient: torch.Tensor) -> None:
        """Add the `gradient`, flat, of another rank."""
        total = (self.gradient_of(range(len(gradient))) + gradient).view(self.parameter.shape)
        if self.has_master:
            self._held = total
        else:
            self.parameter.grad = total

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same elements of it."""
        mesh = ranks.mesh()
        if mesh is None or (isinstance(self.parameter, DTensor) and self.parameter.device_mesh.ndim == mesh.ndim):
            return 1
        return mesh["tensor"].size()

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of `tensor`, of the parameter's shape, that are held here."""
        if self.is_divided:
            return own_part(tensor, self.parameter)
        return tensor if self.own is None else tensor.view(-1)[self.own.start : self.own.stop]

    def forget_gradient(self) -> None:
        """Free the gradient's memory."""
        self._held, self._bound = None, 0.0
        self.parameter.grad = None

    def update(self, gradient: torch.Tensor, factor: float, *, coded: bool) -> ParameterUpdate:
        """The update of the elements held here, with their `gradient`, at `factor` times the peak learning rate; counts
        it.
        """
        if self.moments is None:
            self.moments = zero_moments(self.master, coded=coded)
        self.num_updates += 1
        return ParameterUpdate(
            gradient,
            self.master,
            self.part(self.parameter.detach()) if self.has_master else None,
            self.moments,
            self.num_updates,
            self.peak * factor,
            self.weight_decay,
            start=self.own.start if self.own else 0,
        )

    def placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """One of `tensors`, `name` its prefix; where ranks divide it, with its place in the whole."""
        parameter = self.parameter
        if name == "num_updates":
            return tensor
        if isinstance(parameter, DTensor):
            mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
            return DTensor.from_local(tensor, mesh, parameter.placements, shape=shape, stride=stride)
        if self.own is None:
            return tensor
        if name.endswith("_scale"):
            return Elements(tensor, self.own.start // CODED, (-(-parameter.numel() // CODED),))
        return Elements(tensor, self.own.start, parameter.shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors of the state, by key prefix."""
        found = {"master": self.master} if self.has_master else {}
        if self.moments is not None:
            found |= {**_named(self.moments), "num_updates": torch.tensor(float(self.num_updates))}
        return found

    def expected_moments(self, *, coded: bool) -> dict[str, torch.Tensor]:
        """Meta tensors with the names, shapes and kinds of this parameter's moments in a state."""
        like = torch.empty(self.parameter.shape, dtype=self.master.dtype, device="meta")
        moments = _named(zero_moments(like, coded=coded))
        return {f"{prefix}/{self.name}": t for prefix, t in {**moments, "num_updates": torch.tensor(0.0)}.items()}

    def begin_restore(self, names: Collection[str], *, coded: bool) -> None:
        """Make room for those tensors of a state, or forget them where it has none."""
        self.num_updates, self.moments = 0, zero_moments(self.master, coded=coded) if "exp_avg" in names else None

    def restore(self, tensors: Mapping[str, torch.Tensor], *, coded: bool) -> None:
        """Restore the state from `tensors`, those of the whole parameter."""
        if self.has_master:
            self.master.copy_(self.part(tensors["master"]))
            self.parameter.detach().copy_(tensors["master"])
        self.begin_restore(tensors, coded=coded)
        if self.moments is not None:
            self.num_updates = int(tensors["num_updates"])
            for name, tensor in _named(self.moments).items():
                whole, first = tensors[name], self.own.start // CODED if self.own else 0
                is_scale = name.endswith("_scale")
                tensor.copy_(whole[first : first + len(tensor)] if is_scale else self.part(whole))

    def _collect(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        new, parameter.grad = parameter.grad, None
        if self._exact:
            self._bound += float(new.abs().amax())
            rounded = (new.double() / _GRID).round_().to(torch.int64)
            self._held = rounded if self._held is None else self._held.add_(rounded)
            return
        self._held = new if self._held is None else add_gradient(self._held, new, kernels=self._kernels)


class Slots(Sequence[Slot]):
    """All parameters of an optimizer, and what the ranks exchange about them."""

    def __init__(self, groups: Sequence[ParameterGroup], kernels: Kernels, *, exact: bool) -> None:
        self._exact, self._kernels = exact, kernels
        named = [(name, parameter, group) for group in groups for name, parameter in group.parameters]
        sizes = [0 if isinstance(parameter, DTensor) else parameter.numel() for _, parameter, _ in named]
        self._ranges = ranges_of(sizes, ranks.num_data(), CODED)
        own = [None] * len(named) if ranks.num_data() == 1 else self._ranges[ranks.data_rank()]
        self._slots = [Slot(*each, kernels, Part(part, exact)) for each, part in zip(named, own, strict=True)]

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def summed_gradients(self, loss: float) -> tuple[float, list[tuple[Slot, torch.Tensor]]]:
        """(The loss of all ranks; of each parameter that has a gradient on any rank, the part held here).

        With several ranks the gradients are summed, in float32 or float64, and freed.
        """
        self._finish_stage()
        told = ranks.gathered_of_stage([(loss, [slot.bound for slot in self._slots])], "loss")
        of_slot = [
            [bound for bound in bounds if bound is not None] for bounds in zip(*(each for _, each in told), strict=True)
        ]
        bounds = {slot: sum(found) for slot, found in zip(self._slots, of_slot, strict=True) if found}
        loss = math.fsum(one for one, _ in told) if all(math.isfinite(one) for one, _ in told) else math.nan
        loss = ranks.of_all_stages([loss], "loss")[-1]
        own: dict[Slot, torch.Tensor | None] = {slot: slot.gradient for slot in bounds}
        if ranks.num_data() > 1:
            own |= self._reduced(
                [bool(found) and not slot.is_divided for slot, found in zip(self._slots, of_slot, strict=True)]
            )
        return loss, [
            (slot, slot.own_gradient(total, bounds[slot])) for slot, total in own.items() if total is not None
        ]

    def _reduced(self, used: Sequence[bool]) -> dict[Slot, torch.Tensor]:
        """The elements held here of the summed gradients of the `used` parameters; the gradients are freed."""
        slots, own = list(compress(self._slots, used)), list[torch.Tensor]()
        for owner, ranges in enumerate(self._ranges if slots else ()):
            parts = list(compress(ranges, used))
            buffer = torch.cat([slot.gradient_of(part) for slot, part in zip(slots, parts, strict=True)])
            ranks.add_to(owner, buffer, "gradients")
            if owner == ranks.data_rank():
                own = list(buffer.split([len(part) for part in parts]))
        for slot in slots:
            slot.forget_gradient()
        return dict(zip(slots, own, strict=True))

    def sums_of_squares(self, found: Sequence[tuple[Slot, torch.Tensor]]) -> list[tuple[str, float]]:
        """(Name; sum of squares of the gradient over all ranks), from the elements of each that are held here.

        A parameter of two pipeline stages counts once.
        """
        stages = ranks.stages()
        sums = zip((slot for slot, _ in found), self._sums(found), strict=True)
        own = [(slot.name, total) for slot, total in sums if stages is None or stages.counts(slot.parameter)]
        return ranks.of_all_stages(own, "gradient norms of stages")

    def _finish_stage(self) -> None:
        """Make outstanding backward passes of a pipeline, and add up gradients of what two of its stages hold."""
        stages = ranks.stages()
        if stages is None:
            return
        stages.finish()
        for slot in self._slots:
            other = stages.tied.get(id(slot.parameter))
            if other is not None:
                slot.add(stages.swapped(other, slot.gradient_of(range(slot.parameter.numel()))))
        stages.finish()

    def _sums(self, found: Sequence[tuple[Slot, torch.Tensor]]) -> list[float]:
        gradients = [gradient for _, gradient in found]
        if not self._exact:
            own = sums_of_squares(gradients, kernels=self._kernels)
            own = [one / slot.num_copies for one, (slot, _) in zip(own, found, strict=True)]
            everywhere = ranks.gathered_of_stage([own], "gradient norms", all_ranks=True)
            return [sum(parts) for parts in zip(*everywhere, strict=True)]
        blocks = [pad(g.flatten(), (0, -g.numel() % CODED)).view(-1, CODED).double().square().sum(1) for g in gradients]
        # Blocks lie whole on one rank, and fsum rounds once, so that no bit depends on the number of ranks.
        return [
            math.fsum(torch.cat(parts).tolist())
            for parts in zip(*ranks.gathered_of_stage([blocks], "gradient norms"), strict=True)
        ]

    def send_weights(self) -> None:
        """Send the weights of the elements held here to the other ranks, and receive theirs."""
        if ranks.num_data() == 1:
            return
        dtypes = dict.fromkeys(slot.parameter.dtype for slot in self._slots)
        for (owner, ranges), dtype in product(enumerate(self._ranges), dtypes):
            parts = [
                slot.parameter.detach().view(-1)[part.start : part.stop]
                for slot, part in zip(self._slots, ranges, strict=True)
                if slot.parameter.dtype == dtype and not slot.is_divided
            ]
            if not parts:
                continue
            buffer = torch.cat(parts)
            ranks.copy_from(owner, buffer, "weights")
            if owner != ranks.data_rank():
                for part, new in zip(parts, buffer.split([len(part) for part in parts]), strict=True):
                    part.copy_(new)

    def state(self) -> dict[str, torch.Tensor]:
        """The live tensors of the state of all parameters that this process holds, by prefix and name."""
        return {
            f"{prefix}/{slot.name}": slot.placed(prefix, tensor)
            for slot in self._slots
            if slot.parameter.numel()
            for prefix, tensor in slot.tensors().items()
        }

    def own_state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of `tensors`, a state of all parameters, whose parameters this pipeline stage holds."""
        absent = {slot.name for slot in self._slots if not slot.parameter.numel()}
        return {key: tensor for key, tensor in tensors.items() if key.partition("/")[2] not in absent}


def _named(moments: Moments) -> dict[str, torch.Tensor]:
    """The live tensors of moments, by their prefix in a state."""
    found = {"exp_avg": moments.exp_avg, "exp_avg_sq": moments.exp_avg_sq}
    if isinstance(moments, CodedMoments):
        found |= {"exp_avg_scale": moments.exp_avg_scale_K, "exp_avg_sq_scale": moments.exp_avg_sq_scale_K}
    return found
