"""The choice of the pairs of a campaign that raters are asked about next: by a reward model with several heads, or by a
model of the campaign's votes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from tunesmith.base.config.algorithms.live import LiveSelectionSection
from tunesmith.base.core.errors import DataError, InputError, ModelError
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.answers import Answer, encode_answer, fitting
from tunesmith.collect.data.collate import TokenLimit, truncated
from tunesmith.collect.store.asking import RANDOM, AskedItem, WaitingItem
from tunesmith.collect.store.inbox import Chore
from tunesmith.collect.store.records import StoredVote
from tunesmith.collect.store.vote_reader import VoteReader
from tunesmith.collect.store.votes import do_in
from tunesmith.engine.batch.pack import chunks
from tunesmith.engine.models.heads import RewardModel
from tunesmith.engine.models.language_model import language_model
from tunesmith.engine.models.loaded import LoadedModel, context_length
from tunesmith.learn.evaluation.reward_quality import head_rewards
from tunesmith.learn.live.pool import Waiting, asking_order
from tunesmith.learn.live.selection import Beliefs, HeadBeliefs, Selection
from tunesmith.learn.live.votes import MAX_REMEMBERED, VoteMemory

T = TypeVar("T")

_PORTION = 64
"""Pairs that are computed between two words on progress."""

_NO_LIMIT = 10**9

OnProgress = Callable[[int], None]
"""Called with the number of pairs that are computed."""


@dataclass(frozen=True, slots=True)
class Believed:
    """What is believed of answers: `features` x_2F of each pair that could be read, by its id, and of theta.

    `num_votes` are those that the beliefs come from, as far as they are the campaign's.
    """

    features: Mapping[int, torch.Tensor]
    beliefs: Beliefs
    num_votes: int = 0


class Source(Protocol):
    """Where beliefs come from."""

    def believe(self, pairs: Sequence[WaitingItem], votes: Sequence[StoredVote], progress: OnProgress) -> Believed:
        """The beliefs about `pairs`, after the campaign's `votes`."""
        ...


class FromHeads:
    """The heads of a trained reward model, which differ where its votes leave several things possible.

    Raises InputError for a reward model with one head.
    """

    def __init__(self, model: RewardModel) -> None:
        if model.num_heads == 1:
            raise InputError(
                f"the reward model {model.source} has one head, so nothing says how sure it is; train one with "
                "reward_model.heads, for example 8, or choose by a language model and the votes: --model"
            )
        self.model = model

    @torch.no_grad()
    def believe(self, pairs: Sequence[WaitingItem], votes: Sequence[StoredVote], progress: OnProgress) -> Believed:
        """The reward of each answer by each head, without what a head adds to every answer."""
        known, limit = self.model.known, context_length(self.model.model) or _NO_LIMIT
        offset_K = torch.tensor(known.offsets if known else [0.0] * self.model.num_heads, dtype=torch.float64)
        sides = _readable(pairs, lambda pair: self._encoded(pair, limit))
        features: dict[int, torch.Tensor] = {}
        for part in chunks(list(sides), _PORTION):
            rewards_MK = head_rewards(self.model, [ids for item_id in part for ids in sides[item_id]]) - offset_K
            if not rewards_MK.isfinite().all():
                raise ModelError(f"the reward model {self.model.source} gave rewards that are not finite; get it again")
            features |= dict(zip(part, rewards_MK.reshape(len(part), 2, -1), strict=True))
            progress(len(features))
        return Believed(features, HeadBeliefs(self.model.num_heads))

    def _encoded(self, pair: WaitingItem, limit: int) -> tuple[tuple[int, ...], ...]:
        prompt = Prompt(str(pair.id), pair.prompt)
        return truncated([self.model.encode(prompt, text) for text in pair.answers], TokenLimit(limit, "left"))


class FromVotes:
    """A model of the campaign's votes on features of a language model, as in the live loop."""

    def __init__(self, loaded: LoadedModel, section: LiveSelectionSection) -> None:
        self.tokenizer = loaded.tokenizer
        self.selection = Selection(section, language_model(loaded.model))
        self.limit = context_length(loaded.model) or _NO_LIMIT

    def believe(self, pairs: Sequence[WaitingItem], votes: Sequence[StoredVote], progress: OnProgress) -> Believed:
        """Features of the answers, and the posterior given the newest votes."""
        memory = VoteMemory(self.tokenizer, self.limit)
        memory.add(map(_as_text, votes), learnt=True)
        sides = _readable(pairs, self._encoded)
        for num_done, part in enumerate(chunks(list(sides), _PORTION), start=1):
            fresh = dict.fromkeys(answer for item_id in part for answer in sides[item_id])
            self.selection.compute([one for one in fresh if one not in self.selection.features])
            progress(min(num_done * _PORTION, len(sides)))
        answers = [answer for pair in sides.values() for answer in pair]
        features, beliefs = self.selection.known(answers, memory.train)
        stacked = {item_id: torch.stack([features[one] for one in pair]) for item_id, pair in sides.items()}
        return Believed(stacked, beliefs, len(memory.train))

    def _encoded(self, pair: WaitingItem) -> list[Answer]:
        prompt = Prompt(str(pair.id), pair.prompt)
        answers = [encode_answer(self.tokenizer, prompt, text) for text in pair.answers]
        return fitting(answers, ["answer"] * len(answers), TokenLimit(self.limit, "left"))


