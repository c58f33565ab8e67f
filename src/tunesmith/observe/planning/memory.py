"""Memory of a rank by stage and part, for a layout: data, tensor and pipeline parallel.

Sizes per token follow Korthikanti et al. 2022 (arXiv 2205.05198), eq. 1, without the scores of attention, which are not
stored. Optimizer states are sharded over the data-parallel ranks, as FSDP2 and ZeRO (arXiv 1910.02054) do.
"""

from dataclasses import dataclass

from tunesmith.observe.planning.hardware import GB
from tunesmith.observe.planning.shape import Shape
from tunesmith.observe.planning.workload import Workload

ACTIVATION_VALUES = 17
"""16-bit values a token, layer and hidden unit that a backward pass needs; one with checkpointing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a model: `data` replicas of `tensor` x `pipeline` ranks each; engines of `engine_tensor` ranks.

    With `shards_weights` weights and gradients are sharded over the replicas too, and gathered layer by layer. With
    `workers` as many engines draw in processes of their own; 0: on the ranks that train.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    engine_tensor: int = 1
    shards_weights: bool = False
    workers: int = 0

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.data * self.tensor * self.pipeline

    @property
    def num_parts(self) -> int:
        """Ranks over which one replica is cut."""
        return self.tensor * self.pipeline

    @property
    def num_engines(self) -> int:
        """Engines that draw."""
        return self.workers or max(1, self.num_ranks // self.engine_tensor)

    def __str__(self) -> str:
        sharded = " (weights sharded)" if self.shards_weights and self.data > 1 else ""
        return f"DP {self.data} x TP {self.tensor} x PP {self.pipeline}{sharded}"


def memory_gb(shape: Shape, work: Workload, layout: Layout) -> dict[str, dict[str, float]]:
    """GB (1e9 bytes) of each part, in each stage of a step, on the rank that holds most."""
    held = _held_bytes(shape, work, layout)
    stages = {"update": {**held, **_pass_bytes(shape, work, layout, is_trained=True)}}
    if work.has_reference or work.num_other_models:
        stages["scoring"] = {**held, **_pass_bytes(shape, work, layout, is_trained=False)}
    if work.draws:
        rows = min(work.slots, -(-work.num_rows // layout.num_engines))
        # The engine draws with the trainer's own base in 8 bits, and packs the output layer alone.
        packed = shape.num_parameters if work.base_itemsize is None else shape.vocab_size * shape.hidden_size
        engine = {
            "engine's weights": packed * work.engine_itemsize / layout.engine_tensor,
            "KV cache": shape.cache_values(rows * (work.prompt_tokens + work.new_tokens))
            * work.itemsize
            / min(layout.engine_tensor, shape.num_kv_heads),
        }
        stages["rollout"] = {**{part: size for part, size in held.items() if part != "gradients"}, **engine}
    return {
        stage: {part: size / GB for part, size in parts.items() if size}
        for stage, parts in sorted(stages.items(), key=lambda stage: ("rollout", "scoring", "update").index(stage[0]))
    }


def _held_bytes(shape: Shape, work: Workload, layout: Layout) -> dict[str, float]:
    """Memory of a rank in all stages."""
    own = shape.num_parameters / layout.num_parts
    gathered = 2 * shape.layer_parameters / layout.tensor if layout.shards_weights and layout.data > 1 else 0
    shards = layout.data if layout.shards_weights else 1
    num_trained = own * work.trained_share * (2 if work.critic == "separate" else 1)
    num_weights = own * (2 if work.critic == "separate" and work.trained_share == 1 else 1)
    itemsize: float = work.itemsize
    if work.base_itemsize is not None:  # all but the embedding
        embedded = min(1.0, shape.vocab_size * shape.hidden_size / shape.num_parameters)
        itemsize = embedded * work.itemsize + (1 - embedded) * work.base_itemsize
    has_copies = work.has_reference * (work.trained_share == 1)  # adapters share their base with the reference
    return {
        "weights": (num_weights / shards + gathered) * itemsize,
        "masters": num_trained / layout.data * (4 if work.itemsize == 2 else 0),
        "moments": num_trained / layout.data * work.moment_bytes,
        "gradients": num_trained / shards * 4,
        "other models": own / shards * work.itemsize * (has_copies + work.num_other_models),
    }


def _pass_bytes(shape: Shape, work: Workload, layout: Layout, *, is_trained: bool) -> dict[str, float]:
    """Activations and logits of a micro-batch. A pipeline stage holds those of as many micro-batches as there are
    stages, each of a part of the layers.
    """
    rows = min(work.micro_batch_size, -(-work.num_rows // layout.data))
    tokens = rows * (work.prompt_tokens + work.new_tokens)
    values = 1 if work.checkpointed or not is_trained else ACTIVATION_VALUES
    kept = tokens * shape.num_layers * shape.hidden_size * values * work.itemsize
    layers = 1 if not is_trained else work.trained_share if work.trained_share == 1 else 0.5
    one_layer = tokens * shape.hidden_size * ACTIVATION_VALUES * work.itemsize * work.checkpointed
    scored = rows * (work.new_tokens or work.prompt_tokens)
    logits = (2 if is_trained else 1) * 4 * scored * shape.vocab_size
    return {
        "activations": (kept * layers * is_trained + one_layer) / layout.tensor,
        "logits": logits / layout.tensor if work.trains != "reward model" else 0.0,
    }


def peak_gb(stages: dict[str, dict[str, float]]) -> float:
    """GB of the stage that needs most."""
    return max(sum(parts.values()) for parts in stages.values())
