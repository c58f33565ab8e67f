"""Answers of the endpoint, and what applications say of them. Each function runs in a transaction.

Feedback is append-only, as votes are. What says which of two answers is better becomes a vote too, which the live loop
and the statistics read: a `preference`, and a `demonstration`, which is better than the answer that it corrects.
"""

import hashlib
import random
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, exists, func, insert, select, update

from tunesmith.base.core.errors import UnknownPresentationError, VoteError
from tunesmith.base.schema.records import Text
from tunesmith.collect.store.answers import answering_pair
from tunesmith.collect.store.campaigns import check_not_deleted, rater_of_user, raters_named
from tunesmith.collect.store.content import MAX_NAME, check_text, check_values, encode_json
from tunesmith.collect.store.items import chunks
from tunesmith.collect.store.queue import SIDES_UNKNOWN
from tunesmith.collect.store.records import (
    EDITED,
    MODEL_SOURCE,
    Candidate,
    Choice,
    Feedback,
    GivenFeedback,
    Inference,
    NewItem,
    RatedAnswer,
    StoredFeedback,
    Verdict,
)
from tunesmith.collect.store.tables import (
    feedback,
    inference_choices,
    inferences,
    insert_rows,
    key_usage,
    new_id,
    raters,
)

PREFERENCES: Mapping[str, Verdict] = {
    "better": "left",
    "much_better": "left_much",
    "tie": "tie",
    "both_bad": "both_bad",
}
"""Verdicts of a preference, as those of a vote with the better answer on the left."""

DAY_S = 24 * 3600

IMPORTED = "import-"
"""Begin of the names of answers and feedback that an import brought."""

_MAX_TAGS = 32


def record(connection: Connection, answered: Inference, by: int | None = None) -> None:
    """Store a request and its answers. Raises DataDeletedError, as all that stores something for a key or rater, for
    the rater `by` too, who is the user of a token.
    """
    for rater_id in (answered.rater_id, *(() if by is None else (by,))):
        check_not_deleted(connection, rater_id)
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


