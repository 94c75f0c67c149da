"""Where a query gets its answer: from the running supervisor over REST, so that beats are live, else from the store.

Who asks: on the supervisor's host the kernel says so, over its UNIX socket; elsewhere the token of `RSUP_TOKEN_FILE` or of the
state directory does, else a MUNGE credential. A token file that was named explicitly counts on the UNIX socket, too.

Imports of the database are inside functions: a command that asks the supervisor, or only for `--help`, does without.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from rsup.supervisor import munge, places
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.history_questions import Question
from rsup.supervisor.job_name import JobName
from rsup.supervisor.leading import leading, split_addresses
from rsup.supervisor.munge import MungeError
from rsup.supervisor.principals import owner_name, read_token_file
from rsup.supervisor.unix_http import UnixHTTPHandler, can_connect
from rsup.supervisor.wire import RsupError, UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from rsup.supervisor.database import Target
    from rsup.supervisor.job_selector import FoundJob

REQUEST_TIMEOUT_S = 15.0
MAX_PAGE = 1000
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Json = dict[str, Any]
Answer = TypeVar("Answer")


class QueryError(RsupError):
    """The question cannot be answered; the text is what the supervisor or the store says about it."""


class WrongQuestion(QueryError, UsageError):
    """The question is wrong in itself: a name that fits several devices, a time that is none, a malformed policy."""


class NoAnswer(QueryError):
    """Nobody answers at the supervisor's address."""


class NobodyRuns(NoAnswer):
    """No supervisor runs on the state directory."""


class Source(Protocol):
    """Answers in the shapes of `views`. Raises `RsupError`."""

    def jobs(self, limit: int, state: str, owner: str) -> list[Json]:
        """The newest jobs."""
        ...

    def newest(self) -> JobName:
        """The newest job: one's own if there is any."""
        ...

    def status(self, job: JobName, stacks: bool) -> Json:
        """`views.job_status`, or its public part."""
        ...

    def events(self, job: JobName, after: int, limit: int) -> list[Json]:
        """Events after a number."""
        ...

    def newest_events(self, job: JobName, count: int) -> list[Json]:
        """The last `count` events, in order."""
        ...

    def stacks(self, job: JobName, rank: int | None) -> Json:
        """`story_views.job_stacks`."""
        ...

    def metrics(self, job: JobName, names: Sequence[str], kind: str, points: int) -> Json:
        """`metric_views.series_of` (all series where no `names` are given) and `latest_of`, as `series` and `latest`."""
        ...

    def answer(self, question: Question) -> Json:
        """The answer to a question about devices or nodes."""
        ...

    def cases(self, job: JobName | None, limit: int, verdict: str) -> list[Json]:
        """The newest cases, of that job if given: `case_views.case_fields`, or their public part."""
        ...

    def case(self, case_id: str) -> list[Json]:
        """Cases of that id."""
        ...


