"""One supervisor process: what it owns, in which order it starts, what it does each turn, and how it ends."""

import contextlib
import gc
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rsup.supervisor import daemon_files, local_sockets, node_tokens, places, principals, wire
from rsup.supervisor.agent_admission import Admission
from rsup.supervisor.config import Settings
from rsup.supervisor.heartbeat_board import process_start_ticks
from rsup.supervisor.identities import Identities
from rsup.supervisor.peer_identity import Peers, check_operators
from rsup.supervisor.rpc_server import RpcServer
from rsup.supervisor.wire import Hello, RsupError, UsageError

if TYPE_CHECKING:
    from rsup.supervisor.daemon_turns import Turns
    from rsup.supervisor.store_opening import OpenedStore

LOCK_WITHIN_S = 2.0
REFUSE_FOR_S = 5.0
FOUND_WITHIN_S = 2.0
GARBAGE_AFTER = (50_000, 20, 20)
"""A batch of messages lives until its commit. With Python's threshold of 700 objects each batch was taken for objects that
stay, and with thousands of agents half of the loop's time went into looking through all of them again and again."""

_log = logging.getLogger(__name__)


class AlreadyRuns(RsupError):
    """A supervisor of this state directory runs on this host already."""


class Daemon:
    """Runs in the main thread; `run` may be called once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._state = settings.state_path
        self._instance = os.urandom(8).hex()
        self._told_to_stop = False
        self._server: RpcServer | None = None
        self._stood_by_for: set[str] = set()
        """Why it stood by since it last led: a database that can only be read is tried each few seconds."""

    def run(self) -> int:
        """Until told to stop, or idle for long enough; the exit code."""
        os.umask(0o077)
        with contextlib.suppress(FileNotFoundError):
            places.make_state_dir(self._state)
        own_dir = places.supervisor_runtime_dir(self._state)
        if daemon_files.lock_alone(own_dir / "lock", within_s=LOCK_WITHIN_S) is None:
            return self._not_the_first()
        self._start_logging(own_dir)
        self._settle_place()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop_on_signal)
        for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGPWR):
            signal.signal(number, signal.SIG_IGN)  # the last four: for the ranks, where SLURM signals every process of a step
        daemon_files.allow_many_connections()
        self._server = server = RpcServer(self._link_key(), self._admission(), admits_others=not self._settings.embedded)
        try:
            rpc = self._bind(server)
            return self._serve(server, rpc)
        finally:
            server.close()

    # ------------------------------------------------------------------------------------------------------- starting

    def _not_the_first(self) -> int:
        if self._settings.embedded:
            return 0
        found = places.read_supervisor_file(self._state)
        who = f" with pid {found.pid}" if found else ""
        raise AlreadyRuns(f"a supervisor{who} serves {self._state} already; stop it or choose another --state-dir")

    def _settle_place(self) -> None:
        """Leave a note in the state directory where its store is, if elsewhere: commands are often told the directory only.
        Raise `UsageError` where a note says that the store here is an abandoned one."""
        from rsup.supervisor.database import describe, note_elsewhere, noted_elsewhere, split_target

        if self._settings.embedded:
            return
        url, usual = self._settings.database_url, self._state / "rsup.db"
        if not url and (elsewhere := noted_elsewhere(self._state)):
            raise UsageError(
                f"the store of {self._state} is at {describe(elsewhere)}: start this supervisor with that database_url too, "
                f"copy it back (`rsup db copy`), or remove {self._state / 'database-url'} to go on with what is here"
            )
        place = split_target(url or usual)
        where = "" if place == usual else str(place) if isinstance(place, Path) else url
        try:
            note_elsewhere(self._state, where)
        except OSError as error:
            _log.warning("cannot note in %s where its store is: %s", self._state, error.strerror)

    def _start_logging(self, own_dir: Path) -> None:
        if self._settings.embedded:
            daemon_files.log_to([self._state, own_dir], debug=self._settings.debug)
        else:
            daemon_files.log_with(logging.StreamHandler(), debug=self._settings.debug)

    def _link_key(self) -> places.LinkKey | None:
        """The key of TCP; a new one where other hosts are to come that can read it in the state directory."""
        if not self._settings.key_file and not os.environ.get("RSUP_KEY_FILE") and self._serves_other_hosts():
            try:
                daemon_files.make_key(self._state)
            except places.PlaceError as error:
                if not self._settings.embedded:
                    raise
                _log.warning("%s", error)
        secret = places.find_secret(self._state, self._settings.key_file or None)
        if secret is None:
            return None
        key = places.link_key(secret)
        if not self._settings.embedded:
            daemon_files.write_public_key(self._state, key)
        return key

    def _admission(self) -> Admission:
        """Who may speak for which agents. An embedded supervisor's users have no tokens: it serves one."""
        settings = self._settings
        tokens: principals.Tokens = principals.TokenBook(())
        if not settings.embedded:
            for note in check_operators(settings.operators):
                _log.warning(note)
            principals.make_token(self._state)
            node_tokens.make_secret(self._state)
            tokens = principals.WatchedTokens(self._state)
        peers = Peers(not settings.embedded, settings.operators)
        return Admission(Identities(tokens, peers, settings.munge_socket), shared=not settings.embedded)

    def _serves_other_hosts(self) -> bool:
        if not self._settings.embedded:
            return bool(self._settings.rpc_listen) or any(address.startswith("tcp:") for address in self._settings.rpc)
        from rsup.supervisor.state_disk import is_network_file_system

        return is_network_file_system(self._state)

    def _bind(self, server: RpcServer) -> str:
        """Bind what the settings name; return the address for agents of this host."""
        bound = [server.bind(address) for address in local_sockets.rpc_addresses(self._settings)]
        for address in bound:
            local_sockets.open_to_everybody(self._settings, address)
        for endpoint in self._settings.rpc_listen:
            server.listen(endpoint, "--rpc-listen")
        if self._settings.embedded and self._serves_other_hosts():
            try:
                server.bind("tcp://*:0")
            except RsupError as error:
                _log.warning("other hosts cannot use this supervisor: %s", error)
        return bound[0]

    def _serve(self, server: RpcServer, rpc: str) -> int:
        """Lead until there is nothing left to do. On PostgreSQL: stand by while another leads, also after having led."""
        from rsup.supervisor.store import StoreDamaged, StoreError, StoreHeld, StoreTooNew, StoreTooOld

        has_stood_by = False
        while True:
            try:
                opened, turns = self._start_turns(server, rpc)
            except (StoreDamaged, StoreTooNew, StoreTooOld):
                raise
            except StoreError as error:
                held = isinstance(error, StoreHeld)
                if not self._can_stand_by or not (held or has_stood_by):
                    if not held:
                        raise
                    return self._leave_it_to(error, server)
                has_stood_by = True
                if not self._stand_by(server, error):
                    daemon_files.tell_systemd("STOPPING=1")
                    return 0
                continue
            if not self._lead(server, rpc, opened, turns):
                return 0
            has_stood_by, self._stood_by_for = True, set()

    def _lead(self, server: RpcServer, rpc: str, opened: "OpenedStore", turns: "Turns") -> bool:
        """Decide for the jobs of this store; True where another has taken it over and this one can stand by."""
        lost = False
        gc.freeze()  # modules, settings, the store's states: what is there now is no garbage
        gc.set_threshold(*GARBAGE_AFTER)
        try:
            self._announce(turns, opened, rpc)
            while not self._told_to_stop and not turns.is_over():
                turns.one()
            lost = turns.lost is not None and self._can_stand_by and not self._told_to_stop
            why = "told to" if self._told_to_stop else "another has the store" if turns.lost is not None else "no job is left"
            _log.info("%s", "another supervisor leads: this one will stand by" if lost else f"ending: {why}")
            return lost
        finally:
            if not lost:
                daemon_files.tell_systemd("STOPPING=1")
            self._withdraw()
            turns.close()
            if not lost:
                server.close()
            opened.store.close()

    @property
    def _can_stand_by(self) -> bool:
        return (
            not self._settings.embedded and "://" in self._settings.database_url and "sqlite" not in self._settings.database_url
        )

    def _stand_by(self, server: RpcServer, why: RsupError) -> bool:
        """Until the lease is free (True) or this process is told to stop (False)."""
        from rsup.supervisor.standby import Standby

        standby = Standby(self._settings, self._settings.database_url, server, self._secrets())
        said = str(why) in self._stood_by_for
        self._stood_by_for.add(str(why))
        return standby.wait(lambda: self._told_to_stop, why, said=said)

    def _secrets(self) -> dict[str, str]:
        from rsup.supervisor.standby import secrets_of

        key = self._link_key()
        return secrets_of(self._settings, key.server_public if key else b"")

    def _start_turns(self, server: RpcServer, rpc: str) -> "tuple[OpenedStore, Turns]":
        """The store and the loop on it; for an embedded supervisor on another store where the usual one cannot be used."""
        from rsup.supervisor import store_opening
        from rsup.supervisor.daemon_turns import Turns
        from rsup.supervisor.lease import LeaseHolder
        from rsup.supervisor.store import StoreError, StoreHeld

        holder = LeaseHolder.this_process(self._instance, self._public_rpc(rpc), "")
        target = self._settings.database_url or self._state / "rsup.db"
        try:
            opened = store_opening.open_usual(target, holder, embedded=self._settings.embedded)
            try:
                return opened, Turns(self._settings, server, opened, self._instance)
            except BaseException:
                opened.store.close()
                raise
        except StoreHeld:
            raise
        except (StoreError, UsageError) as error:
            if not self._settings.embedded:
                raise
            _log.error("%s", error)
            opened = store_opening.open_fallback(self._state, holder, str(error))
            _log.warning("going on with %s", opened.place)
            return opened, Turns(self._settings, server, opened, self._instance)

    def _public_rpc(self, rpc: str) -> str:
        """The address that other hosts use, where there is one, else `rpc`."""
        assert self._server is not None
        tcp = self._server.tcp_address()
        if not tcp:
            return rpc
        host, port = places.split_endpoint(tcp.removeprefix("tcp://"))
        return places.tcp_address(places.this_host() if host in ("0.0.0.0", "::", "*") else host, port)

    def _leave_it_to(self, held: RsupError, server: RpcServer) -> int:
        """Another process holds the store. Agents find it by `supervisor.json`, which it may be about to write; if it does
        not, agents are told, but for those whose ranks run: they ask again later."""
        if not self._settings.embedded:
            raise held
        started_s = now_s = time.monotonic()
        while now_s - started_s < REFUSE_FOR_S and not self._told_to_stop:
            if self._holder_can_be_found():
                return 0
            if now_s - started_s >= FOUND_WITHIN_S:
                for received in server.receive(0.1):
                    if isinstance(received.message, Hello) and not received.message.attempt:
                        server.refuse(received.agent_id, 1, str(held))
            else:
                time.sleep(0.05)
            now_s = time.monotonic()
        _log.error("%s", held)
        return held.exit_code

    def _holder_can_be_found(self) -> bool:
        found = places.read_supervisor_file(self._state)
        if found is None:
            return False
        if found.host != places.this_host():
            return bool(found.rpc_tcp)
        return process_start_ticks(found.pid) == found.start_ticks

    # ------------------------------------------------------------------------------------------------ telling and ending

    def _announce(self, turns: "Turns", opened: "OpenedStore", rpc: str) -> None:
        """Say where we are; whatever of that fails costs no job anything."""
        assert self._server is not None
        tcp = self._public_rpc(rpc)
        rest = turns.rest.address if turns.rest else ""
        file = places.SupervisorFile(
            pid=os.getpid(),
            start_ticks=process_start_ticks(os.getpid()),
            host=places.this_host(),
            boot_id=places.boot_id(),
            instance=self._instance,
            rpc=rpc,
            rest=rest,
            embedded=self._settings.embedded,
            rpc_tcp=tcp if tcp.startswith("tcp:") else "",
        )
        try:
            principals.make_token(self._state)
            file.write(self._state)
        except places.PlaceError as error:
            _log.warning("%s", error)
        except OSError as error:
            _log.warning("cannot write %s: %s", self._state / "supervisor.json", error.strerror)
        try:
            opened.announce(tcp, turns.rest.public_address if turns.rest else "")
        except (RsupError, OSError) as error:
            _log.warning("cannot tell in the lease where this supervisor answers: %s", error)
        if self._can_stand_by:
            opened.tell_secrets(self._secrets())
        others = f", agents of other hosts at {tcp}" if tcp != rpc else ""
        _log.info("rsup %s serves agents at %s, REST at %s, store %s%s", wire.RELEASE, rpc, rest or "-", opened.text, others)
        daemon_files.tell_systemd("READY=1")

    def _withdraw(self) -> None:
        found = places.read_supervisor_file(self._state)
        if found is not None and found.instance == self._instance:
            with contextlib.suppress(OSError):
                (self._state / "supervisor.json").unlink()

    def _stop_on_signal(self, number: int, frame: object) -> None:
        del number, frame
        self._told_to_stop = True
        if self._server is not None:
            self._server.wake()
