"""The store's tables: columns of the records in `records`, one table a record, portable between SQLite and PostgreSQL.

A `JobKey` is spread over `cluster, owner, job_id, run` of `jobs`; every other table refers to a job by `job`, the integer
`jobs.id`, which is this database's own and means nothing elsewhere. Columns have the names and meanings of the records'
fields; what exists here only is described beside it. Times are UTC microseconds. JSON columns read back as Python values.

This file says what the newest schema is, `rsup.migrations` how an older store gets there; a test holds the two equal. A
change here needs a migration and its name at the end of `REVISIONS`.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

REVISIONS = ("0001", "0002", "0003", "0004")
"""Every schema this release knows, oldest first. A store that names another one is newer than the code."""

HEAD = REVISIONS[-1]
"""The schema of this file."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _key(name: str, kind: type[BigInteger] | type[Text] = BigInteger) -> Column[object]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _job(*, key: bool = True, nullable: bool = False) -> Column[int]:
    return Column("job", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=key, nullable=nullable, autoincrement=False)


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _number_or_none(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=True)


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _json(name: str) -> Column[object]:
    return Column(name, JSON, nullable=False)


COUNTED = "effect = 'counted' AND weight > 0"
"""Evidence that moves states. An index holds these rows apart, and is used where a query has this very text."""


