"""The audit log: what admins, keys and the server did. Each function runs in a transaction.

Entries are added in the transaction of what they tell, and never changed. They name raters and keys by their ids, so
that a person whose data is deleted is not named in it, and hold no token, no key and no text of anybody.
"""

from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import Connection, insert, select

from tunesmith.collect.store.records import AuditEntry
from tunesmith.collect.store.tables import audit, raters

Kind = Literal[
    "key made",
    "key ended",
    "rater invited",
    "rater ended",
    "settings changed",
    "rollback asked",
    "import",
    "judged",
    "pairs selected",
    "prune",
    "data exported",
    "data deleted",
    "refused",
]
"""The kinds of entries. `refused` counts failed logins and wrong keys, of at most a minute each."""


def add(connection: Connection, kind: Kind, by: int | None, detail: Mapping[str, Any], now: float) -> None:
    """Add an entry; `by` is the rater or key that did it, None for the server or a command on its machine."""
    connection.execute(insert(audit).values(created_at=now, rater_id=by, kind=kind, detail_json=detail))


def before(connection: Connection, cursor: int | None, limit: int) -> list[AuditEntry]:
    """The last `limit` entries, newest first; with `cursor` those with a smaller id."""
    query = select(audit, raters.c.name).select_from(audit.outerjoin(raters, raters.c.id == audit.c.rater_id))
    if cursor is not None:
        query = query.where(audit.c.id < cursor)
    rows = connection.execute(query.order_by(audit.c.id.desc()).limit(limit)).all()
    ids = [row.detail_json["id"] for row in rows if "id" in row.detail_json]
    named = connection.execute(select(raters.c.id, raters.c.name).where(raters.c.id.in_(ids)))
    names = {row.id: row.name for row in named}
    return [
        AuditEntry(
            id=row.id,
            created_at=row.created_at,
            rater_id=row.rater_id,
            who=row.name or "server",
            kind=row.kind,
            about=names.get(row.detail_json.get("id"), ""),
            detail=row.detail_json,
        )
        for row in rows
    ]
