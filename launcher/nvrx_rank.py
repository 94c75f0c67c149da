"""What the NVRx clients of one rank say, on the slot of the board that stands for them; and what they are answered. No I/O.

Rules, as NVRx's server has them (0.4.1 to 0.7) but for its faults:

* Authkey, Init and UpdateConfig are always answered. Heartbeats and sections are answered only to a client whose `InitMsg` had
  no `iteration` (before 0.6): it waits for that; newer ones are told in their configuration that none comes.
* A section is open once in a connection; others may nest or overlap with it. Opening it twice, or closing what is not open, is
  an error for who is answered. Several connections share the slot: a section is open as long as one of them has it open.
* The out-of-section time begins with Init, with the last section's end, and with CLOSE_ALL. For clients since 0.6 it does not
  count before their first `step`, where section limits are set and none of them is `warmup`: Megatron's first iterations are
  outside `step`.
* `warmup` is the limit of `step` during the first iterations: of the iterations that the client tells, else of the steps that
  it has done.
* The end of the last connection means that the rank left: nothing of it is overdue any more. What was open stays to be seen,
  for it may have died there.
"""

from collections.abc import Callable

from rsup.launcher import nvrx_pickle as nvrx
from rsup.launcher.nvrx_limits import BAD_NAME, MAX_SECTIONS, config_for, is_name, limits_change, sections_told
from rsup.launcher.nvrx_pickle import Refused
from rsup.supervisor import heartbeat_board as board
from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import Section, Slot, monotonic_ns

STEP, WARMUP, SETUP = "step", "warmup", "setup"
OTHERS = "(others)"
"""Stands for all sections for which the board has no place."""


