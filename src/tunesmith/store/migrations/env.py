"""Run by Alembic: lets the scripts work on the connection and in the transaction of `store.schema_version`."""

# pyright: basic

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
