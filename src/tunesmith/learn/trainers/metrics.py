"""Metrics of steps, under TRL's names where TRL has one.

Shape legend: P prompts, G completions per prompt, B = P * G sequences, T completion tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import add
from typing import get_args

import torch

from tunesmith.base.schema.records import plain_text
from tunesmith.engine.batch.pack import Sequences
from tunesmith.engine.batch.rollout import Completion, Group, StopReason
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.models.optimizer import StepReport
from tunesmith.learn.algorithms.direct_loss import DirectStats
from tunesmith.learn.algorithms.policy_loss import Correction, LeftOut, PolicyStats, importance_metrics
from tunesmith.learn.algorithms.sums import merged
from tunesmith.learn.algorithms.token_loss import TokenStats
from tunesmith.learn.algorithms.value_loss import ValueStats
from tunesmith.learn.rewards.scorer import Scores
from tunesmith.learn.trainers.api import Metrics


def update_metrics(reports: Sequence[StepReport]) -> Metrics:
    """Gradient norm (mean over the updates), learning rate, refused updates, and for float16 weights the loss scale.

    An update whose gradient overflowed has no norm; it is left out of the mean unless there is no other.
    """
    norms = [report.grad_norm for report in reports if not report.overflowed] or [reports[-1].grad_norm]
    last = reports[-1]
    metrics = {
        "grad_norm": mean(norms),
        "lr": last.learning_rate,
        "refused_steps": float(sum(report.refused for report in reports)),
    }
    if last.loss_scale is not None:
        metrics["loss_scale"] = last.loss_scale
        metrics["overflowed_steps"] = float(sum(report.overflowed for report in reports))
    return metrics


def worst_report(reports: Sequence[StepReport]) -> StepReport | None:
    """The report of the last update that was refused, else of the last one; None without updates."""
    refused = [report for report in reports if report.refused]
    return (refused or reports or [None])[-1]


@dataclass(frozen=True, slots=True)
class FirstPass:
    """Sums over the completions of a step's first update, where the policy is still that of the step's begin."""

    num_tokens: int = 0
    num_sequences: int = 0
    entropy_sum: float = 0.0
    difference_sum: float = 0.0
    difference_max: float = 0.0
    kl_sum: float = 0.0
    has_reference: bool = False
    corrections: tuple[Correction, ...] = ()

    @classmethod
    @torch.no_grad()
    def of_batch(
        cls,
        sequences: Sequences,
        logp_BT: torch.Tensor,
        entropy_BT: torch.Tensor,
        correction: Correction | None = None,
        reference_logp_BT: torch.Tensor | None = None,
    ) -> "FirstPass":
        """The sums of one micro-batch: of the trainer's log-probs and entropies, importance weights, and the KL."""
        mask_BT = sequences.mask_BT
        difference_BT = (sequences.raw_logp_BT.to(logp_BT) - logp_BT).abs() * mask_BT
        has_reference = reference_logp_BT is not None
        return cls(
            sequences.num_tokens,
            len(mask_BT),
            (entropy_BT * mask_BT).sum().item(),
            difference_BT.sum().item(),
            difference_BT.max().item(),
            ((logp_BT - reference_logp_BT) * mask_BT).sum().item() if has_reference else 0.0,
            has_reference,
            () if correction is None else (correction,),
        )

    def __add__(self, other: "FirstPass") -> "FirstPass":
        """The sums of both."""
        return FirstPass(
            self.num_tokens + other.num_tokens,
            self.num_sequences + other.num_sequences,
            self.entropy_sum + other.entropy_sum,
            self.difference_sum + other.difference_sum,
            max(self.difference_max, other.difference_max),
            self.kl_sum + other.kl_sum,
            self.has_reference or other.has_reference,
            (*self.corrections, *other.corrections),
        )

    @property
    def kl_per_sequence(self) -> float:
        """Mean over completions of the KL to the reference, in nats; 0 without a reference."""
        return self.kl_sum / max(1, self.num_sequences)

    @property
    def entropy_per_sequence(self) -> float:
        """Mean over completions of the sum of their tokens' entropies, in nats."""
        return self.entropy_sum / max(1, self.num_sequences)

    def metrics(self) -> Metrics:
        """Mean entropy of a token, and the difference between the engine's and the trainer's log-probs, in nats."""
        num_tokens = max(1, self.num_tokens)
        return {
            "entropy": self.entropy_sum / num_tokens,
            "rollout/logp_diff_max": self.difference_max,
            "rollout/logp_diff_mean": self.difference_sum / num_tokens,
            **importance_metrics(self.corrections),
        }


