"""Diagnosis of a run: the causes that its facts show, ranked by what they cost; as text and as JSON."""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tunesmith.base.schema.records import Finding
from tunesmith.observe.profiling.cause import Cause
from tunesmith.observe.profiling.facts import Facts, MissingError, read_facts, runs_at
from tunesmith.observe.profiling.lost import line_in, tail_causes, wait_causes
from tunesmith.observe.profiling.rules import RULES, Rule
from tunesmith.observe.profiling.savings.computing import size_key

_LEAST_STEPS, _LARGE_SHARE, _MAX_FINDINGS = 5, 0.1, 3


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The causes of a run, the costliest first.

    `step_s` is a usual step, `mean_step_s` the mean of all, slow ones too. `warm_up_s` is the time of the first step,
    and of the first ones after the run was resumed, which are not counted. `coverage` is the share of the step in named
    stages; `missing` has the facts that rules which abstained lack.
    """

    run: Path
    num_steps: int
    step_s: float
    mean_step_s: float
    warm_up_s: float
    num_slow: int
    coverage: float
    causes: Sequence[Cause]
    missing: Mapping[str, Sequence[str]]


def diagnoses(path: Path) -> list[Diagnosis]:
    """The diagnosis of the run in `path`, or of each run inside of a demo's folder, the longest first."""
    found = [diagnose(read_facts(run)) for run in runs_at(path)]
    return sorted(found, key=lambda one: -one.step_s * one.num_steps)


def diagnose(facts: Facts) -> Diagnosis:
    """Apply all rules to `facts`."""
    causes: list[Cause] = []
    missing: dict[str, Sequence[str]] = {}
    rules = [rule for rule in RULES if facts.step_s > 0 and _concerns(rule, facts)]
    for rule in rules:
        lacking = [name for need in rule.needs if (name := _filled(need, facts)) not in facts.values]
        try:
            cause = None if lacking else _cause(rule, facts)
        except MissingError as error:
            lacking, cause = [str(error.args[0])], None
        except (ArithmeticError, TypeError, ValueError):  # a figure that no run writes, in a damaged file
            cause = None
        if lacking:
            missing[rule.name] = lacking
        if cause is not None and cause.share >= rule.least:
            causes.append(cause)
    if facts.step_s > 0:
        causes += tail_causes(facts)
        causes += wait_causes(facts, [cause.name for cause in causes])
    coverage = 1 - facts.number("time/other_s", 0.0) / facts.step_s if facts.step_s > 0 else 0.0
    ranked = sorted(causes, key=lambda cause: (not cause.is_urgent, -cause.predicted_saving_s))
    return Diagnosis(
        run=facts.path,
        num_steps=facts.num_steps,
        step_s=facts.step_s,
        mean_step_s=facts.mean_step_s,
        warm_up_s=facts.warm_up_s,
        num_slow=len(facts.slow_steps),
        coverage=coverage,
        causes=ranked,
        missing=missing,
    )


def _concerns(rule: Rule, facts: Facts) -> bool:
    """True if the rule is for runs of this kind; a run without setup.json counts as one on a CPU."""
    is_on_gpu = facts.values.get("setup.device", "cpu") != "cpu"
    return {
        "all": True,
        "sampling": "recipe.rollout.backend" in facts.values,
        "rewards": "recipe.reward" in facts.values,
        "environments": "environment/turns" in facts.values,
        "groups": "recipe.grpo.kl.coef" in facts.values,
        "cpu": not is_on_gpu,
        "gpu": is_on_gpu,
    }[rule.scope]


def _cause(rule: Rule, facts: Facts) -> Cause | None:
    saving = rule.saving(facts)
    if saving is None:
        return None
    seconds, low, high = (min(max(x, 0.0), facts.step_s) for x in (saving.seconds, saving.low, saving.high))
    line = line_in(facts, rule.stage, rule.kinds) if rule.stage else ""
    files = list(dict.fromkeys(facts.origin(name) for name in (*_names(rule.evidence), "time/step_s")))
    files += ["places.jsonl"] if line else []
    evidence = "; ".join((_filled(rule.evidence, facts), line) if line else (_filled(rule.evidence, facts),))
    return Cause(
        name=rule.name,
        symptom=rule.symptom,
        share=min(1.0, seconds / facts.mean_step_s),
        evidence=f"{evidence} ({', '.join(files)}; {facts.num_steps} steps)",
        advice=rule.advice(facts) if callable(rule.advice) else rule.advice,
        settings=_settings(rule, facts),
        predicted_saving_s=seconds,
        low=low,
        high=high,
        figures={name: facts.values[name] for need in rule.needs if (name := _filled(need, facts)) in facts.values},
        is_urgent=rule.is_urgent(facts),
    )


