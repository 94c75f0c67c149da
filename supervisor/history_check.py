"""Whether a store's history of devices and nodes agrees with itself: what `rsup db check` looks at beside the file."""

from sqlalchemy import Connection, and_, func, select

from rsup.supervisor.history_merge import SEVERITY
from rsup.supervisor.tables import seats, subjects, transitions

MAX_SHOWN = 20


def history_problems(connection: Connection) -> list[str]:
    """One line a disagreement, at most `MAX_SHOWN` of each kind; none in a sound store."""
    return [*_unknown_states(connection), *_states_behind(connection), *_double_seats(connection)]


def _unknown_states(connection: Connection) -> list[str]:
    query = select(subjects.c.kind, subjects.c.subject, subjects.c.state).where(subjects.c.state.not_in(SEVERITY))
    return [f"{kind} {name}: unknown state {state!r}" for kind, name, state in connection.execute(query.limit(MAX_SHOWN))]


def _states_behind(connection: Connection) -> list[str]:
    """Transitions that are newer than the state, or belong to none."""
    same = and_(transitions.c.kind == subjects.c.kind, transitions.c.subject == subjects.c.subject)
    newest = select(transitions.c.kind, transitions.c.subject, func.max(transitions.c.version).label("version"))
    newest_of = newest.group_by(transitions.c.kind, transitions.c.subject).subquery()
    behind = (
        select(newest_of, subjects.c.version)
        .outerjoin(subjects, and_(newest_of.c.kind == subjects.c.kind, newest_of.c.subject == subjects.c.subject))
        .where(func.coalesce(subjects.c.version, -1) < newest_of.c.version)
    )
    lines = [
        f"{kind} {name}: its state is of version {state}, its history goes to {version}"
        for kind, name, version, state in connection.execute(behind.limit(MAX_SHOWN))
    ]
    other = (
        select(subjects.c.kind, subjects.c.subject, subjects.c.state, transitions.c.after)
        .join(transitions, and_(same, transitions.c.version == subjects.c.version))
        .where(transitions.c.after != subjects.c.state)
    )
    lines += [
        f"{kind} {name}: its state is {state}, its history ends in {after}"
        for kind, name, state, after in connection.execute(other.limit(MAX_SHOWN))
    ]
    return lines


def _double_seats(connection: Connection) -> list[str]:
    open_ones = select(seats.c.uuid, func.count()).where(seats.c.to_us.is_(None)).group_by(seats.c.uuid)
    query = open_ones.having(func.count() > 1).limit(MAX_SHOWN)
    return [f"device {uuid}: sits in {count} places at once" for uuid, count in connection.execute(query)]
