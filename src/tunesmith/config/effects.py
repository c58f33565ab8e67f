"""Keys that have no effect beside others: the one table of them, and its check.

A key that somebody set, and that another one makes meaningless, is refused by name: the run would not be the one that
was asked for, and nothing would say so. Defaults are never refused. A few keys, which papers and earlier recipes give
without effect, are a warning instead.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tunesmith.config.algorithm_sections import REFERENCE_FREE
from tunesmith.config.keys import item_of, section_of
from tunesmith.config.merge import Origin, Problem
from tunesmith.config.schema import Recipe
from tunesmith.config.sections import Section
from tunesmith.core.errors import ConfigError
from tunesmith.core.log import get_logger

_log = get_logger(__name__)

Values = Mapping[str, Any]
"""The value of each key of a recipe by its dotted path, and `algorithm`."""

_ASKED = ("file ", "command line", "argument ", "Python")
"""How the origins begin of values that somebody set for this run, rather than a default, a level or a shipped
recipe."""


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
        return _is_one_of(path, self.keys) and not _is_one_of(path, self.others)


@dataclass(frozen=True, slots=True)
class Ineffective:
    """A key without effect as a problem, and whether it is one for a warning alone."""

    problem: Problem
    warns: bool


def ineffective(recipe: Recipe, origins: Mapping[str, Origin]) -> list[Ineffective]:
    """The keys of `recipe` that have another value than their default and no effect, with their origins."""
    values, defaults = dict(_leaves(recipe)), dict(_leaves(type(recipe)()))
    set_keys = [path for path, value in values.items() if value != defaults.get(path, _default(path, recipe))]
    found: list[Ineffective] = []
    for path in set_keys:
        rule = next((one for one in _rules_of(recipe.algorithm) if one.covers(path) and one.holds(values)), None)
        if rule is not None:
            why = rule.why.format(section=path.partition(".")[0], **{"value": values[path]})
            message = f"is {_shown(values[path])}, which has no effect: {why}"
            found.append(Ineffective(Problem(path, message, origins.get(path, "")), rule.warns))
    return found


def check_effects(recipe: Recipe, origins: Mapping[str, Origin], *, only_warns: bool = False) -> None:
    """Raise ConfigError for keys that somebody set and that have no effect; log those that are a warning.

    `only_warns` is for recipes of which nobody knows whether a shipped recipe set a key, or who runs it.
    """
    asked = [one for one in ineffective(recipe, origins) if one.problem.origin.startswith(_ASKED)]
    if not only_warns and (problems := [str(one.problem) for one in asked if not one.warns]):
        raise ConfigError(*problems)
    for one in asked:
        _log.warning("%s", one.problem)


def _is_one_of(path: str, keys: str) -> bool:
    return any(path.startswith(key[:-1]) if key.endswith("*") else path == key for key in keys.split())


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in type(section).model_fields.items():
        value, path = getattr(section, name), prefix + name
        if isinstance(value, Section):
            yield from _leaves(value, f"{path}.")
        elif section_of(item_of(info.annotation)):
            for index, item in enumerate(cast(tuple[Section, ...], value)):
                yield from _leaves(item, f"{path}.{index}.")
        else:
            yield path, value


def _default(path: str, recipe: Recipe) -> object:
    """The default of a key of an item of a list, which the default recipe may not have."""
    value: Any = recipe
    *parts, last = path.split(".")
    for part in parts:
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return type(cast(Section, value)).model_fields[last].get_default(call_default_factory=True)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(cast(tuple[object, ...], value)) if isinstance(value, tuple) else value)


def _is(path: str, *allowed: object) -> Callable[[Values], bool]:
    return lambda v: v.get(path) in allowed


def _is_not(path: str, *allowed: object) -> Callable[[Values], bool]:
    return lambda v: v.get(path) not in allowed


def _always(_: Values) -> bool:
    return True


def _has_one_process(v: Values) -> bool:
    """True where no other rank is asked for, nor started by torchrun, whose number counts."""
    return v["scale.ranks"] == 1 and os.environ.get("WORLD_SIZE", "1") == "1"


def _is_updated_once(section: str) -> Callable[[Values], bool]:
    return lambda v: v[f"{section}.num_epochs"] * v[f"{section}.num_minibatches"] == 1


_NO_KL = "{section}.kl.coef is 0, so there is no KL; set it, or leave this out"
_ONE_UPDATE = (
    "{section}.num_epochs and {section}.num_minibatches are 1, so that each rollout is used for one update, in which "
    "the ratio to the old policy is 1; set one of them to 2 or more, or leave this out"
)
_NO_LORA = "model.lora.rank is 0, which trains the weights themselves; set the rank, or leave this out"

_COMMON: tuple[Rule, ...] = (
    Rule("model.lora.*", _is("model.lora.rank", 0), _NO_LORA, "model.lora.rank"),
    Rule(
        "model.seed",
        lambda v: v["model.name"] != "scratch" and not v["model.name"].startswith("tiny:"),
        "it draws the random weights of `scratch` and `tiny:<family>`, and the model's are loaded; run.seed is that of "
        "everything else",
    ),
    Rule(
        "optimizer.min_ratio",
        _is("optimizer.schedule", "constant"),
        "optimizer.schedule is constant, so the learning rate does not decay; set linear or cosine, or leave this out",
    ),
    Rule(
        "optimizer.decay_share",
        _is_not("optimizer.schedule", "warmup_stable_decay"),
        "it belongs to optimizer.schedule warmup_stable_decay; set that, or leave this out",
    ),
    Rule(
        "optimizer.fused",
        _is("optimizer.state", "int8"),
        "optimizer.state is int8, which is always updated in one pass; set float32, or leave this out",
    ),
    Rule(
        "optimizer.loss_scale optimizer.loss_scale_window",
        _is("model.dtype", "float32", "bfloat16"),
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
        _is("prompts.heldout_fraction", 0.0),
        "prompts.heldout_fraction is 0, so nothing is split; set it, or leave this out",
    ),
    Rule(
        "run.keep_checkpoints",
        _is("run.checkpoint_every", 0),
        "run.checkpoint_every is 0, so no checkpoints are written that could be kept; set it, or leave this out",
    ),
    Rule("scale.shard scale.rank_timeout_s", _has_one_process, "scale.ranks is 1; set it, or leave this out"),
)

_SAMPLING: tuple[Rule, ...] = (
    Rule(
        "scale.threads_per_worker scale.lease scale.timeout_s",
        _is("scale.workers", 0),
        "scale.workers is 0, so this process draws; set it, or leave this out",
    ),
    Rule(
        "rollout.server_timeout_s rollout.server_folder",
        _is("rollout.server_url", None),
        "rollout.server_url is null, so there is no server; set it, or leave this out",
    ),
    Rule(
        "rollout.vllm_options",
        _is_not("rollout.server_url", None),
        "rollout.server_url names a server, which has options of its own; set it to null, or leave this out",
    ),
    Rule(
        "rollout.num_slots",
        _is("rollout.backend", "transformers"),
        "rollout.backend is transformers, whose limit is rollout.batch_size; set that one",
    ),
    Rule(
        "rollout.kv_cache_mb",
        _is_not("rollout.backend", "native"),
        "it is the cache of rollout.backend native; set that, or leave this out",
    ),
    Rule(
        "rollout.batch_size",
        _is("rollout.backend", "vllm"),
        "it is for rollout.backend transformers; the limit of vllm is rollout.num_slots",
    ),
    Rule(
        "rollout.top_p rollout.min_p",
        _is("rollout.top_k", 1),
        "rollout.top_k is 1, which leaves the likeliest token alone; raise it, or leave this out",
    ),
    Rule(
        "rollout.importance.*",
        _is("rollout.importance.mode", "off"),
        "rollout.importance.mode is off; set truncate or mask, or leave this out",
        "rollout.importance.mode",
    ),
)


def _kl_rules(section: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{section}.kl.*", _is(f"{section}.kl.coef", 0.0), _NO_KL, f"{section}.kl.coef"),
        Rule(
            f"{section}.kl.horizon",
            _is(f"{section}.kl.target", None),
            "{section}.kl.target is null, so the coefficient is fixed; set it, or leave this out",
        ),
    )


def _policy_rules(section: str) -> tuple[Rule, ...]:
    """Rules of the sections of PPO and GRPO."""
    return (
        *_kl_rules(section),
        Rule(
            f"{section}.clip_low",
            _is(f"{section}.surrogate", "cispo"),
            "{section}.surrogate is cispo, whose weight has no lower bound; set clip, or leave this out",
        ),
        Rule(
            f"{section}.clip_low {section}.clip_high {section}.dual_clip {section}.surrogate",
            _is_updated_once(section),
            _ONE_UPDATE,
            warns=True,
        ),
    )


_PPO: tuple[Rule, ...] = (
    *_policy_rules("ppo"),
    Rule(
        "ppo.value_clip ppo.value_coef",
        _is("ppo.critic", "none"),
        "ppo.critic is none, so there are no values; set shared or separate, or leave this out",
    ),
    Rule("ppo.value_clip ppo.target_kl", _is_updated_once("ppo"), _ONE_UPDATE.replace("the ratio to", "the KL to")),
)
_GRPO: tuple[Rule, ...] = (
    *_policy_rules("grpo"),
    Rule(
        "grpo.baseline grpo.scale",
        _is("grpo.multi_objective_aggregation", "normalize_then_sum"),
        "grpo.multi_objective_aggregation is normalize_then_sum, which normalizes each reward within its group by "
        "itself; set sum_then_normalize, or leave this out",
    ),
)
_OWN_LOGPS = (
    "grpo.num_epochs and grpo.num_minibatches are 1, so that the old policy is the one that is updated, and its "
    "log-probs are those of the update's own pass; leave this out"
)
_DPO: tuple[Rule, ...] = (
    Rule(
        "dpo.simpo_gamma",
        _is_not("dpo.loss", "simpo"),
        "it is the margin of dpo.loss simpo; set that, or leave this out",
    ),
    Rule(
        "dpo.tie_theta",
        _is_not("dpo.ties", "rao_kupper"),
        "it is the threshold of dpo.ties rao_kupper; set that, or leave this out",
    ),
    Rule(
        "dpo.desirable_weight dpo.undesirable_weight",
        _is_not("dpo.loss", "kto"),
        "it weighs labels of dpo.loss kto; set that, or leave this out",
    ),
    Rule(
        "dpo.reference",
        lambda v: v["dpo.loss"] in REFERENCE_FREE,
        "dpo.loss is one without a reference model; leave this out",
    ),
)
_NO_HEAD = Rule("optimizer.head_learning_rate", _always, "this algorithm has no value or reward head; leave this out")
_ACCURACY = Rule(
    "evaluation.num_prompts evaluation.completions_per_prompt",
    _is("evaluation.correct_at", None),
    "evaluation.correct_at is null, so no accuracy is measured; set it, or leave this out",
)


def _no_kl_alarm(section: str) -> Rule:
    return Rule(
        "alarms.max_kl",
        lambda v: v[f"{section}.kl.coef"] == 0 and v["alarms.max_kl"] is not None,
        f"{section}.kl.coef is 0, so the KL to the reference is not measured; set it, or leave this out",
    )


def _unless_live(update: str, keys: str, others: str = "") -> Rule:
    return Rule(
        keys, _is_not("live.update", *update.split()), f"live.update is not {update}; set it, or leave this out", others
    )


_LIVE: tuple[Rule, ...] = (
    _unless_live("ppo", "ppo.*"),
    _unless_live("grpo", "grpo.*"),
    _unless_live("ppo or grpo", "reward_model.* live.policy_steps optimizer.head_learning_rate rollout.importance.*"),
    _unless_live("ppo or grpo", "rollout.recompute_logps"),
    _unless_live("dpo", "dpo.*", "dpo.ties dpo.micro_batch_size"),
    Rule("live.kl.coef live.kl.target", _is_not("live.update", "dpo"), "live.update has a KL of its own; set that one"),
    Rule("dpo.reference", _always, "the live loop computes log-probs of the reference once for each answer"),
    Rule("rollout.score_while_drawing", _always, "the live loop scores after drawing; leave this out"),
    Rule(
        "run.* scale.*",
        _always,
        "the live loop is one process that runs until it is stopped, and writes a version after each update",
        "run.seed run.measure run.hang_after_s run.num_threads run.keep_freed_memory run.name",
    ),
    Rule(
        "rollout.recompute_logps",
        lambda v: v["live.update"] == "grpo" and _is_updated_once("grpo")(v),
        _OWN_LOGPS,
    ),
    *_PPO,
    *_GRPO,
    *_DPO,
)
_RULES: Mapping[str, tuple[Rule, ...]] = {
    "sft": (_NO_HEAD,),
    "reward": (),
    "dpo": (_NO_HEAD, *_DPO),
    "ppo": (
        *_SAMPLING,
        *_PPO,
        _no_kl_alarm("ppo"),
        Rule(
            "optimizer.head_learning_rate",
            _is("ppo.critic", "none"),
            "ppo.critic is none, so there is no value head; set shared or separate, or leave this out",
        ),
    ),
    "grpo": (
        *_SAMPLING,
        *_GRPO,
        Rule("rollout.recompute_logps", _is_updated_once("grpo"), _OWN_LOGPS),
        _no_kl_alarm("grpo"),
        _ACCURACY,
        _NO_HEAD,
    ),
    "best_of_n": (
        *_SAMPLING,
        *_kl_rules("best_of_n"),
        Rule("best_of_n.kl.bias_correction", _always, "best-of-n has no ratio to weigh the KL with; leave this out"),
        Rule(
            "rollout.importance.* rollout.recompute_logps",
            _always,
            "best-of-n learns the kept completions as SFT does, without the log-probs that they were drawn with; leave "
            "this out",
        ),
        _no_kl_alarm("best_of_n"),
        _ACCURACY,
        _NO_HEAD,
    ),
    "distill": (
        *_SAMPLING,
        Rule(
            "distill.beta",
            _is_not("distill.divergence", "jensen_shannon"),
            "it is the mixture of distill.divergence jensen_shannon; set that, or leave this out",
        ),
        Rule(
            "distill.teachers.0.weight",
            lambda v: "distill.teachers.1.weight" not in v,
            "weights are relative to those of other teachers, and there is one; leave this out",
        ),
        Rule(
            "rollout.importance.* rollout.recompute_logps rollout.score_while_drawing",
            _always,
            "distillation has no reward and no ratio; leave this out",
        ),
        Rule("alarms.max_kl", _always, "distillation measures no KL to a reference; leave this out"),
        _NO_HEAD,
    ),
    "live": (*_SAMPLING, *_LIVE),
}
"""The rules of each algorithm, besides those of every recipe."""


def _rules_of(algorithm: str) -> tuple[Rule, ...]:
    return (*_RULES[algorithm], *_COMMON)
