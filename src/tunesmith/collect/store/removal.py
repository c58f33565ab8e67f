"""Removal from `votes.db`: of what is older than the retention, and of one person's data, which can be exported too.

Each function runs in a transaction. Votes are no part of the retention: they hold their own copy of prompt and answers,
and trainers read them again. A deleted person's row among the raters stays, without a name, because what they did as an
admin and their row in the audit log refer to it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, exists, func, or_, select, update

from tunesmith.base.core.errors import UnknownPersonError
from tunesmith.collect.store import audit
from tunesmith.collect.store.campaigns import (
    DELETED,
    add_command,
    all_campaigns,
    all_raters,
    make_nameless,
    rater_named,
    rater_of_user,
    user_name,
)
from tunesmith.collect.store.content import check_text, encode_json, token_sha256
from tunesmith.collect.store.inferences import DAY_S, IMPORTED, load_all
from tunesmith.collect.store.items import chunks, texts_of_items
from tunesmith.collect.store.queue import refresh_open_items
from tunesmith.collect.store.records import Deleted, Person, Rater
from tunesmith.collect.store.tables import audit as audit_table
from tunesmith.collect.store.tables import (
    candidates,
    demonstrations,
    feedback,
    inference_choices,
    inferences,
    item_candidates,
    items,
    key_usage,
    presentations,
    prompts,
    rankings,
    raters,
    votes,
)

Row = dict[str, Any]

_AT_ONCE = 200
"""Stored answers that one transaction removes, while others wait to write."""


def remove_old(connection: Connection, before: float) -> Counter[str]:
    """Remove some of what is older than `before`, and return how much of what; the next call removes more, until
    nothing is left. An answer goes with its feedback, once all of that is old too.
    """
    said = feedback.alias()
    is_rated = exists().where(said.c.inference_id == inferences.c.id, said.c.created_at >= before)
    old = select(inferences.c.id).where(inferences.c.created_at < before, ~is_rated)
    num = _remove_answers(connection, _ids(connection, old.order_by(inferences.c.created_at)))
    # What was said of a conversation: all revisions, or none.
    same = [getattr(said.c, name) == feedback.c[name] for name in ("episode", "choice", "rater_id", "metric")]
    is_changed = exists().where(said.c.inference_id.is_(None), *same, said.c.created_at >= before)
    about_episodes = feedback.c.inference_id.is_(None), feedback.c.created_at < before, ~is_changed
    found = _ids(connection, select(feedback.c.id).where(*about_episodes))
    num["feedback"] += _delete(connection, feedback, feedback.c.id.in_(found))
    num["usage"] = _delete(connection, key_usage, key_usage.c.day < int(before // DAY_S))
    found = _ids(connection, select(audit_table.c.id).where(audit_table.c.created_at < before))
    num["audit"] = _delete(connection, audit_table, audit_table.c.id.in_(found))
    return +num


def _ids(connection: Connection, query: Any) -> Sequence[int]:
    return connection.execute(query.limit(_AT_ONCE)).scalars().all()


def _delete(connection: Connection, table: Table, condition: ColumnElement[bool]) -> int:
    return connection.execute(delete(table).where(condition)).rowcount


def _remove_answers(connection: Connection, ids: Sequence[int]) -> Counter[str]:
    """Remove stored answers and the feedback on them."""
    num: Counter[str] = Counter()
    for part in chunks(ids):
        num["feedback"] += _delete(connection, feedback, feedback.c.inference_id.in_(part))
        _delete(connection, inference_choices, inference_choices.c.inference_id.in_(part))
        num["answers"] += _delete(connection, inferences, inferences.c.id.in_(part))
    return num


def person_named(connection: Connection, name: str, key: str = "") -> Person:
    """The rater or key of this name, or with `key` the one whom that key calls so.

    Raises UnknownPersonError for nobody.
    """
    check_text(f"{name} {key}", "the name")
    known = all_raters(connection)
    if key:
        found = rater_named((one for one in known if one.scopes is not None), key)
        if found is None:
            raise UnknownPersonError(
                f"there is no key {key!r}; there are {_listed(one.name for one in known if one.scopes)}"
            )
        person = _user_of(connection, found.id, name)
        if person is None:
            raise UnknownPersonError(f"the key {key!r} has no user {name!r}; write it as the application does")
        return person
    rater = rater_named(known, name)
    if rater is None:
        keys = [one.name for one in known if one.scopes is not None and _user_of(connection, one.id, name)]
        hint = f"; of the {_listed(keys)} there is a user of this name: add --key" if keys else ""
        raise UnknownPersonError(f"there is no rater and no key {name!r}{hint}")
    # The rater of a user, by the name that pages show.
    query = select(feedback.c.key_id, feedback.c.user).where(feedback.c.rater_id == rater.id, feedback.c.user != "")
    user = connection.execute(query.limit(1)).first()
    return Person(rater.id, rater.id) if user is None else Person(rater.id, user.key_id, user.user)


def _user_of(connection: Connection, key_id: int, user: str) -> Person | None:
    """A user of a key who asked, or said, something."""
    rater_id = connection.execute(select(raters.c.id).where(raters.c.name == user_name(key_id, user))).scalar()
    person = Person(int(rater_id or 0), key_id, user)
    asked = connection.execute(select(inferences.c.id).where(_asked_by(person)).limit(1)).first()
    return person if rater_id is not None or asked is not None else None


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"


def _asked_by(person: Person) -> ColumnElement[bool]:
    return (inferences.c.rater_id == person.key_id) & (inferences.c.user == person.user)


def forget_requests(connection: Connection, person: Person, now: float) -> None:
    """Tell trainers that the requests of a person are deleted, before the first of them is: they learn from those that
    were made twice.
    """
    first = connection.execute(select(func.min(inferences.c.id)).where(_asked_by(person))).scalar()
    if first is not None:
        rater_id = person.rater_id or rater_of_user(connection, person.key_id, person.user, now)
        add_command(connection, "forget", encode_json(asdict(Deleted(request_id=first))), rater_id, now)


def remove_unrated(connection: Connection, person: Person) -> int:
    """Remove some of a person's answers on which there is no feedback, and return how many; 0 once there are none."""
    is_rated = exists().where(feedback.c.inference_id == inferences.c.id)
    found = _ids(connection, select(inferences.c.id).where(_asked_by(person), ~is_rated))
    return _remove_answers(connection, found)["answers"]


