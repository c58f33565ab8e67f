"""Thumbs and grades that applications gave to answers of the API, as labels and as pairs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunesmith.base.config.algorithms.live import LiveFeedbackSection
from tunesmith.base.schema.records import Prompt
from tunesmith.collect.data.answers import Answer
from tunesmith.collect.store.inferences import conversation_of
from tunesmith.collect.store.records import Inference, StoredFeedback
from tunesmith.learn.live.votes import MAX_REMEMBERED, Remembered, VotedPair

_NO_THUMB = frozenset({"preference", "demonstration", "comment"})
"""Metrics that are votes, or texts."""


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """An answer and what was said of it last: the `value` of a metric, 0 and 1 for a thumb, and whether it `is_wanted`.

    `key_id` is the key whose application asked. `version` gave the answer at `asked_at`, with the log-prob `drawn_logp`
    under the distribution that was sampled. `weight` is that of the answer in the loss.
    """

    feedback_id: int
    key_id: int
    conversation: str
    prompt: Prompt
    answer: Answer
    text: str
    metric: str
    value: float
    is_wanted: bool
    version: int
    drawn_logp: float
    asked_at: float
    created_at: float
    weight: float = 1.0

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answer alone."""
        return (self.answer,)

    def as_row(self) -> dict[str, object]:
        """The label as text."""
        return {"prompt": self.prompt.content, "completion": self.text, "label": self.is_wanted}


@dataclass(slots=True)
class FeedbackMemory(Remembered[LabelledAnswer]):
    """Labelled answers to learn from, by the id of their feedback. An answer, of at most `max_tokens` tokens with its
    prompt, has one label, by what was said of it last.
    """

    section: LiveFeedbackSection
    max_tokens: int
    _label_of: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict[tuple[str, int], tuple[int, str]])

    @property
    def answers(self) -> list[Answer]:
        """Answers of all labels."""
        return [label.answer for label in (*self.fresh.values(), *self.learnt.values())]

    def clear(self) -> None:
        """Forget all."""
        Remembered[LabelledAnswer].clear(self)  # slots=True makes another class, which super() does not know
        self._label_of.clear()

    def add(
        self, page: Iterable[StoredFeedback], requests: Mapping[str, Inference], *, fresh: Iterable[int] | None = None
    ) -> None:
        """Add feedback from the store, on answers to `requests` by name; what is said later replaces what was before.

        With `fresh`, all but those ids were learnt before. Feedback on a conversation as a whole labels no answer; an
        answer of no version, without tokens or too long is left out.
        """
        is_fresh = None if fresh is None else set(fresh)
        for said in page:
            if not said.inference or not self.counts(said):
                continue
            place = (said.inference, said.choice)
            known_id, metric = self._label_of.get(place, (0, ""))
            if said.value is None and metric != said.metric:
                continue
            for known in (self.fresh, self.learnt):
                known.pop(known_id, None)
            self._label_of.pop(place, None)
            label = self.label(said, requests.get(said.inference))
            if label is not None:
                target = self.fresh if is_fresh is None or said.id in is_fresh else self.learnt
                target[said.id], self._label_of[place] = label, (said.id, said.metric)
                if len(self.learnt) > MAX_REMEMBERED:
                    del self.learnt[min(self.learnt)]

    def counts(self, said: StoredFeedback) -> bool:
        """True if it is a thumb or a grade of a metric that counts, or withdraws one."""
        section = self.section
        if said.metric in _NO_THUMB or (section.metrics and said.metric not in section.metrics):
            return False
        return said.value is None or isinstance(said.value, bool) or section.grade_threshold is not None

    def label(self, said: StoredFeedback, request: Inference | None) -> LabelledAnswer | None:
        """The label of an answer; None if it is withdrawn, or there is nothing to learn from."""
        value = said.value
        if not isinstance(value, bool | int | float) or request is None:
            return None
        threshold = self.section.grade_threshold
        is_wanted = bool(value) if isinstance(value, bool) or threshold is None else value >= threshold
        label = answer_of(request, said.choice, self.max_tokens)
        if label is None:
            return None
        facts = {"metric": said.metric, "value": float(value), "is_wanted": is_wanted, "created_at": said.created_at}
        return replace(label, feedback_id=said.id, **facts)

    def is_wanted(self, name: str) -> bool | None:
        """What was said last of the first answer to the request of this name; None if nothing counts."""
        feedback_id, _ = self._label_of.get((name, 0), (0, ""))
        label = self.fresh.get(feedback_id) or self.learnt.get(feedback_id)
        return None if label is None else label.is_wanted


