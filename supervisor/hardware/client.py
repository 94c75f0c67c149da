"""Devices and nodes from Python: the same questions and verbs as `rsup devices` and `rsup nodes`.

    from rsup.supervisor.hardware.client import Hardware
    hardware = Hardware()                        # the state directory of RSUP_STATE_DIR, or Hardware("/var/lib/rsup")
    for device in hardware.devices(state="quarantined"):
        print(device["uuid"], device["reason"])
    hardware.change("device", "GPU-3f2a", "release", "fan replaced", without_test=True)

A running supervisor is asked; where none runs, the store is read, and changed under its lease. All raises `RsupError`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rsup.supervisor import places
from rsup.supervisor.history_questions import Question
from rsup.supervisor.principals import owner_name
from rsup.supervisor.query_source import NoAnswer, QueryError
from rsup.supervisor.render import clean
from rsup.supervisor.sources import Sources

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from rsup.supervisor.hardware.verbs import VerbRequest, Verdict

MAX_PAGE = 1000
BUSY_FOR_S = 5.0
"""How long a change waits for other commands that change the store, which take a moment each."""
RETRY_EVERY_S = 0.1

Json = dict[str, Any]


class ChangeRefused(QueryError):
    """The change was not made; the text says why, and who has changed the device meanwhile."""


@dataclass(frozen=True)
class Change:
    """What is asked for. Fields as in `verbs.VerbRequest`."""

    reason: str
    dry_run: bool = False
    if_version: int | None = None
    until_us: int | None = None
    without_test: bool = False
    ticket: str = ""
    result: str = ""
    sighting: Json | None = None


class Hardware:
    """`supervisor`: its address, if not that of the state directory's; `note` is told where answers come from the store."""

    def __init__(
        self,
        state_dir: str | Path | None = None,
        supervisor: str = "",
        *,
        note: Callable[[str], None] = lambda text: None,
        device_policy: str | Path | None = None,
    ) -> None:
        self._state = places.state_dir_to_read(None if state_dir is None else str(state_dir))
        host_first = places.names_no_state_dir(None if state_dir is None else str(state_dir))
        self._sources = Sources(self._state, supervisor, note=note, host_first=host_first)
        self._policy = None if device_policy is None else str(device_policy)

    # --------------------------------------------------------------------------------------------------------- questions

    def devices(self, state: str = "", node: str = "", limit: int = 100_000) -> list[Json]:
        """Devices by UUID, with their states."""
        from functools import partial

        return self._pages("/devices", partial(_read_devices, state=state, node=node), limit, state=state, node=node)

    def nodes(self, state: str = "", limit: int = 100_000) -> list[Json]:
        """Nodes by name, with their states."""
        from functools import partial

        return self._pages("/nodes", partial(_read_nodes, state=state), limit, state=state)

    def show(self, kind: str, selector: str) -> Json:
        """One device or node: state, what led to it, who used it."""
        question = Question(f"/{kind}s/{quote(selector, safe='')}", lambda connection: _read_detail(connection, kind, selector))
        return self._sources.read(lambda source: source.answer(question))

    def evidence(self, kind: str, selector: str, limit: int = 1000) -> list[Json]:
        """What speaks for or against it, the newest first."""

        def read(connection: "Connection", after: str, size: int) -> tuple[list[Json], str | None]:
            from rsup.supervisor.hardware.standing_views import list_evidence

            return list_evidence(connection, kind, _record(connection, kind, selector)[0], cursor=after, limit=size)

        return self._pages(f"/{kind}s/{quote(selector, safe='')}/evidence", read, limit)

    def why(self, kind: str, selector: str) -> Json:
        """The same with `cases`: the rerun cases that its newest evidence names, as far as they may be read."""
        question = Question(
            f"/{kind}s/{quote(selector, safe='')}/why", lambda connection: _read_why(connection, kind, selector)
        )
        return self._sources.read(lambda source: source.answer(question))

    def _pages(
        self,
        path: str,
        read: "Callable[[Connection, str, int], tuple[list[Json], str | None]]",
        limit: int,
        **query: str,
    ) -> list[Json]:
        found: list[Json] = []
        cursor: str | None = ""
        while cursor is not None and len(found) < limit:
            after, size = cursor, min(MAX_PAGE, limit - len(found))

            def answer(connection: "Connection", after: str = after, size: int = size) -> Json:
                items, following = read(connection, after, size)
                return {"items": items, "next_cursor": following}

            question = Question(path, answer, [*query.items(), ("cursor", after), ("limit", size)])
            page = self._sources.read(lambda source, question=question: source.answer(question))  # type: ignore[misc]
            found += page["items"]
            cursor = page["next_cursor"]
        return found

    # ------------------------------------------------------------------------------------------------------------- verbs

    def change(self, kind: str, selector: str, verb: str, reason: str, **more: Any) -> Json:
        """Do `verb` (`verbs.VERBS`, and `import`): what the supervisor, or the store's own core, says to it. `more`: fields of
        `Change`. Raise `ChangeRefused` where it is not done."""
        wanted = Change(clean(reason), **more)
        question = Question(
            f"/{kind}s/{quote(selector, safe='')}/{verb}",
            lambda connection: {},
            body={name: value for name, value in asdict(wanted).items() if value is not None},
        )
        deadline_s = time.monotonic() + BUSY_FOR_S
        while True:
            try:
                return self._sources.supervisor().answer(question)
            except NoAnswer as error:
                if self._sources.is_given:
                    raise
                no_answer = str(error)
            except QueryError as error:
                raise ChangeRefused(str(error)) from None
            done = self._directly(kind, selector, verb, wanted, no_answer, is_last=time.monotonic() >= deadline_s)
            if done is not None:
                return done
            time.sleep(RETRY_EVERY_S)

    def _directly(self, kind: str, selector: str, verb: str, wanted: Change, why: str, *, is_last: bool) -> Json | None:
        """None: somebody else is at work on the store, and will soon be done."""
        from rsup.supervisor.hardware import direct, policy
        from rsup.supervisor.store import StoreHeld

        def requests(connection: "Connection") -> "list[VerbRequest]":
            return [_request(connection, kind, selector, verb, wanted)]

        rules = policy.configured(self._policy)
        try:
            (verdict,) = direct.change(self._state, rules, requests, dry_run=wanted.dry_run)
        except StoreHeld as error:
            if error.address:
                raise ChangeRefused(f"{why}, and the store cannot be changed beside it: {error}") from None
            if is_last:
                text = f"another rsup command changes the store (for {BUSY_FOR_S:g} s already): try again"
                raise ChangeRefused(text) from None
            return None
        if not verdict.done:
            raise ChangeRefused(verdict.message)
        return _told(verdict, kind, verb, wanted.dry_run)


