"""Votes as the live trainer keeps them: token ids of both answers, new ones apart from those to learn again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunesmith.core.log import get_logger
from tunesmith.core.seeds import derive, permutation
from tunesmith.data.answers import Answer, TokenLimit, encode_answer, fitting
from tunesmith.data.rows import RowError
from tunesmith.models.tokenizer import PreTrainedTokenizerBase, encode_prompt
from tunesmith.schema.records import Pair, Prompt
from tunesmith.store.records import Candidate, StoredVote

_log = get_logger(__name__)

DECIDED = frozenset({"left_much", "left", "right", "right_much"})
"""Verdicts that prefer one answer."""

TAUGHT = DECIDED | {"tie"}
"""Verdicts that are learnt from: `both_bad` and `skip` say nothing about which of the two is better."""

MAX_REMEMBERED = 8192
"""Votes that are kept to be learnt again, and held-out votes; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A vote as token ids. With `tie` the order of the two answers has no meaning. `created_at` in seconds (UTC).

    `duel` names the versions that wrote the preferred answer and the other (`v12`; `v0` is the base model), if known.
    """

    vote_id: int
    prompt: Prompt
    chosen: Answer
    rejected: Answer
    tie: bool
    heldout: bool
    created_at: float
    texts: tuple[str, str]
    duel: tuple[str, str] = ("", "")

    @property
    def answers(self) -> tuple[Answer, Answer]:
        """Both answers, the chosen one first."""
        return self.chosen, self.rejected

    def as_pair(self) -> Pair:
        """The vote as text."""
        return Pair(self.prompt, self.texts[0], self.texts[1], tie=self.tie)


class VoteMemory:
    """All votes that teach something: `fresh` ones, those learnt before, and those on held-out prompts, by vote id."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, *, keeps_ties: bool = True) -> None:
        self.fresh: dict[int, Comparison] = {}
        self.learnt: dict[int, Comparison] = {}
        self.heldout: dict[int, Comparison] = {}
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._keeps_ties = keeps_ties
        self._vote_on: dict[int, int] = {}

    def add(self, votes: Iterable[StoredVote], *, learnt: bool = False) -> None:
        """Take in votes as they come from the store; a changed one takes the place of what it replaces.

        With `learnt` they are none that an update still has to see. Votes on gold items test raters and teach nothing;
        one that is too long, or that the chat template refuses, is left out with a warning.
        """
        for vote in votes:
            replaced = self._vote_on.pop(vote.presentation_id, 0)
            for known in (self.fresh, self.learnt, self.heldout):
                known.pop(replaced, None)
            if vote.verdict not in TAUGHT or vote.is_gold:
                continue
            try:
                found = comparison_of(vote, self._tokenizer, self._max_tokens)
            except RowError as error:
                _log.warning("vote %d is left out: %s", vote.id, error)
                continue
            if found.tie and not (found.heldout or self._keeps_ties):
                continue
            place = self.heldout if vote.heldout else self.learnt if learnt else self.fresh
            place[vote.id], self._vote_on[vote.presentation_id] = found, vote.id
            if len(place) > MAX_REMEMBERED and place is not self.fresh:
                del place[min(place)]

    def take(self, most: int) -> list[Comparison]:
        """The oldest `most` fresh votes, which from now on are learnt."""
        taken = [self.fresh.pop(vote_id) for vote_id in sorted(self.fresh)[:most]]
        self.learnt |= {one.vote_id: one for one in taken}
        for vote_id in sorted(self.learnt)[: max(0, len(self.learnt) - MAX_REMEMBERED)]:
            del self.learnt[vote_id]
        return taken

    def replay(self, count: int, seed: int, but: Sequence[Comparison]) -> list[Comparison]:
        """`count` votes learnt before, drawn without repeats by `seed`: a pure function of seed and ids."""
        known = sorted(self.learnt.keys() - {one.vote_id for one in but})
        drawn = permutation(derive(seed, "replay"), 0, len(known))[:count]
        return [self.learnt[known[index]] for index in drawn]

    def heldout_decided(self, most: int) -> list[Comparison]:
        """The newest `most` held-out votes that prefer one of two answers of the same version.

        Where two versions wrote the answers, each model finds its own likelier, whatever raters say.
        """
        known = (self.heldout[vote_id] for vote_id in sorted(self.heldout))
        return [vote for vote in known if not vote.tie and vote.duel[0] == vote.duel[1]][-most:]


def comparison_of(vote: StoredVote, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Comparison:
    """The vote with the ids that were sampled, or encoded where nothing was. Raises RowError for what has no ids."""
    prompt = Prompt(str(vote.item_id), vote.prompt)
    return Comparison(
        vote_id=vote.id,
        prompt=prompt,
        chosen=_answer(prompt, vote.chosen, tokenizer, max_tokens),
        rejected=_answer(prompt, vote.rejected, tokenizer, max_tokens),
        tie=vote.verdict == "tie",
        heldout=vote.heldout,
        created_at=vote.created_at,
        texts=(vote.chosen.text, vote.rejected.text),
        duel=(vote.chosen.source_id, vote.rejected.source_id),
    )


def _answer(prompt: Prompt, candidate: Candidate, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Answer:
    if not candidate.token_ids:
        answer = encode_answer(tokenizer, prompt, candidate.text)
        return fitting([answer], ["answer"], TokenLimit(max_tokens))[0]
    return Answer(encode_prompt(tokenizer, prompt), tuple(candidate.token_ids))
