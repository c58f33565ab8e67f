"""Raters are found by whatever spelling of their name without reading all of them."""

import sqlalchemy as sa
from alembic import op

from tunesmith.collect.store.content import spelling_of

revision = "votes_0004"
down_revision = "votes_0003"


def upgrade() -> None:
    """Add a column with its values, and an index."""
    op.add_column("raters", sa.Column("spelling", sa.String(64), nullable=False, server_default=""))
    raters = sa.table("raters", sa.column("id"), sa.column("name"), sa.column("spelling"))
    connection = op.get_bind()
    for id_, name in connection.execute(sa.select(raters.c.id, raters.c.name)).all():
        connection.execute(sa.update(raters).where(raters.c.id == id_).values(spelling=spelling_of(name)))
    op.create_index("ix_raters_spelling", "raters", ["spelling"])
