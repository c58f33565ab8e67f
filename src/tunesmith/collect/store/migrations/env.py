"""Run by Alembic: uses the connection and the transaction of `store.database`."""

# pyright: basic

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
