"""A separate critic that another process computes beside the policy.

Shape legend: B sequences, S positions of prompt and completion, T completion tokens.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tunesmith.base.core.child import Child, serve
from tunesmith.base.core.errors import InputError, ServerError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.trace import Trace, include, span, trace
from tunesmith.engine.distributed.ranks import num_ranks
from tunesmith.engine.models.heads import Critic
from tunesmith.engine.rollout.workers import weights

_TRIES = 2
"""Processes that are given a pass before the run ends."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Layout:
    """Shape and dtype of each parameter, whether it is trained, and the file with the weights, then the gradients."""

    path: str
    parameters: Mapping[str, tuple[torch.Size, torch.dtype, bool]]

    def mapped(self) -> list[dict[str, torch.Tensor]]:
        """Weights and gradients, by name, in memory that all processes share that map the file."""
        starts, end = {}, 0
        for name, (shape, dtype, _) in self.parameters.items():
            starts[name], end = end, end + -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        content = torch.from_file(self.path, shared=True, size=2 * end, dtype=torch.uint8)
        return [
            {
                name: content[offset + start :][: shape.numel() * dtype.itemsize].view(dtype).view(shape)
                for (name, (shape, dtype, _)), start in zip(self.parameters.items(), starts.values(), strict=True)
            }
            for offset in (0, end)
        ]


@dataclass(frozen=True, slots=True)
class _Call:
    """A pass over the rows of `inputs`, arrays; with `grad_BT`, the gradient of its values, backward too."""

    number: int
    inputs: Sequence[Any]
    has_grad: bool
    grad_BT: Any = None


