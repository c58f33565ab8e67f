"""Results of a rollout engine: token ids and log-probs exactly as sampled. Nothing is ever re-tokenised."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation.

    `logps[t]` is the log-prob in nats of `token_ids[t]` under the distribution that was sampled (after bias, penalty,
    temperature and filters), `raw_logps[t]` under the model at the same temperature (at 1 if greedy), as a trainer
    computes it. `values[t]` is the value of the state before that token; None without a value head. `finish_reason` is
    "stop" (end-of-sequence id, stop id or stop string) or "length". An end-of-sequence token is the last id and is not
    in `text`. `weight_versions[t]` drew `token_ids[t]`; None if that of the group drew all.
    """

    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    raw_logps: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    values: tuple[float, ...] | None = None
    weight_versions: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one prompt, drawn from weights of `weight_version`, or of this and later ones.

    Example: `engine.generate([prompt], n=4, sampling)` returns one group with four completions.
    """

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    weight_version: int
