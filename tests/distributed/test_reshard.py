"""Weights that move between pipeline stages, shards and tensor parallel slices, and completions drawn meanwhile."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from on_ranks import on_ranks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.base.config.sections import LoraSection
from tunesmith.base.core.errors import InputError
from tunesmith.base.schema.records import Prompt
from tunesmith.engine.batch.rollout import SamplingParams
from tunesmith.engine.distributed.group import TensorGroup
from tunesmith.engine.distributed.ranks import gathered, rank
from tunesmith.engine.distributed.reshard import Layout, reshard, shape_of
from tunesmith.engine.models.language_model import LanguageModel, language_model
from tunesmith.engine.models.layouts import Division, layout_of, parts_of
from tunesmith.engine.models.loaded import LoadedModel
from tunesmith.engine.models.lora import AdapterBase, add_adapters
from tunesmith.engine.models.tensor_parallel import tensor_parallel
from tunesmith.engine.models.tiny import tiny_model
from tunesmith.engine.rollout.factory import open_engine

FAMILIES = ("llama", "qwen2", "gemma3", "gpt2", "phi3", "gpt_oss", "qwen3", "gemma2", "gpt_neox", "phi", "mixtral")
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
PROMPTS = [Prompt("a", "It was"), Prompt("b", "The film began"), Prompt("c", "?")]


def random_model(family: str) -> LoadedModel:
    """A tiny model with biases and norms of random numbers."""
    loaded = tiny_model(family, num_hidden_layers=4) if family == "llama" else tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    if family == "qwen2":
        add_adapters(loaded.model, LoraSection(rank=2), AdapterBase("tiny:qwen2"))
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if "lora_B" in name:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return loaded


def tokens_of(model: LanguageModel, loaded: LoadedModel) -> list[tuple[int, ...]]:
    groups = open_engine(model, loaded.tokenizer).generate(PROMPTS, 2, GREEDY)
    return [completion.token_ids for group in groups for completion in group.completions]


class Resharded:
    """A model on this rank, moved from layout to layout; `changes` has what is not as it should be."""

    def __init__(self, loaded: LoadedModel, num_ranks: int) -> None:
        model = language_model(loaded.model)
        assert model.decoder is not None
        self.parts = parts_of(loaded.model, model.decoder.architecture)
        self.tensors = dict(loaded.model.named_parameters())
        self.whole = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.held = self.layout(Division(copies=num_ranks))

    def layout(self, division: Division) -> Layout:
        return layout_of(self.parts, division)

    def move(self, division: Division) -> None:
        target = self.layout(division)
        reshard(self.tensors, self.held, target)
        self.held = target
        for name, tensor in self.tensors.items():
            expected = self.whole[name]
            for dimension, ranges in enumerate(target[rank()][name]):
                indices = torch.tensor([index for one in ranges for index in one], dtype=torch.long)
                expected = expected.index_select(dimension, indices)
            assert torch.equal(tensor, expected), (name, division)


def there_and_back(family: str, first: Division, drawing: Division) -> list[tuple[int, ...]]:
    """Greedy tokens of tensor parallel ranks, between two stays in the layout `first`."""
    loaded = random_model(family)
    moved = Resharded(loaded, first.num_ranks)
    divided = tensor_parallel(language_model(loaded.model), TensorGroup(drawing.tensor))
    moved.move(first)
    moved.move(drawing)
    tokens = tokens_of(divided, loaded)
    moved.move(first)
    moved.move(Division(copies=first.num_ranks))
    assert all(other == tokens for other in gathered([tokens]))
    return tokens


def all_there_and_back(families: Sequence[str], first: Division, drawing: Division) -> list[list[tuple[int, ...]]]:
    return [there_and_back(family, first, drawing) for family in families]


@pytest.mark.parametrize(
    ("first", "drawing", "families"),
    [
        (Division(stages=2), Division(tensor=2), FAMILIES[:6]),
        (Division(shards=4), Division(copies=2, tensor=2), FAMILIES[:2]),
        pytest.param(Division(shards=2), Division(tensor=2), FAMILIES[6:], marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_ranks_draw_the_tokens_of_one_process(
    first: Division, drawing: Division, families: Sequence[str]
) -> None:
    drawn = on_ranks(first.num_ranks, partial(all_there_and_back, families, first, drawing))
    for family, tokens in zip(families, drawn, strict=True):
        loaded = random_model(family)
        assert tokens == tokens_of(language_model(loaded.model), loaded), family


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive after an operation inside the block, besides those of `before`."""

    def __init__(self, before: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.peak, self._sizes = 0, dict[StorageWeakRef, int]()
        self._note(before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._note([one for one in (out if isinstance(out, list | tuple) else [out]) if isinstance(one, torch.Tensor)])
        return out

    def _note(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._sizes[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))


def peaks(divisions: Sequence[Division]) -> list[float]:
    """On each rank, for each move to the next division, its peak over what the issue allows."""
    loaded = tiny_model("llama", hidden_size=64, intermediate_size=192, num_hidden_layers=8)
    moved = Resharded(loaded, divisions[0].num_ranks)
    moved.move(divisions[0])
    found: list[float] = []
    for division in divisions[1:]:
        layouts = moved.held, moved.layout(division)
        shares = [sum(4 * torch.Size(shape_of(piece)).numel() for piece in one[rank()].values()) for one in layouts]
        layer = 4 * sum(torch.Size(part.shape).numel() for part in moved.parts if part.layers == (0,))
        with LiveBytes([tensor.data for tensor in moved.tensors.values()]) as live:
            reshard(moved.tensors, *layouts)
        moved.held = layouts[1]
        found.append(live.peak / (1.3 * max(shares) + layer))
    return [peak for one in gathered([found]) for peak in one]


@pytest.mark.parametrize(
    "divisions",
    [
        [Division(stages=2), Division(tensor=2), Division(stages=2)],
        [Division(shards=4), Division(copies=2, tensor=2), Division(shards=4)],
    ],
)
def test_no_rank_holds_much_more_than_its_share(divisions: Sequence[Division]) -> None:
    found = on_ranks(divisions[0].num_ranks, partial(peaks, divisions))
    assert max(found) < 1, found


def test_layouts_that_do_not_fit_are_refused() -> None:
    model = language_model(tiny_model("llama").model)
    assert model.decoder is not None
    parts = parts_of(model.module, model.decoder.architecture)
    tensors = dict(model.module.named_parameters())
    lacking = [{name: ((), *piece[1:]) for name, piece in layout_of(parts, Division())[0].items()}]
    with pytest.raises(InputError, match="and the ranks hold 0 of them"):
        reshard(tensors, lacking, layout_of(parts, Division()))
    with pytest.raises(InputError, match="2 key/value heads"):
        tensor_parallel(model, TensorGroup(4))
    with pytest.raises(InputError, match="norms of queries"):
        tensor_parallel(language_model(tiny_model("olmo2").model), TensorGroup(2))
