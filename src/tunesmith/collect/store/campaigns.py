"""Campaigns, raters and commands: the rows and the rules of changing them. Each function runs in a transaction."""

import math
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar, get_args

from sqlalchemy import Connection, delete, insert, select, update

from tunesmith.base.core.errors import DataDeletedError, DataError, NameTakenError, StoreError
from tunesmith.collect.store import audit, tables
from tunesmith.collect.store.content import check_name, check_text, name_key, spelling_of, token_sha256
from tunesmith.collect.store.items import chunks
from tunesmith.collect.store.queue import refresh_open_items
from tunesmith.collect.store.records import (
    SCOPES,
    Campaign,
    CampaignSettings,
    CommandKind,
    KeySettings,
    NewRater,
    PolicyVersion,
    Rater,
    Role,
)
from tunesmith.collect.store.tables import insert_rows, new_id

T = TypeVar("T", Rater, Any)

_SETTINGS = tuple(field.name for field in fields(CampaignSettings))
_MAX_OVERLAP = 1000

KEY_PREFIX = "sk-"
"""Begin of the keys of the API, as those of OpenAI have it, by which scanners for leaked secrets know them."""

DELETED = "deleted"
"""Name of those whose data was deleted, before their id."""

_OF_DELETED = re.compile(rf"{DELETED} [0-9]+'*")
_RESERVED = re.compile(rf"user [0-9a-f]{{24}}|{_OF_DELETED.pattern}")


def set_campaign(connection: Connection, settings: CampaignSettings, now: float) -> Campaign:
    """Create or change the campaign of this name, and reopen it if it was closed."""
    _check_settings(settings)
    table = tables.campaigns
    found = connection.execute(select(table.c.id).where(table.c.name == settings.name)).scalar()
    if found is None:
        found = new_id(connection.execute(insert(table).values(**asdict(settings), created_at=now)))
    else:
        known = asdict(campaign(connection, int(found)).settings)
        changed = {name: value for name, value in asdict(settings).items() if value != known[name]}
        if changed:
            changed |= {"guidelines": "changed"} if "guidelines" in changed else {}
            audit.add(connection, "settings changed", None, {"campaign": settings.name, **changed}, now)
        connection.execute(update(table).where(table.c.id == found).values(**asdict(settings), closed_at=None))
        # Another overlap opens or closes items.
        refresh_open_items(connection, int(found), settings.overlap)
    return campaign(connection, int(found))


def campaign(connection: Connection, campaign_id: int) -> Campaign:
    """The campaign of this id. Raises StoreError if there is none."""
    found = connection.execute(select(tables.campaigns).where(tables.campaigns.c.id == campaign_id)).first()
    if found is None:
        raise StoreError(f"there is no campaign {campaign_id}")
    return _campaign(found)


def all_campaigns(connection: Connection) -> list[Campaign]:
    """All campaigns, oldest first."""
    return [_campaign(row) for row in connection.execute(select(tables.campaigns).order_by(tables.campaigns.c.id))]


def close_campaign(connection: Connection, campaign_id: int, now: float) -> None:
    """Set `closed_at`. Raises StoreError if there is no such campaign."""
    campaign(connection, campaign_id)
    connection.execute(update(tables.campaigns).where(tables.campaigns.c.id == campaign_id).values(closed_at=now))


def add_rater(
    connection: Connection,
    name: str,
    role: Role,
    invited_by: int | None,
    expires_at: float | None,
    now: float,
    key: KeySettings | None = None,
) -> NewRater:
    """A new rater and their token; one whom imported votes brought, and who never had access, gets it now. With `key`
    it is a key of the API, whose token begins as those of OpenAI.

    Raises StoreError if the name is taken, in whatever spelling.
    """
    if role not in ("rater", "admin"):
        raise StoreError(f"role {role!r} is unknown; give rater or admin")
    name = _new_name(name)
    if key is not None and not (key.scopes and set(key.scopes) <= set(SCOPES)):
        raise StoreError(f"the scopes of a key are {', '.join(key.scopes) or 'none'}; give some of {', '.join(SCOPES)}")
    token = f"{'' if key is None else KEY_PREFIX}{secrets.token_urlsafe(24)}"
    table = tables.raters
    values: dict[str, Any] = {"role": role, "token_sha256": token_sha256(token), "expires_at": expires_at}
    values |= {"invited_by": invited_by}
    if key is not None:
        values |= {"scopes_json": key.scopes, "requests_per_minute": key.requests_per_minute}
        values |= {"tokens_per_day": key.tokens_per_day}
    known = _same_name(connection, name)
    if known is None:
        rater_id = new_id(connection.execute(insert(table).values(**named(name), created_at=now, **values)))
    elif known.token_sha256 is None and known.disabled_at is None and not known.is_machine:
        rater_id = int(known.id)
        connection.execute(update(table).where(table.c.id == rater_id).values(**values))
    else:
        raise _taken(name, known.name)
    added = _rater_of_id(connection, rater_id)
    allowed = {"role": role} if key is None else {"scopes": key.scopes}
    audit.add(connection, "rater invited" if key is None else "key made", invited_by, {"id": rater_id, **allowed}, now)
    return NewRater(added, token)


