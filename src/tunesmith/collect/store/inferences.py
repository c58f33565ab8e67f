"""Answers of the endpoint, and what applications say of them. Each function runs in a transaction.

Feedback is append-only, as votes are. What says which of two answers is better becomes a vote too, which the live loop
and the statistics read: a `preference`, and a `demonstration`, which is better than the answer that it corrects.
"""

import math
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, insert, select

from tunesmith.base.core.errors import UnknownPresentationError, VoteError
from tunesmith.base.schema.records import Text
from tunesmith.collect.store.answers import answering_pair
from tunesmith.collect.store.content import MAX_NAME, check_text, check_values, encode_json
from tunesmith.collect.store.items import chunks
from tunesmith.collect.store.records import Candidate, Choice, Feedback, Inference, NewItem, StoredFeedback, Verdict
from tunesmith.collect.store.tables import feedback, inference_choices, inferences, insert_rows, new_id

PREFERENCES: Mapping[str, Verdict] = {
    "better": "left",
    "much_better": "left_much",
    "tie": "tie",
    "both_bad": "both_bad",
}
"""Verdicts of a preference, as those of a vote with the better answer on the left."""

EDITED = "edited by a person"
"""Source of an answer that a demonstration brought."""

_MAX_TAGS = 32


def record(connection: Connection, answered: Inference) -> None:
    """Store a request and its answers."""
    values = {
        "name": answered.name,
        "rater_id": answered.rater_id,
        "user": answered.user,
        "episode": answered.episode,
        "model": answered.model,
        "prompt_json": answered.prompt,
        "prompt_ids_json": answered.prompt_ids,
        "options_json": answered.options,
        "created_at": answered.created_at,
    }
    inference_id = new_id(connection.execute(insert(inferences).values(**values)))
    rows = [
        {
            "inference_id": inference_id,
            "position": position,
            "text": choice.text.replace("\x00", "\ufffd"),  # which PostgreSQL cannot hold; the ids have it
            "message_json": choice.message,
            "token_ids_json": choice.token_ids,
            "logps_json": choice.logps,
            "drawn_logps_json": choice.drawn_logps,
            "finish_reason": choice.finish_reason,
            "weight_version": choice.weight_version,
            "source_id": choice.source_id[:MAX_NAME],
        }
        for position, choice in enumerate(answered.choices)
    ]
    connection.execute(insert(inference_choices), rows)


def load(connection: Connection, name: str, rater_id: int | None = None) -> Inference | None:
    """The request of this name; None if there is none, or it is another key's than `rater_id`."""
    row = connection.execute(select(inferences).where(inferences.c.name == name)).first()
    return None if row is None or rater_id not in (None, row.rater_id) else _whole(connection, [row])[0]


def load_all(connection: Connection, names: Iterable[str]) -> list[Inference]:
    """The requests of these names that there are."""
    found: list[Inference] = []
    for part in chunks(sorted(set(names))):
        found += _whole(connection, connection.execute(select(inferences).where(inferences.c.name.in_(part))).all())
    return found


def _whole(connection: Connection, rows: Sequence[Any]) -> list[Inference]:
    """The requests of these rows with their answers."""
    choices: dict[int, list[Choice]] = {row.id: [] for row in rows}
    query = select(inference_choices).where(inference_choices.c.inference_id.in_(list(choices)))
    for one in connection.execute(query.order_by(inference_choices.c.inference_id, inference_choices.c.position)):
        choice = Choice(
            one.text,
            one.token_ids_json,
            one.logps_json,
            one.drawn_logps_json,
            one.finish_reason,
            one.weight_version,
            one.source_id,
            one.message_json,
        )
        choices[one.inference_id].append(choice)
    return [
        Inference(
            name=row.name,
            rater_id=row.rater_id,
            model=row.model,
            prompt=row.prompt_json,
            prompt_ids=row.prompt_ids_json,
            choices=tuple(choices[row.id]),
            options=row.options_json,
            user=row.user,
            episode=row.episode,
            created_at=row.created_at,
        )
        for row in rows
    ]


def conversation_of(rater_id: int, episode: str, user: str, prompt: Text) -> str:
    """A name of the conversation that a request of a key belongs to: its episode, else its user, else its beginning, up
    to what the person said first. All answers of a conversation come from one version while another is tried.
    """
    if episode or user:
        return encode_json([rater_id, "episode" if episode else "user", episode or user])
    if isinstance(prompt, str):
        return encode_json([rater_id, "text", prompt])
    first = next((place for place, one in enumerate(prompt) if one["role"] == "user"), 0)
    return encode_json([rater_id, "messages", [[one["role"], one["content"]] for one in prompt[: first + 1]]])


