"""Pairs for raters: drawn from the policy as it is, and on held-out prompts against answers of the base model."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tunesmith.batch.rollout import Completion, Group
from tunesmith.core.seeds import derive, items_at
from tunesmith.core.trace import span
from tunesmith.data.answers import Answer
from tunesmith.live.state import State, sampling
from tunesmith.rollout.factory import open_engine
from tunesmith.schema.records import Prompt
from tunesmith.store.content import is_storable
from tunesmith.store.records import Candidate, NewOffer

BASE = "v0"
"""`source_id` of an answer of the base model; `v12` of one of version 12."""

_BASE_ANSWERS = 4
"""Answers of the base model to each held-out prompt, which the policy's are compared with."""


@dataclass(frozen=True, slots=True)
class Round:
    """Completions of one drawing: groups of prompts to learn from, and groups of held-out prompts."""

    train: Sequence[Group]
    heldout: Sequence[Group]

    @property
    def answers(self) -> list[tuple[Group, Completion]]:
        """Every completion with its group."""
        return [(group, one) for group in (*self.train, *self.heldout) for one in group.completions]


class Pool:
    """Offers that wait for their first vote, and the base model's answers to held-out prompts."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self._base: dict[str, Group] = {}

    def base_answers(self, state: State, prompts: Sequence[Prompt]) -> dict[str, Group]:
        """The base model's completions of `prompts` by prompt id: drawn once, the same at every start."""
        missing = [prompt for prompt in state.prompts.heldout if prompt.id not in self._base]
        if prompts and missing:
            engine = open_engine(state.reference, state.tokenizer, backend=state.cfg.rollout.backend)
            groups = engine.generate(missing, _BASE_ANSWERS, sampling(state.cfg, "base answers"))
            self._base |= {group.prompt.id: group for group in groups}
        return {prompt.id: self._base[prompt.id] for prompt in prompts}


def draw(state: State, *stream: int | str) -> Round:
    """The completions of a round: prompts and noise are a pure function of the run's seed and `stream`."""
    cfg, seed = state.cfg, derive(state.cfg.run.seed, "prompts", *stream)
    num_heldout = cfg.live.heldout_prompts_per_round if state.prompts.heldout else 0
    train = _some(state.prompts.train, cfg.rollout.prompts_per_step, seed)
    heldout = _some(state.prompts.heldout, num_heldout, seed)
    with span("rollout"):
        groups = state.engine.generate(
            [*train, *heldout], cfg.rollout.completions_per_prompt, sampling(cfg, "round", *stream)
        )
        if cfg.rollout.unload_during_update:
            state.engine.unload()
    return Round(groups[: len(train)], groups[len(train) :])


def mean_kl(state: State, drawn: Round) -> float:
    """Nats per completion by which the policy that drew is away from the base model: the mean of log p - log p_base.

    The policy's side is what the engine recorded.
    """
    with span("reference"):
        base = state.reference_logps.of(Answer(group.prompt_token_ids, one.token_ids) for group, one in drawn.answers)
    return fmean(sum(one.raw_logps) - logp_T.sum().item() for (_, one), logp_T in zip(drawn.answers, base, strict=True))


def offers(state: State, pool: Pool, drawn: Round, version: int) -> list[NewOffer]:
    """Pairs of different answers. On held-out prompts half of the policy's are paired among themselves, to check
    updates; the other half meet answers of the base model, which tells how often the policy wins.
    """
    made = [
        NewOffer(version, group.prompt.content, pair)
        for group in drawn.train
        for pair in _pairs(group.completions, version)
    ]
    base = pool.base_answers(state, [group.prompt for group in drawn.heldout])
    for group in drawn.heldout:
        middle = len(group.completions) // 2
        duels = zip(base[group.prompt.id].completions, group.completions[middle:], strict=False)
        pairs = _pairs(group.completions[:middle], version)
        pairs += [(_candidate(rival, 0), _candidate(one, version)) for rival, one in duels]
        asked = [pair for pair in pairs if _can_be_asked(*pair)]
        made += [NewOffer(version, group.prompt.content, pair, heldout=True) for pair in asked]
    return made


def _some(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    count = min(count, len(prompts))
    return [prompts[index] for index in items_at(seed, 0, count, len(prompts))] if count else []


def _pairs(completions: Sequence[Completion], version: int) -> list[tuple[Candidate, Candidate]]:
    """Every completion in at most one pair, with the first later one that reads otherwise."""
    left = [_candidate(one, version) for one in completions]
    pairs: list[tuple[Candidate, Candidate]] = []
    while left:
        first = left.pop(0)
        place = next((index for index, other in enumerate(left) if _can_be_asked(first, other)), None)
        if place is not None:
            pairs.append((first, left.pop(place)))
    return pairs


def _candidate(completion: Completion, version: int) -> Candidate:
    return Candidate(
        completion.text, tuple(completion.token_ids), tuple(completion.raw_logps), version, source_id=f"v{version}"
    )


def _can_be_asked(first: Candidate, second: Candidate) -> bool:
    """True if a rater can tell them apart, and both can be stored."""
    return first.text.strip() != second.text.strip() and is_storable(first.text) and is_storable(second.text)