def _told(verdict: "Verdict", kind: str, verb: str, dry_run: bool) -> Json:
    from rsup.supervisor.view_times import iso

    saved = verdict.dossier.saved
    standing = {"state": saved.state, "version": saved.version, "reason": saved.reason, "since": iso(saved.since_us)}
    return {
        "kind": kind,
        "name": saved.subject,
        "verb": verb,
        "dry_run": dry_run,
        "message": verdict.message,
        "standing": standing,
    }


def _record(connection: "Connection", kind: str, selector: str) -> tuple[str, str, str]:
    """Name of the record, serial and node."""
    from rsup.supervisor.device_selector import find_device, find_node
    from rsup.supervisor.hardware.hardware_rows import node_of
    from rsup.supervisor.hardware.standing_views import record_of

    if kind == "node":
        return find_node(connection, selector), "", selector
    found = find_device(connection, selector)
    return record_of(connection, "device", found.uuid, found.serial), found.serial, node_of(connection, found.uuid)


def _request(connection: "Connection", kind: str, selector: str, verb: str, wanted: Change) -> "VerbRequest":
    from rsup.supervisor.evidence import Evidence
    from rsup.supervisor.hardware.verbs import VerbRequest

    name, serial, node = _record(connection, kind, selector)
    who, told = owner_name(), wanted.sighting
    evidence = None
    if told is not None:
        values: Json = {"count": 1, "text": "", **told, "is_total": True, "serial": serial, "node": node, "principal": who}
        values["episode"] = told.get("episode") or f"import:{told['at_us'] // 86_400_000_000}"
        evidence = Evidence(kind=kind, subject=name, **values)
    return VerbRequest(
        kind=kind,
        subject=name,
        verb="sighted" if verb == "import" else verb,
        principal=who,
        is_operator=True,
        reason=wanted.reason,
        if_version=wanted.if_version,
        until_us=wanted.until_us,
        without_test=wanted.without_test,
        ticket=clean(wanted.ticket),
        result=wanted.result,
        evidence=evidence,
        dry_run=wanted.dry_run,
        serial=serial,
        node=node,
    )


def _read_devices(connection: "Connection", after: str, size: int, state: str, node: str) -> tuple[list[Json], str | None]:
    from rsup.supervisor.hardware_views import list_devices

    return list_devices(connection, after=after, limit=size, state=state, node=node)


def _read_nodes(connection: "Connection", after: str, size: int, state: str) -> tuple[list[Json], str | None]:
    from rsup.supervisor.hardware_views import list_nodes

    return list_nodes(connection, after=after, limit=size, state=state)


def _read_why(connection: "Connection", kind: str, selector: str) -> Json:
    from rsup.supervisor.hardware.why_view import why

    return why(connection, kind, selector)


def _read_detail(connection: "Connection", kind: str, selector: str) -> Json:
    from rsup.supervisor.device_selector import find_device
    from rsup.supervisor.hardware_views import device_detail
    from rsup.supervisor.node_story import node_story

    if kind == "node":
        return node_story(connection, selector)
    return device_detail(connection, find_device(connection, selector).uuid)