@dataclass(frozen=True, slots=True)
class Selected:
    """What came of a choice. Of `num_waiting` items that nobody was shown, `num_placed` are asked first; `num_random`
    were placed at random; `num_unread` pairs could not be read by the model, and come last. `num_votes` were known.
    """

    num_waiting: int
    num_placed: int
    num_random: int
    num_unread: int
    num_votes: int


@dataclass(frozen=True, slots=True)
class CampaignPairs:
    """Given items of a campaign that no rater was shown, one at least, and its votes, of which the newest are known."""

    id: int
    waiting: Sequence[WaitingItem]
    votes: Sequence[StoredVote]

    @property
    def pairs(self) -> list[WaitingItem]:
        """The items that can be chosen: pairs that are not held out."""
        return [one for one in self.waiting if one.kind == "pair" and not one.heldout]


def read_campaign(place: str | Path, name: str) -> CampaignPairs:
    """The campaign of this name. Raises StoreError for an unknown one, DataError if nothing waits in it."""
    with VoteReader.open(place) as reader:
        campaign_id = reader.campaign_named(name).id
        found = CampaignPairs(campaign_id, list(reader.waiting_items(campaign_id)), _newest_votes(reader, campaign_id))
    if not found.waiting:
        raise DataError(
            f"in the campaign {name!r} no given pair waits for its first vote; import some with `votes import`, or "
            "choose among a live loop's own pairs by `tunesmith live --live.selection`"
        )
    return found


def select_pairs(
    place: str | Path,
    campaign: CampaignPairs,
    section: LiveSelectionSection,
    source: Source | None,
    *,
    most: int,
    seed: int,
    waiting: Callable[[str], None],
    progress: OnProgress,
) -> Selected:
    """Put at most `most` waiting items of a campaign into the order in which raters are asked (`pool.asking_order`).

    `source` may be None with the method `random`. `waiting` is called with a message where a server must store the
    order. Raises DataError if the source can read no pair.
    """
    items, pairs = campaign.waiting, campaign.pairs
    believed = None if source is None or not pairs else source.believe(pairs, campaign.votes, progress)
    features = {} if believed is None else believed.features
    unread = set[int]() if believed is None else {one.id for one in pairs} - features.keys()
    pool = [Waiting(one.id, one.prompt_id, features.get(one.id)) for one in items if one.id not in unread]
    beliefs = None if believed is None else believed.beliefs
    order = asking_order(pool, beliefs, section, most=most, seed=seed)
    asked = [asdict(AskedItem(one.id, one.reason)) for one in order]
    facts = {"campaign_id": campaign.id, "method": section.method, "order": asked}
    done = do_in(place, Chore("select", facts), waiting)
    return Selected(
        num_waiting=len(items),
        num_placed=done["num_placed"],
        num_random=sum(one.reason == RANDOM for one in order),
        num_unread=len(unread),
        num_votes=0 if believed is None else believed.num_votes,
    )


def _newest_votes(reader: VoteReader, campaign_id: int) -> list[StoredVote]:
    votes: list[StoredVote] = []
    while page := reader.votes_after(votes[-1].id if votes else 0, campaign_id=campaign_id, changes=False):
        votes += page
    return votes[-MAX_REMEMBERED:]


def _as_text(vote: StoredVote) -> StoredVote:
    """The vote without the token ids of its answers, which may be another tokenizer's."""
    sides = (replace(one, token_ids=None, logps=None) for one in (vote.chosen, vote.rejected))
    return replace(vote, **dict(zip(("chosen", "rejected"), sides, strict=True)))


def _readable(pairs: Sequence[WaitingItem], encoded: Callable[[WaitingItem], Sequence[T]]) -> dict[int, Sequence[T]]:
    """The encoded answers of the pairs that can be, by their ids. Raises DataError if none can."""
    found: dict[int, Sequence[T]] = {}
    reason = ""
    for pair in pairs:
        try:
            found[pair.id] = encoded(pair)
        except DataError as error:
            reason = str(error)
    if not found:
        raise DataError(f"the model can read none of the {len(pairs)} pairs: {reason}; name another model")
    return found
