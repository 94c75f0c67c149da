"""What is said of a SLURM that does not answer: nothing where nobody expects one."""

import logging
import os
import subprocess
import time
from pathlib import Path

import pytest

from rsup.supervisor.config import Settings
from rsup.supervisor.records import DrainNoted
from rsup.supervisor.slurm.drain_terms import Step
from rsup.supervisor.slurm.lookout import ClusterFile, Lookout
from rsup.supervisor.slurm.node_log import NodeLog
from rsup.supervisor.slurm.said_once import SaidOnce
from rsup.supervisor.slurm.scheduler import Scontrol
from rsup.supervisor.slurm.start import expects_slurm, name_in_conf
from rsup.supervisor.slurm.step_taker import StepTaker


def test_slurm_is_expected_where_it_is_set_up_or_wanted(tmp_path: Path) -> None:
    nothing, conf = tmp_path / "none.conf", tmp_path / "slurm.conf"
    conf.touch()
    assert not expects_slurm(Settings(), {}, nothing), "drains are proposed by default"
    assert not expects_slurm(Settings(drains="off"), {}, nothing)
    assert expects_slurm(Settings(), {}, conf)
    assert expects_slurm(Settings(), {"SLURM_CONF": "/x"}, nothing)
    assert expects_slurm(Settings(drains="act"), {}, nothing)
    assert expects_slurm(Settings(scontrol="sudo -n scontrol"), {}, nothing)


