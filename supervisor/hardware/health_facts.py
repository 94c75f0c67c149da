"""What the driver says of a node's devices (`wire.HealthSeen`), as evidence about them. Pure; `job_machine.FACTS` names it."""

from rsup.supervisor.actions import FoundEvidence
from rsup.supervisor.case_evidence import episode_of
from rsup.supervisor.evidence import Evidence
from rsup.supervisor.turn import Turn
from rsup.supervisor.wire import HealthReading, HealthSeen

TOTALS = ("ecc", "remap", "link")
"""Sources whose `count` is a total since the boot or of the device's life; a total that has not grown is nothing new."""
CONDITIONS = (("remap", "pending"), ("remap", "failed"))
"""Of these what holds or does not: told again where it still holds."""
MAX_READINGS = 256


def health_seen(turn: Turn, agent_id: str, fact: HealthSeen) -> None:
    """Evidence about the devices of this agent; what it says of others is kept, and refused."""
    agent = turn.state.agents[agent_id]
    boot = fact.boot_id or agent.info.boot_id
    for reading in fact.readings[:MAX_READINGS]:
        turn.act(FoundEvidence(_evidence(turn, agent_id, reading, fact.at_us, boot)))
    told = ", ".join(f"{r.device}: {r.source} {r.code}" for r in fact.readings[:8])
    more = f" and {len(fact.readings) - 8} more" if len(fact.readings) > 8 else ""
    node = agent.info.node
    turn.log("HealthSeen", f"the driver on {node} says of {told}{more}", "warning", at_us=fact.at_us, node=node)


def _evidence(turn: Turn, agent_id: str, reading: HealthReading, at_us: int, boot: str) -> Evidence:
    state, agent = turn.state, turn.state.agents[agent_id]
    rank = next((rank for rank, device in agent.devices_used.items() if device == reading.device), None)
    times = f" ({reading.count} times)" if reading.count > 1 else ""
    text = f"{reading.source} {reading.code}{times} on {agent.info.node} during job {state.key}"
    by_job = reading.source in ("xid", "test")
    return Evidence(
        kind="device",
        subject=reading.device,
        source=reading.source,
        code=reading.code,
        episode=f"boot:{boot} {episode_of(state.key)}" if by_job else f"boot:{boot}",
        at_us=at_us,
        text=f"{text}\n{reading.detail}" if reading.detail else text,
        count=reading.count,
        is_total=reading.source in TOTALS and (reading.source, reading.code) not in CONDITIONS,
        node=agent.info.node,
        job=state.key,
        attempt=state.attempt,
        rank=rank,
        iteration=state.attempt_iteration,
        is_held=reading.device in agent.devices,
    )
