"""The division of a trained model among the ranks, if the recipe asks for one: by layers, or each parameter."""

from collections.abc import Mapping

from torch import nn

from tunesmith.base.core.errors import InputError
from tunesmith.engine.distributed import ranks
from tunesmith.engine.distributed.shares import whole
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.pipeline import ModelStage
from tunesmith.engine.models.sharding import gather, shard


def divide(trained: LanguageModel, *frozen: LanguageModel | None, draws: bool = False) -> None:
    """Leave this rank its part of a model, in place: after copies of it are made, and before an optimizer is.

    Frozen models are divided into pipeline stages too. With `draws` completions will be drawn from `trained`.

    Raises:
        InputError: a model that cannot be divided; the message names the part.
    """
    stages = ranks.stages()
    if stages is not None:
        stages.tied.clear()  # an earlier training of this process may have left ids of what is freed
        stages.divided.clear()
        for model in (trained, *filter(None, frozen)):
            if model.decoder is None:
                raise InputError("pipeline stages need the packed forward pass of a known model on a CPU")
            model.decoder.part = ModelStage(model, stages, draws=draws and model is trained)
    shard(trained, draws=draws)


def make_whole(modules: Mapping[str, nn.Module]) -> None:
    """Put the whole parameters into the trained modules of rank 0, to be written. All ranks must call it; no pass may
    follow.
    """
    if ranks.stages() is None:
        gather(modules)
        return
    for module in modules.values():
        for parameter in module.parameters():
            parameter.data = whole(parameter)
