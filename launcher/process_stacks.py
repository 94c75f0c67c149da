"""The part of the process machine about stacks: when the decider asks for them, and before evidence is destroyed.

* A rank failed for having waited in vain, so the culprit is among those that live: the decider's stop says that stacks come
  first. The timeout was long, so that a second or two more do not count.
* A rank that another one's failure ends does not die of SIGTERM within a second: it is stuck in something, and SIGKILL will not
  tell in what. Stacks are taken beside the grace; nothing waits for them.

Otherwise no restart waits for the stacks of healthy ranks.
"""

from rsup.launcher.process_ending import HAS_PROCESSES, stop_ranks
from rsup.launcher.process_events import CollectStacks, StacksReady
from rsup.launcher.process_state import HeldStop, Phase
from rsup.launcher.process_turn import Turn
from rsup.launcher.stacks import innermost_frame
from rsup.supervisor import wire

SLOW_S = 1.0
"""A rank that lives so long after SIGTERM."""
WITHIN_S = 5.0
HOLD_MARGIN_S = 0.5
"""A stop is held this long beyond the time for stacks, in case their answer does not come."""


def take_stacks(turn: Turn, command: wire.TakeStacks) -> None:
    """The decider wants stacks; nothing is ended."""
    if turn.state.phase in HAS_PROCESSES and command.attempt == turn.state.attempt and turn.state.alive:
        turn.set(stacks_asked=True)
        turn.do(CollectStacks(command.attempt, command.within_s, command.reason))
    else:
        turn.fact(wire.StacksTaken(turn.now.wall_us, command.attempt, []))


def stop_after_stacks(turn: Turn, command: wire.StopAttempt) -> bool:
    """Hold the stop until stacks are there, if it asks for some and there are ranks to look at; else False."""
    state, within_s = turn.state, command.stacks_within_s
    if within_s <= 0 or state.phase is not Phase.RUNNING or not state.alive or state.stacks_asked or command.grace_s <= 0:
        return False
    until = turn.now.mono_s + within_s + HOLD_MARGIN_S
    turn.set(held_stop=HeldStop(command.reason, command.grace_s, until), stacks_asked=True)
    turn.do(CollectStacks(state.attempt, within_s, f"{command.reason}: stacks first"))
    return True


def stacks_ready(turn: Turn, event: StacksReady) -> None:
    """Tell them; what waited for them goes on."""
    turn.fact(wire.StacksTaken(turn.now.wall_us, event.attempt, list(event.stacks)))
    if event.attempt == turn.state.attempt:
        turn.set(
            stood_in=tuple((stack.rank, frame) for stack in event.stacks if (frame := innermost_frame(stack.text, stack.pid)))
        )
        _release(turn)


def look_at_stacks(turn: Turn) -> None:
    """At each tick: the time of a held stop is up, or a rank does not die of SIGTERM."""
    state, now_s = turn.state, turn.now.mono_s
    if state.held_stop is not None and now_s >= state.held_stop.until:
        _release(turn)
    stop = turn.state.stop
    if state.phase is not Phase.STOPPING or stop is None or stop.kill_at is None or state.told_to_leave or state.ending:
        return
    left_s = stop.kill_at - now_s
    if state.alive and not state.stacks_asked and now_s >= stop.since + SLOW_S and left_s > 0:
        turn.set(stacks_asked=True)
        turn.do(CollectStacks(state.attempt, min(WITHIN_S, left_s), f"alive {SLOW_S:g} s after SIGTERM"))


def _release(turn: Turn) -> None:
    held = turn.state.held_stop
    turn.set(held_stop=None)
    if held is not None and turn.state.phase in HAS_PROCESSES:
        stop_ranks(turn, held.why, held.grace_s)
