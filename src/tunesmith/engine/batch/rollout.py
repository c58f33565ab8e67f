"""Results of a rollout engine: token ids and log-probs exactly as sampled. Nothing is ever re-tokenised."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tunesmith.base.schema.records import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one call of `generate`; checked by the engine.

    Args:
        max_new_tokens: Tokens of a completion at most; at least 1.
        min_new_tokens: Stop ids are masked, and stop strings ignored, before as many tokens.
        temperature: 0 is greedy.
        top_p: Nucleus sampling, in (0, 1]; 1 is off.
        top_k: Sample from the k most likely tokens; 0 is off.
        min_p: Least probability relative to the most likely token, in [0, 1); 0 is off.
        repetition_penalty: Of tokens in the prompt and the completion (Keskar et al. 2019); 1 is off.
        stop_token_ids: Added to the model's own end-of-sequence ids.
        stop_strings: End a completion, and are cut from its text; special tokens too, such as `<|im_end|>`.
        logit_bias: Token id to a number added to its logit before everything else; -inf forbids the token.
        seed: Of the noise of the whole call; None draws a random one.

    Example:
        >>> SamplingParams(max_new_tokens=32, temperature=0.7, top_p=0.9, stop_strings=("\\n\\n",), seed=0)
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None


StopReason = Literal[
    "completed", "tool_ended", "max_turns", "max_tokens", "context_full", "malformed", "time_limit", "error"
]
"""Why a trajectory ended: the model gave an answer without a call; the environment or a tool ended it; a limit of turns
or of tokens; no room in the context; calls that cannot be read, several times in a row; a call of the environment that
took too long, or raised."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model, `completion.token_ids[start:stop]`, and what the environment gave for it.

    `reward` is None where it gave none. `reply_s` is the seconds that the reply took, `num_calls` the tool calls in the
    turn, of which `num_failed` could not be read, or named no tool. `replies` are the ranges of `token_ids` that hold
    the contents of the reply, if they are learnt.
    """

    start: int
    stop: int
    reward: float | None = None
    reply_s: float = 0.0
    num_calls: int = 0
    num_failed: int = 0
    replies: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A conversation with an environment, of which a completion has the ids.

    `turns` are those of this completion. `messages` follow the prompt: what the model said and what it was answered.
    `reward` is what the environment gave for the whole and for all turns together; None if it gave nothing, or if
    something broke, which `error` names. `environment` is the instance that it was played with, as it was at the end,
    until the next trajectories are drawn; None if that is in another process, or broke.
    """

    turns: tuple[Turn, ...]
    messages: tuple[Mapping[str, object], ...]
    stop_reason: StopReason
    reward: float | None = None
    error: str | None = None
    environment: object | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type["Trajectory"], tuple[object, ...]]:
        """What is sent to another process: all but the instance."""
        return Trajectory, (self.turns, self.messages, self.stop_reason, self.reward, self.error)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation.

    `logps[t]` is the log-prob in nats of `token_ids[t]` under the distribution that was sampled (after bias, penalty,
    temperature and filters), `raw_logps[t]` under the model at the same temperature (at 1 if greedy), as a trainer
    computes it. `values[t]` is the value of the state before that token; None without a value head. `finish_reason` is
    "stop" (end-of-sequence id, stop id or stop string) or "length". An end-of-sequence token is the last id and is not
    in `text`. `weight_versions[t]` drew `token_ids[t]`; None if that of the group drew all.

    With a `trajectory`, `token_ids` are those of all turns and of the replies between them, whose log-probs are 0.0;
    `text` is that of the last turn. Where the chat template writes the history otherwise once a turn follows, another
    sample begins: `earlier` are the ones before it, each with its own turns, and `prompt_ids` is what stands before
    this one; None if that is the group's prompt.
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    raw_logps: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    values: tuple[float, ...] | None = None
    weight_versions: tuple[int, ...] | None = None
    trajectory: Trajectory | None = None
    prompt_ids: tuple[int, ...] | None = None
    earlier: tuple["Completion", ...] = ()

    @property
    def samples(self) -> tuple["Completion", ...]:
        """The sequences that the trainer learns: one, but for a trajectory whose history was rewritten."""
        return (*self.earlier, self)

    @property
    def is_sampled(self) -> tuple[bool, ...]:
        """For each of `token_ids`, whether the model drew it."""
        if self.trajectory is None:
            return (True,) * len(self.token_ids)
        mask = [False] * len(self.token_ids)
        for turn in self.trajectory.turns:
            mask[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
        return tuple(mask)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model drew, in all samples."""
        if self.trajectory is None:
            return len(self.token_ids)
        return sum(turn.stop - turn.start for one in self.samples for turn in one.trajectory_turns)

    @property
    def trajectory_turns(self) -> tuple[Turn, ...]:
        """The turns of this sample; none without a trajectory."""
        return () if self.trajectory is None else self.trajectory.turns


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one prompt, drawn from weights of `weight_version`, or of this and later ones.

    Example: `engine.generate([prompt], n=4, sampling)` returns one group with four completions.
    """

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    weight_version: int