def answer_of(request: Inference, place: int, max_tokens: int) -> LabelledAnswer | None:
    """An answer to `request` of which nothing is said yet; None if there is nothing to learn from: it is of no version,
    without tokens, or has more than `max_tokens` with its prompt.
    """
    choice = request.choices[place]
    num_tokens = len(request.prompt_ids) + len(choice.token_ids)
    if choice.weight_version is None or not choice.token_ids or num_tokens > max_tokens:
        return None
    return LabelledAnswer(
        feedback_id=0,
        key_id=request.rater_id,
        conversation=conversation_of(request.rater_id, request.episode, request.user, request.prompt),
        prompt=Prompt(request.name, request.prompt, token_ids=request.prompt_ids),
        answer=Answer(request.prompt_ids, choice.token_ids),
        text=choice.text,
        metric="",
        value=0.0,
        is_wanted=False,
        version=choice.weight_version,
        drawn_logp=sum(choice.drawn_logps),
        asked_at=request.created_at,
        created_at=request.created_at,
    )


def with_pairs(
    labels: Sequence[LabelledAnswer], others: Iterable[LabelledAnswer]
) -> tuple[list[VotedPair], list[LabelledAnswer]]:
    """The pairs among `labels`, and the labels that are in none.

    Two different answers to one prompt, of which one key said different values of one metric, are a pair: those
    furthest apart first. What is left over makes a pair with one of `others`, which were learnt from before.
    """
    groups: dict[object, list[LabelledAnswer]] = defaultdict(list)
    for label in labels:
        groups[_question(label)].append(label)
    partners: dict[object, list[LabelledAnswer]] = defaultdict(list)
    for label in others:
        if _question(label) in groups:
            partners[_question(label)].append(label)
    pairs: list[VotedPair] = []
    single: list[LabelledAnswer] = []
    for question, group in groups.items():
        ordered = sorted(group, key=lambda one: (one.value, one.feedback_id))
        while len(ordered) > 1 and _differ(ordered[-1], ordered[0]):
            pairs.append(pair_of(ordered.pop(), ordered.pop(0)))
        free = sorted(partners[question], key=lambda one: one.feedback_id)
        for label in ordered:
            best = max(free, key=lambda one: abs(one.value - label.value), default=None)
            if best is None or not _differ(best, label):
                single.append(label)
                continue
            free.remove(best)
            pairs.append(pair_of(*sorted((best, label), key=lambda one: -one.value)))
    return pairs, single


def _question(label: LabelledAnswer) -> object:
    return label.key_id, label.metric, label.answer.prompt_ids


def _differ(first: LabelledAnswer, second: LabelledAnswer) -> bool:
    return first.value != second.value and first.answer != second.answer


def pair_of(better: LabelledAnswer, worse: LabelledAnswer) -> VotedPair:
    """Two answers to one prompt as a vote that the first is better."""
    return VotedPair(
        vote_id=-max(better.feedback_id, worse.feedback_id),  # ids of votes are positive
        prompt=better.prompt,
        chosen=better.answer,
        rejected=worse.answer,
        tie=False,
        heldout=False,
        created_at=max(better.created_at, worse.created_at),
        texts=(better.text, worse.text),
        sources=(f"v{better.version}", f"v{worse.version}"),
    )