def give(
    connection: Connection, rng: random.Random, campaign_id: int, said: Feedback, rater_id: int, now: float
) -> StoredFeedback:
    """Store feedback of a key on its own answers; what the key said before of the same metric is replaced.

    Raises:
        UnknownPresentationError: there is no such answer or conversation of this key.
        VoteError: the value does not fit the metric.
        VoteConflictError, DataError: of the vote that it makes, see `answers.answering_pair`.
    """
    said = _checked(said)
    about = _About.of(connection, said, rater_id)
    table = feedback
    of_it = (
        table.c.inference_id.is_(None) if about.id is None else table.c.inference_id == about.id,
        table.c.episode == said.episode,
        table.c.choice == said.choice,
        table.c.rater_id == rater_id,
        table.c.metric == said.metric,
    )
    last = connection.execute(select(table).where(*of_it).order_by(table.c.revision.desc()).limit(1)).first()
    if last is not None and encode_json([last.value_json, last.tags_json]) == encode_json([said.value, said.tags]):
        return _stored(last, said, is_repeat=True)
    if said.value is None and (last is None or last.value_json is None):
        raise VoteError("there is nothing to withdraw")
    about.vote(connection, rng, campaign_id, said, rater_id, now, before=None if last is None else last.value_json)
    values = {
        "name": f"feedback-{secrets.token_hex(16)}",
        "inference_id": about.id,
        "episode": said.episode,
        "choice": said.choice,
        "rater_id": rater_id,
        "metric": said.metric,
        "value_json": said.value,
        "tags_json": said.tags,
        "revision": 1 if last is None else last.revision + 1,
        "created_at": now,
    }
    (row_id,) = insert_rows(connection, table, [values])
    return _stored(connection.execute(select(table).where(table.c.id == row_id)).one(), said)


def after(connection: Connection, cursor: int, limit: int) -> list[StoredFeedback]:
    """At most `limit` revisions with an id above `cursor`, in order."""
    joined = feedback.outerjoin(inferences, inferences.c.id == feedback.c.inference_id)
    columns = (feedback, inferences.c.name.label("inference"))
    query = select(*columns).select_from(joined).where(feedback.c.id > cursor).order_by(feedback.c.id).limit(limit)
    return [
        _stored(
            row,
            Feedback(
                metric=row.metric,
                value=row.value_json,
                inference=row.inference or "",
                choice=row.choice,
                episode=row.episode,
                tags=row.tags_json,
            ),
        )
        for row in connection.execute(query)
    ]


def _stored(row: Any, said: Feedback, *, is_repeat: bool = False) -> StoredFeedback:
    return StoredFeedback(
        metric=said.metric,
        value=said.value,
        inference=said.inference,
        choice=said.choice,
        episode=said.episode,
        tags=said.tags,
        id=row.id,
        name=row.name,
        rater_id=row.rater_id,
        revision=row.revision,
        created_at=row.created_at,
        is_repeat=is_repeat,
    )


def _checked(said: Feedback) -> Feedback:
    """`said` itself. Raises VoteError for what cannot be stored."""
    metric = check_text(said.metric, "metric_name")
    if not 0 < len(metric) <= MAX_NAME:
        raise VoteError(f"metric_name has {len(metric)} characters; give 1 to {MAX_NAME}")
    if bool(said.inference) + bool(said.episode) != 1 and metric != "preference":
        raise VoteError("give either inference_id, of an answer, or episode_id, of a conversation")
    if len(said.tags) > _MAX_TAGS or any(len(part) > MAX_NAME for tag in said.tags.items() for part in tag):
        raise VoteError(f"tags are up to {_MAX_TAGS} texts of up to {MAX_NAME} characters")
    check_values([said.tags, said.inference, said.episode, said.value], "the feedback")
    value = said.value
    if value is None:
        return said
    if metric in ("comment", "demonstration"):
        if not isinstance(value, str) or not value.strip():
            raise VoteError(f"the value of {metric} is a text")
    elif metric == "preference":
        if not isinstance(value, Mapping):
            raise VoteError('the value of preference is an object such as {"better": 0, "worse": 1}')
    elif not isinstance(value, bool | float | int) or not math.isfinite(value):
        raise VoteError(f"the value of {metric} is true or false (a thumb) or a finite number")
    return said


