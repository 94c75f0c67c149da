"""Where this agent's supervisor is, and the link to it: shared, behind the rendezvous endpoint, or embedded.

A shared supervisor that does not answer a new launch within `FALLBACK_AFTER_S` is replaced by an embedded one, in a line; of
several none must have;
with `--require-supervisor` the launch ends with 75. An embedded one is started again whenever it does not answer, and killed
first if it lives and is silent.
"""

import time
from dataclasses import replace

import msgspec

from rsup.launcher.launch_options import LaunchOptions, speaks_for_all
from rsup.launcher.route import Route, choose_route, why_silent
from rsup.launcher.spool import Spool
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.launcher.supervisor_process import SILENT_S, EmbeddedSupervisor, StartError
from rsup.supervisor import places, wire
from rsup.supervisor.places import LinkKey
from rsup.supervisor.wire import RsupError, UsageError

FALLBACK_AFTER_S = 10.0
SAY_SILENCE_AFTER_S = 5.0


class NoSupervisor(RsupError):
    """The supervisor that this launch requires does not answer."""

    exit_code = wire.EXIT_NO_SUPERVISOR


class Decider:
    """The link of this agent to whoever decides. Single-threaded; nothing blocks. An embedded supervisor is started at once,
    the link is made by `connect`, so that the agent can look for its devices meanwhile."""

    client: SupervisorClient

    def __init__(self, options: LaunchOptions, route: Route) -> None:
        """Raise `RsupError` if keys or directories cannot be used."""
        self.route = route
        self._options = options
        self._shared_key: LinkKey | None = None
        self._tcp_key = self._find_key()
        self._since_s = time.monotonic()
        self._note = route.note
        self._said_silence = False
        self._said_trouble = ""
        self._embedded = self._start_embedded()

    def connect(self, agent: wire.AgentInfo, spec: wire.JobSpec, spool: Spool) -> SupervisorClient:
        """Dial. Raise `UsageError` for an address that is none."""
        address = self._address()
        self.client = SupervisorClient(address, agent, spec, spool, self._key_for(address))
        self.client.speaks_for_all = speaks_for_all(self._options)
        return self.client

    @property
    def key(self) -> LinkKey | None:
        """The key of the link in use, None where it has none."""
        return self._key_for(self.client.all_addresses)

    def close(self) -> None:
        """Let another agent be the one that listens."""
        if self.route.claim:
            self.route.claim.close()

    def look_after(self) -> str:
        """Start or replace a supervisor that does not answer; call it ten times a second. Returns a line for people, or "".

        Raise `NoSupervisor` if one is required and has not answered.
        """
        if self._note:
            note, self._note = self._note, ""
            return f"rsup: {note}"
        if note := self.client.take_note():
            return f"rsup: {note}"
        if self.client.connected:
            if self._embedded:
                self._embedded.heard()
            return ""
        if self._embedded:
            return self._look_after_embedded(self._embedded)
        if not self.route.shared:
            return self._say_silence()
        if self.route.shared and self.client.supervisor is None and time.monotonic() - self._since_s >= FALLBACK_AFTER_S:
            return self._fall_back()
        return ""

    def _look_after_embedded(self, embedded: EmbeddedSupervisor) -> str:
        if pid := embedded.kill_silent():
            return f"rsup: the supervisor (pid {pid}) has said nothing for {SILENT_S:g} s: it was killed, and another goes on"
        try:
            address = embedded.ensure()
        except StartError as error:
            if self.client.supervisor is None:
                raise
            said, self._said_trouble = self._said_trouble, str(error)  # training goes on: it is tried again
            return f"rsup: {error}" if said != self._said_trouble else ""
        if address != self.client.address:
            self.client.use_address(address, self._key_for(address))
        return self._say_silence()

    def _say_silence(self) -> str:
        """One line for a person who waits, once: nothing starts before a supervisor answers."""
        waited_s = time.monotonic() - self._since_s
        if self._said_silence or self.client.supervisor is not None or waited_s < SAY_SILENCE_AFTER_S:
            return ""
        self._said_silence = True
        if self._embedded:
            return f"rsup: the supervisor of this launch does not answer yet; see {self._options.state_dir / 'supervisor.log'}"
        endpoint = self.client.address.removeprefix("tcp://")
        why = why_silent(*places.split_endpoint(endpoint), in_step=bool(self._options.meeting_ports))
        return f"rsup: no answer from {endpoint} yet: {why}" if why not in self.route.note else ""

    def _fall_back(self) -> str:
        options = self._options
        several = "," in self.route.address
        shared = f"supervisor{'s' if several else ''} at {self.route.address.replace(',', ', ')}"
        silent = f"the {shared} did not answer within {FALLBACK_AFTER_S:g} s"
        if self.client.standby_note:
            silent = f"no supervisor at {self.route.address.replace(',', ', ')} leads ({self.client.standby_note})"
        if options.require_supervisor:
            ask = "" if self.client.standby_note else f"; {'are they' if several else 'is it'} running there?"
            raise NoSupervisor(f"{silent}{ask}")
        if options.max_nodes > 1 and not options.rdzv_endpoint:
            raise NoSupervisor(f"{silent}, and without --rdzv-endpoint the job's nodes have no other place to meet")
        self.route = choose_route(replace(options, supervisor=""))
        self._note = self.route.note
        self._since_s = time.monotonic()
        self.client.spec = msgspec.structs.replace(self.client.spec, listen=self.route.listen)  # for the job's other nodes
        self._embedded = self._start_embedded()
        address = self._address()
        self.client.leave_for(address, self._key_for(address))
        return (
            f"rsup: {silent}; an embedded one takes its place and "
            f"keeps this job's records in {options.state_dir}: once the job has ended, hand them over there with "
            f"`rsup db merge {options.state_dir}` (see `rsup db merge --help`)"
        )

    def _start_embedded(self) -> EmbeddedSupervisor | None:
        if not self.route.is_embedded:
            return None
        key_file = self._options.key_file
        policy = self._options.device_policy
        arguments = ["--key-file", str(key_file.absolute())] if key_file else []
        arguments += ["--device-policy", str(policy.absolute())] if policy else []
        embedded = EmbeddedSupervisor(self._options.state_dir, arguments)
        embedded.ensure()
        return embedded

    def _address(self) -> str:
        return self._embedded.ensure() if self._embedded else self.route.address

    def _key_for(self, address: str) -> LinkKey | None:
        if "tcp:" not in address:
            return None
        return self._tcp_key or (self._public_key() if self.route.shared else None)

    def _find_key(self) -> LinkKey | None:
        secret = places.find_secret(self._options.state_dir, str(self._options.key_file) if self._options.key_file else None)
        has_public = secret is None and self.route.shared and self._public_key() is not None
        if secret is None and not has_public and self._options.require_key and self._options.max_nodes > 1:
            raise UsageError("--require-key: there is no key; name one with --key-file or RSUP_KEY_FILE on all nodes")
        return places.link_key(secret) if secret else None

    def _public_key(self) -> LinkKey | None:
        """The key of a shared supervisor that everybody may know, made once: an agent's own part of it stays the same."""
        if self._shared_key is None:
            given = str(self._options.key_file) if self._options.key_file else None
            self._shared_key = places.find_link_key(self._options.state_dir, given)
        return self._shared_key