def remove_person(connection: Connection, person: Person, by: int | None, num_answers: int, now: float) -> Row:
    """Remove what is stored of a person, and tell trainers to forget it; returns how much of what, with the
    `num_answers` that were removed before, and the `id` under which they remain, without a name.

    Votes are removed with all revisions. What was shown to them outside of the queue is theirs (conversations, imported
    pairs), unless others brought the same: its texts are emptied, and votes of others on it removed too.
    """
    rater_id = person.rater_id or rater_of_user(connection, person.key_id, person.user, now)
    theirs = _own_items(connection, rater_id)
    shown = [presentations.c.rater_id == rater_id, *(presentations.c.item_id.in_(part) for part in chunks(theirs))]
    rows = [row for one in shown for row in connection.execute(select(presentations).where(one))]
    ids, item_ids = [row.id for row in rows], [row.item_id for row in rows]
    said = or_(
        feedback.c.rater_id == rater_id, feedback.c.inference_id.in_(select(inferences.c.id).where(_asked_by(person)))
    )
    deleted = _learnable(connection, ids, said)
    num: Counter[str] = Counter(answers=num_answers)
    about = connection.execute(select(feedback.c.inference_id).where(said).distinct()).scalars().all()
    for part in chunks(ids):
        for name, table in (("votes", votes), ("rankings", rankings), ("written answers", demonstrations)):
            num[name] += _delete(connection, table, table.c.presentation_id.in_(part))
        _delete(connection, presentations, presentations.c.id.in_(part))
    _empty(connection, theirs, now)
    for campaign in all_campaigns(connection):
        for part in chunks(item_ids):
            refresh_open_items(connection, campaign.id, campaign.settings.overlap, part)
    num["feedback"] += _delete(connection, feedback, said)
    for part in chunks([one for one in about if one is not None]):
        is_rated = exists().where(feedback.c.inference_id == inferences.c.id)
        imported = inferences.c.id.in_(part), inferences.c.name.startswith(IMPORTED), ~is_rated
        num += _remove_answers(connection, connection.execute(select(inferences.c.id).where(*imported)).scalars().all())
    num += _remove_answers(
        connection, connection.execute(select(inferences.c.id).where(_asked_by(person))).scalars().all()
    )
    num["usage"] = _delete(connection, key_usage, key_usage.c.rater_id == rater_id)
    make_nameless(connection, rater_id, now)
    add_command(connection, "forget", encode_json(asdict(deleted)), rater_id, now)
    detail: Row = {"id": rater_id, **+num}
    audit.add(connection, "data deleted", by, detail, now)
    return detail


