"""Rules for keys that have no effect beside others: those of all recipes, and those that several algorithms share."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
"""The value of each key of a recipe by its dotted path, and `algorithm`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`keys`, separated by blanks, have no effect where `holds` is true, because of `why`.

    A key that ends with `*` stands for all that begin so.
    """

    keys: str
    holds: Callable[[Values], bool]
    why: str
    others: str = ""
    """Keys that `keys` covers and the rule does not."""
    warns: bool = False
    """True if a run begins all the same, with a warning."""

    def covers(self, path: str) -> bool:
        """True if the key at `path` is one of the rule's."""
        return is_one_of(path, self.keys) and not is_one_of(path, self.others)


def is_one_of(path: str, keys: str) -> bool:
    """True if `keys`, separated by blanks, have the key at `path`; `*` at the end stands for the rest."""
    return any(path.startswith(key[:-1]) if key.endswith("*") else path == key for key in keys.split())


def is_(path: str, *allowed: object) -> Callable[[Values], bool]:
    """Holds where the key has one of these values."""
    return lambda v: v.get(path) in allowed


def is_not(path: str, *allowed: object) -> Callable[[Values], bool]:
    """Holds where the key has none of these values."""
    return lambda v: v.get(path) not in allowed


def always(_: Values) -> bool:
    """Holds for every recipe."""
    return True


def _has_one_process(v: Values) -> bool:
    """True where no other rank is asked for, nor started by torchrun, whose number counts."""
    return v["scale.ranks"] == 1 and os.environ.get("WORLD_SIZE", "1") == "1"


def is_updated_once(section: str) -> Callable[[Values], bool]:
    """Holds where each rollout is used for one update."""
    return lambda v: v[f"{section}.num_epochs"] * v[f"{section}.num_minibatches"] == 1


_NO_KL = "{section}.kl.coef is 0, so there is no KL; set it, or leave this out"
NO_RATIO = "the ratio to the old policy is 1"
ONE_UPDATE = (
    "{section}.num_epochs and {section}.num_minibatches are 1, so that each rollout is used for one update, in which "
    f"{NO_RATIO}; set one of them to 2 or more, or leave this out"
)
NO_KL_YET = ONE_UPDATE.replace(NO_RATIO, "the KL to the old policy is 0")
_NO_LORA = "model.lora.rank is 0, which trains the weights themselves; set the rank, or leave this out"


COMMON: tuple[Rule, ...] = (
    Rule("model.lora.*", is_("model.lora.rank", 0), _NO_LORA, "model.lora.rank"),
    Rule(
        "model.reference",
        is_("model.base", "int8"),
        "model.base is int8, and the reference is that base; leave this out",
    ),
    Rule(
        "model.seed",
        lambda v: v["model.name"] != "scratch" and not v["model.name"].startswith("tiny:"),
        "it draws the random weights of `scratch` and `tiny:<family>`, and the model's are loaded; run.seed is that of "
        "everything else",
    ),
    Rule(
        "optimizer.min_ratio",
        is_("optimizer.schedule", "constant"),
        "optimizer.schedule is constant, so the learning rate does not decay; set linear or cosine, or leave this out",
    ),
    Rule(
        "optimizer.decay_share",
        is_not("optimizer.schedule", "warmup_stable_decay"),
        "it belongs to optimizer.schedule warmup_stable_decay; set that, or leave this out",
    ),
    Rule(
        "optimizer.fused",
        is_("optimizer.state", "int8"),
        "optimizer.state is int8, which is always updated in one pass; set float32, or leave this out",
    ),
    Rule(
        "optimizer.loss_scale optimizer.loss_scale_window",
        is_("model.dtype", "float32", "bfloat16"),
        "it is for float16 weights alone, which model.dtype excludes; leave this out",
    ),
    *(
        Rule(
            f"{data}.heldout_fraction {data}.split_column",
            lambda v, data=data: bool(v.get(f"{data}.heldout_source")),
            f"{data}.heldout_source names the rows held out, so none of the source are; leave one of them out",
        )
        for data in ("prompts", "pairs", "demonstrations")
    ),
    Rule(
        "prompts.split_column",
        is_("prompts.heldout_fraction", 0.0),
        "prompts.heldout_fraction is 0, so nothing is split; set it, or leave this out",
    ),
    Rule(
        "run.keep_checkpoints",
        is_("run.checkpoint_every", 0),
        "run.checkpoint_every is 0, so no checkpoints are written that could be kept; set it, or leave this out",
    ),
    Rule("scale.shard scale.rank_timeout_s", _has_one_process, "scale.ranks is 1; set it, or leave this out"),
)

