"""Which supervisor, or which store, a command asks.

Imports of the database are inside functions: a command that asks the supervisor, or only for `--help`, does without.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from rsup.supervisor import munge, places
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.job_name import JobName
from rsup.supervisor.leading import check_address, leading, split_addresses
from rsup.supervisor.principals import read_token_file
from rsup.supervisor.query_source import Json, NoAnswer, NobodyRuns, QueryError, Source
from rsup.supervisor.rest_source import RestSource
from rsup.supervisor.store_source import StoreSource
from rsup.supervisor.unix_http import can_connect
from rsup.supervisor.wire import RsupError

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Answer = TypeVar("Answer")


class Sources:
    """Chooses the source anew for each question: a supervisor may go and come while a command watches. `note` is told once
    whenever the answers begin to come from the store."""

    def __init__(
        self, state: Path, url: str, note: Callable[[str], None], *, host_first: bool = False, own_only: bool = False
    ) -> None:
        """`host_first`: `state` is only where the user's own launches leave their stories, and a supervisor that serves this
        host is meant before it. `own_only`: no other than that of `state` is."""
        self._state = state
        self._host_first = host_first and not url
        self._own_only = own_only
        self._given = url
        self._url = url or os.environ.get("RSUP_SUPERVISOR_URL", "")
        self._urls = split_addresses(self._url)
        """Several: of supervisors on one database, of which one leads."""
        self._note = note
        self._noted = ""
        self._notes: set[str] = set()

    @property
    def is_given(self) -> bool:
        """Whether somebody has named the supervisor: then the store here is not meant in its place."""
        return bool(self._url)

    def read(self, question: Callable[[Source], Answer]) -> Answer:
        """The answer to `question`. Raise `NoAnswer` where the supervisor that somebody has named does not answer, and there is
        no store here."""
        try:
            supervisor = self._usual()
            answer = question(supervisor)
            self._noted = ""
            return answer
        except NoAnswer as error:
            if self._given:
                raise
            store = StoreSource(self._state, self._note_once)
            named = self._url or os.environ.get("RSUP_SUPERVISOR") or os.environ.get("RSUP_SOCKET_DIR")
            is_named = bool(named) and not self._own_only
            if is_named and not store.is_there():
                raise type(error)(f"{error}; {self._state} has no store that could be read in its place") from None
            if self._noted != str(error):
                self._noted = str(error)
                where = f" in {self._state}" if is_named and str(self._state) not in str(error) else ""
                self._note(f"{error}; reading the store{where}")
        return question(store)

    def jobs(self, limit: int, state: str, owner: str) -> list[Json]:
        """The newest jobs."""
        return self.read(lambda source: source.jobs(limit, state, owner))

    def cases(self, limit: int, verdict: str) -> list[Json]:
        """The newest cases of all jobs."""
        return self.read(lambda source: source.cases(None, limit, verdict))

    def newest(self) -> JobName:
        """The newest job: one's own if there is any."""
        return self.read(lambda source: source.newest())

    def tell(self, note: Callable[[str], None]) -> None:
        """Notes go there from now on."""
        self._note = note

    def _note_once(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._note(text)

    def supervisor(self) -> RestSource:
        """The running supervisor. Raise `NoAnswer` where none runs."""
        return self._usual()

    def _usual(self) -> RestSource:
        if len(self._urls) > 1:
            self._url = leading(self._urls)
        local = self._local_socket()
        if local is not None:
            return RestSource("", self.token() if os.environ.get("RSUP_TOKEN_FILE") else "", local, self._leader_of(local))
        return self._at(self.address())

    def _at(self, address: str) -> RestSource:
        try:
            token = "" if self._is_foreign(address) and munge.is_here(munge.default_socket()) else self.token()
        except NoAnswer:
            if not munge.is_here(munge.default_socket()):
                raise
            token = ""
        return RestSource(address, token)

    def _leader_of(self, local: Path) -> Callable[[str], RestSource]:
        def follow(leader: str) -> RestSource:
            try:
                return self._at(leader)
            except QueryError as error:
                raise QueryError(
                    f"the supervisor at {local} stands by, and the one at {leader} leads: {error}, or run this on its host"
                ) from None

        return follow

    def _local_socket(self) -> Path | None:
        """The UNIX socket of the supervisor meant, None where it has none that lets us in: of the address given, else of the
        state directory, else of `RSUP_SUPERVISOR`, else of this host where the state directory has no store. With `host_first`
        that of the state directory comes last."""
        if self._url:
            path = Path(self._url.removeprefix("unix://"))
            return path if self._url.startswith("unix:///") and can_connect(path) else None
        file = self._running()
        own = [places.rest_socket_beside(file.rpc)] if file is not None and _is_here(file) else []
        if self._host_first:
            found = [*self._shared_sockets(), *own]
        else:
            found = own if file is not None or self._own_only else self._shared_sockets()
        return next((path for path in found if path is not None and can_connect(path)), None)

    def asks_the_host(self) -> bool:
        """Whether a supervisor answers that serves this host, and has nothing to do with the state directory."""
        local = self._local_socket() if self._host_first else None
        file = self._running()
        return local is not None and (file is None or local != places.rest_socket_beside(file.rpc))

    def _shared_sockets(self) -> list[Path | None]:
        """Where supervisors that are not the state directory's may answer this host's users."""
        named = os.environ.get("RSUP_SUPERVISOR", "").split(",")
        found = [places.rest_socket_beside(address.strip()) for address in named]
        # A directory that was named and has a store is meant itself; one that is not ours to look into has none for us.
        if self._host_first or not os.path.exists(self._state / "rsup.db"):
            found.append(places.host_rest_socket())
        return found

    def _running(self) -> places.SupervisorFile | None:
        """Who holds the store of the state directory, None where it is known that nobody does."""
        file = places.read_supervisor_file(self._state)
        if file is not None and _is_here(file) and (process_start_ticks(file.pid) or -1) != file.start_ticks:
            return None
        return file

    def _is_foreign(self, address: str) -> bool:
        """Whether that is not the supervisor of our state directory, whose token is worth nothing there."""
        file = places.read_supervisor_file(self._state)
        return not os.environ.get("RSUP_TOKEN_FILE") and (file is None or file.rest.rstrip("/") != address.rstrip("/"))

    def address(self) -> str:
        """Where the supervisor answers: as given, else as `supervisor.json` says. Raise `NoAnswer` where none runs."""
        if "," in self._url:
            self._url = leading(self._urls)
        if self._url:
            return check_address(self._url)
        file = self._running()
        if file is None:
            raise NobodyRuns(_nobody_runs(self._state))
        if not file.rest:
            raise NoAnswer(f"the supervisor (pid {file.pid} on {file.host}) serves no page")
        if not _is_here(file) and urlsplit(file.rest).hostname in LOOPBACK:
            raise NoAnswer(f"the supervisor runs on {file.host} and answers only there")
        return file.rest

    def token(self) -> str:
        """The token of `RSUP_TOKEN_FILE`, else of the state directory. Where there is none, raise `QueryError` in the first
        case, `NoAnswer` in the second."""
        given = os.environ.get("RSUP_TOKEN_FILE")
        path = Path(given or self._state / "token")
        try:
            return read_token_file(path)
        except FileNotFoundError:
            error = QueryError if given else NoAnswer
            raise error(f"there is no token file {path}; set RSUP_TOKEN_FILE or --state-dir") from None


def _is_here(file: places.SupervisorFile) -> bool:
    return (file.host, file.boot_id) == (places.this_host(), places.boot_id())


def _leader(state: Path) -> str:
    """The supervisor that leads on the database in which that directory's store is, as it says there; empty where nobody does,
    and where the store is a file."""
    from sqlalchemy.exc import SQLAlchemyError

    from rsup.supervisor.database import find_database, reader_engine

    with contextlib.suppress(SQLAlchemyError, RsupError, OSError, ValueError):  # told by whoever reads the store
        target = find_database(state)
        if "://" not in str(target) or str(target).startswith("sqlite"):
            return ""
        from rsup.supervisor.postgres_lease import is_held, read_holder

        engine = reader_engine(target)
        try:
            with engine.connect() as connection:
                found = read_holder(connection)
                if found is None or not is_held(connection):
                    return ""
        finally:
            engine.dispose()
        where = f": RSUP_SUPERVISOR_URL={found.rest} asks it" if found.rest else ""
        return f"the supervisor of this database runs elsewhere, pid {found.pid} on {found.host}{where}"
    return ""


def _nobody_runs(state: Path) -> str:
    """Whoever has a shared supervisor in mind must not take an own, empty store for its word."""
    named = os.environ.get("RSUP_SUPERVISOR", "")
    if not named:
        elsewhere = os.environ.get("RSUP_DATABASE_URL") or os.path.exists(state / "database-url")
        if elsewhere and (leader := _leader(state)):
            return leader
        folder = os.environ.get("RSUP_SOCKET_DIR", "")
        if folder and can_connect(places.host_rest_socket()):  # and another state directory was named
            return f"no supervisor runs on {state}"
        return f"no supervisor answers in RSUP_SOCKET_DIR={folder}" if folder else "no supervisor runs"
    if "ipc://" in named:
        return f"the supervisor of RSUP_SUPERVISOR={named} does not answer"
    return f"RSUP_SUPERVISOR={named} answers launches only: set RSUP_SUPERVISOR_URL=http://HOST:PORT of that supervisor"