def rater_of_token(connection: Connection, token: str, now: float) -> Rater | None:
    """The rater with this token; None for a wrong, expired or disabled one."""
    table = tables.raters
    found = connection.execute(select(table).where(table.c.token_sha256 == token_sha256(token))).first()
    rater = None if found is None else _rater(found)
    return rater if rater is not None and rater.has_access(now) else None


def redeem(
    connection: Connection, token: str, name: str | None, expires_at: float | None, now: float
) -> NewRater | None:
    """The rater of `token` with a fresh token in its place; None for a bad token."""
    rater = rater_of_token(connection, token, now)
    if rater is None:
        return None
    fresh = secrets.token_urlsafe(24)
    values: dict[str, object] = {"token_sha256": token_sha256(fresh), "expires_at": expires_at}
    if name is not None and name != rater.name:
        values |= named(_new_name(name))
        known = _same_name(connection, name)
        if known is not None and known.id != rater.id:
            raise _taken(name, known.name)
    connection.execute(update(tables.raters).where(tables.raters.c.id == rater.id).values(**values))
    return NewRater(_rater_of_id(connection, rater.id), fresh)


def raters_named(
    connection: Connection, names: Sequence[str], now: float, machines: Collection[str] = ()
) -> dict[str, int]:
    """Id of the rater of each name, in whatever spelling; created without access if missing: for imported votes, among
    which may be those of users of keys, and of `machines`. Raises DataError for a name that nobody may have.
    """
    wanted = {given: named(_new_name(given, _OF_DELETED)) for given in dict.fromkeys(names)}
    table, known = tables.raters, dict[str, int]()
    for chunk in chunks([one["spelling"] for one in wanted.values()]):
        query = select(table.c.spelling, table.c.id).where(table.c.spelling.in_(chunk)).order_by(table.c.id)
        known |= {row.spelling: int(row.id) for row in connection.execute(query)}
    missing: dict[str, dict[str, Any]] = {}
    for given, one in wanted.items():
        if one["spelling"] not in known:
            facts = {"role": "rater", "created_at": now, "is_machine": given in machines}
            missing.setdefault(one["spelling"], {**one, **facts})
    known |= dict(zip(missing, insert_rows(connection, table, list(missing.values())), strict=True))
    return {given: known[one["spelling"]] for given, one in wanted.items()}


def rater_of_user(connection: Connection, key_id: int, user: str, now: float) -> int:
    """Id of the rater for a user of a key, without access, created if missing."""
    name = user_name(key_id, user)
    found = connection.execute(select(tables.raters.c.id).where(tables.raters.c.name == name)).scalar()
    if found is not None:
        return int(found)
    values = {**named(name), "role": "rater", "invited_by": key_id, "created_at": now}
    return new_id(connection.execute(insert(tables.raters).values(**values)))


def _new_name(name: str, reserved: re.Pattern[str] = _RESERVED) -> str:
    """`name` without white space around it. Raises DataError for one that no rater may have: users of
    keys, and those whose data was deleted, are found by theirs.
    """
    name = check_name(name.strip(), "the rater's name")
    if reserved.fullmatch(name_key(name)):
        raise DataError(
            f"the name {name!r} is of the form that users of keys ('user 12ab...') and those whose data was deleted "
            f"('{DELETED} 12') get; choose another"
        )
    return name


def named(name: str) -> dict[str, str]:
    """The columns of a rater's name."""
    return {"name": name, "spelling": spelling_of(name)}


def user_name(key_id: int, user: str) -> str:
    """The name of the rater for a user of a key, which does not tell who it is."""
    return f"user {token_sha256(f'{key_id}:{user}')[:24]}"


def make_nameless(connection: Connection, rater_id: int, now: float) -> None:
    """End the access of a rater whose data is deleted, and give them a name that does not tell who they were."""
    name, table = f"{DELETED} {rater_id}", tables.raters
    while connection.execute(select(table.c.id).where(table.c.name == name, table.c.id != rater_id)).first():
        name += "'"
    values = {**named(name), "token_sha256": None, "disabled_at": now}
    connection.execute(update(table).where(table.c.id == rater_id).values(**values))


def is_deleted(connection: Connection, rater_id: int) -> bool:
    """True if the data of this rater was deleted: nothing of theirs is stored any more."""
    query = select(tables.raters.c.name, tables.raters.c.disabled_at).where(tables.raters.c.id == rater_id)
    found = connection.execute(query).first()
    return found is not None and found.disabled_at is not None and found.name.rstrip("'") == f"{DELETED} {rater_id}"


