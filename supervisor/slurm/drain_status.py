"""What people and Prometheus see of drains: proposals, the guard, and the difference to what SLURM shows. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rsup.supervisor.hardware.hostlist import expand, fold
from rsup.supervisor.metrics import Metric
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_plan import Plan
from rsup.supervisor.slurm.drain_terms import Step, View
from rsup.supervisor.slurm.gate_watch import GateWatch, gate_metrics
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.snapshot import Snapshot, told_refused
from rsup.supervisor.slurm.step_taker import Failing
from rsup.supervisor.view_times import iso
from rsup.supervisor.wire import now_us

Json = dict[str, Any]


@dataclass
class Counters:
    """Since the start of this supervisor."""

    notes: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    """Of gates, as nodes report them, by kind of event."""
    events: Counter[str] = field(default_factory=Counter)
    """Of node reports, by kind; new ones only."""
    rounds: int = 0
    failed: int = 0
    """Steps that SLURM did not do."""
    fetched_us: dict[str, int] = field(default_factory=dict)
    """When each node last asked for the snapshot."""
    watch: GateWatch = field(default_factory=lambda: GateWatch(now_us()))
    """What is known of each node's gate."""

    gate_s: float = 0.0
    """That gates took before jobs began, in all; `num_timed` of them."""
    num_timed: int = 0
    longest_gate_s: float = 0.0

    def time_gates(self, seconds: Sequence[float]) -> None:
        """Some more."""
        self.gate_s += sum(seconds)
        self.num_timed += len(seconds)
        self.longest_gate_s = max(self.longest_gate_s, *seconds, 0.0)

    def count(self, note: DrainNoted) -> None:
        """One more."""
        self.notes[note.what] += 1


def status_of(
    mode: str,
    cluster: str,
    view: View,
    plan: Plan,
    logs: Mapping[str, NodeLog],
    snapshot: Snapshot | None,
    trouble: str,
    num_rounds: int,
    failing: Iterable[Failing] = (),
    no_snapshot: str = "",
    *,
    is_expected: bool = True,
) -> Json:
    """Everything in one screen. `failing`: steps that SLURM does not do; `no_snapshot`: why gates get none; `is_expected`:
    somebody wants SLURM to answer."""
    admission = plan.admission
    nodes = view.nodes or {}
    drained = {name: seen for name, seen in nodes.items() if seen.is_drained}
    ours = {n: seen for n, seen in drained.items() if seen.is_ours and not (n in logs and logs[n].taken_over)}
    theirs = {name: seen for name, seen in drained.items() if name not in ours}
    return {
        "mode": mode,
        "cluster": cluster,
        "rounds": num_rounds,
        "scheduler": {
            "answers": view.nodes is not None and not view.is_stale,
            "is_expected": is_expected,
            "trouble": trouble,
            "num_nodes": len(nodes),
            "running": fold(name for name, seen in sorted(nodes.items()) if seen.is_in_service),
            "unknown_words": sorted({word for seen in nodes.values() for word in seen.unknown}),
        },
        "guard": {
            "open": admission.is_open,
            "num_refused": admission.num_refused,
            "num_eligible": admission.num_eligible,
            "limit": admission.limit,
            "in_last_hour": admission.in_last_hour,
            "out_of_service": sorted(admission.away),
            "held": [{"node": name, "why": why} for name, why in sorted(admission.held.items())],
        },
        "failing": [
            {"step": one.kind, "node": one.node, "error": one.error, "since": iso(one.since_us)}
            for one in sorted(failing, key=lambda one: (one.error, one.kind, one.node))
        ],
        "proposals": [_step(step) for step in plan.proposals],
        "refused": _refused(plan, logs, snapshot),
        "drained": {
            "ours": [{"node": name, "reason": seen.reason} for name, seen in sorted(ours.items())],
            "others": [{"node": n, "reason": seen.reason, "by": seen.reason_by} for n, seen in sorted(theirs.items())],
        },
        "reserved": sorted(name for name, log in logs.items() if log.reserved),
        "differences": {
            "left_alone": [{"node": name, "by": by} for name, by in sorted(plan.left_alone.items())],
            "waiting": [{"node": name, "for": what} for name, what in sorted(plan.waiting.items())],
            "for_gates": [{"node": name, "until": iso(until_us)} for name, until_us in sorted(plan.for_gates.items())],
            "unknown_to_slurm": plan.unknown,
            "drained_without_ground": sorted(n for n in ours if n not in plan.refused and not _is_ours(logs, n)),
        },
        "no_snapshot": no_snapshot,
        "snapshot": None if snapshot is None else {"serial": snapshot.serial, "made": iso(snapshot.made_us)},
    }


