"""Votes as token ids: new ones, those learnt from, and those on held-out prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from tunesmith.base.config.algorithms.live import LiveReasonsSection
from tunesmith.base.core.errors import DataError
from tunesmith.base.core.log import get_logger
from tunesmith.base.core.seeds import derive, permutation
from tunesmith.base.schema.records import Pair, Prompt, Text
from tunesmith.collect.data.answers import Answer, encode_answer, fitting
from tunesmith.collect.data.collate import TokenLimit
from tunesmith.collect.data.contexts import with_context
from tunesmith.collect.store.records import EDITED, Candidate, StoredVote
from tunesmith.engine.models.tokenizer import PreTrainedTokenizerBase, encode_prompt

_log = get_logger(__name__)

LEARNABLE = frozenset({"left_much", "left", "right", "right_much", "tie"})
"""Verdicts that are learnt from; `both_bad` and `skip` do not say which answer is better."""

MAX_REMEMBERED = 8192
"""Learnt votes that are kept for replay, and held-out votes; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class VotedPair:
    """A vote as token ids. With `tie` the order of the answers has no meaning. `created_at` in seconds (UTC).

    `sources` are the versions that wrote the chosen and the rejected answer (`v12`; `v0` is the base model), if known.
    `weight` multiplies the loss. `taught_ids` is the prompt with what the rater said in it, empty if it is not learnt;
    `is_edit`: that is the chosen answer, which a person wrote.
    """

    vote_id: int
    prompt: Prompt
    chosen: Answer
    rejected: Answer
    tie: bool
    heldout: bool
    created_at: float
    texts: tuple[str, str]
    sources: tuple[str, str] = ("", "")
    weight: float = 1.0
    taught_ids: tuple[int, ...] = ()
    is_edit: bool = False

    @property
    def taught(self) -> list[tuple[Answer, Answer]]:
        """The answers whose tokens are judged anew by what the rater said: each as it was drawn, and behind the prompt
        with what was said.
        """
        if not self.taught_ids:
            return []
        drawn = (self.rejected,) if self.is_edit else self.answers
        return [(answer, replace(answer, prompt_ids=self.taught_ids)) for answer in drawn]

    @property
    def answers(self) -> tuple[Answer, Answer]:
        """Both answers, the chosen one first."""
        return self.chosen, self.rejected

    def as_pair(self) -> Pair:
        """The vote as text."""
        return Pair(self.prompt, self.texts[0], self.texts[1], tie=self.tie)


def weighed(votes: Sequence[VotedPair], weight_of: Mapping[int, float]) -> list[VotedPair]:
    """The votes with weights by their ids, from -1 to 1, whose sizes have the mean 1; the answers of one with a
    negative weight are exchanged. Ties, edits and votes without a weight weigh 1.
    """
    judged = [vote.vote_id for vote in votes if not (vote.tie or vote.is_edit)]
    known = {id: weight_of[id] for id in judged if id in weight_of}
    size = sum(map(abs, known.values())) / len(known) if known else 0.0
    if size == 0:
        return list(votes)
    return [_with_weight(vote, known[vote.vote_id] / size) if vote.vote_id in known else vote for vote in votes]


def _with_weight(vote: VotedPair, weight: float) -> VotedPair:
    if weight >= 0:
        return replace(vote, weight=weight)
    sides = {"chosen": vote.rejected, "rejected": vote.chosen, "texts": vote.texts[::-1], "sources": vote.sources[::-1]}
    return replace(vote, weight=-weight, **sides)


JudgedT = TypeVar("JudgedT")


@dataclass(slots=True)
class Remembered(Generic[JudgedT]):
    """Records that are learnt from, by id: `fresh`, and `learnt` before, of which the oldest are dropped first."""

    fresh: dict[int, JudgedT] = field(default_factory=dict[int, JudgedT], kw_only=True)
    learnt: dict[int, JudgedT] = field(default_factory=dict[int, JudgedT], kw_only=True)

    def clear(self) -> None:
        """Forget all."""
        self.fresh.clear()
        self.learnt.clear()

    def take(self, limit: int) -> list[JudgedT]:
        """Move the oldest `limit` fresh ones to the learnt ones, and return them."""
        taken = {id: self.fresh.pop(id) for id in sorted(self.fresh)[:limit]}
        self.learnt |= taken
        for id in sorted(self.learnt)[: max(0, len(self.learnt) - MAX_REMEMBERED)]:
            del self.learnt[id]
        return list(taken.values())

    def replay(self, count: int, seed: int, excluded: Iterable[int]) -> list[JudgedT]:
        """`count` learnt ones, none of the ids `excluded`, without repeats: a pure function of `seed` and their ids."""
        known = sorted(self.learnt.keys() - set(excluded))
        drawn = permutation(derive(seed, "replay"), 0, len(known))[:count]
        return [self.learnt[known[index]] for index in drawn]