@dataclass(frozen=True, slots=True)
class MicroStats:
    """Statistics of one micro-batch: of the surrogate, of the critic, of a pass of the step's first update, of
    demonstrations, of tokens that are left out, and of the replies of an environment.
    """

    policy: PolicyStats | DirectStats | None = None
    value: ValueStats | None = None
    first: FirstPass | None = None
    ptx: TokenStats | None = None
    left_out: LeftOut | None = None
    replies: TokenStats | None = None


@dataclass(slots=True)
class UpdateStats:
    """Statistics of a step's updates, summed over micro-batches; those of the last minibatch are also kept apart, for
    early stopping.
    """

    first: FirstPass = field(default_factory=FirstPass)
    stopped_early: bool = False
    reports: list[StepReport] = field(default_factory=list[StepReport])
    _policy: list[PolicyStats | DirectStats] = field(default_factory=list[PolicyStats | DirectStats])
    _value: list[ValueStats] = field(default_factory=list[ValueStats])
    _ptx: list[TokenStats] = field(default_factory=list[TokenStats])
    _left_out: list[LeftOut] = field(default_factory=list[LeftOut])
    _replies: list[TokenStats] = field(default_factory=list[TokenStats])
    _minibatch: list[PolicyStats | DirectStats] = field(default_factory=list[PolicyStats | DirectStats])

    def add(self, report: StepReport, micros: Sequence[MicroStats]) -> None:
        """Add one update: the optimizer's report, and the statistics of the micro-batches of all ranks."""
        self.first = reduce(add, (micro.first for micro in micros if micro.first is not None), self.first)
        self._minibatch = [micro.policy for micro in micros if micro.policy is not None]
        self._policy += self._minibatch
        self._value += [micro.value for micro in micros if micro.value is not None]
        self._left_out += [micro.left_out for micro in micros if micro.left_out is not None]
        self._ptx += [micro.ptx for micro in micros if micro.ptx is not None]
        self._replies += [micro.replies for micro in micros if micro.replies is not None]
        self.reports.append(report)

    def is_beyond(self, target_kl: float | None) -> bool:
        """True, and noted, if the last minibatch's KL to the policy that drew its tokens, in nats per token, exceeds
        the target.
        """
        self.stopped_early = (
            target_kl is not None and merged(self._minibatch).metrics()["policy/approxkl_avg"] > target_kl
        )
        return self.stopped_early

    def metrics(self) -> Metrics:
        """Means over all tokens of all updates, and the optimizer's metrics."""
        return {
            **(merged(self._policy).metrics() if self._policy else {}),
            **(merged(self._value).metrics() if self._value else {}),
            **(merged(self._left_out).metrics() if self._left_out else {}),
            **_under("ptx", self._ptx),
            **_under("replies", self._replies),
            **(self.first.metrics() if self.first.num_sequences else {}),
            **update_metrics(self.reports),
            "updates": float(len(self.reports)),
            "policy/stopped_early": float(self.stopped_early),
        }


def _under(name: str, stats: Sequence[TokenStats]) -> Metrics:
    """The means of `stats` as metrics of the group `name`; empty without any."""
    return {f"{name}/{key}": value for key, value in merged(stats).metrics().items()} if stats else {}


def completion_metrics(groups: Sequence[Group], learnt: Sequence[int] | None = None) -> Metrics:
    """Lengths in tokens, the share that the length limit cut off, and the tokens of completions that are not `learnt`.

    `learnt` are indices over all groups; None means all.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths = [completion.num_sampled for completion in completions]
    return {
        "completions/mean_length": mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": mean([completion.finish_reason == "length" for completion in completions]),
        **trajectory_metrics(groups),
        "rollout/unused_tokens": 0.0 if learnt is None else float(sum(lengths) - sum(lengths[row] for row in learnt)),
    }


def has_tokens(groups: Sequence[Group]) -> torch.Tensor:
    """True for completions of which a token was drawn, `[P, G]`: an environment may break before the first turn."""
    return torch.tensor([[completion.num_sampled > 0 for completion in group.completions] for group in groups])


def kl_per_sequence(logp_BT: torch.Tensor, reference_logp_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Mean over the sequences of log policy - log reference, summed over the tokens, in nats."""
    return ((logp_BT - reference_logp_BT) * mask_BT).sum(dim=1).mean().item()