def _settings(rule: Rule, facts: Facts) -> dict[str, object]:
    """The keys to set: those that the recipe has with another value."""
    settings: dict[str, object] = {}
    for key, value in rule.settings.items():
        path = key.format(section=facts.section, size=size_key(facts))
        wanted = value(facts) if callable(value) else value
        if f"recipe.{path}" in facts.values and facts.values[f"recipe.{path}"] != wanted:
            settings[path] = wanted
    return settings


class _Sentence(string.Formatter):
    """`str.format` whose fields are names of facts, which have slashes and dots in them."""

    def get_field(self, field_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, str]:
        return kwargs.get(field_name), field_name


def _filled(template: str, facts: Facts) -> str:
    """`template` with each fact in braces replaced by its value."""
    return _Sentence().vformat(template, (), facts.values)


def _names(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def slow_findings(run: Path) -> list[Finding]:
    """A finding for each of the costliest causes that take a tenth of a long enough run or more."""
    facts = read_facts(run)
    found = diagnose(facts) if facts.num_steps >= _LEAST_STEPS else None
    return [
        Finding(
            step=facts.last_step,
            name=f"slow/{cause.name}",
            severity="note",
            message=f"{cause.symptom} {cause.share:.0%} of the run could be saved: {cause.evidence}; `tunesmith "
            f"diagnose {run}` says what to change",
        )
        for cause in (found.causes[:_MAX_FINDINGS] if found else ())
        if cause.share >= _LARGE_SHARE
    ]


def as_json(found: Sequence[Diagnosis]) -> dict[str, object]:
    """The first diagnosis as plain values, and all of them under `runs` where there are several."""
    runs: list[dict[str, object]] = [{**asdict(one), "verdict": verdict(one)} for one in found]
    return {**runs[0], "runs": runs} if len(runs) > 1 else runs[0]


def verdict(one: Diagnosis) -> str:
    """The result in a sentence."""
    if not one.step_s:
        return "no step is recorded yet"
    if not one.causes:
        return "nothing to gain: no known cause costs a noticeable share of the run"
    first = one.causes[0]
    seconds = f"{first.predicted_saving_s:.2g} s of {one.mean_step_s:.3g} s a step"
    return f"{first.symptom} {seconds}, {first.share:.0%} of the run, could be saved"


def as_text(one: Diagnosis) -> str:
    """The diagnosis as it is printed."""
    lines = [f"{one.run}", *_head(one), ""]
    for place, cause in enumerate(one.causes, 1):
        seconds = f"{cause.predicted_saving_s:.2g} s of a step ({cause.low:.2g} to {cause.high:.2g})"
        lines += [
            f"{place}. {cause.name}: {cause.symptom}",
            f"   could save   {seconds}, {cause.share:.0%} of the run",
            f"   evidence     {cause.evidence}",
            f"   what to do   {cause.advice}",
            *(f"   set          {line}" for line in setting_lines(cause)),
            "",
        ]
    if not one.causes:
        lines += [verdict(one), ""]
    if one.missing:
        lines += ["not judged, because figures are missing:"]
        lines += [f"   {name}: {', '.join(facts)}" for name, facts in one.missing.items()]
    return "\n".join(lines).rstrip()


def _head(one: Diagnosis) -> Iterator[str]:
    """The time of steps: usual ones, all, and those that are not counted."""
    yield f"{one.num_steps} steps of {one.step_s:.3g} s, {one.coverage:.0%} of it in named stages"
    if one.num_slow:
        steps = "step takes" if one.num_slow == 1 else "steps take"
        yield f"{one.num_slow} {steps} far longer: the mean is {one.mean_step_s:.3g} s"
    if one.warm_up_s > max(1.0, 3 * one.mean_step_s):
        yield f"not counted: {one.warm_up_s:.3g} s of the first step, which compiles and allocates"


def setting_lines(cause: Cause) -> list[str]:
    """Each key to set with its value, as in a recipe and as a flag."""
    values = {key: yaml_value(value) for key, value in cause.settings.items()}
    return [f"{key}: {text}   (--{key.replace('_', '-')} {text})" for key, text in values.items()]


def yaml_value(value: object) -> str:
    """The value of a setting as text of a recipe or a flag."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