@dataclass(slots=True)
class VoteMemory(Remembered[VotedPair]):
    """Votes to learn from, by vote id: `fresh` ones, those `learnt` before, and those on held-out prompts.

    An answer has at most `max_tokens` tokens with its prompt. `prompt_ids` are the ids of prompts that were cut by
    tokens, by their text. What raters said is learnt as `reasons` says.
    """

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    keeps_ties: bool = True
    prompt_ids: Mapping[Text, tuple[int, ...]] = field(default_factory=dict[Text, tuple[int, ...]])
    reasons: LiveReasonsSection = field(default_factory=LiveReasonsSection)
    heldout: dict[int, VotedPair] = field(default_factory=dict[int, VotedPair])
    _vote_of: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def answers(self) -> list[Answer]:
        """Answers of all votes."""
        votes = (*self.fresh.values(), *self.learnt.values(), *self.heldout.values())
        return [answer for vote in votes for answer in vote.answers]

    @property
    def train(self) -> list[VotedPair]:
        """All votes on training prompts, oldest first."""
        known = self.learnt | self.fresh
        return [known[id] for id in sorted(known)]

    def clear(self) -> None:
        """Forget all."""
        Remembered[VotedPair].clear(self)  # slots=True makes another class, which super() does not know
        self.heldout.clear()
        self._vote_of.clear()

    def add(self, votes: Iterable[StoredVote], *, learnt: bool = False) -> None:
        """Add votes from the store; a changed vote replaces the one before. `learnt` marks them as trained on.

        Votes on gold items, which test raters, are skipped; so are, with a warning, votes with an answer that is too
        long or refused by the chat template.
        """
        for vote in votes:
            replaced = self._vote_of.pop(vote.presentation_id, 0)
            for known in (self.fresh, self.learnt, self.heldout):
                known.pop(replaced, None)
            if vote.verdict not in LEARNABLE or vote.is_gold:
                continue
            try:
                known = self.prompt_ids.get(vote.prompt) if isinstance(vote.prompt, str) else None
                pair = encode_vote(vote, self.tokenizer, self.max_tokens, known)
                if self.reasons.weight > 0 and not pair.heldout:
                    pair = with_reason(pair, vote, self.reasons, self.tokenizer, self.max_tokens)
            except DataError as error:
                _log.warning("vote %d is left out: %s", vote.id, error)
                continue
            if pair.tie and not (pair.heldout or self.keeps_ties):
                continue
            target = self.heldout if vote.heldout else self.learnt if learnt else self.fresh
            target[vote.id], self._vote_of[vote.presentation_id] = pair, vote.id
            if len(target) > MAX_REMEMBERED and target is not self.fresh:
                del target[min(target)]

    def heldout_decided(self, limit: int) -> list[VotedPair]:
        """The newest `limit` held-out votes that prefer one of two answers of the same version.

        Each model assigns its own answers a higher likelihood, so votes between two versions would be biased.
        """
        known = (self.heldout[vote_id] for vote_id in sorted(self.heldout))
        return [vote for vote in known if not vote.tie and vote.sources[0] == vote.sources[1]][-limit:]


def encode_vote(
    vote: StoredVote, tokenizer: PreTrainedTokenizerBase, max_tokens: int, prompt_ids: tuple[int, ...] | None = None
) -> VotedPair:
    """The vote with its sampled token ids, or text encoded where there are none; `prompt_ids` are the prompt's, if its
    text does not say them. Raises DataError if it cannot be.
    """
    prompt = Prompt(str(vote.item_id), vote.prompt, token_ids=prompt_ids)
    return VotedPair(
        vote_id=vote.id,
        prompt=prompt,
        chosen=_answer(prompt, vote.chosen, tokenizer, max_tokens),
        rejected=_answer(prompt, vote.rejected, tokenizer, max_tokens),
        tie=vote.verdict == "tie",
        heldout=vote.heldout,
        created_at=vote.created_at,
        texts=(vote.chosen.text, vote.rejected.text),
        sources=(vote.chosen.source_id, vote.rejected.source_id),
    )


def with_reason(
    pair: VotedPair,
    vote: StoredVote,
    section: LiveReasonsSection,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> VotedPair:
    """`pair` with the prompt that its teacher reads, if the rater said why, or wrote the chosen answer; as it is, with
    a warning, if that would be too long with an answer, or cannot be added to the prompt.
    """
    reason, is_edit = vote.reason.strip(), vote.chosen.source_id == EDITED
    if not (reason or is_edit):
        return pair
    chosen, rejected = pair.texts
    said = {"edit": chosen} if is_edit else {"reason": reason, "chosen": chosen, "rejected": rejected}
    template = section.edit_template if is_edit else section.template
    try:
        content = with_context(pair.prompt.content, template, said)
        ids = encode_prompt(tokenizer, replace(pair.prompt, content=content, token_ids=None))
    except DataError as error:
        _log.warning("the reason of vote %d is left out: %s", vote.id, error)
        return pair
    taught = replace(pair, taught_ids=ids, is_edit=is_edit)
    longest = max(len(read.prompt_ids) + len(read.completion_ids) for _, read in taught.taught)
    if longest > max_tokens:
        _log.warning("the reason of vote %d is left out: %d tokens, %d at most", vote.id, longest, max_tokens)
        return pair
    return taught


def _answer(prompt: Prompt, candidate: Candidate, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Answer:
    if not candidate.token_ids:
        answer = encode_answer(tokenizer, prompt, candidate.text)
        return fitting([answer], ["answer"], TokenLimit(max_tokens))[0]
    return Answer(encode_prompt(tokenizer, prompt), tuple(candidate.token_ids))
