"""The first schema: jobs with their events, attempts, ranks, incidents, sections, checkpoints, nodes, devices and beats.

Frozen: it says what the schema was, and imports nothing of `tables`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _job() -> sa.Column[int]:
    return sa.Column("job", row_id, autoincrement=False, nullable=False)


def upgrade() -> None:
    """Make every table."""
    op.create_table(
        "devices",
        sa.Column("uuid", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("first_us", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("serial", sa.Text(), nullable=False),
        sa.Column("board", sa.Text(), nullable=False),
        sa.Column("pci_bus_id", sa.Text(), nullable=False),
        sa.Column("vbios", sa.Text(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", name="pk_devices"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", row_id, nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("updated_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("num_nodes", sa.BigInteger(), nullable=False),
        sa.Column("num_ranks", sa.BigInteger(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("injected", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("cluster", "owner", "job_id", "run", name="uq_jobs_cluster_owner_job_id_run"),
    )
    op.create_index("ix_jobs_created_us", "jobs", ["created_us"])
    op.create_index("ix_jobs_phase", "jobs", ["phase"])
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_meta"),
    )
    op.create_table(
        "attempts",
        _job(),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("stopped_us", sa.BigInteger(), nullable=True),
        sa.Column("first_step_us", sa.BigInteger(), nullable=True),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("start_iteration", sa.BigInteger(), nullable=False),
        sa.Column("last_iteration", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_attempts_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt", name="pk_attempts"),
    )
    op.create_table(
        "beats",
        _job(),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("ranks", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_beats_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", name="pk_beats"),
    )
    op.create_table(
        "checkpoints",
        _job(),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_checkpoints_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt", "iteration", name="pk_checkpoints"),
    )
    op.create_table(
        "events",
        _job(),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("recorded_us", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_events_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "number", name="pk_events"),
    )
    op.create_table(
        "incidents",
        _job(),
        sa.Column("incident", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("signal", sa.BigInteger(), nullable=False),
        sa.Column("signal_name", sa.Text(), nullable=False),
        sa.Column("section", sa.Text(), nullable=False),
        sa.Column("found_by", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("victims", sa.JSON(), nullable=False),
        sa.Column("detected_us", sa.BigInteger(), nullable=True),
        sa.Column("recovered_us", sa.BigInteger(), nullable=True),
        sa.Column("lost_iterations", sa.BigInteger(), nullable=True),
        sa.Column("stacks", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_incidents_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "incident", name="pk_incidents"),
    )
    op.create_table(
        "job_nodes",
        _job(),
        sa.Column("node", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("first_us", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_job_nodes_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "node", name="pk_job_nodes"),
    )
    op.create_table(
        "nodes",
        sa.Column("node", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("first_us", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("job", row_id, nullable=True),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("devices", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_nodes_job", ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("node", name="pk_nodes"),
    )
    op.create_table(
        "placements",
        _job(),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("from_us", sa.BigInteger(), nullable=False),
        sa.Column("to_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_placements_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt", "rank", name="pk_placements"),
    )
    op.create_index("ix_placements_device", "placements", ["device"])
    op.create_index("ix_placements_node", "placements", ["node"])
    op.create_table(
        "ranks",
        _job(),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("signal", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_ranks_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt", "rank", name="pk_ranks"),
    )
    op.create_table(
        "sections",
        _job(),
        sa.Column("section", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("limit_s", sa.Double(), nullable=True),
        sa.Column("calculated", sa.Boolean(), nullable=False),
        sa.Column("longest_s", sa.Double(), nullable=False),
        sa.Column("times", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_sections_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "section", name="pk_sections"),
    )


def downgrade() -> None:
    """Never: an older release does not touch a newer store, and the backup made before an upgrade is the way back."""
    raise NotImplementedError("restore the backup that was made before the upgrade")
