"""A model in pipeline stages: each rank has consecutive layers, and passes hidden states on.

`engine/distributed/stages.py` says when the backward passes are made. Ranks of one pipeline compute the same
micro-batches, so all of them know the shapes. Losses are those of the last stage; on the others log-probs are zeros
(`engine/models/logprob.py`), and the backward pass of a loss reaches nothing.

Shape legend: T tokens, H hidden.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tunesmith.base.core.errors import InputError
from tunesmith.engine.distributed import ranks
from tunesmith.engine.distributed.group import TensorGroup
from tunesmith.engine.distributed.reshard import reshard
from tunesmith.engine.distributed.stages import Stages
from tunesmith.engine.models.architecture import Architecture
from tunesmith.engine.models.decoder import Ops, after_layers, normed
from tunesmith.engine.models.embedding import embedded
from tunesmith.engine.models.language_model import LanguageModel, language_model
from tunesmith.engine.models.layouts import Division, layout_of, parts_of, stage_of
from tunesmith.engine.models.tensor_parallel import tensor_parallel


class ModelStage:
    """The layers of `model`, which has a decoder, that this rank has; its other parameters are empty from now on.

    With `draws` there is a second model, `drawing`, of which `refresh` gives each rank of the pipeline a tensor
    parallel part, for the rollout engine.
    """

    drawing: LanguageModel | None = None

    def __init__(self, model: LanguageModel, stages: Stages, *, draws: bool) -> None:
        assert model.decoder is not None
        architecture = model.decoder.architecture
        num_layers = len(architecture.blocks)
        if stages.count > num_layers:
            raise InputError(f"scale.pipeline is {stages.count}, but the model has {num_layers} layers")
        if draws:
            self.drawing = tensor_parallel(_view(model), TensorGroup(stages.count))
        self.is_last = stages.is_last
        self._stages = stages
        layers = [i for i in range(num_layers) if stage_of(i, stages.count, num_layers) == stages.index]
        self._layers = range(layers[0], layers[-1] + 1)
        self._version: int | None = None
        parts = parts_of(model.module, architecture)
        self._parameters = dict(model.module.named_parameters())
        own = {
            part.name: sorted({stage_of(layer, stages.count, num_layers) for layer in part.layers}) for part in parts
        }
        self._layout = layout_of(parts, Division(copies=ranks.num_data(), stages=stages.count))
        self._drawing_layout = layout_of(parts, Division(copies=ranks.num_data(), tensor=stages.count))
        trained = {stage for name, held in own.items() if self._parameters[name].requires_grad for stage in held}
        self._takes_gradient = any(stage < stages.index for stage in trained)
        self._gives_gradient = any(stage <= stages.index for stage in trained)
        stages.divided.update(map(id, self._parameters.values()))
        for name, parameter in self._parameters.items():
            if stages.index not in own[name]:
                parameter.data = parameter.data[:0].clone()
            elif len(own[name]) > 1:
                stages.tied[id(parameter)] = next(stage for stage in own[name] if stage != stages.index)

    def hidden_states(
        self, architecture: Architecture, ids_T: torch.Tensor, positions_T: torch.Tensor, ops: Ops
    ) -> torch.Tensor:
        """Hidden states after the final norm, `[T, H]`, on the last stage; on others `[T, 0]`."""
        stages = self._stages
        if not torch.is_grad_enabled():
            stages.finish()
        if stages.index == 0:
            # The output layer is another stage's, even if it is the same parameter.
            x_TH = embedded(replace(architecture, output=None), ids_T, positions_T)
        else:
            x_TH = self._received(architecture, len(ids_T))
        x_TH, residual_TH = after_layers(architecture, self._layers, x_TH, ops)
        if self.is_last:
            return normed(architecture, x_TH, residual_TH, ops)
        x_TH = x_TH if residual_TH is None else x_TH + residual_TH
        stages.send(stages.index + 1, x_TH)
        if torch.is_grad_enabled() and self._gives_gradient:
            stages.later(partial(self._backward, x_TH))
        return x_TH.new_zeros((len(ids_T), 0))

    def refresh(self, version: int) -> None:
        """Give `drawing` its part of the weights of `version`, tensor by tensor. All ranks must call it."""
        if self.drawing is None or version == self._version:
            return
        copies = dict(self.drawing.module.named_parameters())
        for name, own in copies.items():
            own.data = self._parameters[name].detach()
        reshard(copies, self._layout, self._drawing_layout)
        self._version = version

    def _received(self, architecture: Architecture, num_tokens: int) -> torch.Tensor:
        """The hidden states that the stage before has sent; their gradient goes back to it."""
        dtype, device = architecture.dtype, architecture.device
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        width = architecture.embedding.embedding_dim
        x_TH = torch.empty((num_tokens, width), dtype=dtype, device=device)  # type: ignore[arg-type]
        self._stages.receive(self._stages.index - 1, x_TH)
        if not (torch.is_grad_enabled() and self._takes_gradient):
            return x_TH
        return _Received.apply(torch.zeros((), requires_grad=True), x_TH, self._stages)  # type: ignore[return-value]

    def _backward(self, x_TH: torch.Tensor) -> None:
        """Make the backward pass of this stage, from the gradient that the next one sends."""
        gradient_TH = self._stages.receive(self._stages.index + 1, torch.empty_like(x_TH))
        torch.autograd.backward(x_TH, gradient_TH)


def _view(model: LanguageModel) -> LanguageModel:
    """A second model on the same weights, which keeps its own once those of `model` are replaced."""
    parameters = {id(one): nn.Parameter(one.detach(), requires_grad=False) for one in model.module.parameters()}
    return language_model(copy.deepcopy(model.module, parameters).eval(), model.kernels)


class _Received(torch.autograd.Function):
    """Hidden states of the stage before, and the gradient that goes back; `anchor` makes autograd come here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x_TH: torch.Tensor, stages: Stages) -> torch.Tensor:
        ctx.stages = stages
        return x_TH.view_as(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.stages.send(ctx.stages.index - 1, grads[0])
        return None, None, None
