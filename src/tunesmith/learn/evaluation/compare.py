"""Compare two models on the same prompts with the same seeds.

Shape suffixes: P prompts, G completions per prompt. The score of a prompt is the mean over its G completions; medians,
wins, the permutation test and the bootstrap are over the P prompt scores. With an environment a completion is a
trajectory, and what is counted of it are the tokens that the model drew.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import groupby
from math import isfinite
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

import numpy as np
import torch

from tunesmith.base.core.errors import DataError, InputError, ModelError, RewardError
from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Prompt, Text, plain_text
from tunesmith.collect.statistics.intervals import (
    bootstrap_interval,
    distinct_at_equal_tokens,
    is_exact,
    paired_permutation_p,
    proportion_interval,
)
from tunesmith.engine.batch.pack import chunks, completion_of_rows, pack
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.models.language_model import LanguageModel, language_model
from tunesmith.engine.models.loaded import PreTrainedModel, PreTrainedTokenizerBase
from tunesmith.engine.models.logprob import token_logps
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import Backend, open_engine
from tunesmith.learn.environments.episodes import Conversations
from tunesmith.learn.evaluation.judged import JudgedPairs
from tunesmith.learn.rewards.scorer import Scorer
from tunesmith.observe.reports.text import answer_text

_GROUPS_PER_PASS = 4

LogProbs = Callable[[Sequence[Group], float], Sequence[float]]
"""Summed log-prob in nats of every completion at a temperature, without filters: P x G numbers, groups in order."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models: name in tables, engine, log-probs of given completions, and what it talks to."""

    name: str
    engine: Engine
    logps: LogProbs
    conversations: Conversations | None = None

    @classmethod
    def of(
        cls,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        backend: Backend = "native",
        batch_size: int = 64,
    ) -> Self:
        """The side of a causal language model; `backend` draws its completions."""
        known = language_model(model)
        engine = open_engine(known, tokenizer, backend=backend, batch_size=batch_size)
        return cls(name, engine, summed_logps(known))

    def draw(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams) -> Sequence[Group]:
        """`n` completions of each prompt: of one turn, or trajectories with the environment, if there is one."""
        if self.conversations is not None:
            return self.conversations.draw(self.engine, prompts, n, sampling)
        return self.engine.generate(prompts, n, sampling)


def summed_logps(model: LanguageModel) -> LogProbs:
    """A function from groups and a temperature to the log-prob in nats of each completion, summed over its tokens."""

    @torch.no_grad()
    def logps(groups: Sequence[Group], temperature: float = 1.0) -> list[float]:
        sums: list[float] = []
        for some in chunks(groups, _GROUPS_PER_PASS):
            completions = [completion for group in some for completion in group.completions]
            rows = [row for row, one in enumerate(completions) if one.num_sampled]  # an environment may break at once
            if not rows:
                sums += [0.0] * len(completions)
                continue
            batch = pack(some, pad_id=0, device=model.module.device, rows=rows)
            scores = token_logps(
                model,
                batch.ids_BS,
                batch.lengths_B,
                prompt_lengths_B=batch.prompt_lengths_B,
                temperature=temperature,
            )
            found = [0.0] * len(completions)
            of_rows = (scores.logp_BT.double() * batch.mask_BT).sum(dim=1).tolist()
            for completion, logp in zip(completion_of_rows(some, rows), of_rows, strict=True):
                found[completion] += logp
            sums += found
        return sums

    return logps