SAMPLING: tuple[Rule, ...] = (
    Rule(
        "scale.threads_per_worker scale.lease scale.timeout_s",
        is_("scale.workers", 0),
        "scale.workers is 0, so this process draws; set it, or leave this out",
    ),
    Rule(
        "rollout.server_timeout_s rollout.server_folder",
        is_("rollout.server_url", None),
        "rollout.server_url is null, so there is no server; set it, or leave this out",
    ),
    Rule(
        "rollout.vllm_options",
        is_not("rollout.server_url", None),
        "rollout.server_url names a server, which has options of its own; set it to null, or leave this out",
    ),
    Rule(
        "rollout.num_slots",
        is_("rollout.backend", "transformers"),
        "rollout.backend is transformers, whose limit is rollout.batch_size; set that one",
    ),
    Rule(
        "rollout.weights rollout.drafts",
        is_not("rollout.backend", "native"),
        "it is for rollout.backend native; set that, or leave this out",
    ),
    Rule(
        "rollout.kv_cache_mb",
        is_not("rollout.backend", "native"),
        "it is the cache of rollout.backend native; set that, or leave this out",
    ),
    Rule(
        "rollout.batch_size",
        is_("rollout.backend", "vllm"),
        "it is for rollout.backend transformers; the limit of vllm is rollout.num_slots",
    ),
    Rule(
        "rollout.top_p rollout.min_p",
        is_("rollout.top_k", 1),
        "rollout.top_k is 1, which leaves the likeliest token alone; raise it, or leave this out",
    ),
    Rule(
        "rollout.importance.*",
        is_("rollout.importance.mode", "off"),
        "rollout.importance.mode is off; set truncate or mask, or leave this out",
        "rollout.importance.mode",
    ),
)


def kl_rules(section: str) -> tuple[Rule, ...]:
    """Rules of a section with a KL to the reference."""
    return (
        Rule(f"{section}.kl.*", is_(f"{section}.kl.coef", 0.0), _NO_KL, f"{section}.kl.coef"),
        Rule("model.reference", is_(f"{section}.kl.coef", 0.0), _NO_KL.format(section=section)),
        Rule(
            f"{section}.kl.horizon",
            is_(f"{section}.kl.target", None),
            "{section}.kl.target is null, so the coefficient is fixed; set it, or leave this out",
        ),
    )


def policy_rules(section: str) -> tuple[Rule, ...]:
    """Rules of the sections of PPO and GRPO."""
    return (
        *kl_rules(section),
        Rule(
            "ptx.* demonstrations.*",
            is_("ptx.coef", 0.0),
            "ptx.coef is 0, so no demonstrations are learnt; set it, or leave this out",
            "ptx.coef",
        ),
        Rule(
            "demonstrations.heldout_source demonstrations.heldout_fraction demonstrations.split_column",
            always,
            "no demonstrations are evaluated here, only learnt; leave this out",
        ),
        Rule(
            f"{section}.clip_low",
            is_(f"{section}.surrogate", "cispo"),
            "{section}.surrogate is cispo, whose weight has no lower bound; set clip, or leave this out",
        ),
        *(
            Rule(
                f"{section}.clip_low {section}.clip_high",
                is_(f"{section}.surrogate", surrogate),
                f"{{section}}.surrogate is {surrogate}, which does not clip; set clip, or leave this out",
            )
            for surrogate in ("sapo", "log_prob", "kl_cov")
        ),
        Rule(
            f"{section}.temperature_positive {section}.temperature_negative",
            is_not(f"{section}.surrogate", "sapo"),
            "it is the steepness of {section}.surrogate sapo; set that, or leave this out",
        ),
        Rule(
            f"{section}.kl_cov_share {section}.kl_cov_coef",
            is_not(f"{section}.surrogate", "kl_cov"),
            "it belongs to {section}.surrogate kl_cov; set that, or leave this out",
        ),
        Rule(
            f"{section}.clip_cov_low {section}.clip_cov_high",
            is_(f"{section}.clip_cov_share", 0.0),
            "{section}.clip_cov_share is 0, which leaves out no token; set it, or leave this out",
        ),
        Rule(
            f"{section}.clip_low {section}.clip_high {section}.dual_clip {section}.surrogate",
            lambda v: is_updated_once(section)(v) and v[f"{section}.surrogate"] not in ("dppo_tv", "dppo_kl", "gmpo"),
            ONE_UPDATE,
            warns=True,
        ),
        Rule(
            f"{section}.importance_sampling_level",
            is_(f"{section}.surrogate", "log_prob"),
            "{section}.surrogate is log_prob, which has no ratio; leave this out",
        ),
        Rule(f"{section}.target_kl", is_updated_once(section), NO_KL_YET),
    )


NO_HEAD = Rule("optimizer.head_learning_rate", always, "this algorithm has no value or reward head; leave this out")
NO_REFERENCE = Rule("model.reference", always, "this training has no reference; leave this out")
ACCURACY = Rule(
    "evaluation.num_prompts evaluation.completions_per_prompt",
    is_("evaluation.correct_at", None),
    "evaluation.correct_at is null, so no accuracy is measured; set it, or leave this out",
)


def no_kl_alarm(section: str) -> Rule:
    """The rule of the KL's alarm, where the section has a KL to the reference."""
    return Rule(
        "alarms.max_kl",
        lambda v: v[f"{section}.kl.coef"] == 0 and v["alarms.max_kl"] is not None,
        f"{section}.kl.coef is 0, so the KL to the reference is not measured; set it, or leave this out",
    )
