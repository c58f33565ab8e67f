"""A metric's points, thinned out inside the database so that a long run is answered as quickly as a short one."""

from typing import Any

from sqlalchemy import Connection, case, func, select

from tunesmith.store.candidates import chunks
from tunesmith.store.records import Metric, Series
from tunesmith.store.tables import metrics


def metric_names(connection: Connection) -> list[str]:
    """Names of all metrics, sorted. Each is one step in the index, however many points it has."""
    names: list[str] = []
    last = ""
    while True:
        found = connection.execute(select(func.min(metrics.c.name)).where(metrics.c.name > last)).scalar()
        if found is None:
            return names
        last = str(found)
        names.append(last)


def series(connection: Connection, name: str, after_id: int, max_points: int) -> Series:
    """The points of a metric with an id above `after_id`; see `RunReader.series`."""
    is_asked = metrics.c.name == name, metrics.c.id > after_id
    first, last, num = connection.execute(
        select(func.min(metrics.c.id), func.max(metrics.c.id), func.count()).where(*is_asked)
    ).one()
    if not num:
        return Series(name, (), after_id, 0, False)
    if num <= max_points:
        rows = connection.execute(select(metrics).where(*is_asked).order_by(metrics.c.id))
        return Series(name, tuple(Metric(**row) for row in rows.mappings()), last, num, False)
    ids = _extremes(connection, name, first, last, max(1, max_points // 2)) | {first, last}
    points: list[Metric] = []
    for chunk in chunks(sorted(ids)):
        rows = connection.execute(select(metrics).where(metrics.c.id.in_(chunk)).order_by(metrics.c.id))
        points += [Metric(**row) for row in rows.mappings()]
    return Series(name, tuple(points), last, num, True)


def _extremes(connection: Connection, name: str, first: int, last: int, num_buckets: int) -> set[int]:
    """Ids of the lowest and the highest point of each bucket of ids, and of its first gap.

    One pass over the index finds each bucket's bounds and extremes; where these stand is then looked up inside the
    bucket. The plain way, a row number over each bucket, sorts everything.
    """
    bucket = ((metrics.c.id - first) * num_buckets) // (last - first + 1)
    found = (
        select(
            func.min(metrics.c.id).label("first"),
            func.max(metrics.c.id).label("last"),
            func.min(metrics.c.value).label("low"),
            func.max(metrics.c.value).label("high"),
            func.min(case((metrics.c.value.is_(None), metrics.c.id))).label("gap"),
        )
        .where(metrics.c.name == name, metrics.c.id >= first, metrics.c.id <= last)
        .group_by(bucket)
        .subquery()
    )
    query = select(_place(found, name, found.c.low), _place(found, name, found.c.high), found.c.gap)
    return {int(id_) for row in connection.execute(query) for id_ in row if id_ is not None}


def _place(found: Any, name: str, value: Any) -> Any:
    """Id of the first point of a bucket that has this value."""
    point = metrics.alias()
    return (
        select(point.c.id)
        .where(point.c.name == name, point.c.id >= found.c.first, point.c.id <= found.c.last, point.c.value == value)
        .order_by(point.c.id)
        .limit(1)
        .correlate(found)
        .scalar_subquery()
    )