@pytest.mark.parametrize("command", ["/nonexistent/scontrol", "/bin/false"])
def test_a_missing_slurm_is_said_once_and_only_where_it_is_expected(command: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for is_expected in (False, True):
        said = SaidOnce(logging.getLogger("drains"))
        lookout = Lookout(Scontrol(command), "", said, lambda: 10**15, is_expected=is_expected)
        for _ in range(3):
            assert lookout.look({}, reservations_too=False).nodes is None and lookout.trouble
        assert [record.levelname for record in caplog.records] == ["WARNING"] * is_expected


def test_one_that_has_answered_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answer = "NodeName=n0 State=IDLE Weight=1\n"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\nprintf '{answer}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    subprocess.run([tmp_path / "scontrol"], check=True, capture_output=True)
    lookout = Lookout(
        Scontrol(str(tmp_path / "scontrol")), "c", SaidOnce(logging.getLogger("drains")), lambda: 10**15, is_expected=False
    )
    assert list(lookout.look({}, reservations_too=False).nodes or ()) == ["n0"]
    (tmp_path / "scontrol").unlink()
    lookout.look({}, reservations_too=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_clusters_name_stands_in_slurm_conf(tmp_path: Path) -> None:
    """With `--drains off` SLURM is not asked, and gates believe no snapshot without a name."""
    conf = tmp_path / "slurm.conf"
    assert name_in_conf(conf) == ""
    conf.write_text("SlurmctldHost=a\nclustername = Big1 # comment\n")
    assert name_in_conf(conf) == "big1", "as SLURM tells it"


def test_the_clusters_name_is_remembered_for_a_start_without_slurm(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\n[ $2 = config ] && echo 'ClusterName = big' || echo 'NodeName=n0 State=IDLE Weight=1'\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    said = SaidOnce(logging.getLogger("drains"))

    def name(command: str, given: str = "") -> str:
        lookout = Lookout(Scontrol(command), given, said, lambda: 10**15, remembered=ClusterFile(tmp_path / "name"))
        lookout.look({}, reservations_too=False)
        return lookout.cluster

    here = str(tmp_path / "scontrol")
    assert [name("/nonexistent/scontrol"), name(here), name("/nonexistent/scontrol")] == ["", "big", "big"]
    (tmp_path / "name").write_text("before\n")
    assert name(here) == "big" == (tmp_path / "name").read_text().strip(), "SLURM's own word counts"
    assert name(here, "given") == "given"


STEPS = """#!/bin/sh
case "$*" in
  "show node"*) echo 'NodeName=n0 State=IDLE'; echo 'NodeName=n1 State=IDLE'; echo 'NodeName=n2 State=IDLE';;
  "show reservation"*) echo 'ReservationName=rsup_q_n2 Nodes=n2';;
  delete*) echo 'Requested reservation is in use' >&2; exit 1;;
  *n1*reason=*|*'n[0-1]'*reason=*) [ -e %s ] || { echo 'slurm_update error: Invalid node state' >&2; exit 1; };;
  *"reason=forbidden"*) echo 'slurm_update error: Invalid user id' >&2; exit 1;;
esac
"""


def test_a_step_that_fails_holds_up_no_other_and_is_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "scontrol").write_text(STEPS % (tmp_path / "mended"))
    (tmp_path / "scontrol").chmod(0o755)
    taker = StepTaker(Scontrol(str(tmp_path / "scontrol")), SaidOnce(logging.getLogger("drains")), lambda: 5)
    steps = [Step("unreserve", ("n2",)), Step("drain", ("n0", "n1"), "x"), Step("drain", ("n2",), "forbidden")]

    def take() -> list[DrainNoted]:
        return [note for _, notes in taker.take_all(steps, {}, lambda: True) for note in notes]

    assert [note.node for note in take()] == ["n0"], "a batch of which SLURM does not like one node is taken node by node"
    failing = {key: one.error for key, one in taker.failing.items()}
    assert "reservation is in use" in failing["unreserve", "n2"] and "Invalid node state" in failing["drain", "n1"]
    assert "is not allowed to rsup's user (docs/operating.md, Rights in SLURM)" in failing["drain", "n2"]
    assert "in use" in taker.trouble(["n2"]) and not taker.trouble(["n0"])
    take()
    assert len([record for record in caplog.records if "in use; tried again" in record.message]) == 1
    (tmp_path / "mended").touch()
    steps = steps[1:2]
    assert [note.node for note in take()] == ["n0", "n1"] and not taker.failing, "done, or not wanted any more"


RESTARTED = """#!/bin/sh
case "$*" in
  "show config"*) echo 'ClusterName = c'; echo 'BOOT_TIME = %s';;
  *) echo 'NodeName=n0 State=%s'; echo 'NodeName=n1 State=IDLE';;
esac
"""


def test_a_slurm_that_lost_its_state_while_the_supervisor_was_away_has_ended_no_drain(tmp_path: Path) -> None:
    command, file = tmp_path / "scontrol", ClusterFile(tmp_path / "name")
    logs = {name: NodeLog(number=1, drained=f"rsup:Q-1 {name}") for name in ("n0", "n1")}
    started_us = int(time.mktime((2020, 11, 30, 12, 0, 0, 0, 0, -1))) * 1_000_000

    def has_forgotten(noted_us: int, state: str = "IDLE", kept: ClusterFile | None = None) -> bool:
        command.write_text(RESTARTED % ("2020-11-30T12:00:00", state))
        command.chmod(0o755)
        lookout = Lookout(Scontrol(str(command)), "c", SaidOnce(logging.getLogger("drains")), lambda: 10**15, remembered=kept)
        return lookout.look(logs, reservations_too=False, noted_us=noted_us).has_forgotten

    assert has_forgotten(started_us - 1), "started after all that was noted"
    assert not has_forgotten(started_us + 1), "drained since: somebody has let them run"
    assert not has_forgotten(started_us - 1, "IDLE+DRAIN Reason=rsup:Q-1 n0 [root@x]"), "one is there still"
    assert has_forgotten(started_us - 1, kept=file)
    os.utime(tmp_path / "name-looked", (started_us / 1e6 + 1, started_us / 1e6 + 1))
    assert not has_forgotten(started_us - 1, kept=file), "it was seen to keep them after its start"
    assert file.looked_us() > started_us + 1_000_000
