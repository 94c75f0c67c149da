"""The agent's hold on its keeper: starts it, starts another when it dies, and lets it go in one of two ways.

Who has performed the job's end, and has nothing left to tell, dismisses it. Everybody else leaves on his own word (a silent
supervisor, a signal, a fault) and hands over: the keeper delivers what is left, and that this agent is gone.
"""

import os
import selectors
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from rsup.launcher.agent_places import AgentPlaces
from rsup.launcher.keeper import Keeper
from rsup.launcher.supervisor_client import SupervisorClient
from rsup.supervisor.places import LinkKey


class AgentKeeper:
    """Use from the agent's loop only. `remove`: what a keeper deletes if the agent is killed. `note` is called with each line
    for the job's story; the registered callbacks of `selector` take no arguments."""

    def __init__(
        self,
        agent_id: str,
        places: AgentPlaces,
        remove: Sequence[Path],
        selector: selectors.BaseSelector,
        note: Callable[[str], None],
    ) -> None:
        self._agent_id = agent_id
        self._places = places
        self._remove = remove
        self._selector = selector
        self._note = note
        self._sessions: Collection[int] = ()
        self._supervisor: tuple[str, LinkKey | None] = ("", None)
        self._member: tuple[SupervisorClient, int] | None = None
        self._hosted = 0
        self._keeper = self._start()

    @property
    def pid(self) -> int:
        """Of the process now in office."""
        return self._keeper.pid

    @property
    def hosts_stores(self) -> bool:
        """As `Keeper.hosts_stores`."""
        return self._keeper.hosts_stores

    def use(self, client: SupervisorClient, key: LinkKey | None, epoch: int) -> None:
        """After each welcome: whom to tell the last facts, and in whose name."""
        self._supervisor = (client.all_addresses, key)
        self._member = (client, epoch)
        self._tell()

    def host_store(self, attempt: int, host: str, port: int) -> int:
        """Serve the attempt's store; those of the attempts before are over. As `Keeper.host_store`."""
        for before in range(max(1, attempt - 2), attempt):
            self._keeper.drop_store(before)
        port = self._keeper.host_store(attempt, host, port)
        self._hosted = attempt if self._keeper.hosts_stores else 0
        return port

    def set_sessions(self, sessions: Collection[int]) -> None:
        """The sessions of the ranks now running."""
        self._sessions = sessions
        self._keeper.set_sessions(sessions)

    def flush(self) -> None:
        """As `Keeper.flush`."""
        self._keeper.flush()

    def dismiss(self) -> None:
        """All it could do for us is done; waiting for its goodbye (it may be importing torch) would only cost time."""
        with suppress(ProcessLookupError):
            os.kill(self._keeper.pid, signal.SIGKILL)
        self._keeper.close()

    def hand_over(self, reason: str) -> bool:
        """It speaks for us from our end on; False if it cannot. The agent's files but its spool stay ours to remove."""
        self._keeper.set_files(())
        return self._keeper.hand_over(reason)

    def _start(self) -> Keeper:
        keeper = Keeper.start(os.getpid(), self._agent_id, self._agent_id, self._places.spool, remove=self._remove)
        self._selector.register(keeper, selectors.EVENT_READ, self._died)
        self._selector.register(keeper.notices_fileno(), selectors.EVENT_READ, self._hear)
        return keeper

    def _hear(self) -> None:
        for notice in self._keeper.read_notices():
            self._note(notice)

    def _died(self) -> None:
        self._hear()
        self._selector.unregister(self._keeper)
        self._selector.unregister(self._keeper.notices_fileno())
        self._keeper.close()
        text = "the launcher's keeper process died and was started again"
        if self._hosted:
            text += (
                f"; the TCPStore of attempt {self._hosted} is lost with it: training goes on, but ranks that still need it "
                "(a new process group) fail, and are then restarted like any failed rank"
            )
            self._hosted = 0
        self._keeper = self._start()
        self._tell()
        self._note(text)

    def _tell(self) -> None:
        self._keeper.set_sessions(self._sessions)
        self._keeper.set_supervisor(*self._supervisor)
        if self._member is not None:
            client, epoch = self._member
            self._keeper.set_member(client.agent, client.spec, epoch)