def charge(connection: Connection, rater_id: int, num_tokens: int, now: float) -> None:
    """Add to the tokens that a key has used on the day (UTC) of `now`."""
    check_not_deleted(connection, rater_id)
    table, day = key_usage, int(now // DAY_S)
    of_it = table.c.rater_id == rater_id, table.c.day == day
    values = {"num_tokens": table.c.num_tokens + num_tokens}
    if not connection.execute(update(table).where(*of_it).values(**values)).rowcount:
        connection.execute(insert(table).values(rater_id=rater_id, day=day, num_tokens=num_tokens))


def tokens_of_day(connection: Connection, now: float) -> dict[int, int]:
    """Tokens that each key has used on the day (UTC) of `now`, by its id."""
    query = select(key_usage.c.rater_id, key_usage.c.num_tokens).where(key_usage.c.day == int(now // DAY_S))
    return {row.rater_id: row.num_tokens for row in connection.execute(query)}


def load_all(connection: Connection, names: Iterable[str]) -> list[Inference]:
    """The requests of these names that there are."""
    found: list[Inference] = []
    for part in chunks(sorted(set(names))):
        found += _whole(connection, connection.execute(select(inferences).where(inferences.c.name.in_(part))).all())
    return found


def requests_after(connection: Connection, cursor: int, limit: int) -> list[Inference]:
    """At most `limit` requests with an id above `cursor`, in the order in which they were answered."""
    query = select(inferences).where(inferences.c.id > cursor).order_by(inferences.c.id).limit(limit)
    return _whole(connection, connection.execute(query).all())


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
            id=row.id,
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


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who says something of answers: the key `key_id` of all of its answers, or with `user` that user of theirs."""

    key_id: int
    user: str | None = None

    def may_see(self, key_id: int, user: str) -> bool:
        """True if what belongs to this user of this key is theirs."""
        return key_id == self.key_id and self.user in (None, user)


def give(
    connection: Connection, rng: random.Random, campaign_id: int, said: Feedback, speaker: Speaker, now: float
) -> StoredFeedback:
    """Store feedback on answers of the speaker; what was said before of the same metric is replaced.

    It counts as that of the user whom the answer was for, so that users of one key may judge the same pair.

    Raises:
        UnknownPresentationError: the speaker has no such answer or conversation.
        VoteError: the value does not fit the metric.
        VoteConflictError, DataError: of the vote that it makes, see `answers.answering_pair`.
    """
    check_not_deleted(connection, speaker.key_id)
    said = _checked(said)
    about = _About.of(connection, said, speaker)
    rater_id = rater_of_user(connection, speaker.key_id, about.user, now) if about.user else speaker.key_id
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
        "key_id": speaker.key_id,
        "user": about.user,
        "rater_id": rater_id,
        "metric": said.metric,
        "value_json": said.value,
        "tags_json": said.tags,
        "revision": 1 if last is None else last.revision + 1,
        "created_at": now,
    }
    (row_id,) = insert_rows(connection, table, [values])
    return _stored(connection.execute(select(table).where(table.c.id == row_id)).one(), said)


def check_given(given: GivenFeedback) -> None:
    """Raise VoteError or DataError for imported feedback that cannot be stored."""
    if given.metric == "preference":
        raise VoteError("a preference between imported answers is a vote")
    _checked(Feedback(metric=given.metric, value=given.value, inference=given.answer_id or "0", tags=given.tags))
    check_values([given.prompt, given.answer, given.id, given.model], "the answer")


def add_given(connection: Connection, given: Sequence[GivenFeedback], now: float) -> int:
    """Number of feedback added of `given`, with the answers that it is about. What is there already is skipped."""
    for one in given:
        check_given(one)
    fresh = {_feedback_name(one): one for one in given}
    for chunk in chunks(list(fresh)):
        there = connection.execute(select(feedback.c.name).where(feedback.c.name.in_(chunk))).scalars()
        for name in there.all():
            del fresh[name]
    people = [name for one in fresh.values() for name in (one.application, one.rater)]
    rater_ids = raters_named(connection, people, now)
    answers = _given_answers(connection, list(fresh.values()), rater_ids, now)
    last = _last_revisions(connection, list(answers.values()))
    rows: list[dict[str, Any]] = []
    for name, one in fresh.items():
        key = (answers[_answer_name(one)], rater_ids[one.rater], one.metric)
        last[key] = last.get(key, 0) + 1
        values = {"inference_id": key[0], "rater_id": key[1], "metric": key[2], "revision": last[key]}
        values |= {"name": name, "episode": "", "choice": 0, "value_json": one.value, "tags_json": dict(one.tags)}
        values |= {"key_id": rater_ids[one.application], "user": ""}
        rows.append(values | {"created_at": now if one.created_at is None else one.created_at})
    insert_rows(connection, feedback, rows)
    return len(rows)


def _given_answers(
    connection: Connection, given: Sequence[GivenFeedback], rater_ids: Mapping[str, int], now: float
) -> dict[str, int]:
    """Id of the inference of each name that `_answer_name` gives; those that are missing are added."""
    wanted = {_answer_name(one): one for one in given}
    found: dict[str, int] = {}
    for chunk in chunks(list(wanted)):
        query = select(inferences.c.name, inferences.c.id).where(inferences.c.name.in_(chunk))
        found |= {row.name: int(row.id) for row in connection.execute(query)}
    missing = {name: one for name, one in wanted.items() if name not in found}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "rater_id": rater_ids[one.application],
            "user": "",
            "episode": "",
            "model": one.model,
            "prompt_json": one.prompt,
            "prompt_ids_json": (),
            "options_json": {},
            "created_at": now if one.created_at is None else one.created_at,
        }
        for name, one in missing.items()
    ]
    ids = insert_rows(connection, inferences, rows)
    # No token ids: which tokens another program drew is not known.
    unknown = {"message_json": None, "token_ids_json": (), "logps_json": (), "drawn_logps_json": ()}
    choices = [
        {
            **unknown,
            "inference_id": id_,
            "position": 0,
            "text": one.answer,
            "finish_reason": "stop",
            "weight_version": None,
            "source_id": f"{MODEL_SOURCE}{one.model or one.application}"[:MAX_NAME],
        }
        for id_, one in zip(ids, missing.values(), strict=True)
    ]
    if choices:
        connection.execute(insert(inference_choices), choices)
    return found | dict(zip(missing, ids, strict=True))


def _last_revisions(connection: Connection, ids: Sequence[int]) -> dict[tuple[int, int, str], int]:
    """The highest revision of what each rater says of the answers, by answer, rater and metric."""
    key = feedback.c.inference_id, feedback.c.rater_id, feedback.c.metric
    found: dict[tuple[int, int, str], int] = {}
    for chunk in chunks(ids):
        query = select(*key, func.max(feedback.c.revision)).where(feedback.c.inference_id.in_(chunk)).group_by(*key)
        found |= {(row[0], row[1], row[2]): int(row[3]) for row in connection.execute(query)}
    return found


def _feedback_name(given: GivenFeedback) -> str:
    # With the value: what the same person says later of the same answer is a new revision.
    said = [given.metric, given.value, given.tags, given.created_at]
    return _given_name("feedback", given.application, given.id, encode_json(said))


def _answer_name(given: GivenFeedback) -> str:
    return _given_name("answer", given.application, given.answer_id, encode_json([given.prompt, given.answer]))


def _given_name(*parts: str) -> str:
    """A name that is the same at every import, and that no request of the endpoint has."""
    return f"{IMPORTED}{hashlib.sha256(encode_json(parts).encode()).hexdigest()[:48]}"


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


def effective(connection: Connection, cursor: int, limit: int) -> list[RatedAnswer]:
    """At most `limit` feedback with an id above `cursor` of which there is no later word, with the answers; what was
    withdrawn is none, and a preference is a vote.
    """
    later, choices, table = feedback.alias(), inference_choices, feedback
    same = [getattr(later.c, name) == table.c[name] for name in ("episode", "choice", "rater_id", "metric")]
    same.append(later.c.revision > table.c.revision)
    of_answer = later.c.inference_id == table.c.inference_id
    of_conversation = later.c.inference_id.is_(None) & table.c.inference_id.is_(None)
    is_last = ~exists().where(of_answer, *same) & ~exists().where(of_conversation, *same)
    wanted = table.c.metric != "preference", table.c.id > cursor, is_last, table.c.value_json.is_not(None)
    is_choice = (choices.c.inference_id == table.c.inference_id) & (choices.c.position == table.c.choice)
    joined = table.outerjoin(inferences, inferences.c.id == table.c.inference_id).outerjoin(choices, is_choice)
    joined = joined.join(raters, raters.c.id == table.c.rater_id)
    answered = inferences.c.name.label("answered"), inferences.c.prompt_json, choices.c.text, choices.c.source_id
    conversation = func.coalesce(inferences.c.episode, table.c.episode).label("conversation")
    columns = (table, *answered, conversation, raters.c.name.label("rater"))
    query = select(*columns).select_from(joined).where(*wanted).order_by(table.c.id).limit(limit)
    return [
        RatedAnswer(
            id=row.id,
            prompt=row.prompt_json,
            answer=row.text,
            metric=row.metric,
            value=row.value_json,
            rater=row.rater,
            source_id=row.source_id,
            inference=row.answered,
            choice=None if row.answered is None else row.choice,
            episode=row.conversation,
            created_at=row.created_at,
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
        key_id=row.key_id,
        user=row.user,
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
    check_values([said.tags, said.inference, said.episode], "the feedback")
    value = said.value
    if value is None:
        return said
    if metric in ("comment", "demonstration"):
        if not isinstance(value, str) or not value.strip():
            raise VoteError(f"the value of {metric} is a text")
    elif metric == "preference":
        if not isinstance(value, Mapping):
            raise VoteError('the value of preference is an object such as {"better": 0, "worse": 1}')
    elif not isinstance(value, bool | float | int) or not abs(value) <= sys.float_info.max:  # nor nan
        raise VoteError(f"the value of {metric} is true or false (a thumb) or a finite number")
    check_values(value, "the feedback")
    return said


@dataclass(frozen=True, slots=True)
class _About:
    """The subject of feedback: an answer and its id in the store; both None for a conversation. `user` is whom it was
    for.
    """

    id: int | None
    answered: Inference | None
    user: str
    speaker: Speaker

    @classmethod
    def of(cls, connection: Connection, said: Feedback, speaker: Speaker) -> "_About":
        """Raises UnknownPresentationError if the speaker has no such answer or conversation."""
        if said.episode:
            theirs = [inferences.c.episode == said.episode, inferences.c.rater_id == speaker.key_id]
            if speaker.user is not None:
                theirs.append(inferences.c.user == speaker.user)
            found = connection.execute(select(inferences.c.user).where(*theirs).limit(1)).first()
            if found is None:
                raise UnknownPresentationError(f"there is no conversation {said.episode!r} of this key")
            return cls(None, None, found.user, speaker)
        answered, row_id = _theirs(connection, said.inference or _names(said.value)[0], speaker)
        _choice(answered, said.choice)
        return cls(row_id, answered, answered.user, speaker)

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
            item, verdict = self._pair(connection, said, value)
            if not all(isinstance(part, str) for one in _messages(item.prompt) for part in one.values()):
                return  # a prompt with calls of tools, which no page can show
            if item.candidates[0].text == item.candidates[1].text:
                is_correction = said.metric == "demonstration"
                equal = "the correction equals the answer" if is_correction else "the two answers are the same text"
                raise VoteError(f"{equal}; there is nothing to compare, so give another one")
            answering = answering_pair(connection, rng, campaign_id, item, rater_id, now, SIDES_UNKNOWN)
            if is_withdrawn:
                answering.withdraw(None)
            else:
                answering.vote(verdict, "", None, None)

    def _pair(self, connection: Connection, said: Feedback, value: Any) -> tuple[NewItem, Verdict]:
        assert self.answered is not None
        if said.metric == "demonstration":
            edited = Candidate(value, source_id=EDITED)
            sampled = _candidate(_choice(self.answered, said.choice))
            return NewItem(self.answered.prompt, (edited, sampled)), "left"
        verdict = value.get("verdict", "better")
        if verdict not in PREFERENCES:
            raise VoteError(f"the verdict of a preference is {verdict!r}; give one of {', '.join(PREFERENCES)}")
        sides = [self._side(connection, value.get(name)) for name in ("better", "worse")]
        if encode_json(sides[0][0]) != encode_json(sides[1][0]):
            raise VoteError("the two answers are to different conversations; compare answers to the same one")
        return NewItem(sides[0][0], (sides[0][1], sides[1][1])), PREFERENCES[verdict]

    def _side(self, connection: Connection, reference: object) -> tuple[Text, Candidate]:
        """An answer by its place among the choices, or by the id of its request, and the prompt that it is to."""
        assert self.answered is not None
        if isinstance(reference, int) and not isinstance(reference, bool):
            return self.answered.prompt, _candidate(_choice(self.answered, reference))
        name, place = _split(reference)
        other = _theirs(connection, name, self.speaker)[0]
        return other.prompt, _candidate(_choice(other, place))


def _theirs(connection: Connection, name: str, speaker: Speaker) -> tuple[Inference, int]:
    """The request of this name, and its id in the store. Raises UnknownPresentationError if the speaker has none."""
    row = connection.execute(select(inferences).where(inferences.c.name == name)).first()
    if row is None or not speaker.may_see(row.rater_id, row.user):
        raise UnknownPresentationError(f"there is no answer {name!r} of this key")
    return _whole(connection, [row])[0], int(row.id)


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
    if place and not (place.isascii() and place.isdigit() and len(place) < MAX_NAME):
        raise VoteError(f"{reference[:MAX_NAME]!r} names no choice; write it as 'chatcmpl-12ab#1'")
    return name, int(place or 0)


def _choice(answered: Inference, place: int) -> Choice:
    if not 0 <= place < len(answered.choices):
        raise VoteError(f"choice is {place}; the answer has {len(answered.choices)}, counted from 0")
    return answered.choices[place]


def _candidate(choice: Choice) -> Candidate:
    return Candidate(choice.text, choice.token_ids, choice.logps, choice.weight_version, source_id=choice.source_id)


def _messages(prompt: Text) -> Sequence[Mapping[str, object]]:
    return () if isinstance(prompt, str) else prompt