class RestSource:
    """A supervisor at `address` (`http://host:port`), or at the UNIX socket `local`. Without a token the kernel or MUNGE says
    who asks. Proxies of the environment are not used: it is in the cluster."""

    def __init__(
        self, address: str, token: str = "", local: Path | None = None, follow: "Callable[[str], RestSource] | None" = None
    ) -> None:
        """`follow` makes the source for the address that leads, where the supervisor at `local` stands by."""
        self._address = address.rstrip("/")
        self._token = token
        self._local = local
        self._place = str(local or self._address)
        self._follow = follow
        self._leader: RestSource | None = None
        self._opener = build_opener(ProxyHandler({}), *([UnixHTTPHandler(local)] if local else []))

    def jobs(self, limit: int, state: str = "", owner: str = "") -> list[Json]:
        """The newest jobs, over as many pages as needed."""
        return self._pages("/jobs", limit, state=state, owner=owner)

    def cases(self, job: JobName | None, limit: int, verdict: str) -> list[Json]:
        """The newest cases, of that job if given."""
        of_job = {} if job is None else {"job": job.name, "owner": job.owner, "cluster": job.cluster}
        return self._pages("/cases", limit, verdict=verdict, **of_job)

    def case(self, case_id: str) -> list[Json]:
        """Cases of that id."""
        items: list[Json] = self._get(f"/cases/{quote(case_id, safe='')}")["items"]
        return items

    def _pages(self, path: str, limit: int, **query: object) -> list[Json]:
        found: list[Json] = []
        cursor: str | None = ""
        while cursor is not None and len(found) < limit:
            answer = self._get(path, limit=min(MAX_PAGE, limit - len(found)), cursor=cursor, **query)
            found += answer["items"]
            cursor = answer["next_cursor"]
        return found

    def newest(self) -> JobName:
        """The newest job, one's own if there is any."""
        found = self.jobs(1, owner=owner_name()) or self.jobs(1)
        if not found:
            raise QueryError("no jobs yet: start one with `rsup launch`")
        return name_of(found[0])

    def status(self, job: JobName, stacks: bool) -> Json:
        """The job's status."""
        return self._get_of(job, "", stacks=str(stacks).lower())

    def events(self, job: JobName, after: int, limit: int) -> list[Json]:
        """Events after a number."""
        items: list[Json] = self._get_of(job, "/events", cursor=after, limit=min(limit, MAX_PAGE))["items"]
        return items

    def stacks(self, job: JobName, rank: int | None) -> Json:
        """Stacks of the newest incident that has some."""
        return self._get_of(job, "/stacks", **({} if rank is None else {"rank": rank}))

    def metrics(self, job: JobName, names: Sequence[str], kind: str, points: int) -> Json:
        """The job's curves, and the newest values."""
        path, query = self._job_place(job, "/metrics", {"kind": kind, "points": points})
        return self._ask(path, [*query.items(), *(("name", name) for name in names)])

    def answer(self, question: Question) -> Json:
        """The answer to a question about devices or nodes."""
        body = None if question.body is None else json.dumps(question.body).encode()
        return self._ask(question.path, [(name, value) for name, value in question.query if value != ""], body)

    def change(self, verb: str, job: JobName, reason: str, dry_run: bool, **more: object) -> Json:
        """Ask for a `stop`, a `checkpoint`, a `fence` of the `node` in `more`, or for `stragglers` to be `on` or not: what the
        supervisor says to it."""
        body = json.dumps({"reason": reason, "dry_run": dry_run, **more}).encode()
        return self._ask(*self._job_place(job, f"/{verb}", {}), body)

    def newest_events(self, job: JobName, count: int) -> list[Json]:
        """The last `count` events, in order."""
        items: list[Json] = self._get_of(job, "/events", last=count)["items"]
        return items

    def _get_of(self, job: JobName, rest: str, **query: object) -> Json:
        return self._ask(*self._job_place(job, rest, query))

    def _job_place(self, job: JobName, rest: str, query: dict[str, object]) -> tuple[str, dict[str, object]]:
        return f"/jobs/{quote(job.name, safe='')}{rest}", {"owner": job.owner, "cluster": job.cluster, **query}

    def _get(self, path: str, **query: object) -> Json:
        return self._ask(path, query)

    def _ask(self, path: str, query: dict[str, object] | list[tuple[str, object]], body: bytes | None = None) -> Json:
        if self._leader is not None:
            return self._leader._ask(path, query, body)
        sought = urlencode(query)
        url = f"{'http://localhost' if self._local else self._address}/api/v1{path}?{sought}"
        method = "GET" if body is None else "POST"
        headers = {"Content-Type": "application/json", **self._authorization(method, f"/api/v1{path}", sought, body or b"")}
        try:
            with self._opener.open(Request(url, data=body, headers=headers), timeout=REQUEST_TIMEOUT_S) as answer:
                content: Json = json.load(answer)
                return content
        except HTTPError as error:
            with error:
                detail, leader = _detail(error)
            if error.code == 405:  # it has no such place: what follows a job's name it takes for a part of that
                detail = f"the supervisor at {self._place} is of an older release, which cannot do that"
            if not leader or self._follow is None:
                raise (WrongQuestion if error.code == 422 else QueryError)(detail) from None
            self._leader = self._follow(leader)
            return self._leader._ask(path, query, body)
        except (URLError, HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise NoAnswer(f"no answer from the supervisor at {self._place}: {reason}") from None

    def _authorization(self, method: str, path: str, query: str, body: bytes) -> dict[str, str]:
        if self._token:
            return {"Authorization": f"Bearer {self._token}"}
        if self._local:
            return {}
        try:
            payload = munge.rest_payload(self._address, method, path, query, body)
            credential = munge.encode(payload, munge.default_socket())
        except MungeError as error:
            raise QueryError(f"{error}; set RSUP_TOKEN_FILE") from None
        return {"Authorization": f"Munge {credential}"}


class StoreSource:
    """The store of a state directory. Where there is none yet, it has no jobs. Where it cannot be read, the newest that was
    used in its place is; `note` is told."""

    def __init__(self, state: Path, note: Callable[[str], None]) -> None:
        self._state = state
        self._note = note

    def is_there(self) -> bool:
        """Whether there is a store, or one that was used in its place."""
        with self._reading() as connection:
            return connection is not None

    def jobs(self, limit: int, state: str = "", owner: str = "") -> list[Json]:
        """The newest jobs."""
        from rsup.supervisor.views import list_jobs

        with self._reading() as connection:
            return [] if connection is None else list_jobs(connection, limit=limit, state=state, owner=owner)[0]

    def newest(self) -> JobName:
        """The newest job, one's own if there is any."""
        found = self.jobs(1, owner=owner_name()) or self.jobs(1)
        if not found:
            raise QueryError(f"no jobs yet in {self._state}: start one with `rsup launch`")
        return name_of(found[0])

    def status(self, job: JobName, stacks: bool) -> Json:
        """The job's status, with the last beats that were stored."""
        from rsup.supervisor.views import job_status

        with self._filled(job) as connection:
            found = self._find(connection, job)
            return job_status(connection, found, now_us=time.time_ns() // 1000, with_stacks=stacks)

    def events(self, job: JobName, after: int, limit: int) -> list[Json]:
        """Events after a number."""
        from rsup.supervisor.story_views import list_events

        with self._filled(job) as connection:
            found = self._find(connection, job)
            return list_events(connection, found, after=after, limit=limit)[0]

    def newest_events(self, job: JobName, count: int) -> list[Json]:
        """The last `count` events, in order."""
        from rsup.supervisor.story_views import list_events

        with self._filled(job) as connection:
            return list_events(connection, self._find(connection, job), last=count)[0]

    def stacks(self, job: JobName, rank: int | None) -> Json:
        """Stacks of the newest incident that has some."""
        from rsup.supervisor.story_views import job_stacks

        with self._filled(job) as connection:
            return job_stacks(connection, self._find(connection, job), rank=rank)

    def metrics(self, job: JobName, names: Sequence[str], kind: str, points: int) -> Json:
        """The job's curves, and the newest values."""
        from rsup.supervisor.metric_views import latest_of, series_of

        with self._filled(job) as connection:
            found = self._find(connection, job)
            series = series_of(connection, found.id, names or None, kind or None, points)
            return {"series": series, "latest": latest_of(connection, found.id)}

    def answer(self, question: Question) -> Json:
        """The answer to a question about devices or nodes."""
        with self._reading() as connection:
            if connection is None:
                raise QueryError(f"{self._state} has no history yet: nothing was launched with it{self._of_slurm_jobs()}")
            return question.read(connection)

    def cases(self, job: JobName | None, limit: int, verdict: str) -> list[Json]:
        """The newest cases, of that job if given."""
        from rsup.supervisor.case_views import list_cases

        if job is not None:
            with self._filled(job) as connection:
                return list_cases(connection, job=self._find(connection, job), limit=limit, verdict=verdict)[0]
        with self._reading() as reader:
            return [] if reader is None else list_cases(reader, limit=limit, verdict=verdict)[0]

    def case(self, case_id: str) -> list[Json]:
        """Cases of that id."""
        from rsup.supervisor.case_views import AmbiguousCase, UnknownCase, find_cases

        with self._reading() as connection:
            if connection is None:
                raise QueryError(f"no case {case_id[:200]!r}: {self._state} has no jobs yet")
            try:
                return find_cases(connection, case_id)
            except (UnknownCase, AmbiguousCase) as error:
                raise QueryError(str(error)) from None

    def _of_slurm_jobs(self) -> str:
        there = (self._state / "slurm").is_dir()
        return f"; what SLURM jobs found is in {self._state}/slurm/CLUSTER-JOB, see `rsup db merge`" if there else ""

    def _find(self, connection: "Connection", job: JobName) -> "FoundJob":
        from rsup.supervisor.job_selector import find_job

        return find_job(connection, job.name, owner=job.owner, cluster=job.cluster, prefer_owner=owner_name())

    @contextlib.contextmanager
    def _filled(self, job: JobName) -> "Iterator[Connection]":
        with self._reading() as connection:
            if connection is None:
                raise QueryError(f"no job {job.name[:200]!r}: {self._state} has no jobs yet; `rsup jobs` lists them")
            yield connection

    @contextlib.contextmanager
    def _reading(self) -> "Iterator[Connection | None]":
        """A connection to the store, None where there is none yet."""
        from rsup.supervisor.database import describe, find_database

        try:
            usual = find_database(self._state)
        except PermissionError as error:
            text = f"cannot look into {self._state}: {error.strerror}; ask a supervisor, or set RSUP_STATE_DIR"
            raise QueryError(text) from None
        with contextlib.ExitStack() as stack:
            trouble: RsupError | None = None
            try:
                connection = stack.enter_context(_connected(usual))
            except RsupError as error:
                connection, trouble = None, error
            if connection is None and (fallback := next(iter(places.fallback_stores(self._state)), None)):
                self._note(f"{trouble or f'there is nothing in {describe(usual)}'}; reading {fallback} in its place")
                connection, trouble = stack.enter_context(_connected(fallback)), None
            if trouble is not None:
                raise trouble
            yield connection


@contextlib.contextmanager
def _connected(target: "Target") -> "Iterator[Connection | None]":
    """A connection to that store, None where it has no tables yet. Raise `RsupError` where it cannot be read."""
    from rsup.supervisor.database import describe, reader_engine, split_target
    from rsup.supervisor.schema import check_revision, read_revision

    place = split_target(target)
    try:
        is_missing = isinstance(place, Path) and not place.exists()
    except OSError as error:
        raise QueryError(f"the store {describe(target)} cannot be read: {error.strerror}") from None
    if is_missing:
        yield None
        return
    engine = reader_engine(target)
    try:
        with _told(target), engine.connect() as connection:
            revision = read_revision(connection)
            if revision is not None:
                check_revision(revision, describe(target))
            yield connection if revision is not None else None
    finally:
        engine.dispose()


@contextlib.contextmanager
def _told(target: "Target") -> Iterator[None]:
    """Make one line of the database's errors."""
    from sqlalchemy.exc import SQLAlchemyError

    from rsup.supervisor.database import describe

    try:
        yield
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        raise QueryError(f"the store {describe(target)} cannot be read ({cause}); run `rsup db check`") from None


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
            if urlsplit(self._url).scheme not in ("http", "https") or not urlsplit(self._url).hostname:
                raise UsageError(f"{self._url!r} is no address of a supervisor; write http://host:port")
            return self._url
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


def name_of(job: Json) -> JobName:
    """What names exactly that run of that job. A run of 1 is written too, since a newer one may come meanwhile."""
    return JobName(job["cluster"], job["owner"], f"{job['id']}.{job['run']}")


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


def _detail(error: HTTPError) -> tuple[str, str]:
    """What is wrong, and the address of the supervisor that leads, if this one stands by and says it."""
    try:
        content = json.load(error)
        return str(content["detail"]), str(content.get("leader") or "") if content.get("standby") else ""
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return f"the supervisor answered with status {error.code}", ""
