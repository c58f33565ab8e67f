"""Alarms: signs in the metrics that a policy leaves the path, each recorded once as a finding when it begins."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType

from tunesmith.base.config.sections import AlarmsSection
from tunesmith.base.schema.records import Finding

_FIRST_STEPS = 3
"""Steps whose mean length and entropy later ones are compared with."""

_STEPS_WITHOUT = 3
"""Steps without any reward of the environment that are told."""

_MANY = 0.1
"""Share of broken trajectories that is told."""

_CUT, _DIFFERENCE = "sampling/importance_sampling_ratio/cut_share", "rollout/logp_diff_mean"
_STEPS_OF_MISMATCH = 3
"""Steps over which the distance of engine and trainer is averaged."""

Row = Mapping[str, float]


def alarms(rows: Sequence[Row], section: AlarmsSection) -> list[Finding]:
    """Findings that hold at the last of `rows`, the metrics of all steps so far, and did not one step before."""
    begun: list[Finding] = []
    for name, message_of in _ALARMS.items():
        message = message_of(rows, section)
        if message and not (len(rows) > 1 and message_of(rows[:-1], section)):
            begun.append(Finding(int(rows[-1]["step"]), name, "warning", message))
    return begun


def _kl(rows: Sequence[Row], section: AlarmsSection) -> str:
    value = _latest(rows, "objective/kl")
    if value is None or section.max_kl is None or value <= section.max_kl:
        return ""
    return (
        f"the KL to the reference is {value:.1f} nats per completion, above {section.max_kl:g} (alarms.max_kl): the "
        "policy has moved far; raise the KL coefficient or lower optimizer.learning_rate"
    )


def _length(rows: Sequence[Row], section: AlarmsSection) -> str:
    first, now = _first(rows, "completions/mean_length"), _latest(rows, "completions/mean_length")
    if first is None or now is None or section.length_factor is None:
        return ""
    if now > first * section.length_factor:
        return f"completions grew from {first:.0f} to {now:.0f} tokens: look whether the reward pays for length"
    if now < first / section.length_factor:
        return f"completions shrank from {first:.0f} to {now:.0f} tokens: look whether the reward pays for saying less"
    return ""


def _entropy(rows: Sequence[Row], section: AlarmsSection) -> str:
    first, now = _first(rows, "entropy"), _latest(rows, "entropy")
    if first is None or now is None or section.min_entropy_share is None or now >= first * section.min_entropy_share:
        return ""
    return (
        f"the entropy per token fell from {first:.2f} to {now:.2f} nats: completions become alike; raise entropy_coef, "
        "the KL coefficient or clip_high, or stop earlier"
    )


def _no_signal(rows: Sequence[Row], section: AlarmsSection) -> str:
    now = rows[-1].get("frac_reward_zero_std")
    if now is None or now < 1.0:
        return ""
    return "in no group do the rewards differ, so nothing was learnt in this step; take easier or harder prompts"


def _unfamiliar(rows: Sequence[Row], section: AlarmsSection) -> str:
    """The message on completions about which the heads of a reward model differ as they do not on votes."""
    limit = section.max_unfamiliar
    if limit is None:
        return ""
    names = [name for name in rows[-1] if name.startswith("rewards/") and name.endswith("/unfamiliar")]
    for name in names:
        shares = [row[name] for row in rows if name in row]
        first, now = fmean(shares[:_FIRST_STEPS]), fmean(shares[-_FIRST_STEPS:])
        if len(shares) < _FIRST_STEPS or now <= limit:
            continue
        model = name.removeprefix("rewards/").removesuffix("/unfamiliar")
        share = (
            f"on {now:.0%} of the completions the heads of the reward model {model} differ more than on 95 % of the "
            "answers of held-out votes"
        )
        if first > limit:
            return (
                f"{share}, from the first steps on: it judges text unlike its votes; collect "
                "votes on answers of this policy to these prompts"
            )
        return (
            f"{share}, at first {first:.0%}: the policy has left what the reward model knows; "
            "take an earlier checkpoint, collect votes on its answers, or set pessimism of the reward"
        )
    return ""


def _environment(rows: Sequence[Row], section: AlarmsSection) -> str:
    """The message on what goes wrong between the policy and its environment; the first of several."""
    now = rows[-1]
    if now.get("environment/errors", 0.0) > _MANY:
        return (
            f"the environment broke {now['environment/errors']:.0%} of the trajectories of this step (it raised, or "
            "took longer than environment.timeout_s): their errors stand in samples.jsonl and in the log"
        )
    if now.get("environment/failed_calls", 0.0) > 0.5:
        return (
            f"{now['environment/failed_calls']:.0%} of the tool calls could not be made: they cannot be read, name no "
            "tool, or lack arguments; show the model how to call by a few steps of SFT on rows with `tool_calls`"
        )
    cut = sum(now.get(f"environment/ended/{reason}", 0.0) for reason in ("max_turns", "max_tokens", "context_full"))
    if cut > 0.5:
        return (
            f"{cut:.0%} of the trajectories ended at a limit before they were done: raise environment.max_turns, "
            "environment.max_tokens or rollout.max_new_tokens, or shorten replies by environment.max_reply_tokens"
        )
    if now.get("environment/samples", 1.0) > 1.0:
        return (
            "the chat template writes earlier turns otherwise once a turn follows (reasoning is left out, as a rule), "
            f"so a trajectory comes to {now['environment/samples']:.1f} sequences to learn: take a template that keeps "
            "them"
        )
    return ""


def _nothing_earned(rows: Sequence[Row], section: AlarmsSection) -> str:
    """An environment that has given nothing for several steps, for no turn and for no trajectory."""
    last = rows[-_STEPS_WITHOUT:]
    names = ("environment/rewarded_turns", "rewards/environment/mean", "rewards/environment/std")
    if len(last) < _STEPS_WITHOUT or any(row.get(name, 1.0) != 0.0 for row in last for name in names):
        return ""
    return (
        f"no turn and no trajectory earned anything in {_STEPS_WITHOUT} steps: look at the turns in samples.jsonl, "
        "give a part of the reward for a part of the way (`ToolResult.reward`), or show the way by a few steps of SFT"
    )


def _mismatch(rows: Sequence[Row], section: AlarmsSection) -> str:
    """The message on completions that were drawn from too different a distribution, as a mean of the last steps."""
    limits = {_CUT: section.max_cut_share, _DIFFERENCE: section.max_logp_difference}
    last = [row for row in rows[-_STEPS_OF_MISMATCH:] if _CUT in row and _DIFFERENCE in row]
    if len(last) < _STEPS_OF_MISMATCH:
        return ""
    means = {name: fmean(row[name] for row in last) for name in limits}
    if not any(limit is not None and means[name] > limit for name, limit in limits.items()):
        return ""
    return (
        f"{means[_CUT]:.0%} of the importance weights are cut (alarms.max_cut_share), and the engine's log-prob of a "
        f"token is {means[_DIFFERENCE]:.2g} nats from the trainer's (alarms.max_logp_difference): too far to be "
        "corrected. With rollout.weights int8 or auto, train with rollout.weights model; else lower scale.staleness, "
        "or sample nearer to the model (rollout.top_p, rollout.repetition_penalty)"
    )


_ALARMS: Mapping[str, Callable[[Sequence[Row], AlarmsSection], str]] = MappingProxyType(
    {
        "kl": _kl,
        "length": _length,
        "entropy": _entropy,
        "no_signal": _no_signal,
        "unfamiliar": _unfamiliar,
        "environment": _environment,
        "nothing_earned": _nothing_earned,
        "mismatch": _mismatch,
    }
)
"""Functions that return the message of a finding if the last row is alarming, else empty text, by its name."""


def _latest(rows: Sequence[Row], name: str) -> float | None:
    """The figure of the last step that has it: a step without an update has no KL and no entropy."""
    return next((row[name] for row in reversed(rows) if name in row), None)


def _first(rows: Sequence[Row], name: str) -> float | None:
    """The mean of the first steps, None before there are more than those."""
    values = [row[name] for row in rows[:_FIRST_STEPS] if name in row]
    return fmean(values) if len(rows) > _FIRST_STEPS and values else None