def _only(condition: str) -> dict[str, Any]:
    """Options of an index of the rows that fulfil `condition` alone."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


jobs = Table(
    "jobs",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    _text("cluster"),
    _text("owner"),
    _text("job_id"),
    _number("run"),
    Column("state", LargeBinary, nullable=False),
    _text("phase"),
    _number("epoch"),
    _number("attempt"),
    _number("created_us"),
    _number("updated_us"),
    _number_or_none("ended_us"),
    _number_or_none("exit_code"),
    _text("reason"),
    _text("command"),
    _number("num_nodes"),
    _number("num_ranks"),
    _number("iteration"),
    Column("injected", Boolean, nullable=False),
    UniqueConstraint("cluster", "owner", "job_id", "run"),
    Index("ix_jobs_phase", "phase"),
    Index("ix_jobs_created_us", "created_us"),
)

events = Table(
    "events",
    metadata,
    _job(),
    _key("number"),
    _number("at_us"),
    _number("recorded_us"),
    _text("kind"),
    _text("text"),
    _text("level"),
    _number("attempt"),
    _number_or_none("rank"),
    _text("node"),
    _text("principal"),
    _json("data"),
)

attempts = Table(
    "attempts",
    metadata,
    _job(),
    _key("attempt"),
    _number("epoch"),
    _number("started_us"),
    _number_or_none("stopped_us"),
    _number_or_none("first_step_us"),
    _number("world_size"),
    _json("nodes"),
    _text("outcome"),
    _text("reason"),
    _number("start_iteration"),
    _number("last_iteration"),
    Index("ix_attempts_stopped_us", "stopped_us", "started_us", "world_size", "outcome"),
)

ranks = Table(
    "ranks",
    metadata,
    _job(),
    _key("attempt"),
    _key("rank"),
    _text("node"),
    _number("pid"),
    _text("device"),
    _number_or_none("exit_code"),
    _number("signal"),
    _text("reason"),
)

incidents = Table(
    "incidents",
    metadata,
    _job(),
    _key("incident"),
    _number("attempt"),
    _number("at_us"),
    _text("kind"),
    _number_or_none("rank"),
    _text("node"),
    _text("device"),
    _number("iteration"),
    _number_or_none("exit_code"),
    _number("signal"),
    _text("signal_name"),
    _text("section"),
    _text("found_by"),
    _text("text"),
    _json("victims"),
    _number_or_none("detected_us"),
    _number_or_none("recovered_us"),
    _number_or_none("lost_iterations"),
    _json("stacks"),
    Index("ix_incidents_device_at_us", "device", "at_us"),
    Index("ix_incidents_node_at_us", "node", "at_us"),
)

sections = Table(
    "sections",
    metadata,
    _job(),
    _key("section", Text),
    Column("limit_s", Double, nullable=True),
    Column("calculated", Boolean, nullable=False),
    Column("longest_s", Double, nullable=False),
    _number("times"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _job(),
    _key("attempt"),
    _key("iteration"),
    _text("path"),
    _number("at_us"),
    Column("duration_s", Double, nullable=False),
    Index("ix_checkpoints_path", "path"),
)

resumes = Table(  # which checkpoint an attempt went on from
    "resumes",
    metadata,
    _job(),
    _key("attempt"),
    _key("iteration"),
    _text("path"),
    _number("at_us"),
    Index("ix_resumes_path", "path"),
)

nodes = Table(  # every node ever seen, as it was last seen; what it was in each job: `job_nodes`
    "nodes",
    metadata,
    _key("node", Text),
    _number("first_us"),  # when it was first seen
    _number("at_us"),
    Column("job", ForeignKey("jobs.id", ondelete="SET NULL"), nullable=True),
    _text("role"),
    _json("devices"),
)

job_nodes = Table(
    "job_nodes",
    metadata,
    _job(),
    _key("node", Text),
    _number("first_us"),
    _number("at_us"),
    _text("role"),
    _json("devices"),
    Index("ix_job_nodes_node_at_us", "node", "at_us"),
)

devices = Table(  # every device ever seen, where it was last seen
    "devices",
    metadata,
    _key("uuid", Text),
    _number("first_us"),
    _number("at_us"),
    _text("node"),
    _text("model"),
    _text("serial"),
    _text("board"),
    _text("pci_bus_id"),
    _text("vbios"),
    _text("driver"),
    Index("ix_devices_serial", "serial"),
    Index("ix_devices_node", "node"),
    Index("ix_devices_model", "model"),
    Index("ix_devices_vbios", "vbios"),
    Index("ix_devices_driver", "driver"),
)

placements = Table(  # which device of which node a rank of an attempt used, from when to when
    "placements",
    metadata,
    _job(),
    _key("attempt"),
    _key("rank"),
    _text("device"),  # devices.uuid
    _text("node"),
    _number("from_us"),
    _number_or_none("to_us"),  # the attempt's stopped_us; None while it runs
    Index("ix_placements_device_from_us", "device", "from_us", "to_us"),
    Index("ix_placements_node_from_us", "node", "from_us", "to_us"),
    Index("ix_placements_from_us", "from_us"),
)

beats = Table("beats", metadata, _job(), _number("at_us"), _json("ranks"))

cases = Table(
    "cases",
    metadata,
    _job(),
    _key("case_id", Text),
    _number("attempt"),
    _number("iteration"),
    _number("opened_us"),
    _number_or_none("closed_us"),
    Column("fatal", Boolean, nullable=False),
    _json("findings"),
    _text("verdict"),
    _text("reason"),
    _text("action"),
    Column("data_dependent", Boolean, nullable=False),
    _json("accused"),
    _number("suspect_of"),
    _json("tried"),
    _text("checkpoint"),
    _json("data_position"),
    _text("found_by"),
    Column("injected", Boolean, nullable=False),
    _json("placements"),
    _text("note"),
    Index("ix_cases_opened_us", "opened_us"),
)

metric_series = Table(  # the series of a job's numbers, with the newest point of each
    "metric_series",
    metadata,
    _job(),
    _key("kind", Text),
    _key("name", Text),
    _number("attempt"),  # whose rank told it last
    _number("entry"),  # of that attempt's ranks into their training function, 0: without in-process restart
    _number("rank"),
    _number("iteration"),
    _number("at_us"),
    _number("consumed_samples"),
    Column("value", Double, nullable=True),  # None: it was not finite
    Column("total", Double, nullable=False),  # of all finite values ever told: also of iterations that were done again
    _number("num_points"),  # rows in `metric_points`
)

metric_points = Table(  # a point is one iteration, or neighbours put together: `wire.MetricBin`; None where nothing is finite
    "metric_points",
    metadata,
    _job(),
    _key("kind", Text),
    _key("name", Text),
    _key("iteration"),
    _number("first"),
    _number("at_us"),
    _number("consumed_samples"),
    Column("value", Double, nullable=True),
    Column("low", Double, nullable=True),
    Column("high", Double, nullable=True),
    Column("last", Double, nullable=True),
    _number("count"),
    _number("num_non_finite"),
)

stragglers = Table(
    "stragglers",
    metadata,
    _job(),
    _key("episode"),
    _number("attempt"),
    _number("rank"),
    _text("device"),
    _text("node"),
    _text("section"),
    _number("from_us"),
    _number("seen_us"),
    _number_or_none("to_us"),
    _number("first"),
    _number("iteration"),
    _number("num_reports"),
    Column("slowdown", Double, nullable=False),
    Column("individual", Double, nullable=False),
    Column("usual", Double, nullable=False),
    _text("cause"),
    _text("text"),
    _text("verdict"),
    Index("ix_stragglers_device_from_us", "device", "from_us"),
)

evidence = Table(  # what speaks for or against a device or node; append only, but for counts
    "evidence",
    metadata,
    _key("fingerprint", Text),
    _text("kind"),
    _text("subject"),
    _text("source"),
    _text("code"),
    _text("episode"),
    _number("first_us"),
    _number("last_us"),
    _number("recorded_us"),
    _number("count"),
    Column("weight", Double, nullable=False),
    _text("serial"),
    _text("node"),
    Column("job", ForeignKey("jobs.id", ondelete="SET NULL"), nullable=True),
    _number("attempt"),
    _number_or_none("rank"),
    _number("iteration"),
    _text("case_id"),
    _text("text"),
    _text("principal"),
    Column("injected", Boolean, nullable=False),
    _text("effect"),
    _text("rule"),
    Column("share", Double, nullable=False),
    Index("ix_evidence_kind_subject_last_us", "kind", "subject", "last_us", "effect", "weight", "first_us"),
    Index("ix_evidence_last_us", "last_us"),
    Index("ix_evidence_job", "job"),
    Index("ix_evidence_source", "source", "count"),
    Index("ix_evidence_counted", "last_us", "kind", "subject", "episode", "weight", **_only(COUNTED)),
)

subjects = Table(  # the state of each device and node that has ever been more than clear
    "subjects",
    metadata,
    _key("kind", Text),
    _key("subject", Text),
    _text("state"),
    _number("since_us"),
    _text("reason"),
    _number("version"),
    Column("score", Double, nullable=False),
    _number_or_none("expires_us"),
    _text("serial"),
    _text("rule"),
    _number("clean_us"),
    _text("override"),
    _text("override_actor"),
    _text("override_reason"),
    _number_or_none("override_until_us"),
    _text("ticket"),
    Column("held_by_test", Boolean, nullable=False),
    _number("settled_us"),
    _text("may_drain"),
    Index("ix_subjects_kind_state_subject", "kind", "state", "subject"),
    Index("ix_subjects_serial", "serial"),
    Index("ix_subjects_expires_us", "expires_us"),
    Index("ix_subjects_override_until_us", "override_until_us"),
)

transitions = Table(
    "transitions",
    metadata,
    _key("kind", Text),
    _key("subject", Text),
    _key("version"),
    _number("at_us"),
    _text("before"),
    _text("after"),
    _text("reason"),
    _text("principal"),
    _text("verb"),
    _text("rule"),
    _text("fingerprint"),
    Column("job", ForeignKey("jobs.id", ondelete="SET NULL"), nullable=True),
    Index("ix_transitions_at_us", "at_us", "kind", "after", "before", "subject"),
)

seats = Table(  # where each device sat, from when to when; `placements` says which rank used it
    "seats",
    metadata,
    _key("uuid", Text),
    _key("from_us"),
    _text("node"),
    _text("pci_bus_id"),
    _text("serial"),
    _text("board"),
    _number_or_none("to_us"),
    _number("seen_us"),
    _text("boot_id"),
    Index("ix_seats_node", "node"),
    Index("ix_seats_serial", "serial"),
)

drain_notes = Table(  # what was done, seen and asked for about a node in the scheduler; append only
    "drain_notes",
    metadata,
    _key("node", Text),
    _key("at_us"),
    _key("what", Text),
    _number("number"),
    _text("reason"),
    _text("principal"),
)

meta = Table(  # facts about the store itself: `store` (its random id), `holder` (PostgreSQL's lease), `term` (copies)
    "meta",
    metadata,
    Column("key", Text, primary_key=True),
    _text("value"),
)

alembic_version = Table(  # Alembic's own table, made by us in a fresh store; apart, so that Alembic does not compare it
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