def _shown_elsewhere(rater_id: ColumnElement[bool]) -> Any:
    """Condition on presentations outside of the queue, of raters for whom `rater_id` holds."""
    return rater_id & or_(presentations.c.seed < 0, presentations.c.lease_until <= presentations.c.shown_at)


def _own_items(connection: Connection, rater_id: int) -> list[int]:
    """Ids of the items that came from this rater alone: no trainer offered them, and nobody else brought them."""
    found = select(presentations.c.item_id).where(_shown_elsewhere(presentations.c.rater_id == rater_id))
    others = select(presentations.c.item_id).where(
        _shown_elsewhere(presentations.c.rater_id != rater_id), presentations.c.item_id.in_(found)
    )
    wanted = items.c.id.in_(found), items.c.id.not_in(others), items.c.offer_id.is_(None), items.c.is_gold.is_(False)
    return list(connection.execute(select(items.c.id).where(*wanted)).scalars())


def _learnable(connection: Connection, ids: Sequence[int], said: ColumnElement[bool]) -> Deleted:
    """What of the presentations `ids`, and of feedback for which `said` holds, trainers may have learnt from."""
    joined = votes.join(presentations).join(items)
    found: list[Any] = []
    for part in chunks(ids):
        query = select(func.min(votes.c.id), func.min(votes.c.created_at)).select_from(joined)
        is_learnt = items.c.heldout.is_(False), items.c.is_gold.is_(False), presentations.c.id.in_(part)
        found.append(connection.execute(query.where(*is_learnt)).one())
    query = select(func.min(feedback.c.id), func.min(feedback.c.created_at)).where(feedback.c.inference_id.is_not(None))
    rated = connection.execute(query.where(said)).one()
    return Deleted(
        vote_id=min((row[0] for row in found if row[0] is not None), default=None),
        feedback_id=rated[0],
        since=min((row[1] for row in (*found, rated) if row[1] is not None), default=None),
    )


def _empty(connection: Connection, item_ids: Sequence[int], now: float) -> None:
    """Retire items, and empty the texts that belong to them alone. Rows stay: others refer to them."""
    for part in chunks(item_ids):
        own = select(item_candidates.c.candidate_id).where(item_candidates.c.item_id.in_(part))
        values: Row = {"text": "", "token_ids_json": None, "logps_json": None}
        connection.execute(update(candidates).where(candidates.c.id.in_(own)).values(**values))
        connection.execute(update(items).where(items.c.id.in_(part)).values(retired_at=now, is_open=False))
        other, used = items.alias(), select(items.c.prompt_id).where(items.c.id.in_(part))
        # An emptied item of this person may share the prompt; it is retired, and its answers are empty.
        is_used = exists().where(other.c.prompt_id == prompts.c.id, other.c.id.not_in(item_ids))
        for prompt_id in (
            connection.execute(select(prompts.c.id).where(prompts.c.id.in_(used), ~is_used)).scalars().all()
        ):
            values = {"content_json": "", "sha256": token_sha256(f"{DELETED} {prompt_id}")}
            connection.execute(update(prompts).where(prompts.c.id == prompt_id).values(**values))


def facts_of(connection: Connection, person: Person, now: float) -> list[Row]:
    """The first rows of a person's export: who they are, and the tokens of each day if they are a key."""
    ids = {person.rater_id, person.key_id}
    found = {one.id: one for one in all_raters(connection) if one.id in ids}
    rows: list[Row] = [{"kind": "export", "time": _time(now), **({"user": person.user} if person.user else {})}]
    rows += [_rater_row(found[one]) for one in sorted(ids) if one in found]
    if not person.user:
        query = select(key_usage).where(key_usage.c.rater_id == person.key_id).order_by(key_usage.c.day)
        rows += [
            {"kind": "usage", "day": _time(row.day * DAY_S)[:10], "num_tokens": row.num_tokens}
            for row in connection.execute(query)
        ]
    return rows