class Client:
    """One connection of a rank's process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.began = False
        self.is_answered = True
        self.num_warmup_iters: int | None = None
        self.stepped = False
        self.open: set[str] = set()


class LimitsInForce:
    """Of the node: what clients are told, and what they change."""

    def __init__(self) -> None:
        self.limits = wire.Limits()


class NvrxRank:
    """One local rank. `tell` hands on what the agent must hear."""

    def __init__(self, slot: Slot, in_force: LimitsInForce, tell: Callable[[wire.RankToAgent], None]) -> None:
        self._slot = slot
        self._in_force = in_force
        self._tell = tell
        self._attempt = 0
        self._clients: list[Client] = []
        self._taken_by = (0, 0)
        self._num_begun = 0
        self._first_iteration: int | None = None
        self._clear()

    def begin(self, attempt: int) -> None:
        """Another attempt: nothing of the one before is left, save connections that have yet to end."""
        self._attempt = attempt
        self._num_begun = 0
        self._clients.clear()
        self._clear()

    def hear(self, client: Client, message: object) -> bytes:
        """Take one message up; return the frame of the answer, empty if there is none. Raise `Refused` for what is none."""
        if isinstance(message, nvrx.AuthkeyMsg):
            return nvrx.ok_reply()
        if isinstance(message, nvrx.InitMsg):
            return self._init(client, message)
        if not isinstance(message, (nvrx.HeartbeatMsg, nvrx.SectionMsg, nvrx.UpdateConfigMsg)):
            raise Refused(f"{type(message).__name__} is no message to a rank monitor")
        if not client.began:
            raise Refused(f"{type(message).__name__} before InitMsg")
        if isinstance(message, nvrx.UpdateConfigMsg):
            return self._update_config(message)
        error = ""
        if client in self._clients:  # else its attempt is over
            self._slot.set(board.MAIN_NS, monotonic_ns())
            error = self._heartbeat(message) if isinstance(message, nvrx.HeartbeatMsg) else self._section(client, message)
        if not client.is_answered:
            return b""
        return nvrx.error_reply(error) if error else nvrx.ok_reply()

    def left(self, client: Client) -> None:
        """The connection has ended."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        if self._clients:
            self._close_all(client)
        else:
            self._slot.set(board.FLAGS, board.FLAG_LEFT)

    # ------------------------------------------------------------------------------------------------------- messages

    def _init(self, client: Client, message: nvrx.InitMsg) -> bytes:
        info = message.get("rank_info")
        pid = info.get("pid") if isinstance(info, nvrx.RankInfo) else None
        client.pid = pid if isinstance(pid, int) and 0 < pid < 2**31 else client.pid
        client.is_answered = "iteration" not in message.__dict__
        client.num_warmup_iters = _whole_number(message.get("num_warmup_iters"))
        self._close_all(client)
        if not self._clients:
            self._begin_anew(client.pid)
        if client not in self._clients:
            self._clients.append(client)
        client.began = True
        client.stepped = False
        self._restart_out_of_section()
        return nvrx.config_reply(config_for(self._in_force.limits, client.is_answered))

    def _begin_anew(self, pid: int) -> None:
        slot = self._slot
        if self._taken_by != (pid, self._attempt):
            self._taken_by = (pid, self._attempt)
            slot.take_over(pid, self._attempt)
            self._clear()
        self._leave_all()  # what was open when the client before left
        self._first_iteration = None
        for field in (board.FLAGS, board.PHASE, board.HEARTBEATS, board.HEARTBEAT_NS):
            slot.set(field, 0)
        slot.set(board.MAIN_NS, monotonic_ns())
        self._num_begun += 1
        slot.set(board.CALLS, self._num_begun)

    def _heartbeat(self, message: nvrx.HeartbeatMsg) -> str:
        if message.get("state"):
            return "state in a heartbeat is not supported"
        slot = self._slot
        slot.set(board.HEARTBEAT_NS, monotonic_ns())
        slot.set(board.HEARTBEATS, slot.get(board.HEARTBEATS) + 1)
        return ""

    def _section(self, client: Client, message: nvrx.SectionMsg) -> str:
        action, name = message.get("action"), message.get("section")
        if action is nvrx.SectionAction.CLOSE_ALL:
            self._close_all(client)
            self._restart_out_of_section()
            return ""
        if not is_name(name):
            return BAD_NAME
        assert isinstance(name, str)
        if action is nvrx.SectionAction.OPEN:
            return self._open(client, name, _whole_number(message.get("iteration")))
        if action is nvrx.SectionAction.CLOSE:
            return self._close(client, name)
        return "a section is to be opened or closed"

    def _update_config(self, message: nvrx.UpdateConfigMsg) -> bytes:
        change = limits_change(message)
        limits = change.apply(self._in_force.limits)
        if limits is not self._in_force.limits:
            self._tell(wire.RankSetsLimits(change))
            self._in_force.limits = limits
        return nvrx.ok_reply()

    # ------------------------------------------------------------------------------------------------------- sections

    def _open(self, client: Client, name: str, iteration: int | None) -> str:
        if name in client.open:
            return f"Section '{name}' is already open."
        if len(client.open) >= MAX_SECTIONS:
            return f"more than {MAX_SECTIONS} sections are open"
        client.open.add(name)
        if name == STEP:
            client.stepped = True
            self._begin_step(client, iteration)
        elif name == SETUP:
            self._slot.set(board.PHASE, board.PHASES.index("setup"))
        num_open = self._num_open.get(name, 0)
        self._num_open[name] = num_open + 1
        if not num_open:
            self._enter(name)
        return ""

    def _close(self, client: Client, name: str) -> str:
        if name not in client.open:
            return f"Section '{name}' is not open."
        client.open.discard(name)
        self._num_open[name] -= 1
        if not self._num_open[name]:
            del self._num_open[name]
            self._exit(name)
        if name == STEP:
            self._num_steps += 1
            self._slot.set(board.TRAIN_STEPS, self._num_steps)
        if name == SETUP or (name == STEP and self._slot.get(board.PHASE) == board.PHASES.index("warmup")):
            self._slot.set(board.PHASE, 0)
        self._hold_out_of_section()
        return ""

    def _close_all(self, client: Client) -> None:
        for name in list(client.open):
            self._close(client, name)

    def _begin_step(self, client: Client, iteration: int | None) -> None:
        limits, num_done = self._in_force.limits, self._num_steps
        if iteration is not None:
            if self._first_iteration is None:
                self._first_iteration = iteration
            num_done = iteration - self._first_iteration
            self._slot.set(board.ITERATION, iteration + 1)  # Megatron-LM counts those that are done
        num_warmup = limits.num_warmup_iters if client.num_warmup_iters is None else client.num_warmup_iters
        # the agent takes a `train` phase with few steps for warm-up, too
        settled = limits.warmup_s is None or self._num_steps >= limits.num_warmup_iters
        phase = "warmup" if limits.warmup_s is not None and num_done < num_warmup else "train" if settled else ""
        self._slot.set(board.PHASE, board.PHASES.index(phase))

    def _restart_out_of_section(self) -> None:
        self._slot.set(board.CLOSED_SINCE_NS, monotonic_ns())
        self._hold_out_of_section()

    def _hold_out_of_section(self) -> None:
        """Out-of-section time does not count yet, see above: the board says so by "never closed"."""
        sections = sections_told(self._in_force.limits)
        if not sections or WARMUP in sections:
            return
        if self._clients and all(not client.is_answered and not client.stepped for client in self._clients):
            self._slot.set(board.CLOSED_SINCE_NS, 0)

    # -------------------------------------------------------------------------------------------------------- the board

    def _clear(self) -> None:
        self._sections: dict[str, Section] = {}
        self._num_open: dict[str, int] = {}
        self._num_others = 0
        self._num_steps = 0
        self._first_iteration = None

    def _enter(self, name: str) -> None:
        section = self._section_of(name)
        if section is not None:
            section.enter()
            return
        self._num_others += 1
        if self._num_others == 1:
            self._slot.section(OTHERS).enter()

    def _exit(self, name: str) -> None:
        section = self._section_of(name)
        if section is not None:
            section.exit()
            return
        self._num_others -= 1
        if not self._num_others:
            self._slot.section(OTHERS).exit()

    def _leave_all(self) -> None:
        for name in list(self._num_open):
            self._exit(name)
        self._num_open.clear()
        for client in self._clients:
            client.open.clear()

    def _section_of(self, name: str) -> Section | None:
        section = self._sections.get(name)
        if section is None and len(self._sections) < board.NUM_SECTIONS - 1:
            section = self._sections[name] = self._slot.section(name)
            if len(self._sections) == board.NUM_SECTIONS - 1:
                self._tell(wire.RankNote("warning", f"more than {board.NUM_SECTIONS - 1} sections: further ones have no limit"))
        return section


def _whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None
