"""Drains on a real cluster: which nodes they take, whose hand they never overrule, and what survives a crash."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rsup.launcher.slurm.snapshot_file import public_key_of, read_snapshot
from rsup.supervisor import node_tokens
from rsup.supervisor.places import make_state_dir, state_dir
from tests.slurm.cluster import Cluster
from tests.slurm.drain_daemon import Daemon, gpu

Start = Callable[..., Daemon]


@pytest.fixture
def daemon(slurm: Cluster, own_directories: Path) -> Iterator[Daemon]:
    made = Daemon(own_directories, slurm.environ)
    yield made
    made.kill()


def drained(slurm: Cluster, node: str) -> str:
    """The reason of a drained node, empty for one in service."""
    state, reason = slurm.state(node)
    return reason if state.startswith("drain") else ""


def test_bad_gpus_keep_jobs_off_their_nodes_and_nobody_else_is_overruled(slurm: Cluster, daemon: Daemon) -> None:
    secret = node_tokens.make_secret(make_state_dir(state_dir()))
    daemon.restart("--drains", "act")
    for node in slurm.names:
        assert daemon.report(node)["lines"] == []
    own = {"Authorization": f"Bearer {node_tokens.node_token(secret, 'n1')}"}
    asked = {
        path: daemon.client.request(verb, f"/api/v1/{path}", headers=own, json={} if verb == "POST" else None).status_code
        for verb, path in (
            ("GET", "gate/snapshot"),
            ("POST", "nodes/n1/report"),
            ("POST", "nodes/n2/report"),
            ("POST", "nodes/n1/drain"),
            ("GET", "slurm"),
        )
    }
    assert list(asked.values()) == [200, 200, 403, 403, 403], asked
    assert daemon.metric("rsup_gate_cache_age_seconds") < 60
    daemon.quarantine("n1")
    daemon.wait(lambda: drained(slurm, "n1").startswith("rsup:Q-1 GPU-n1-0 quarantined"), "n1 to be drained")
    job = slurm.submit("srun -n3 hostname", "-N3", "--gres=gpu:4")
    assert slurm.wait_job(job) == "COMPLETED" and slurm.job(job)["NodeList"] == "n[0,2-3]"

    key = public_key_of((Path(daemon.folder) / "state" / "signing-key.pub").read_bytes())
    fetched = daemon.client.get("/api/v1/gate/snapshot")
    read = read_snapshot(fetched.content, key)
    assert read.refused_nodes == {"n1"} and read.devices[gpu("n1", 0)].id == "Q-1" and read.cluster == "rsup"
    again = daemon.client.get("/api/v1/gate/snapshot", headers={"If-None-Match": fetched.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    verdict = daemon.client.get("/api/v1/nodes/n1/verdict", params={"gpu": gpu("n1", 1)}).json()
    assert verdict["verdict"] == "accept", "the other GPU of that node is none of it"
    assert daemon.client.get("/api/v1/nodes/n1/verdict").json()["verdict"] == "refuse"

    # an admin's own drain: his reason stays, and stays his after our quarantine has ended
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=ann: broken dimm")
    daemon.quarantine("n2")
    daemon.wait(lambda: [one["node"] for one in daemon.status()["differences"]["waiting"]] == ["n2"], "n2 to be left alone")
    assert drained(slurm, "n2") == "ann: broken dimm" and not daemon.status()["guard"]["open"]
    assert daemon.snapshot()["devices"][gpu("n2", 0)]["verdict"] == "avoid", "what no guard has let pass is not refused"
    assert "n2 is drained by root: ann: broken dimm" in daemon.rsup("nodes", "drain", "n2", "--reason", "mine", code=1)
    assert "not ours to end" in daemon.rsup("nodes", "undrain", "n2", "--reason", "mine", code=1)
    daemon.release("n2")
    daemon.rounds()
    assert drained(slurm, "n2") == "ann: broken dimm"

    # an admin resumes a node that we drained: said once, counted, not fought over; not after a crash of ours either
    slurm.run("scontrol", "update", "nodename=n1", "state=resume")
    daemon.wait(lambda: daemon.metric('rsup_drain_actions_total{what="resumed"}') == 1, "the resume to be seen")
    daemon.restart()
    status = daemon.rounds()
    assert [one["node"] for one in status["differences"]["left_alone"]] == ["n1"] and not drained(slurm, "n1")
    assert daemon.snapshot()["devices"][gpu("n1", 0)]["verdict"] == "avoid", "a gate that refused would fight, too"
    assert daemon.log.count("somebody else let it run") == 1
    xid = {"key": "x1", "time_us": 1, "kind": "xid", "device": gpu("n1", 0), "code": 79, "detail": "fell off the bus"}
    assert daemon.report("n1", events=[xid])["new"] == 1
    daemon.wait(lambda: drained(slurm, "n1").startswith("rsup:Q-2 "), "new evidence to drain it again")
    assert daemon.report("n1", events=[xid]) == {"node": "n1", "new": 0, "known": 1, "lines": []}

    # our drain becomes somebody else's: then it is not ours to end
    slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=ann: I take it")
    daemon.wait(lambda: daemon.metric('rsup_drain_actions_total{what="yielded"}') == 1, "ours to be given up")
    daemon.release("n1")
    daemon.rounds()
    assert drained(slurm, "n1") == "ann: I take it"


def test_the_guard_trips_at_its_limit_and_never_holds_up_a_release(slurm: Cluster, daemon: Daemon) -> None:
    daemon.restart("--drains", "act")
    for node in slurm.names:
        daemon.report(node)
    for node in ("n0", "n1", "n2"):
        daemon.quarantine(node)
    daemon.wait(lambda: daemon.metric("rsup_guard_open") == 1, "the guard to trip")
    daemon.wait(lambda: bool(drained(slurm, "n0") and drained(slurm, "n1")), "two drains")
    status = daemon.rounds()
    assert [one["node"] for one in status["guard"]["held"]] == ["n2"] and not drained(slurm, "n2")
    assert "the guard holds back n2: 2 of at most 2 nodes are refused already" in daemon.log
    assert daemon.log.count("the guard holds back") == 1
    content = daemon.snapshot()
    refused = {one["node"] for one in content["devices"].values() if one["verdict"] == "refuse"}
    assert refused == {"n0", "n1"} and content["guard_open"] and content["max_refused"] == 2 and content["num_nodes"] == 4
    assert "TRIPPED" in daemon.rsup("slurm", "status") and "held back n2" in daemon.rsup("slurm", "status")
    assert "the guard holds back n3" in daemon.rsup("nodes", "drain", "n3", "--reason", "fan", code=1)
    assert not drained(slurm, "n3")
    daemon.rsup("nodes", "drain", "n3", "--reason", "fan", "--beyond-guard")
    assert drained(slurm, "n3") == "rsup:root: fan" and daemon.snapshot()["max_refused"] == 3
    daemon.rounds()
    seen = read_snapshot(
        daemon.client.get("/api/v1/gate/snapshot").content,
        public_key_of((daemon.folder / "state" / "signing-key.pub").read_bytes()),
    )
    assert len(seen.refused_nodes) == 2, "gates would believe nothing of one that refuses three of four"
    assert "but not by gates: they would not believe" in daemon.rsup("slurm", "status")
    daemon.rsup("nodes", "undrain", "n3", "--reason", "done")
    slurm.start_controller_anew()  # nobody has ended our drains: SLURM has lost them
    daemon.wait(lambda: bool(drained(slurm, "n0") and drained(slurm, "n1")), "both to be drained again")
    assert daemon.metric('rsup_drain_actions_total{what="resumed"}') == 0
    daemon.rounds()
    daemon.kill()
    slurm.start_controller_anew()  # and again while the supervisor is away
    daemon.restart()
    daemon.wait(lambda: bool(drained(slurm, "n0") and drained(slurm, "n1")), "both to be drained again")
    assert daemon.metric('rsup_drain_actions_total{what="resumed"}') == 0
    slurm.run("scontrol", "reboot", "ASAP", "nextstate=resume", "reason=firmware", "n1")
    daemon.wait(lambda: daemon.metric('rsup_drain_actions_total{what="rebooting"}') == 1, "the reboot to be seen")
    daemon.wait(lambda: "reboot issued" in slurm.run("scontrol", "show", "node", "n1").stdout, "SLURM to have ordered it")
    ordered_s = int(time.time())
    daemon.wait(lambda: time.time() > ordered_s + 2, "the next second: SLURM compares whole ones")
    slurm.boot_node("n1")
    daemon.wait(lambda: drained(slurm, "n1").startswith("rsup:Q-"), "its return to be nobody's word")
    assert daemon.metric('rsup_drain_actions_total{what="resumed"}') == 0
    daemon.release("n0")
    daemon.wait(lambda: not drained(slurm, "n0") and drained(slurm, "n2") != "", "a release, and the next to pass")
    assert "the guard holds nothing back any more" in daemon.log


def test_a_release_waits_for_the_gate_of_its_node(slurm: Cluster, daemon: Daemon) -> None:
    """Its prolog would refuse the first job, and SLURM drain the node for good."""
    secret = node_tokens.make_secret(make_state_dir(state_dir()))
    own = {"Authorization": f"Bearer {node_tokens.node_token(secret, 'n1')}"}
    daemon.restart("--drains", "act")
    daemon.report("n1")
    daemon.quarantine("n1")
    daemon.wait(lambda: bool(drained(slurm, "n1")), "n1 to be drained")
    assert daemon.client.get("/api/v1/gate/snapshot", headers=own).status_code == 200
    daemon.wait(lambda: daemon.metric('rsup_drain_actions_total{what="told"}') == 1, "its gate to be known to refuse it")
    daemon.release("n1")
    daemon.wait(lambda: gpu("n1", 0) not in daemon.snapshot()["devices"], "a snapshot without it")
    daemon.restart()  # it is known after a restart, too
    daemon.rounds()
    assert drained(slurm, "n1") and "kept off still n1" in daemon.rsup("slurm", "status")
    assert "once its gate knows" in daemon.rsup("nodes", "why", "n1")
    assert daemon.client.get("/api/v1/gate/snapshot", headers=own).status_code == 200
    daemon.wait(lambda: not drained(slurm, "n1"), "its release")


def test_after_installation_drains_are_proposed_and_off_says_so(slurm: Cluster, daemon: Daemon) -> None:
    key = make_state_dir(state_dir()) / "signing-key"
    key.write_text("no key")
    key.chmod(0o600)
    daemon.restart("--bad-gpu", "drain")
    status = daemon.rsup("slurm", "status")
    assert "snapshot: NONE for gates: cannot read the signing key" in status and "4 nodes" in status
    answer = daemon.client.get("/api/v1/gate/snapshot")
    assert (
        answer.status_code == 503 and "signing key" in answer.json()["detail"] and daemon.metric("rsup_gate_snapshot_up") == 0
    )
    key.unlink()
    daemon.wait(lambda: daemon.metric("rsup_gate_snapshot_up") == 1, "a key that can be used")
    assert [node["node"] for node in json.loads(daemon.rsup("nodes", "list", "--json"))] == list(slurm.names), (
        "none has reported"
    )
    daemon.rsup("nodes", "quarantine", "n3", "--reason", "on the first day")
    assert "on the first day" in daemon.rsup("nodes", "why", "n3") and "quarantine by" in daemon.rsup("nodes", "history", "n3")
    daemon.rsup("nodes", "release", "n3", "--without-test", "--reason", "it is well")
    daemon.report("n1")
    daemon.report("n9")
    daemon.quarantine("n1")
    daemon.quarantine("n9")
    daemon.wait(lambda: daemon.metric("rsup_drain_proposals") == 1, "a proposal")
    status = daemon.rounds()
    assert status["mode"] == "propose" and [one["nodes"] for one in status["proposals"]] == [["n1"]]
    assert status["differences"]["unknown_to_slurm"] == ["n9"] and not drained(slurm, "n1")
    assert daemon.log.count("would drain n1") == 1 and "SLURM knows no node n9" in daemon.log
    assert daemon.snapshot()["devices"][gpu("n1", 0)]["verdict"] == "refuse", "gates have a mode of their own"
    assert "SLURM knows no node n8" in daemon.rsup("nodes", "drain", "n[2,8]", "--reason", "x", code=1)
    assert not drained(slurm, "n2"), "all of them or none"
    daemon.rsup("nodes", "drain", "n[2-3]", "--reason", "a person asks", "--beyond-guard")
    assert drained(slurm, "n2") == drained(slurm, "n3") == "rsup:root: a person asks"
    daemon.kill()
    assert "start it, or use scontrol" in daemon.rsup("nodes", "undrain", "n2", "--reason", "x", code=1)
    daemon.restart("--drains", "off")
    assert "drains are off here" in daemon.rsup("nodes", "undrain", "n2", "--reason", "x", code=1)
    assert daemon.rounds()["scheduler"]["answers"] is False and drained(slurm, "n2")
    assert "'0' is too short; use 0.1 seconds or more" in daemon.rsup("serve", "--drain-interval", "0", code=2)
    assert "'perhaps' is not possible; use off, propose, act" in daemon.rsup("serve", "--drains", "perhaps", code=2)


SCONTROL = """#!/bin/bash
cd {folder}
[ -e hang ] && exec sleep 600
[ -e powerless ] && [ "$1" = update ] && {{ echo 'slurm_update error: Invalid user id' >&2; exit 1; }}
[ -e fail ] && {{ echo 'slurm_update error: Access denied' >&2; exit 1; }}
[ -e odd ] && [ "$1" = show ] || exec scontrol "$@"
scontrol "$@" | sed 's/State=IDLE /State=IDLE+SHINY /; /^NodeName=n2 /s/State=IDLE/State=WONDERFUL/'
"""


def test_a_scheduler_that_hangs_fails_or_says_what_we_do_not_know(slurm: Cluster, daemon: Daemon) -> None:
    folder = daemon.folder
    (folder / "scontrol").write_text(SCONTROL.format(folder=folder))
    (folder / "scontrol").chmod(0o755)
    (folder / "odd").touch()
    daemon.restart("--drains", "act", "--scontrol", f"env WHAT=ever {folder}/scontrol")
    for node in slurm.names:
        daemon.report(node)
    for node in ("n1", "n2"):
        daemon.quarantine(node)
    daemon.wait(lambda: bool(drained(slurm, "n1")), "a node with an unknown flag to be drained")
    status = daemon.rounds()
    assert status["scheduler"]["unknown_words"] == ["SHINY", "WONDERFUL"] and status["guard"]["num_eligible"] == 3
    assert not drained(slurm, "n2") and [one["node"] for one in status["differences"]["waiting"]] == ["n2"]
    assert daemon.log.count("that this rsup does not know: SHINY, WONDERFUL") == 1
    (folder / "powerless").touch()
    (folder / "odd").unlink()
    daemon.wait(lambda: daemon.metric("rsup_drain_failing_nodes") == 1, "n2, which is known again, to be wanted as well")
    told = daemon.rsup("nodes", "drain", "n3", "--reason", "x", "--beyond-guard", code=1)
    assert "n3: not drained: scontrol update nodename=n3 is not allowed to rsup's user" in told and "Invalid user id" in told
    daemon.wait(lambda: daemon.metric("rsup_drain_failing_nodes") == 2, "n3 to be wanted, too")
    told = daemon.rsup("slurm", "status")
    assert "NOT DONE since" in told and "refused n2" in told and "SLURM does not do what is due" in told
    daemon.rsup("nodes", "undrain", "n3", "--reason", "x")
    (folder / "fail").touch()
    (folder / "powerless").unlink()
    daemon.wait(lambda: daemon.metric("rsup_scheduler_up") == 0, "the failure to be seen")
    assert "Access denied" in daemon.status()["scheduler"]["trouble"]
    daemon.release("n1")
    assert "SLURM does not answer" in daemon.rsup("nodes", "drain", "n3", "--reason", "x", code=1)
    (folder / "hang").touch()
    (folder / "fail").unlink()
    daemon.wait(lambda: "did not answer within" in daemon.status()["scheduler"]["trouble"], "a hanging scontrol")
    daemon.quarantine("n3")
    assert daemon.client.get("/readyz").status_code == 200 and drained(slurm, "n1")
    (folder / "hang").unlink()
    daemon.wait(lambda: bool(drained(slurm, "n3")) and not drained(slurm, "n1"), "what was due to be done")
    assert "SLURM answers again" in daemon.log and daemon.log.count("did not answer within") == 1
    daemon.restart("--drains", "act", "--scontrol", "/nonexistent/scontrol")
    assert "there is no /nonexistent/scontrol" in daemon.status()["scheduler"]["trouble"]
    assert gpu("n3", 0) in daemon.snapshot()["devices"], "gates are told all the same"


def test_a_reservation_or_weights_in_place_of_drains(slurm: Cluster, daemon: Daemon) -> None:
    def weight(node: str) -> str:
        line = slurm.run("scontrol", "-o", "show", "node", node).stdout
        return line.split(" Weight=")[1].split()[0]

    def reservations() -> str:
        return slurm.run("scontrol", "-o", "show", "reservation").stdout

    daemon.restart("--drains", "act", "--quarantine-by", "reservation", "--avoid-suspects")
    for node in slurm.names:
        daemon.report(node)
    daemon.quarantine("n1")
    daemon.wait(lambda: "ReservationName=rsup_q_n1 " in reservations(), "a reservation")
    assert not drained(slurm, "n1")
    job = slurm.submit("hostname", "-N4")
    test = slurm.run("srun", "-N1", "-w", "n1", "--reservation=rsup_q_n1", "hostname")
    assert test.returncode == 0 and slurm.job(job)["JobState"] == "PENDING"
    test_job = slurm.submit("sleep 60", "-N1", "-w", "n1", "--reservation=rsup_q_n1")
    slurm.wait_job(test_job, "RUNNING")
    daemon.release("n1")
    daemon.wait(lambda: daemon.metric("rsup_drain_failing_nodes") == 1, "a reservation in use")
    daemon.quarantine("n3")
    daemon.wait(lambda: "ReservationName=rsup_q_n3 " in reservations(), "another node not to wait for it")
    (failing,) = daemon.status()["failing"]
    assert (failing["step"], failing["node"]) == ("unreserve", "n1") and "in use" in failing["error"]
    slurm.run("scancel", str(test_job))
    daemon.wait(lambda: "rsup_q_n1" not in reservations() and not daemon.status()["failing"], "the reservation to end")
    daemon.release("n3")
    xids = [{"key": f"s{i}", "time_us": 1, "kind": "ecc", "device": gpu("n0", 0), "code": "correctable"} for i in range(3)]
    for boot, event in enumerate(xids):
        daemon.report("n0", events=[event], boot_id=f"boot-{boot}")
    daemon.wait(lambda: weight("n0") == "1001", "a suspect to come last")
    light = slurm.submit("sleep 0", "-N1")
    slurm.wait_job(light)
    assert slurm.job(light)["NodeList"] in ("n1", "n2", "n3")
    daemon.release("n0")
    daemon.wait(lambda: "rsup_q_" not in reservations() and weight("n0") == "1", "both to be taken back")
    slurm.wait_job(job, "COMPLETED")