MOST_TOKENS = 512
"""Tokens of a trajectory that `samples.jsonl` shows one by one."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """The rows of a step: the completion of each, counted over all groups, and the advantages of its tokens."""

    completion_B: Sequence[int] = ()
    advantage_BT: torch.Tensor | None = None

    def of(self, completion: int) -> list[list[float]]:
        """The advantages of the tokens of each sample of a completion; empty if it is not learnt."""
        if self.advantage_BT is None:
            return []
        rows = [row for row, own in enumerate(self.completion_B) if own == completion]
        return [self.advantage_BT[row].tolist() for row in rows]


def sample_rows(
    groups: Sequence[Group],
    scores: Scores | None,
    step: int,
    limit: int = 8,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    learnt: Learnt | None = None,
) -> list[dict[str, object]]:
    """Rows of `samples.jsonl`: the first completion of the first `limit` groups, with its reward, the parts of it, and
    what functions passed to `log_extra`; without them if `scores` is None. With a `tokenizer` trajectories also have
    their tokens, see `_tokens`.
    """
    rows: list[dict[str, object]] = []
    for p, group in enumerate(groups[:limit]):
        completion, place = group.completions[0], p * len(group.completions)
        rewards: dict[str, object] = {}
        if scores is not None:
            rewards["reward"] = scores.total_PG[p, 0].item() if scores.valid_PG[p, 0] else None
            rewards["rewards"] = {name: part_PG[p, 0].item() for name, part_PG in scores.parts.items()}
            if scores.columns:
                rewards["logged"] = {name: _as_json(values[place]) for name, values in scores.columns.items()}
        rows.append(
            {
                "step": step,
                "prompt_id": group.prompt.id,
                "prompt": plain_text(group.prompt.content),
                "completion": completion.text,
                "num_tokens": completion.num_sampled,
                "finish_reason": completion.finish_reason,
                "weight_version": group.weight_version,
                **_trajectory_fields(completion),
                **({} if tokenizer is None else _tokens(completion, tokenizer, (learnt or Learnt()).of(place))),
                **({} if (versions := completion.weight_versions) is None else {"weight_versions": list(versions)}),
                **rewards,
            }
        )
    return rows


def _trajectory_fields(completion: Completion) -> dict[str, object]:
    """The messages behind the prompt, each turn of the model with its reward, and why the trajectory ended."""
    if (trajectory := completion.trajectory) is None:
        return {}
    turns = iter([turn for one in completion.samples for turn in one.trajectory_turns])
    said: list[dict[str, object]] = []
    for message in trajectory.messages:
        turn = next(turns, None) if message["role"] == "assistant" else None
        given = {} if turn is None or turn.reward is None else {"reward": turn.reward}
        said.append({**message, **given})
    broke = {} if trajectory.error is None else {"error": trajectory.error}
    return {"messages": said, "stop_reason": trajectory.stop_reason, **broke}


def _tokens(
    completion: Completion, tokenizer: PreTrainedTokenizerBase, advantages: Sequence[Sequence[float]]
) -> dict[str, object]:
    """The field `tokens` of a trajectory: its parts in order, drawn turns and what was replied, up to `MOST_TOKENS`
    tokens in all, and the number of tokens that are `left_out`.

    A part has the `pieces` of text of its tokens. A turn also has its number `turn`, the `logps` of its tokens under
    the model, its `reward`, if any, and, if it is learnt, its `advantage`, or those of its tokens where they differ.
    `sample` is the number of the sequence that begins with a part, where the template rewrote the history.
    """
    if completion.trajectory is None:
        return {}
    parts: list[dict[str, object]] = []
    piece_of = _pieces(tokenizer)
    for index, sample in enumerate(completion.samples):
        number = 1 + sum("turn" in part for part in parts)
        own = _parts(sample, number, piece_of, advantages[index] if index < len(advantages) else None)
        if index and own:
            own[0]["sample"] = index + 1
        parts += own
    kept: list[dict[str, object]] = []
    num_left = MOST_TOKENS
    for part in parts:
        lists = {name: value for name, value in part.items() if isinstance(value, list)}
        cut = {**part, **{name: value[:num_left] for name, value in lists.items()}}
        kept += [cut] if num_left else []
        num_left -= min(num_left, len(lists["pieces"]))
    total = sum(len(sample.token_ids) for sample in completion.samples)
    return {"tokens": {"parts": kept, "left_out": total - MOST_TOKENS + num_left}}


def _parts(
    sample: Completion, number: int, piece_of: Callable[[int], str], advantages: Sequence[float] | None
) -> list[dict[str, object]]:
    """The parts of one sequence of a trajectory, whose turns are counted from `number`."""
    parts: list[dict[str, object]] = []
    turns = sample.trajectory_turns
    starts = (*(turn.start for turn in turns), len(sample.token_ids))
    for place, turn in enumerate(turns):
        end = starts[place + 1]
        drawn, replied = sample.token_ids[turn.start : turn.stop], sample.token_ids[turn.stop : end]
        part: dict[str, object] = {"turn": number + place, "pieces": [*map(piece_of, drawn)]}
        part["logps"] = [round(logp, 3) for logp in sample.raw_logps[turn.start : turn.stop]]
        part |= {} if turn.reward is None else {"reward": turn.reward}
        if advantages is not None:
            of_tokens = [round(one, 4) for one in advantages[turn.start : turn.stop]]
            part["advantage"] = of_tokens[0] if len({*of_tokens}) == 1 else of_tokens
        parts.append(part)
        if replied:
            parts.append({"pieces": [*map(piece_of, replied)]})
    return parts


def _pieces(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """A function from an id to its text. It is read behind another one: alone, some tokenizers drop its first space."""
    front: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]  # type: ignore[assignment]

    def text_of(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    alone = text_of(front)

    @cache
    def piece(token: int) -> str:
        return text_of([*front, token]).removeprefix(alone)

    return piece


def _as_json(value: object) -> object:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def batch_rows(groups: Sequence[Group], scores: Scores | None) -> list[dict[str, object]]:
    """Every completion of a step with its prompt and reward, written to `refused/` if an update was refused."""
    return [
        {
            "prompt_id": group.prompt.id,
            "prompt": plain_text(group.prompt.content),
            "completion": completion.text,
            "token_ids": list(completion.token_ids),
            "logps": list(completion.logps),
            **({} if scores is None else {"reward": scores.total_PG[p, g].item() if scores.valid_PG[p, g] else None}),
        }
        for p, group in enumerate(groups)
        for g, completion in enumerate(group.completions)
    ]


_SUMMARY = ("reward", "objective/kl", "entropy", "completions/mean_length", "eval/reward")


def summary(metrics: Sequence[Mapping[str, float]], names: Sequence[str] = _SUMMARY) -> dict[str, object]:
    """The metrics `names` of a run at the first step, and at the last step that has them."""
    first = metrics[0]
    last = {name: value for row in metrics for name, value in row.items()}
    return {
        "steps": len(metrics),
        "refused_steps": int(sum(row["refused_steps"] for row in metrics)),
        **{f"{name}_first": first[name] for name in names if name in first and len(metrics) > 1},
        **{name: last[name] for name in names if name in last},
    }


def mean(values: Sequence[float]) -> float:
    """The mean of `values`."""
    return sum(values) / len(values)


def trajectory_metrics(groups: Sequence[Group]) -> Metrics:
    """Metrics of trajectories; empty without any. Shares of trajectories by what ended them, turns and calls of each,
    seconds of a reply, the samples that each came to (more than 1 where the template rewrote the history), and the
    share of turns that a reward was given for.
    """
    found = [one for group in groups for one in group.completions if one.trajectory is not None]
    if not found:
        return {}
    turns = [turn for one in found for sample in one.samples for turn in sample.trajectory_turns]
    reasons = [one.trajectory.stop_reason for one in found if one.trajectory is not None]
    num_calls = sum(turn.num_calls for turn in turns)
    reply_s = [turn.reply_s for turn in turns] or [0.0]
    return {
        "environment/turns": len(turns) / len(found),
        "environment/calls": num_calls / len(found),
        "environment/failed_calls": sum(turn.num_failed for turn in turns) / max(1, num_calls),
        "environment/samples": mean([len(one.samples) for one in found]),
        "environment/rewarded_turns": sum(turn.reward is not None for turn in turns) / max(1, len(turns)),
        "environment/errors": mean([reason in ("error", "time_limit") for reason in reasons]),
        **{f"environment/ended/{reason}": mean([one == reason for one in reasons]) for reason in get_args(StopReason)},
        "environment/reply_mean_s": mean(reply_s),
        "environment/reply_max_s": max(reply_s),
    }
