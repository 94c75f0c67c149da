"""Rerun cases, and the history of devices and nodes: evidence, states with their transitions, and where boards sat.

Frozen: it says what this step was, and imports nothing of `tables`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _job() -> sa.Column[int]:
    return sa.Column("job", row_id, autoincrement=False, nullable=False)


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "cases",
        _job(),
        sa.Column("case_id", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("opened_us", sa.BigInteger(), nullable=False),
        sa.Column("closed_us", sa.BigInteger(), nullable=True),
        sa.Column("fatal", sa.Boolean(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("data_dependent", sa.Boolean(), nullable=False),
        sa.Column("accused", sa.JSON(), nullable=False),
        sa.Column("suspect_of", sa.BigInteger(), nullable=False),
        sa.Column("tried", sa.JSON(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("data_position", sa.JSON(), nullable=False),
        sa.Column("found_by", sa.Text(), nullable=False),
        sa.Column("injected", sa.Boolean(), nullable=False),
        sa.Column("placements", sa.JSON(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_cases_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "case_id", name="pk_cases"),
    )
    op.create_index("ix_cases_opened_us", "cases", ["opened_us"])
    op.create_table(
        "evidence",
        sa.Column("fingerprint", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("episode", sa.Text(), nullable=False),
        sa.Column("first_us", sa.BigInteger(), nullable=False),
        sa.Column("last_us", sa.BigInteger(), nullable=False),
        sa.Column("recorded_us", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("serial", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("job", row_id, nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("case_id", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("injected", sa.Boolean(), nullable=False),
        sa.Column("effect", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("share", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_evidence_job", ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_evidence"),
    )
    counted = sa.text("effect = 'counted' AND weight > 0")
    op.create_index(
        "ix_evidence_counted",
        "evidence",
        ["last_us", "kind", "subject", "episode", "weight"],
        sqlite_where=counted,
        postgresql_where=counted,
    )
    op.create_index("ix_evidence_job", "evidence", ["job"])
    covering = ["kind", "subject", "last_us", "effect", "weight", "first_us"]
    op.create_index("ix_evidence_kind_subject_last_us", "evidence", covering)
    op.create_index("ix_evidence_last_us", "evidence", ["last_us"])
    op.create_table(
        "subjects",
        sa.Column("kind", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("subject", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("since_us", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("score", sa.Double(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=True),
        sa.Column("serial", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("clean_us", sa.BigInteger(), nullable=False),
        sa.Column("override", sa.Text(), nullable=False),
        sa.Column("override_actor", sa.Text(), nullable=False),
        sa.Column("override_reason", sa.Text(), nullable=False),
        sa.Column("override_until_us", sa.BigInteger(), nullable=True),
        sa.Column("ticket", sa.Text(), nullable=False),
        sa.Column("held_by_test", sa.Boolean(), nullable=False),
        sa.Column("settled_us", sa.BigInteger(), nullable=False),
        sa.Column("may_drain", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "subject", name="pk_subjects"),
    )
    op.create_index("ix_subjects_expires_us", "subjects", ["expires_us"])
    op.create_index("ix_subjects_kind_state_subject", "subjects", ["kind", "state", "subject"])
    op.create_index("ix_subjects_override_until_us", "subjects", ["override_until_us"])
    op.create_index("ix_subjects_serial", "subjects", ["serial"])
    op.create_table(
        "transitions",
        sa.Column("kind", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("subject", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("before", sa.Text(), nullable=False),
        sa.Column("after", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("verb", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("job", row_id, nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_transitions_job", ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("kind", "subject", "version", name="pk_transitions"),
    )
    op.create_index("ix_transitions_at_us", "transitions", ["at_us", "kind", "after", "before", "subject"])
    op.create_table(
        "seats",
        sa.Column("uuid", sa.Text(), autoincrement=False, nullable=False),
        sa.Column("from_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("pci_bus_id", sa.Text(), nullable=False),
        sa.Column("serial", sa.Text(), nullable=False),
        sa.Column("board", sa.Text(), nullable=False),
        sa.Column("to_us", sa.BigInteger(), nullable=True),
        sa.Column("seen_us", sa.BigInteger(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("uuid", "from_us", name="pk_seats"),
    )
    op.create_index("ix_seats_node", "seats", ["node"])
    op.create_index("ix_seats_serial", "seats", ["serial"])
    op.create_table(
        "resumes",
        _job(),
        sa.Column("attempt", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_resumes_job", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt", "iteration", name="pk_resumes"),
    )
    op.create_index("ix_resumes_path", "resumes", ["path"])
    op.create_index("ix_placements_from_us", "placements", ["from_us"])
    op.drop_index("ix_placements_device", "placements")
    op.create_index("ix_placements_device_from_us", "placements", ["device", "from_us", "to_us"])
    op.drop_index("ix_placements_node", "placements")
    op.create_index("ix_placements_node_from_us", "placements", ["node", "from_us", "to_us"])
    op.create_index("ix_attempts_stopped_us", "attempts", ["stopped_us", "started_us", "world_size", "outcome"])
    op.create_index("ix_checkpoints_path", "checkpoints", ["path"])
    op.create_index("ix_incidents_device_at_us", "incidents", ["device", "at_us"])
    op.create_index("ix_incidents_node_at_us", "incidents", ["node", "at_us"])
    op.create_index("ix_job_nodes_node_at_us", "job_nodes", ["node", "at_us"])
    for column in ("driver", "model", "node", "serial", "vbios"):
        op.create_index(f"ix_devices_{column}", "devices", [column])


def downgrade() -> None:
    """Not offered: `rsup db upgrade` leaves a backup."""
    raise NotImplementedError
