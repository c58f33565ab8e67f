"""Answers that people asked for again: the one that they kept is better than the one before it."""

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tunesmith.base.schema.records import Text
from tunesmith.collect.data.answers import Answer
from tunesmith.collect.store.content import encode_json
from tunesmith.collect.store.records import Inference
from tunesmith.learn.live.feedback import FeedbackMemory, LabelledAnswer, answer_of, pair_of
from tunesmith.learn.live.votes import MAX_REMEMBERED, Remembered, VotedPair


@dataclass(slots=True)
class _Asked:
    """The answer to a request, and whether the person went on from it. `question` names person and conversation."""

    label: LabelledAnswer
    question: str
    is_gone_on_from: bool = False


@dataclass(slots=True)
class RegeneratedMemory(Remembered[VotedPair]):
    """Pairs to learn from, by the id of the request whose answer was kept.

    A key asks for one answer to the same conversation twice within `within_s`, for the same `user` and `episode_id`, of
    which one is given. The later answer is kept if it is wanted by `feedback`, or if nothing is said of it and a later
    request goes on from it. It makes no pair if the person wanted or went on from the earlier answer too, or said of
    both what they think: thumbs are learnt as such. The newest requests are remembered, so pairs follow from what the
    store holds.
    """

    feedback: FeedbackMemory
    within_s: float
    _asked: dict[str, _Asked] = field(default_factory=dict[str, _Asked])
    _names: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Requests of each question, in order."""

    @property
    def answers(self) -> list[Answer]:
        """Answers of all pairs."""
        return [answer for pair in (*self.fresh.values(), *self.learnt.values()) for answer in pair.answers]

    def clear(self) -> None:
        """Forget all."""
        Remembered[VotedPair].clear(self)  # slots=True makes another class, which super() does not know
        self._asked.clear()
        self._names.clear()

    def add(self, requests: Iterable[Inference]) -> None:
        """Note requests from the store, in order."""
        for request in requests:
            if not (request.user or request.episode):
                continue  # who asks is not known: two people may ask the same
            self._go_on(request)
            label = answer_of(request, 0, self.feedback.max_tokens) if len(request.choices) == 1 else None
            if label is not None:
                question = _question(request, request.prompt)
                self._asked[request.name] = _Asked(replace(label, feedback_id=request.id), question)
                self._names.setdefault(question, []).append(request.name)
            if len(self._asked) > MAX_REMEMBERED:
                self._forget(next(iter(self._asked)))

    def settle(self, fresh: Iterable[int] | None = None) -> None:
        """Find the pairs anew. Those that are new were learnt before unless their id is in `fresh`; None: none was."""
        is_fresh = None if fresh is None else set(fresh)
        for names in self._names.values():
            for before, name in itertools.pairwise(names):
                kept, dropped = self._asked[name], self._asked[before]
                pair_id = kept.label.feedback_id
                if not self._is_pair(kept, dropped):
                    self._drop(pair_id)
                elif pair_id not in self.fresh and pair_id not in self.learnt:
                    target = self.fresh if is_fresh is None or pair_id in is_fresh else self.learnt
                    target[pair_id] = pair_of(kept.label, dropped.label)

    def _is_pair(self, kept: _Asked, dropped: _Asked) -> bool:
        wanted, wanted_before = (self.feedback.is_wanted(one.label.prompt.id) for one in (kept, dropped))
        is_kept = kept.is_gone_on_from if wanted is None else wanted and wanted_before is None
        is_dropped = not (wanted_before or dropped.is_gone_on_from)
        is_near = kept.label.asked_at - dropped.label.asked_at <= self.within_s
        first, second = kept.label.answer, dropped.label.answer
        return is_kept and is_dropped and is_near and first.prompt_ids == second.prompt_ids and first != second

    def _go_on(self, request: Inference) -> None:
        """Note the answer that the messages of `request` go on from."""
        said = request.prompt
        places = [place for place, one in enumerate(said) if not isinstance(one, str) and one["role"] == "assistant"]
        if not places or places[-1] == len(said) - 1:
            return
        answer = said[places[-1]]
        assert not isinstance(answer, str)
        for name in reversed(self._names.get(_question(request, said[: places[-1]]), [])):
            if self._asked[name].label.text.strip() == str(answer["content"]).strip():
                self._asked[name].is_gone_on_from = True
                return

    def _forget(self, name: str) -> None:
        """Forget a request, the first of its question, and the pairs that it is in."""
        forgotten = self._asked.pop(name)
        names = self._names[forgotten.question]
        names.pop(0)
        if names:
            self._drop(self._asked[names[0]].label.feedback_id)
        else:
            del self._names[forgotten.question]

    def _drop(self, pair_id: int) -> None:
        self.fresh.pop(pair_id, None)
        self.learnt.pop(pair_id, None)


def _question(request: Inference, said: Text) -> str:
    """A name of what was `said` by the person of `request` in its conversation."""
    asked = [request.rater_id, request.user, request.episode, said if isinstance(said, str) else list(said)]
    return hashlib.sha256(encode_json(asked).encode()).hexdigest()
