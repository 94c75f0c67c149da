"""Alembic's environment: migrates the connection that `rsup.supervisor.schema.migrate` hands in.

By hand, to make a revision: `alembic -x url=sqlite:////tmp/x.db revision --autogenerate -m "..." --rev-id 0002`.
"""

from alembic import context
from sqlalchemy import Connection, create_engine

from rsup.supervisor.tables import metadata


def run(connection: Connection) -> None:
    """Run all steps in one transaction, the caller's where there is one."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with create_engine(context.get_x_argument(as_dictionary=True)["url"]).connect() as own:
        run(own)
        own.commit()