def _refused(plan: Plan, logs: Mapping[str, NodeLog], snapshot: Snapshot | None) -> list[Json]:
    told = () if snapshot is None else told_refused(snapshot.content)
    return [
        {
            "node": name,
            "id": f"Q-{number}",
            "since": iso(logs[name].admitted_us),
            "drained": bool(logs[name].drained),
            "reserved": logs[name].reserved,
            "gates_refuse": name in told,
        }
        for name, number in sorted(plan.refused.items())
        if name in logs
    ]


def _is_ours(logs: Mapping[str, NodeLog], name: str) -> bool:
    return name in logs and bool(logs[name].drained)


def _step(step: Step) -> Json:
    return {"step": step.kind, "nodes": list(step.nodes), "reason": step.reason, "why": step.why}


def running_nodes(status: Mapping[str, Any]) -> list[str]:
    """The nodes whose gates ought to ask, as SLURM shows them; none where it was not asked."""
    text: str = status.get("scheduler", {}).get("running", "")
    return expand(text) if text else []


def metrics_of(status: Mapping[str, Any], counters: Counters, now_us: int) -> list[Metric]:
    """Families of `/metrics`; few where no round was made yet."""
    found = [
        Metric("rsup_drain_actions_total", "counter", "Done, or seen, about nodes in SLURM.", _by("what", counters.notes)),
        Metric("rsup_drain_failures_total", "counter", "Steps that SLURM did not do.", [({}, counters.failed)]),
        Metric("rsup_gate_decisions_total", "counter", "Decisions that gates report, but for plain accepts.", [
            ({"verdict": _VERDICTS.get(kind, "accept"), "why": kind}, num) for kind, num in sorted(counters.decisions.items())
        ]),
        Metric("rsup_node_events_total", "counter", "Events that nodes have reported, by kind.", _by("kind", counters.events)),
    ]  # fmt: skip
    if counters.num_timed:
        found += [
            Metric("rsup_gate_seconds_total", "counter", "What gates took, interpreter included, before jobs that ran.", [
                ({}, counters.gate_s)
            ]),
            Metric("rsup_gates_timed_total", "counter", "Gates that this counts.", [({}, counters.num_timed)]),
            Metric("rsup_gate_seconds_max", "gauge", "The longest of them.", [({}, counters.longest_gate_s)]),
        ]  # fmt: skip
    found.append(gate_metrics(counters.watch, running_nodes(status), now_us))
    oldest_us = min(list(counters.fetched_us.values()), default=None)
    if oldest_us is not None:
        age_s = max(0, now_us - oldest_us) / 1e6
        text = "How long ago the node that has waited longest asked for the snapshot."
        found.append(Metric("rsup_gate_cache_age_seconds", "gauge", text, [({}, age_s)]))
    found.append(
        Metric("rsup_drain_rounds_total", "counter", "Rounds in which nodes were decided on.", [({}, counters.rounds)])
    )
    if status:
        guard, drained = status["guard"], status["drained"]
        owners = [({"owner": "rsup"}, len(drained["ours"])), ({"owner": "other"}, len(drained["others"]))]
        found += [
            Metric("rsup_guard_open", "gauge", "1 while the blast guard holds nodes back.", [({}, int(guard["open"]))]),
            Metric("rsup_guard_held_nodes", "gauge", "Nodes that the guard holds back.", [({}, len(guard["held"]))]),
            Metric("rsup_refused_nodes", "gauge", "Nodes that gates refuse.", [({}, guard["num_refused"])]),
            Metric("rsup_refused_nodes_limit", "gauge", "The guard's limit to that.", [({}, guard["limit"])]),
            Metric("rsup_drain_proposals", "gauge", "Steps that mode propose has not taken.", [({}, len(status["proposals"]))]),
            Metric("rsup_drained_nodes", "gauge", "Nodes that SLURM shows drained, by whose reason.", owners),
            Metric("rsup_reserved_nodes", "gauge", "Nodes in reservations of ours.", [({}, len(status["reserved"]))]),
            Metric("rsup_left_alone_nodes", "gauge", "Nodes that somebody let run though they were to be refused.", [
                ({}, len(status["differences"]["left_alone"]))
            ]),
            Metric("rsup_drain_failing_nodes", "gauge", "Nodes for which SLURM does not do what is due.", [
                ({}, len({one["node"] for one in status["failing"]}))
            ]),
            Metric("rsup_scheduler_up", "gauge", "1 while SLURM answers.", [({}, int(status["scheduler"]["answers"]))]),
            Metric("rsup_scheduler_expected", "gauge", "1 where somebody wants SLURM to answer.", [
                ({}, int(status["scheduler"]["is_expected"]))
            ]),
            Metric("rsup_gate_snapshot_up", "gauge", "1 while there is a signed snapshot for gates.", [
                ({}, int(not status["no_snapshot"]))
            ]),
        ]  # fmt: skip
    return found


_VERDICTS = {"prolog-refused": "refuse", "gate-unknown": "unknown", "gate-cap": "accept", "observed": "accept"}


def _by(label: str, counts: Mapping[str, int]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, num) for name, num in sorted(counts.items())]
