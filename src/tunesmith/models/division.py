"""The division of a trained model among the ranks, if the recipe asks for one: by layers, or each parameter."""

from collections.abc import Mapping

from torch import nn

from tunesmith.distributed import ranks
from tunesmith.distributed.shares import whole
from tunesmith.models.language_model import LanguageModel
from tunesmith.models.pipeline import into_stages
from tunesmith.models.sharding import gather, shard


def divide(trained: LanguageModel, *frozen: LanguageModel | None, draws: bool = False) -> None:
    """Leave this rank its part of a model, in place: after copies of it are made, and before an optimizer is.

    Frozen models are divided into pipeline stages too. With `draws` completions will be drawn from `trained`.

    Raises:
        InputError: a model that cannot be divided; the message names the part.
    """
    into_stages(trained, *frozen, draws=draws)
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
