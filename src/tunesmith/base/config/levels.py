"""Levels of optimisation: documented sets of settings that exist anyway, from textbook code to all that there is.

A level is the sum of its techniques and those of the levels below it. `docs/ladder.md` explains them, and
`tunesmith ladder` measures them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from tunesmith.base.config.keys import Key, leaves
from tunesmith.base.config.sections import Section

Level = Literal["baseline", "basic", "advanced", "optimal"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""All levels, the slowest first."""

WHOLE = 1_000_000
"""More rows than a step has: each minibatch is a single pass."""

MICRO_BATCH = "<section>.micro_batch_size"
"""The key of each section with a KL to the reference: elsewhere it also bounds the passes over held-out rows."""


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique, the lowest level that has it, and the values of its keys without and with it.

    A key that is in `without` alone keeps the recipe's value from that level on.
    """

    name: str
    level: Level
    without: Mapping[str, object]
    used: Mapping[str, object]


TECHNIQUES = (
    Technique("vectorized advantages", "basic", {"ppo.gae": "loop"}, {"ppo.gae": "auto"}),
    Technique("pooled memory", "basic", {"run.keep_freed_memory": False}, {"run.keep_freed_memory": True}),
    Technique("logits in blocks", "basic", {"model.forward": "full"}, {"model.forward": "padded"}),
    Technique("16-bit weights", "advanced", {"model.dtype": "float32"}, {"model.dtype": "auto"}),
    Technique("packing", "advanced", {"model.forward": "padded"}, {"model.forward": "auto"}),
    Technique("accumulation", "advanced", {MICRO_BATCH: WHOLE}, {}),
    Technique(
        "rewards while drawing",
        "advanced",
        {"rollout.score_while_drawing": False},
        {"rollout.score_while_drawing": True},
    ),
    Technique("rollout engine", "optimal", {"rollout.backend": "transformers"}, {"rollout.backend": "native"}),
    Technique("exact log-probs", "optimal", {"rollout.recompute_logps": True}, {"rollout.recompute_logps": False}),
    Technique("fused kernels", "optimal", {"model.kernels": "torch"}, {"model.kernels": "auto"}),
    Technique("shared prefixes", "optimal", {"model.share_prefixes": False}, {"model.share_prefixes": True}),
    Technique("fused optimizer", "optimal", {"optimizer.fused": False}, {"optimizer.fused": True}),
)
"""All techniques. Of those that share a key, the later is the better one."""


LADDER_ONLY = frozenset(
    {"ppo.gae", "run.keep_freed_memory", "model.forward", "model.share_prefixes", "optimizer.fused"}
)
"""Keys whose other values are slower and otherwise equal: they exist to be measured, and `docs/ladder.md` has them."""


def shown_keys(schema: type[Section]) -> list[Key]:
    """The keys of `schema` that lists for users have: all but those of the ladder alone."""
    return [key for key in leaves(schema) if key.path not in LADDER_ONLY]


def settings_of(level: Level, schema: type[Section]) -> dict[str, object]:
    """The values that `level` sets, by dotted path, among the keys of `schema`."""
    rank = LEVELS.index(level)
    values: dict[str, object] = {}
    for technique in reversed(TECHNIQUES):
        if LEVELS.index(technique.level) > rank:
            values |= technique.without
    for technique in TECHNIQUES:
        if LEVELS.index(technique.level) <= rank:
            values |= technique.used
    known = {key.path for key in leaves(schema)}
    size = values.pop(MICRO_BATCH, None)
    if size is not None:
        sections = [path.removesuffix(".kl.coef") for path in known if path.endswith(".kl.coef")]
        values |= {f"{section}.micro_batch_size": size for section in sections}
    return {path: value for path, value in values.items() if path in known}