@dataclass(frozen=True, slots=True)
class Sample:
    """Completion `completion_index` of one prompt by both sides, drawn with the same seed.

    `logp_<sample>_by_<model>` is the summed log-prob in nats of one side's completion under one side's model, at the
    temperature of the draw (1 for greedy ones) without filters. Of a trajectory `token_ids` are those that were drawn,
    and `text` is the whole conversation behind the prompt; without one there is no turn and no `stop_reason`.
    """

    prompt_index: int
    completion_index: int
    prompt_id: str
    prompt: Text
    prompt_token_ids: tuple[int, ...]
    token_ids_before: tuple[int, ...]
    token_ids_after: tuple[int, ...]
    text_before: str
    text_after: str
    score_before: float
    score_after: float
    logp_before_by_before: float
    logp_before_by_after: float
    logp_after_by_before: float
    logp_after_by_after: float
    finish_reason_before: str
    finish_reason_after: str
    seed: int
    num_turns_before: int = 0
    num_turns_after: int = 0
    num_calls_before: int = 0
    num_calls_after: int = 0
    num_failed_before: int = 0
    num_failed_after: int = 0
    stop_reason_before: str = ""
    stop_reason_after: str = ""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Mean score of one prompt before and after."""

    prompt_id: str
    prompt: str
    mean_before: float
    mean_after: float
    difference: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of `compare`. Every figure follows from `samples`; `recompute` does it from the file.

    `num_improved` counts prompts whose mean score rose. `mean_*` and `median_*` are over prompt means. `p_value` is
    that of the two-sided paired permutation test, `interval` the 95 % bootstrap interval of the mean difference.
    `kl_per_sequence` is the mean over the completions after of log p_after - log p_before, in nats. `distinct2_*` are
    taken at `distinct2_num_tokens` tokens on each side; the ratio is None where the side before has no bigram.

    `interval_before` and `interval_after` are bootstrap intervals of the mean scores, `win_rate` is the share of the
    pairs of completions of which the one after scores higher, ties counted half, with its 95 % interval over prompts.
    `environment` has the turns, calls and stop reasons of trajectories, None without any. `num_left_out` pairs are in
    no figure, because the reward of one has no number, as of a trajectory that its environment broke. `judge` is who
    scored, if that was a judge: its model and rubric, its agreement with people, and what it cost.
    """

    before: str
    after: str
    num_prompts: int
    num_completions: int
    num_improved: int
    mean_before: float
    mean_after: float
    median_before: float
    median_after: float
    mean_difference: float
    interval: tuple[float, float]
    p_value: float
    p_value_exact: bool
    kl_per_sequence: float
    distinct2_before: float
    distinct2_after: float
    distinct2_ratio: float | None
    distinct2_num_tokens: int
    mean_tokens_before: float
    mean_tokens_after: float
    seed: int
    sampling: SamplingParams | None
    rows: tuple[PromptRow, ...]
    samples: tuple[Sample, ...]
    interval_before: tuple[float, float]
    interval_after: tuple[float, float]
    win_rate: float
    win_rate_interval: tuple[float, float]
    environment: Mapping[str, Any] | None = None
    num_left_out: int = 0
    judge: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types, samples included."""
        return {**asdict(self), "samples": [asdict(sample) for sample in self.samples]}

    def figures(self) -> dict[str, Any]:
        """The figures that follow from the samples alone: no names or sampling settings."""
        left_out = ("samples", "before", "after", "sampling", "num_left_out", "judge")
        return {name: value for name, value in self.to_json().items() if name not in left_out}

    def write_samples_jsonl(self, path: Path) -> Path:
        """Write one JSON line for each sample, as UTF-8, and return `path`. Parent folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="\n") as file:
            # ASCII escapes keep text that is no valid UTF-8, such as a lone surrogate, readable and exact.
            file.writelines(json.dumps(asdict(sample), allow_nan=False) + "\n" for sample in self.samples)
        return path


def compare(
    before: Side,
    after: Side,
    prompts: Sequence[Prompt],
    scorer: Scorer | JudgedPairs,
    sampling: SamplingParams,
    num_completions: int = 8,
    seed: int = 0,
) -> Comparison:
    """Draw `num_completions` of every prompt from both sides with the same `seed`, score them all, and compare.

    A `JudgedPairs` compares each completion of one side with that of the other, instead of scoring it alone.
    `sampling.seed` is replaced by `seed`. Raises InputError without prompts or completions, ModelError for a log-prob
    that is not finite.
    """
    if not prompts or num_completions < 1:
        raise InputError(
            f"compare was given {len(prompts)} prompts and {num_completions} completions of each; "
            "give at least one of both"
        )
    settings = replace(sampling, seed=seed)
    drawn: list[Sequence[Group]] = []
    scored: list[np.ndarray] = []
    for stage, side in (("before", before), ("after", after)):
        with span(f"generate_{stage}"):
            groups = side.draw(prompts, num_completions, settings)
        drawn.append(groups)
        if isinstance(scorer, JudgedPairs):
            continue
        with span(f"score_{stage}"):
            scores = scorer.score(groups)
            is_valid_PG = np.array(scores.valid_PG.tolist(), dtype=bool)
            scored.append(np.where(is_valid_PG, np.array(scores.total_PG.tolist(), dtype=np.float64), np.nan))
    if isinstance(scorer, JudgedPairs):
        with span("judge"):
            texts = [[[_text(one) for one in group.completions] for group in groups] for groups in drawn]
            scored = [*scorer.score([prompt.content for prompt in prompts], *texts)]
    with span("logps"):
        # logps[sample side][model side]
        temperature = settings.temperature or 1.0  # greedy completions have no distribution of their own
        sides = before, after
        logps = [
            [_logps(side, groups, temperature, drew=side is by) for side in sides]
            for by, groups in zip(sides, drawn, strict=True)
        ]
    samples = _samples(drawn, scored, logps, seed)
    if not samples:
        raise RewardError(
            f"of none of {scored[0].size} pairs of completions both have a reward: the environment broke one of each "
            "(try it with `tunesmith chat --environment`), or the judge gave no verdict"
        )
    found = summarise(samples, before=before.name, after=after.name, sampling=settings)
    judge = scorer.facts() if isinstance(scorer, JudgedPairs) else None
    return replace(found, num_left_out=scored[0].size - len(samples), judge=judge)