def check_not_deleted(connection: Connection, rater_id: int) -> None:
    """Raise DataDeletedError if the data of this rater was deleted, which a process that knew them may learn later."""
    if is_deleted(connection, rater_id):
        raise DataDeletedError("the data of this rater or key was deleted, and the access ended; nothing is stored")


def all_raters(connection: Connection) -> list[Rater]:
    """All raters, oldest first."""
    return [_rater(row) for row in connection.execute(select(tables.raters).order_by(tables.raters.c.id))]


def rater_of_id(connection: Connection, rater_id: int) -> Rater | None:
    """The rater of this id; None if there is none."""
    found = connection.execute(select(tables.raters).where(tables.raters.c.id == rater_id)).first()
    return None if found is None else _rater(found)


def rater_named(raters: Iterable[T], name: str) -> T | None:
    """The one of `raters`, or of their rows, with this name in whatever spelling: the exact one first."""
    key = name_key(name)
    same = [one for one in raters if name_key(one.name) == key]
    return next((one for one in same if one.name == name), next(iter(same), None))


def disable_rater(connection: Connection, rater_id: int, now: float, by: int | None = None) -> None:
    """Set `disabled_at`; `by` is the admin or key that ends the access. Raises StoreError if there is no such rater."""
    ended = _rater_of_id(connection, rater_id)
    audit.add(connection, "rater ended" if ended.scopes is None else "key ended", by, {"id": rater_id}, now)
    connection.execute(update(tables.raters).where(tables.raters.c.id == rater_id).values(disabled_at=now))


def add_command(connection: Connection, kind: CommandKind, argument: str, rater_id: int, now: float) -> int:
    """Id of a new command. Raises StoreError for an unknown kind."""
    if kind not in get_args(CommandKind):
        raise StoreError(f"command {kind!r} is unknown; there are {', '.join(get_args(CommandKind))}")
    check_text(argument, "the command's argument")
    if kind == "rollback":
        audit.add(connection, "rollback asked", rater_id, {"version": argument}, now)
    values = {"kind": kind, "argument": argument, "rater_id": rater_id, "created_at": now}
    return new_id(connection.execute(insert(tables.commands).values(**values)))


def copy_versions(connection: Connection, versions: Sequence[PolicyVersion]) -> None:
    """Add or replace the copies of the trainer's versions."""
    table = tables.shown_versions
    for version in versions:
        connection.execute(delete(table).where(table.c.version == version.version))
        connection.execute(insert(table).values(**asdict(version)))


def _check_settings(settings: CampaignSettings) -> None:
    check_name(settings.name, "the campaign's name")
    check_text(settings.guidelines, "the campaign's guidelines")
    for name in ("lease_s", "undo_s", "gold_share"):
        number = getattr(settings, name)
        if not math.isfinite(number) or number < 0:
            raise StoreError(f"{name} is {number}; it must be finite and at least 0")
    if settings.lease_s == 0:
        raise StoreError("lease_s is 0; give the seconds for which a pair is leased to one rater")
    if settings.gold_share > 0.5:
        raise StoreError(f"gold_share is {settings.gold_share}; it must be at most 0.5")
    if not 1 <= settings.overlap <= _MAX_OVERLAP:
        raise StoreError(f"overlap is {settings.overlap}; it must be from 1 to {_MAX_OVERLAP}")
    if settings.max_votes_per_rater < 0:
        raise StoreError(f"max_votes_per_rater is {settings.max_votes_per_rater}; give 0 for no limit, or more")
    if settings.kind not in ("pair", "ranking"):
        raise StoreError(f"kind {settings.kind!r} is unknown; give pair or ranking")
    if settings.answer_style not in ("raw", "markdown"):
        raise StoreError(f"answer_style {settings.answer_style!r} is unknown; give raw or markdown")


def _same_name(connection: Connection, name: str) -> Any | None:
    """The row of the rater with this name in whatever spelling: the exact one first."""
    same = tables.raters.c.spelling == spelling_of(name)
    return rater_named(connection.execute(select(tables.raters).where(same).order_by(tables.raters.c.id)), name)


def _taken(name: str, known: str) -> NameTakenError:
    spelt = "" if name == known else f" by {known!r}"
    return NameTakenError(f"the name {name!r} is taken{spelt}; choose another")


def _rater_of_id(connection: Connection, rater_id: int) -> Rater:
    found = rater_of_id(connection, rater_id)
    if found is None:
        raise StoreError(f"there is no rater {rater_id}")
    return found


def _campaign(row: Any) -> Campaign:
    settings = CampaignSettings(**{name: getattr(row, name) for name in _SETTINGS})
    return Campaign(row.id, settings, row.created_at, row.closed_at)


def _rater(row: Any) -> Rater:
    names = {field.name: f"{field.name}_json" if field.name == "scopes" else field.name for field in fields(Rater)}
    return Rater(**{name: getattr(row, column) for name, column in names.items()})
