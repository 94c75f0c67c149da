"""What was done, seen and asked for about nodes in the scheduler.

Frozen: it says what this step was, and imports nothing of `tables`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table, and an index that counts evidence by source."""
    op.create_table(
        "drain_notes",
        sa.Column("node", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("at_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("what", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("node", "at_us", "what", name="pk_drain_notes"),
    )
    op.create_index("ix_evidence_source", "evidence", ["source", "count"])


def downgrade() -> None:
    """Not offered: `rsup db upgrade` leaves a backup."""
    raise NotImplementedError
