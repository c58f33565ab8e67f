"""Pairs offered to raters: completions of the served policy, on held-out prompts also against the base model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from tunesmith.base.config.algorithms.live import LiveRecipe
from tunesmith.base.core.seeds import derive, items_at
from tunesmith.base.core.trace import span
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.answers import Answer
from tunesmith.collect.data.sets import PromptSets
from tunesmith.collect.store.content import is_storable
from tunesmith.collect.store.records import Candidate, NewOffer
from tunesmith.engine.batch.rollout import Completion, Group, SamplingParams
from tunesmith.engine.models.language_model import LanguageModel
from tunesmith.engine.models.loaded import PreTrainedTokenizerBase
from tunesmith.engine.rollout.engine import Engine
from tunesmith.engine.rollout.factory import open_engine
from tunesmith.learn.live.selection import Selection, mixed
from tunesmith.learn.live.votes import VotedPair
from tunesmith.learn.trainers.rollouts import sampling_params

_BASE_COMPLETIONS = 4
"""Completions of the base model for each held-out prompt."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Completions drawn together: groups of training prompts, and groups of held-out prompts. `seed` chose them."""

    train: Sequence[Group]
    heldout: Sequence[Group]
    seed: int

    @property
    def completions(self) -> list[Completion]:
        """Every completion."""
        return [one for group in (*self.train, *self.heldout) for one in group.completions]

    @property
    def answers(self) -> list[Answer]:
        """Every completion with its prompt, as token ids."""
        groups = (*self.train, *self.heldout)
        return [Answer(group.prompt_token_ids, one.token_ids) for group in groups for one in group.completions]


@dataclass(slots=True)
class Offers:
    """Draws completions and pairs them. `open` are ids of the offers without a vote.

    With `selection` None all pairs are random.
    """

    cfg: LiveRecipe
    prompts: PromptSets
    engine: Engine
    reference: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    selection: Selection | None = None
    open: set[int] = field(default_factory=set[int])
    base_groups: dict[str, Group] = field(default_factory=dict[str, Group])

    def draw(self, *stream: int | str) -> Rollout:
        """Completions of some prompts; both are a pure function of weights, the run's seed and `stream`."""
        cfg, seed = self.cfg, derive(self.cfg.run.seed, "prompts", *stream)
        train = _sample(self.prompts.train, cfg.rollout.prompts_per_step, seed)
        heldout = _sample(self.prompts.heldout, cfg.live.heldout_prompts_per_round, seed)
        with span("rollout"):
            groups = self.engine.generate(
                [*train, *heldout], cfg.rollout.completions_per_prompt, self.sampling("round", *stream)
            )
            if cfg.rollout.unload_during_update:
                self.engine.unload()
        return Rollout(groups[: len(train)], groups[len(train) :], seed)

    def pair(self, rollout: Rollout, version: int, votes: Iterable[VotedPair]) -> list[NewOffer]:
        """Pairs of different completions; raters are asked about the last one first. `votes` say what is known.

        On held-out prompts, half of the policy's completions are paired among themselves, for the checks of updates;
        the other half with completions of the base model, for the win rate.
        """
        offers = [
            NewOffer(version, group.prompt.content, pair, selection=reason)
            for group, pair, reason in self.train_pairs(rollout.train, version, votes, rollout.seed)
        ]
        if rollout.heldout:
            self.draw_base_groups()
        for group in rollout.heldout:
            middle = len(group.completions) // 2
            pairs = _pairs(group.completions[:middle], version)
            base = self.base_groups[group.prompt.id].completions
            for rival, one in zip(base, group.completions[middle:], strict=False):
                pair = _candidate(rival, 0), _candidate(one, version)
                pairs += [pair] if _comparable(*pair) else []
            offers += [NewOffer(version, group.prompt.content, pair, heldout=True) for pair in pairs]
        return offers

    def train_pairs(
        self, groups: Sequence[Group], version: int, votes: Iterable[VotedPair], seed: int
    ) -> list[tuple[Group, tuple[Candidate, Candidate], str]]:
        """Pairs of the completions of training prompts with the reason of each, those most worth asking last."""
        if self.selection is None:
            return [(group, pair, "random") for group in groups for pair in _pairs(group.completions, version)]
        order = items_at(seed, 0, len(groups), len(groups))
        # Rounded up or down by chance: of few prompts the share is kept over the rounds.
        middle = int(self.selection.section.random_share * len(groups) + derive(seed, "random share") / 2**63)
        at_random, selected = ([groups[index] for index in part] for part in (order[:middle], order[middle:]))
        random_pairs = [(group, pair, "random") for group in at_random for pair in _pairs(group.completions, version)]
        made = [[_candidate(one, version) for one in group.completions] for group in selected]
        chosen = self.selection.choose(
            [[Answer(group.prompt_token_ids, one.token_ids) for one in group.completions] for group in selected],
            [{(i, j) for i, j in combinations(range(len(of)), 2) if _comparable(of[i], of[j])} for of in made],
            votes,
            seed,
        )
        best_first = [
            (selected[one.prompt], (made[one.prompt][one.pair[0]], made[one.prompt][one.pair[1]]), one.reason)
            for one in chosen
        ]
        return mixed(best_first, random_pairs)[::-1]

    def forget_features(self, votes: Iterable[VotedPair]) -> None:
        """Drop the cached features of all answers but those of `votes`."""
        if self.selection is not None:
            self.selection.keep(answer for vote in votes for answer in vote.answers)

    def draw_base_groups(self) -> None:
        """Draw the base model's completions of all held-out prompts, once; they are the same at every start."""
        missing = [prompt for prompt in self.prompts.heldout if prompt.id not in self.base_groups]
        if missing:
            assert self.cfg.rollout.backend != "vllm", "its section refuses it"
            engine = open_engine(self.reference, self.tokenizer, backend=self.cfg.rollout.backend)
            groups = engine.generate(missing, _BASE_COMPLETIONS, self.sampling("base answers"))
            self.base_groups |= {group.prompt.id: group for group in groups}

    def sampling(self, *stream: int | str) -> SamplingParams:
        """Sampling parameters with a seed that is a pure function of the run's seed and `stream`."""
        return sampling_params(self.cfg.rollout, derive(self.cfg.run.seed, *stream))


def _sample(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    count = min(count, len(prompts))
    return [prompts[index] for index in items_at(seed, 0, count, len(prompts))] if count else []


def _pairs(completions: Sequence[Completion], version: int) -> list[tuple[Candidate, Candidate]]:
    """Each completion in at most one pair, with the first later one of another text."""
    candidates = [_candidate(one, version) for one in completions]
    pairs: list[tuple[Candidate, Candidate]] = []
    while candidates:
        first = candidates.pop(0)
        index = next((i for i, other in enumerate(candidates) if _comparable(first, other)), None)
        if index is not None:
            pairs.append((first, candidates.pop(index)))
    return pairs


def _candidate(completion: Completion, version: int) -> Candidate:
    tokens = tuple(completion.token_ids), tuple(completion.raw_logps)
    return Candidate(completion.text, *tokens, version, source_id=f"v{version}")


def _comparable(first: Candidate, second: Candidate) -> bool:
    """True if the texts differ and can be stored."""
    return first.text.strip() != second.text.strip() and is_storable(first.text) and is_storable(second.text)