def summarise(
    samples: Sequence[Sample], before: str = "before", after: str = "after", sampling: SamplingParams | None = None
) -> Comparison:
    """The comparison that `samples` hold: every figure is a function of them alone."""
    if not samples:
        raise InputError("there are no samples to compare; give at least one")
    seed = samples[0].seed
    in_order = sorted(samples, key=attrgetter("prompt_index"))
    rows = tuple(_row(list(group)) for _, group in groupby(in_order, key=attrgetter("prompt_index")))
    before_P = [row.mean_before for row in rows]
    after_P = [row.mean_after for row in rows]
    diff_P = [row.difference for row in rows]
    ids_before = [sample.token_ids_before for sample in samples]
    ids_after = [sample.token_ids_after for sample in samples]
    win_N = [((one.score_after > one.score_before) + (one.score_after >= one.score_before)) / 2 for one in samples]
    distinct_before, distinct_after, num_tokens = distinct_at_equal_tokens(ids_before, ids_after)
    return Comparison(
        before=before,
        after=after,
        num_prompts=len(rows),
        num_completions=1 + max(sample.completion_index for sample in samples),
        num_improved=sum(diff > 0 for diff in diff_P),
        mean_before=fmean(before_P),
        mean_after=fmean(after_P),
        median_before=median(before_P),
        median_after=median(after_P),
        mean_difference=fmean(diff_P),
        interval=bootstrap_interval(diff_P, seed),
        p_value=paired_permutation_p(diff_P, seed),
        p_value_exact=is_exact(len(rows)),
        kl_per_sequence=fmean(one.logp_after_by_after - one.logp_after_by_before for one in samples),
        distinct2_before=distinct_before,
        distinct2_after=distinct_after,
        distinct2_ratio=distinct_after / distinct_before if distinct_before else None,
        distinct2_num_tokens=num_tokens,
        mean_tokens_before=fmean(map(len, ids_before)),
        mean_tokens_after=fmean(map(len, ids_after)),
        seed=seed,
        sampling=sampling,
        rows=rows,
        samples=tuple(samples),
        interval_before=bootstrap_interval(before_P, seed),
        interval_after=bootstrap_interval(after_P, seed),
        win_rate=fmean(win_N),
        win_rate_interval=proportion_interval(win_N, [str(one.prompt_index) for one in samples]),
        environment=_trajectories(samples),
    )


def _trajectories(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Turns and calls of a trajectory, the share of calls that could not be made, and the share of trajectories that
    each reason ended, on both sides; None where no sample is a trajectory.
    """
    if not any(one.stop_reason_before or one.stop_reason_after for one in samples):
        return None
    found: dict[str, Any] = {}
    for side in ("before", "after"):
        turns, calls, failed = (
            sum(getattr(one, f"num_{what}_{side}") for one in samples) for what in ("turns", "calls", "failed")
        )
        reasons = Counter(getattr(one, f"stop_reason_{side}") for one in samples)
        found[f"turns_{side}"], found[f"calls_{side}"] = turns / len(samples), calls / len(samples)
        found[f"failed_calls_{side}"] = failed / calls if calls else 0.0
        found[f"stop_reasons_{side}"] = {name: num / len(samples) for name, num in sorted(reasons.items())}
    return found


def recompute(path: Path) -> dict[str, Any]:
    """The figures of a comparison from its samples file: the same numbers as `Comparison.figures`.

    Raises DataError, naming file and line, for a file that does not hold samples.
    """
    return summarise(read_samples(path)).figures()


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file that `write_samples_jsonl` wrote; raises DataError that names file and line."""
    if not path.is_file():
        raise DataError(
            f"samples file {path} does not exist; give the JSONL that `tunesmith compare` or the demo wrote"
        )
    lines = path.read_text(encoding="utf-8").split("\n")
    samples = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not samples:
        raise DataError(f"samples file {path} is empty; give one with at least one line")
    return samples


def _parse(line: str, where: str) -> Sample:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); each line is one object") from error
    kinds = {field.name: field.type for field in fields(Sample)}
    needed = {field.name for field in fields(Sample) if field.default is MISSING}  # older files lack the others
    if not isinstance(row, dict) or not needed <= row.keys() <= kinds.keys():
        raise DataError(f"{where}: each line is one object with the fields {', '.join(sorted(needed))}")
    values: dict[str, Any] = dict(row)  # pyright: ignore[reportUnknownArgumentType]
    for name, value in values.items():
        if kinds[name] is float and not (isinstance(value, int | float) and isfinite(value)):
            raise DataError(f"{where}: {name} is {value!r}; give a finite number")
        if isinstance(value, list):
            values[name] = tuple(value)  # pyright: ignore[reportUnknownArgumentType]
    return Sample(**values)


