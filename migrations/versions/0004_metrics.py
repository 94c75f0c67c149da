"""Numbers of trainings, and episodes of slow ranks.

Frozen: it says what this step was, and imports nothing of `tables`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _job() -> sa.Column[int]:
    return sa.Column("job", row_id, autoincrement=False, nullable=False)


def _key(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), autoincrement=False, nullable=False)


def _numbers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def _of_jobs(table: str, *keys: str) -> list[sa.Constraint]:
    return [
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=f"fk_{table}_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", *keys, name=f"pk_{table}"),
    ]


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "metric_series",
        _job(),
        _key("kind"),
        _key("name"),
        *_numbers("attempt", "entry", "rank", "iteration", "at_us", "consumed_samples"),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("total", sa.Double(), nullable=False),
        *_numbers("num_points"),
        *_of_jobs("metric_series", "kind", "name"),
    )
    op.create_table(
        "metric_points",
        _job(),
        _key("kind"),
        _key("name"),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        *_numbers("first", "at_us", "consumed_samples"),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("value", "low", "high", "last")),
        *_numbers("count", "num_non_finite"),
        *_of_jobs("metric_points", "kind", "name", "iteration"),
    )
    op.create_table(
        "stragglers",
        _job(),
        sa.Column("episode", sa.BigInteger(), autoincrement=False, nullable=False),
        *_numbers("attempt", "rank"),
        *_texts("device", "node", "section"),
        *_numbers("from_us", "seen_us"),
        sa.Column("to_us", sa.BigInteger(), nullable=True),
        *_numbers("first", "iteration", "num_reports"),
        sa.Column("slowdown", sa.Double(), nullable=False),
        sa.Column("individual", sa.Double(), nullable=False),
        sa.Column("usual", sa.Double(), nullable=False),
        *_texts("cause", "text", "verdict"),
        *_of_jobs("stragglers", "episode"),
    )
    op.create_index("ix_stragglers_device_from_us", "stragglers", ["device", "from_us"])


def downgrade() -> None:
    """Not offered: `rsup db upgrade` leaves a backup."""
    raise NotImplementedError
