"""What a rollout engine returns: token ids and log-probs exactly as sampled. Nothing is ever re-tokenised."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tunesmith.schema.records import FinishReason, Prompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy. `top_k=0`, `top_p=1` and `min_p=0` switch the filters off.

    `seed` fixes the noise of the whole call; None draws a fresh one. `stop_token_ids` are added to the model's own
    end-of-sequence ids; a text of `stop_strings` ends a completion too, and is cut from its text. `logit_bias` maps
    token ids to what is added to their logits, before everything else; minus infinity forbids a token.
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


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation.

    `logps[t]` is the log-prob in nats of `token_ids[t]` under the distribution that it was drawn from (after bias,
    penalty, temperature and filters), `raw_logps[t]` under the model itself at the same temperature (at 1 if greedy):
    what a trainer computes. `values[t]` is the value of the state before that token, None from an engine without a
    value head. A completion that ended by itself carries its end-of-sequence token as the last id; `text` does not
    show it.
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    raw_logps: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    values: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one prompt, drawn from weights of `weight_version`.

    Example: `engine.generate([prompt], n=4, sampling)` returns one group with four completions.
    """

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    weight_version: int