@dataclass(frozen=True, slots=True)
class _About:
    """What feedback is about: the answer, and its id in the store; both None for a conversation."""

    id: int | None
    answered: Inference | None

    @classmethod
    def of(cls, connection: Connection, said: Feedback, rater_id: int) -> "_About":
        """Raises UnknownPresentationError if there is no such answer or conversation of this key."""
        if said.episode:
            theirs = inferences.c.episode == said.episode, inferences.c.rater_id == rater_id
            if connection.execute(select(inferences.c.id).where(*theirs).limit(1)).first() is None:
                raise UnknownPresentationError(f"there is no conversation {said.episode!r} of this key")
            return cls(None, None)
        name = said.inference or _names(said.value)[0]
        row = connection.execute(select(inferences).where(inferences.c.name == name)).first()
        if row is None or row.rater_id != rater_id:
            raise UnknownPresentationError(f"there is no answer {name!r} of this key")
        (answered,) = _whole(connection, [row])
        _choice(answered, said.choice)
        return cls(int(row.id), answered)

    def vote(
        self,
        connection: Connection,
        rng: random.Random,
        campaign_id: int,
        said: Feedback,
        rater_id: int,
        now: float,
        *,
        before: Any,
    ) -> None:
        """Store the vote that the feedback makes; one that is withdrawn or replaced is withdrawn."""
        if said.metric not in ("preference", "demonstration") or self.answered is None:
            return
        for value, is_withdrawn in ((before, True), (said.value, False)):
            if value is None:
                continue
            item, verdict = self._pair(connection, said, value, rater_id)
            if not all(isinstance(part, str) for one in _messages(item.prompt) for part in one.values()):
                return  # a prompt with calls of tools, which no page can show
            answering = answering_pair(connection, rng, campaign_id, item, rater_id, now)
            if is_withdrawn:
                answering.withdraw(None)
            else:
                answering.vote(verdict, "", None, None)

    def _pair(self, connection: Connection, said: Feedback, value: Any, rater_id: int) -> tuple[NewItem, Verdict]:
        assert self.answered is not None
        if said.metric == "demonstration":
            edited = Candidate(value, source_id=EDITED)
            sampled = _candidate(_choice(self.answered, said.choice))
            return NewItem(self.answered.prompt, (edited, sampled)), "left"
        verdict = value.get("verdict", "better")
        if verdict not in PREFERENCES:
            raise VoteError(f"the verdict of a preference is {verdict!r}; give one of {', '.join(PREFERENCES)}")
        sides = [self._side(connection, value.get(name), rater_id) for name in ("better", "worse")]
        if encode_json(sides[0][0]) != encode_json(sides[1][0]):
            raise VoteError("the two answers are to different conversations; compare answers to the same one")
        return NewItem(sides[0][0], (sides[0][1], sides[1][1])), PREFERENCES[verdict]

    def _side(self, connection: Connection, reference: object, rater_id: int) -> tuple[Text, Candidate]:
        """An answer by its place among the choices, or by the id of its request, and the prompt that it is to."""
        assert self.answered is not None
        if isinstance(reference, int) and not isinstance(reference, bool):
            return self.answered.prompt, _candidate(_choice(self.answered, reference))
        name, place = _split(reference)
        other = self.answered if name == self.answered.name else load(connection, name, rater_id)
        if other is None:
            raise UnknownPresentationError(f"there is no answer {name!r} of this key")
        return other.prompt, _candidate(_choice(other, place))


def _names(value: Any) -> tuple[str, ...]:
    """Names of the requests that a preference compares."""
    if not isinstance(value, Mapping):
        raise VoteError("give inference_id with a preference that is withdrawn")
    given = cast(Mapping[str, object], value)
    return tuple(_split(given.get(side))[0] for side in ("better", "worse"))


def _split(reference: object) -> tuple[str, int]:
    """A request's name, and the place of a choice: `chatcmpl-12ab`, or `chatcmpl-12ab#1`."""
    if not isinstance(reference, str):
        raise VoteError(
            "better and worse are places of choices, such as 0 and 1, or ids of answers, such as 'chatcmpl-12ab' or "
            "'chatcmpl-12ab#1'"
        )
    name, _, place = reference.partition("#")
    if place and not (place.isascii() and place.isdigit()):
        raise VoteError(f"{reference!r} names no choice; write it as 'chatcmpl-12ab#1'")
    return name, int(place or 0)


def _choice(answered: Inference, place: int) -> Choice:
    if not 0 <= place < len(answered.choices):
        raise VoteError(f"choice is {place}; the answer has {len(answered.choices)}, counted from 0")
    return answered.choices[place]


def _candidate(choice: Choice) -> Candidate:
    return Candidate(choice.text, choice.token_ids, choice.logps, choice.weight_version, source_id=choice.source_id)


def _messages(prompt: Text) -> Sequence[Mapping[str, object]]:
    return () if isinstance(prompt, str) else prompt