def _row(group: Sequence[Sample]) -> PromptRow:
    before, after = fmean(sample.score_before for sample in group), fmean(sample.score_after for sample in group)
    return PromptRow(group[0].prompt_id, plain_text(group[0].prompt), before, after, after - before)


def _logps(side: Side, groups: Sequence[Group], temperature: float, *, drew: bool) -> np.ndarray:
    """logp_PG of one side; an exact engine that drew the groups has recorded them. Raises ModelError for one that is
    not finite.
    """
    if drew and side.engine.is_exact:
        completions = [completion for group in groups for completion in group.completions]
        found = [sum(float(np.sum(s.raw_logps, dtype=np.float64)) for s in one.samples) for one in completions]
    else:
        found = side.logps(groups, temperature)
    logp_PG = np.asarray(found, dtype=np.float64).reshape(len(groups), -1)
    for p, g in np.argwhere(~np.isfinite(logp_PG)).tolist():
        raise ModelError(
            f"{side.name!r} gave the log-prob {logp_PG[p, g]} to completion {g} of prompt {groups[p].prompt.id!r}; it "
            "must be finite: check the model's weights"
        )
    return logp_PG


def _samples(
    drawn: Sequence[Sequence[Group]], scored: Sequence[np.ndarray], logps: Sequence[Sequence[np.ndarray]], seed: int
) -> list[Sample]:
    samples: list[Sample] = []
    for p, (first, second) in enumerate(zip(*drawn, strict=True)):
        for g, (old, new) in enumerate(zip(first.completions, second.completions, strict=True)):
            if np.isnan(scored[0][p, g] + scored[1][p, g]):
                continue
            samples.append(
                Sample(
                    prompt_index=p,
                    completion_index=g,
                    prompt_id=first.prompt.id,
                    prompt=first.prompt.content,
                    prompt_token_ids=tuple(first.prompt_token_ids),
                    token_ids_before=_drawn_ids(old),
                    token_ids_after=_drawn_ids(new),
                    text_before=_text(old),
                    text_after=_text(new),
                    score_before=float(scored[0][p, g]),
                    score_after=float(scored[1][p, g]),
                    logp_before_by_before=float(logps[0][0][p, g]),
                    logp_before_by_after=float(logps[0][1][p, g]),
                    logp_after_by_before=float(logps[1][0][p, g]),
                    logp_after_by_after=float(logps[1][1][p, g]),
                    finish_reason_before=old.finish_reason,
                    finish_reason_after=new.finish_reason,
                    seed=seed,
                    **_counts(old, "before"),
                    **_counts(new, "after"),
                )
            )
    return samples


def _drawn_ids(completion: Completion) -> tuple[int, ...]:
    """The ids that the model drew, those of all turns of a trajectory."""
    parts = [zip(one.token_ids, one.is_sampled, strict=True) for one in completion.samples]
    return tuple(token for part in parts for token, is_sampled in part if is_sampled)


def _text(completion: Completion) -> str:
    """The text of a completion; of a trajectory that of all turns, calls and replies."""
    if (trajectory := completion.trajectory) is None:
        return completion.text
    return answer_text({"messages": list(trajectory.messages), "stop_reason": trajectory.stop_reason})


def _counts(completion: Completion, side: str) -> dict[str, Any]:
    """The fields of a sample that trajectories have."""
    if completion.trajectory is None:
        return {}
    turns = [turn for one in completion.samples for turn in one.trajectory_turns]
    return {
        f"num_turns_{side}": len(turns),
        f"num_calls_{side}": sum(turn.num_calls for turn in turns),
        f"num_failed_{side}": sum(turn.num_failed for turn in turns),
        f"stop_reason_{side}": completion.trajectory.stop_reason,
    }
