"""What SLURM is told at the end of a launch, by what it answers: whether other nodes are left, what it does not do in time."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rsup.launcher.slurm import finish, requeue, scontrol
from rsup.launcher.slurm.environment import SlurmPlace
from rsup.launcher.slurm.other_nodes import has_features, obstacle
from rsup.launcher.slurm.requeue import Outcome, settle

SINFO = """n0|mixed|(null)
n1|allocated|a100,ib
n2|idle|a100
n3|idle~|a100,ib
n4|down*|a100,ib
n5|drained|a100,ib
n6|idle*|a100,ib
n7|maint|h200
"""
JOB = {"Partition": "main", "NumNodes": "2", "ReqNodeList": "(null)", "ExcNodeList": "(null)", "Features": "(null)"}


@pytest.mark.parametrize(
    ("job", "nodes", "why"),
    [
        ({}, "n1", ""),
        ({"NumNodes": "4"}, "n1", ""),
        ({"NumNodes": "5"}, "n1", "it needs 5, and 4 of the others can be used"),
        ({"NumNodes": "4", "ExcNodeList": "n[2-3]"}, "n1", "it needs 4, and 2 of the others can be used"),
        ({"ReqNodeList": "n[0-1]"}, "n1", "its --nodelist names n1"),
        ({"ReqNodeList": "n[0,2]"}, "n1", ""),
        ({"Features": "a100"}, "n1", ""),
        ({"Features": "a100&ib"}, "n1", "it needs 2, and 1 of the others can be used"),
        ({"Features": "a100&ib", "NumNodes": "1"}, "n3", ""),
        ({"Features": "h200|ib"}, "n1", ""),
        ({"Features": "tpu"}, "n1", "it needs 2, and none of the others can be used"),
        ({"Reservation": "mine"}, "n1", "it needs 2, and 1 of the others can be used"),
        ({"Reservation": "mine", "NumNodes": "1"}, "n1", ""),
        ({"Reservation": "gone"}, "n1", ""),
        ({"Partition": "hidden", "NumNodes": "9"}, "n1", ""),
        ({"Partition": "lost", "NumNodes": "9"}, "n1", ""),
        ({"NumNodes": "9-12"}, "n1", "it needs 9, and 4 of the others can be used"),
    ],
)
def test_other_nodes_that_the_job_may_use(job: dict[str, str], nodes: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*command: str, within_s: float = 0) -> str:
        if command[-1] == "mine":
            return "ReservationName=mine Nodes=n[1-2],n4"
        assert not {"-a", "-p"} <= {*command}, "sinfo refuses that"
        if command[0] != "sinfo" or "hidden" in command:
            raise scontrol.SlurmUnavailable(f"{command[0]} is not here")
        return "" if "lost" in command else SINFO

    monkeypatch.setattr(scontrol, "ask", ask)
    assert obstacle([nodes], JOB | job) == why


def test_constraints() -> None:
    for constraint, features, meets in (
        ("a", "a,b", True),
        ("a&b", "a", False),
        ("a,b", "a,b", True),
        ("a|b", "b", True),
        ("[rack1*2&rack2*4]", "rack2", True),
        ("[rack1*2&rack2*4]", "rack3", False),
        ("(a|b)&c", "(null)", False),
    ):
        assert has_features(constraint, features) is meets, constraint


class Slurm:
    """Answers as slurmctld, or not: `fails` says why not, by what it is asked. Its clock goes on by what an answer takes."""

    def __init__(self, fails: Callable[[str], Exception | None], kill_wait: str = "30 sec", **job: str) -> None:
        self.now_s = 100.0
        self.told: list[str] = []
        self.said: list[str] = []
        self.requeue_exit = "(null)"
        self._fails, self._kill_wait = fails, kill_wait
        self._job = {"BatchFlag": "1", "Requeue": "1", "Restarts": "0"} | JOB | job

    def ask(self, *command: str, within_s: float = 5.0) -> str:
        words = " ".join(command)
        error = self._fails(words)
        self.now_s += within_s if isinstance(error, scontrol.SlurmSilent) else 0.01
        if "show" not in command and command[0] == "scontrol" and words not in self.told:
            self.told.append(words)
        if error:
            raise error
        if command[0] == "sinfo":
            return SINFO
        if "config" in command:
            return f"KillWait                = {self._kill_wait}\nRequeueExit             = {self.requeue_exit}\n"
        fields = " ".join(f"{key}={value}" for key, value in self._job.items())
        job = f"JobId=7 JobName=t UserId=ann(1) GroupId=ann(1) MCS_label=N/A {fields} Network=(null) Command=t.sh 16 Requeue=0"
        return job if "job" in command else "NodeName=n1"

    def settle(self, monkeypatch: pytest.MonkeyPatch, exit_code: int = 16) -> float:
        """Seconds that it took."""

        def sleep(seconds: float) -> None:
            self.now_s += seconds

        monkeypatch.setattr(scontrol, "ask", self.ask)
        monkeypatch.setattr(requeue, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=sleep))
        monkeypatch.setattr(requeue, "_shield", lambda: None)
        began_s = self.now_s
        assert settle(Outcome(exit_code, ("n1",)), SlurmPlace("7"), self.said.append)
        return self.now_s - began_s


HOLD, EXCLUDE, RELEASE = "scontrol requeuehold 7", "scontrol update jobid=7 ExcNodeList=n1", "scontrol release 7"


def refuses(*words: str, silent: bool = False) -> Callable[[str], Exception | None]:
    kind = scontrol.SlurmSilent if silent else scontrol.SlurmUnavailable
    return lambda asked: kind(f"{asked}: no") if any(word in asked for word in words) else None


def test_requeued_without_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(refuses())
    slurm.settle(monkeypatch)
    assert slurm.told == [HOLD, EXCLUDE, RELEASE]
    assert slurm.said == ["rsup: job 7 is requeued and will not run on n1 again"]
    needed = Slurm(refuses(), ReqNodeList="n[1-2]")
    needed.settle(monkeypatch)
    away = "rsup: exit 16: job 7 cannot be requeued away from n1, so it ends: its --nodelist names n1; submit it anew"
    assert needed.told == [] and needed.said == [away]
    never = Slurm(refuses(), Requeue="0")
    never.settle(monkeypatch)
    assert never.told == [] and "so it ends: it was submitted with --no-requeue" in never.said[0]


def test_a_requeue_that_cannot_avoid_the_refused_node_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "rsup: exit 88: job 7 cannot be kept off n1: its --nodelist names n1; it may wait, or run there again"
    needed = Slurm(refuses(), ReqNodeList="n[1-2]")
    needed.settle(monkeypatch, 88)
    assert (needed.told, needed.said) == (["scontrol requeue 7"], [why, "rsup: job 7 is requeued"])
    by_code = Slurm(refuses(), ReqNodeList="n[1-2]")
    by_code.requeue_exit = "88"
    by_code.settle(monkeypatch, 88)
    assert (by_code.told, by_code.said) == ([], [why])
    never = Slurm(refuses(), Requeue="0")
    never.settle(monkeypatch, 88)
    assert never.said == ["rsup: exit 88: job 7 was submitted with --no-requeue, so it ends; submit it again"]


def test_finish_does_not_send_people_to_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm = Slurm(refuses("show job"))
    monkeypatch.setattr(scontrol, "ask", slurm.ask)
    assert settle(Outcome(16), SlurmPlace("7"), slurm.said.append) is False
    assert slurm.said[0].endswith("no; `rsup slurm finish RESULT-FILE` at the end of the batch script does it")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "result").write_text('{"exit_code": 16}')
    assert finish.main([str(tmp_path / "result")]) == 16
    said = capfd.readouterr().err
    assert "SLURM cannot be told from here" in said and "where scontrol works: scontrol requeue JOB" in said
    assert "rsup slurm finish" not in said


def test_a_list_that_slurm_does_not_take_leads_into_no_endless_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for restarts, exit_code, released in (("2", 16, True), ("3", 16, False), ("4", 16, False), ("9", 88, True)):
        slurm = Slurm(refuses("ExcNodeList"), Restarts=restarts)
        slurm.settle(monkeypatch, exit_code)
        assert slurm.told == [HOLD, EXCLUDE, RELEASE][: 3 if released else 2], restarts
        assert slurm.said[1] == f"rsup: n1 could not be excluded: {EXCLUDE}: no"
        held = f"rsup: job 7 was restarted {restarts} times and stays held: scontrol release 7 runs it there again"
        assert slurm.said[2:] == ([] if released else [held])


@pytest.mark.parametrize(
    ("kill_wait", "most_s"), [("30 sec", 20), ("9 sec", 8), ("1 sec", 2), ("120 sec", 20), ("nonsense", 20)]
)
def test_all_of_it_is_over_before_slurm_kills_us(kill_wait: str, most_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(refuses(HOLD, EXCLUDE, RELEASE, silent=True), kill_wait)
    took_s = slurm.settle(monkeypatch)
    assert slurm.told == [HOLD, EXCLUDE, RELEASE], "an order that was not answered is done perhaps: then it must not stay held"
    assert most_s * 0.9 < took_s <= most_s + 0.6
    assert slurm.said[-1] == f"rsup: job 7 is held: {RELEASE}: no; scontrol release 7"
    slow = Slurm(refuses(EXCLUDE, silent=True), kill_wait)
    assert slow.settle(monkeypatch) < most_s * 0.75 + 0.6 and slow.told[-1] == RELEASE and len(slow.said) == 2