class CriticProcess:
    """Values of `critic`, computed by a process with as many threads as this one has.

    Weights and gradients are in memory that both processes share, so the optimizer of this one updates what the other
    reads, and a step is that of one process, to the bit. A process that ends is started again, and its pass repeated.

    Raises:
        InputError: the critic is on a GPU, or several ranks train.
    """

    def __init__(self, critic: Critic) -> None:
        parameters = dict(critic.named_parameters())
        device = next(iter(parameters.values())).device
        if device.type != "cpu" or num_ranks() > 1:
            raise InputError(
                f"ppo.critic_process is for one rank on a CPU, but {num_ranks()} train on a {device.type}; set it to "
                "false"
            )
        self._file = os.memfd_create("tunesmith-critic")
        self._layout = _Layout(
            f"/proc/{os.getpid()}/fd/{self._file}",
            {name: (one.shape, one.dtype, one.requires_grad) for name, one in parameters.items()},
        )
        self._shared, self._gradients = self._layout.mapped()
        self._parameters = parameters
        self._share()
        self._trained = {name: one for name, one in parameters.items() if one.requires_grad}
        setup = self._layout, weights.pickled(critic, parameters), torch.get_num_threads()
        self._child = Child("tunesmith.learn.trainers.critic", setup)
        with contextlib.suppress(OSError):  # `answer` will find that it ended
            self._child.start()
        self._asked = _Call(0, (), False)
        weakref.finalize(self, _end, self._child, self._file, os.getpid())

    def _share(self) -> None:
        """Have all parameters in the memory that both processes share: code may have given one another tensor.

        Raises:
            InputError: it has another shape or dtype now.
        """
        for name, parameter in self._parameters.items():
            shared = self._shared[name]
            if parameter.data_ptr() == shared.data_ptr():
                continue
            if parameter.shape != shared.shape or parameter.dtype != shared.dtype:
                raise InputError(
                    f"{name} of the critic became {parameter.dtype} of shape {tuple(parameter.shape)}; set "
                    "ppo.critic_process to false to change it"
                )
            parameter.data = shared.copy_(parameter.data)

    def begin(
        self, ids_BS: torch.Tensor, lengths_B: torch.Tensor, prompt_lengths_B: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Begin a pass, as of `Critic.forward`; its values when they are called for. Take them before the next pass.

        What this process computes between the two calls, forward or backward, runs beside the critic.
        """
        inputs = ids_BS, lengths_B, prompt_lengths_B
        begun = _Begin.apply(self, inputs, torch.is_grad_enabled(), *self._trained.values())
        return lambda: _Values.apply(self, begun)  # type: ignore[no-any-return]

    def ask_values(self, inputs: Sequence[torch.Tensor], has_grad: bool) -> None:
        """Ask for values; with `has_grad` their gradients may be asked for."""
        self._share()
        self._asked = _Call(self._asked.number + 1, [tensor.numpy() for tensor in inputs], has_grad)
        self._send()

    def ask_gradients(self, grad_BT: torch.Tensor) -> None:
        """Ask for the gradients of the parameters, from that of the last values."""
        self._asked = replace(self._asked, grad_BT=grad_BT.numpy())
        self._send()

    def answer(self) -> Any:
        """The answer to the last `ask`.

        Raises:
            ServerError: the process ended, twice.
        """
        for left in reversed(range(_TRIES)):
            try:
                found, work = self._child.receive()
                include(work)
                return found
            except (EOFError, OSError):
                ended = self._child.end()
            if not left:
                raise ServerError(
                    f"the critic's process {ended}, {_TRIES} times in one pass; is there memory for a second process? "
                    "Otherwise set ppo.critic_process to false"
                )
            get_logger(__name__).warning("the critic's process %s; it is started again", ended)
            self._send()

    def gradients(self) -> list[torch.Tensor | None]:
        """Gradients of all trained parameters, once they are computed; None for those that the values do not use."""
        unused = self.answer()
        return [None if name in unused else self._gradients[name].clone() for name in self._trained]

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # `answer` will find that the process ended
            self._child.send(self._asked)


# Autograd runs the backward of the youngest node first and of the oldest last. So one node made before the policy's
# pass and one made after it are called, in backward, in the opposite order: gradients are asked for before the policy's
# backward begins and awaited once it has ended, and both processes compute at the same time in both directions.


class _Begin(torch.autograd.Function):
    """Asks for values. Its backward, the last of the graph to run because it is the oldest, waits for gradients."""

    @staticmethod
    def forward(ctx: Any, process: CriticProcess, inputs: Any, has_grad: bool, *_: nn.Parameter) -> torch.Tensor:
        ctx.process = process
        process.ask_values(inputs, has_grad)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, None, *ctx.process.gradients()


class _Values(torch.autograd.Function):
    """Waits for the values. Its backward, which runs before the policy's because it is younger, asks for gradients."""

    @staticmethod
    def forward(ctx: Any, process: CriticProcess, begun: torch.Tensor) -> torch.Tensor:
        ctx.process = process
        return torch.from_numpy(process.answer())

    @staticmethod
    def backward(ctx: Any, grad_BT: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.process.ask_gradients(grad_BT)
        return None, torch.zeros(())


def _end(child: Child, file: int, owner: int) -> None:
    child.close()
    if owner == os.getpid():
        os.close(file)


def main() -> None:
    """Answer calls with the critic, until the training closes the connection."""
    serve(_prepared)


def _prepared(setup: tuple[_Layout, bytes, int]) -> Callable[[_Call], object]:
    layout, skeleton, num_threads = setup
    torch.set_num_threads(num_threads)
    shared, gradients = layout.mapped()
    parameters = {name: nn.Parameter(shared[name], one[-1]) for name, one in layout.parameters.items()}
    critic: Critic = weights.unpickled(skeleton, parameters)
    return _Passes(critic, parameters, gradients).answer


class _Passes:
    """The side of the process: the values of the last call, for its gradients."""

    def __init__(
        self, critic: Critic, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, torch.Tensor]
    ) -> None:
        self._critic, self._gradients = critic, gradients
        self._trained = {name: one for name, one in parameters.items() if one.requires_grad}
        self._value_BT, self._number = torch.zeros(()), 0

    def answer(self, call: _Call) -> tuple[object, Trace]:
        """(Values, or names of the parameters whose gradients are not written; the work)."""
        with trace() as work, span("critic"):
            if call.number != self._number:  # also in a process that was started again
                with torch.set_grad_enabled(call.has_grad):
                    self._value_BT = self._critic(*map(torch.from_numpy, call.inputs))
                self._number = call.number
            found = self._value_BT.detach().numpy() if call.grad_BT is None else self._backward(call.grad_BT)
        return found, work

    def _backward(self, grad_BT: Any) -> list[str]:
        trained = list(self._trained.values())
        found = torch.autograd.grad(self._value_BT, trained, torch.from_numpy(grad_BT), allow_unused=True)
        for name, gradient in zip(self._trained, found, strict=True):
            if gradient is not None:
                self._gradients[name].copy_(gradient)
        return [name for name, gradient in zip(self._trained, found, strict=True) if gradient is None]


if __name__ == "__main__":
    main()
