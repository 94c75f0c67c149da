"""Answers of a running supervisor, over REST: its beats are live.

Who asks: on the supervisor's host the kernel says so, over its UNIX socket; elsewhere the token of `RSUP_TOKEN_FILE` or of the
state directory does, else a MUNGE credential. A token file that was named explicitly counts on the UNIX socket, too.
"""

import json
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import ProxyHandler, Request, build_opener

from rsup.supervisor import munge
from rsup.supervisor.history_questions import Question
from rsup.supervisor.job_name import JobName
from rsup.supervisor.munge import MungeError
from rsup.supervisor.principals import owner_name
from rsup.supervisor.query_source import Json, NoAnswer, QueryError, WrongQuestion, name_of
from rsup.supervisor.unix_http import UnixHTTPHandler

REQUEST_TIMEOUT_S = 15.0
MAX_PAGE = 1000


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


def _detail(error: HTTPError) -> tuple[str, str]:
    """What is wrong, and the address of the supervisor that leads, if this one stands by and says it."""
    try:
        content = json.load(error)
        return str(content["detail"]), str(content.get("leader") or "") if content.get("standby") else ""
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return f"the supervisor answered with status {error.code}", ""