def _rater_row(rater: Rater) -> Row:
    return {
        "kind": "rater" if rater.scopes is None else "key",
        "name": rater.name,
        "since": _time(rater.created_at),
        "access_ended": None if rater.disabled_at is None else _time(rater.disabled_at),
    }


Page = Callable[[Connection, Person, int], list[tuple[int, Row]]]
"""A page of a person's rows behind the one of an id, each with its id."""


def answers_of(connection: Connection, person: Person, cursor: int) -> list[tuple[int, Row]]:
    """Answers that were given to them, with the conversations before."""
    query = select(inferences.c.id, inferences.c.name).where(_asked_by(person), inferences.c.id > cursor)
    ids = {row.name: row.id for row in connection.execute(query.order_by(inferences.c.id).limit(_AT_ONCE))}
    found = sorted(load_all(connection, ids), key=lambda one: ids[one.name])
    return [
        (
            ids[one.name],
            {
                "kind": "answer",
                "id": one.name,
                "time": _time(one.created_at),
                "model": one.model,
                "conversation": one.episode or None,
                "prompt": one.prompt,
                "answers": [each.message or each.text for each in one.choices],
                "options": one.options,
                "num_tokens": len(one.prompt_ids) + sum(len(each.token_ids) for each in one.choices),
            },
        )
        for one in found
    ]


def feedback_of(connection: Connection, person: Person, cursor: int) -> list[tuple[int, Row]]:
    """What they said of answers, with all revisions; the answer too, if it is of an import."""
    joined = feedback.outerjoin(inferences, inferences.c.id == feedback.c.inference_id)
    columns = feedback, inferences.c.name.label("answer")
    theirs = or_(feedback.c.rater_id == person.rater_id, _asked_by(person))
    query = select(*columns).select_from(joined).where(theirs, feedback.c.id > cursor).order_by(feedback.c.id)
    rows = connection.execute(query.limit(_AT_ONCE)).all()
    imported = {row.answer for row in rows if row.answer and row.answer.startswith(IMPORTED)}
    answers = {one.name: one for one in load_all(connection, imported)}
    return [
        (
            row.id,
            {
                "kind": "feedback",
                "time": _time(row.created_at),
                "answer": row.answer,
                "conversation": row.episode or None,
                "choice": row.choice,
                "metric": row.metric,
                "value": row.value_json,
                "tags": row.tags_json,
                "revision": row.revision,
            }
            | (
                {"prompt": answers[row.answer].prompt, "text": answers[row.answer].choices[0].text}
                if row.answer in answers
                else {}
            ),
        )
        for row in rows
    ]


def _judgements(table: Table, kind: str) -> Page:
    def page(connection: Connection, person: Person, cursor: int) -> list[tuple[int, Row]]:
        joined = table.join(presentations, presentations.c.id == table.c.presentation_id)
        joined = joined.join(items, items.c.id == presentations.c.item_id)
        joined = joined.join(prompts, prompts.c.id == items.c.prompt_id)
        shown = presentations.c.item_id, presentations.c.order_json, prompts.c.content_json
        query = select(table, *shown).select_from(joined).where(presentations.c.rater_id == person.rater_id)
        rows = connection.execute(query.where(table.c.id > cursor).order_by(table.c.id).limit(_AT_ONCE)).all()
        texts = texts_of_items(connection, [row.item_id for row in rows])
        return [(row.id, _judgement(row, kind, texts[row.item_id])) for row in rows]

    return page


def _judgement(row: Any, kind: str, texts: Sequence[str]) -> Row:
    """A vote, a ranking, or a written answer, with what was shown from left to right."""
    said: Row = {"text": row.text} if kind == "written answer" else {"verdict": row.verdict, "reason": row.reason}
    ranks = getattr(row, "ranks_json", None)
    if ranks:
        said["ranks"] = [ranks[index] for index in row.order_json]
    return {
        "kind": kind,
        "time": _time(row.created_at),
        "prompt": row.content_json,
        "answers": [texts[index] for index in row.order_json],
        **said,
        "revision": row.revision,
    }


PAGES: tuple[Page, ...] = (
    answers_of,
    feedback_of,
    _judgements(votes, "vote"),
    _judgements(rankings, "ranking"),
    _judgements(demonstrations, "written answer"),
)
"""The rows of a person's export behind the first ones."""


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")
