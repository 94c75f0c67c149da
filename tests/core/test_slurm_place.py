"""What a launch reads from SLURM's variables, and the words that it makes of SLURM's answers."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rsup.launcher.launch_checks import check
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.launch_parser import parse_launch
from rsup.launcher.result_file import write_results
from rsup.launcher.slurm import meeting, scontrol
from rsup.launcher.slurm.environment import SeveralAgents, SlurmPlace, check_tasks, read_place
from rsup.launcher.slurm.finish import NoResult, main, read_outcome
from rsup.launcher.slurm.hostnames import node_names
from rsup.launcher.slurm.launch import _fitting
from rsup.launcher.slurm.meeting import meeting_ports
from rsup.launcher.slurm.node_watch import NodeWatch, given_up
from rsup.launcher.slurm.requeue import _follows, _known, _names_code, target
from rsup.launcher.slurm.scontrol import row_of_job
from rsup.supervisor.records import JobKey
from rsup.supervisor.rpc_links import Link, is_astray
from rsup.supervisor.wire import JobResult, UsageError

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_CLUSTER_NAME": "c1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[0-2]",
    "SLURM_JOB_NODELIST": "n[0-3]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURMD_NODENAME": "n1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_GPUS": "0,1,2,3",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
BATCH = {name: value for name, value in STEP.items() if "STEP" not in name and name != "SLURM_LAUNCH_NODE_IPADDR"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n0", ["n0"]),
        ("n[0-2,07],login", ["n0", "n1", "n2", "n07", "login"]),
        ("r[1-2]c[0-1]", ["r1c0", "r1c1", "r2c0", "r2c1"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("", []),
        ("n[3-1]", []),
        ("n[a]", []),
        ("n[1-99999999999]", []),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert node_names(text) == names


def test_a_step_is_an_agent_a_node() -> None:
    place = read_place(STEP)
    assert place is not None and place.in_step
    assert (place.nodes, place.node_index, place.num_nodes, place.num_gpus) == (("n0", "n1", "n2"), 1, 3, 4)
    check_tasks(place)
    options = parse_launch(["train.py"], STEP)
    assert (options.min_nodes, options.max_nodes, options.nproc_per_node, options.node_rank) == (3, 3, 4, 1)
    assert (options.rdzv_id, options.preferred_job_id, options.cluster) == ("slurm-c1-17.2.0", "17", "c1")
    assert options.state_dir.parts[-2:] == ("slurm", "c1-17")
    assert options.asks_for_end and options.rdzv_endpoint == ""


def test_what_a_user_says_goes_before() -> None:
    words = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-id",
        "mine",
        "--rdzv-endpoint",
        "n0:5",
        "--state-dir",
        "/x",
        "t.py",
    ]
    options = parse_launch(words, STEP | {"SLURM_JOB_END_TIME": "99999999999"})
    assert (options.max_nodes, options.nproc_per_node, options.rdzv_id, options.rdzv_endpoint) == (2, 1, "mine", "n0:5")
    assert str(options.state_dir) == "/x" and not options.asks_for_end
    assert parse_launch(["--standalone", "t.py"], STEP).max_nodes == 1


def test_several_tasks_on_a_node_are_refused() -> None:
    for changed in ({"SLURM_STEP_NUM_TASKS": "4"}, {"SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "3"}):
        with pytest.raises(SeveralAgents, match=r"step 17\.2 starts several tasks on a node.*--ntasks-per-node=1"):
            parse_launch(["t.py"], STEP | changed)


def test_the_batch_script_itself_is_one_node() -> None:
    options = parse_launch(["t.py"], BATCH)
    assert (options.max_nodes, options.nproc_per_node, options.node_rank, options.rdzv_id) == (1, 4, -1, "none")
    assert any("job 17 has 4 nodes, and this launch is on one" in note for note in options.notes)


def test_no_gpus_and_nonsense() -> None:
    without = {name: value for name, value in STEP.items() if "GPU" not in name and "CUDA" not in name}
    assert parse_launch(["t.py"], without).nproc_per_node == 1
    assert parse_launch(["t.py"], STEP | {"CUDA_VISIBLE_DEVICES": "2"}).nproc_per_node == 1
    assert parse_launch(["t.py"], STEP | {"CUDA_VISIBLE_DEVICES": ""}).nproc_per_node == 1
    assert read_place({}) is None and read_place({"SLURM_JOB_ID": "x"}) is None
    odd = read_place({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "many"})
    assert odd is not None and not odd.in_step and odd.num_nodes == 1


def test_ports_are_the_steps_own() -> None:
    first = SlurmPlace("17", "c1", "2")
    assert meeting_ports(first, {}) == meeting_ports(replace(first, node="n9", node_index=3), {})
    others = [SlurmPlace(str(job), "c1", str(step)) for job in range(17, 400) for step in range(8)]
    ports = [port for place in others for port in meeting_ports(place, {})]
    assert len(set(ports)) == len(ports) and all(10000 <= port < 30000 for port in ports)
    assert meeting_ports(first, {"RSUP_PORT_RANGE": "41000-41001"}) == (41000, 41001)


def test_another_steps_agent_is_sent_on() -> None:
    link = Link(None, "tcp://a:1", jobs=[JobKey("c1", "ann", "17", 1)], groups=["slurm-c1-17.2.0"])  # type: ignore[arg-type]
    assert is_astray(link, "slurm-c1-18.0.0")
    assert not is_astray(link, "slurm-c1-17.2.0") and not is_astray(link, "mine")
    link.groups = []
    assert not is_astray(link, "slurm-c1-18.0.0"), "nobody knows yet whose the endpoint is"


@pytest.mark.parametrize(("text", "found"), [("88", True), ("1,80-90", True), ("(null)", False), ("89", False), ("", False)])
def test_requeue_exit_of_slurm_conf(text: str, found: bool) -> None:
    assert _names_code(text, 88) is found


@pytest.mark.parametrize(
    ("waiting", "found"),
    [
        ("18|18|singleton(unfulfilled)|train", True),
        ("18|18|singleton(unfulfilled)|other", False),
        ("18|18|afterany:17(unfulfilled)|other", True),
        ("18|18|afterok:16(unfulfilled):17(unfulfilled)|other", True),
        ("18|18|afternotok:171(unfulfilled)|train", False),
        ("18|18|(null)|train", False),
        ("17|17|singleton|train", False),
        ("nonsense", False),
    ],
)
def test_what_would_go_on_with_a_job(waiting: str, found: bool) -> None:
    assert _follows(waiting.split("|", 3), "17", {"JobName": "train"}) is found


SHOWN = (
    "JobId={head} UserId=ann(1) GroupId=domain users(1) MCS_label=N/A Priority=4 Nice=0 Account=(null) QOS=(null)"
    " JobState=RUNNING Reason=None Dependency=(null) {fields} Licenses=(null) Network=(null) Command={command}"
    " WorkDir=/tmp Comment=c Requeue=0 NodeList=n9  StdErr=/tmp/o BatchFlag=0 StdIn=/dev/null StdOut=/tmp/o Power= \n"
)
"""As 22.05 prints it, without some of what nobody reads."""


def shown(head: str, fields: str, command: str = "/tmp/t.sh") -> str:
    return SHOWN.format(head=head, fields=fields, command=command)


ARRAY = (
    shown("93 ArrayJobId=93 ArrayTaskId=2 JobName=t", "Requeue=1 Restarts=0 EndTime=2030-01-01T00:00:00 NodeList=n[0-1]")
    + shown("94 ArrayJobId=93 ArrayTaskId=1 JobName=t", "Requeue=0 Restarts=1 EndTime=2029-01-01T00:00:00 NodeList=n[2-3]")
    + shown("95 ArrayJobId=93 ArrayTaskId=3-9%2 ArrayTaskThrottle=2 JobName=t", "Requeue=1 NodeList=")
)


def test_a_task_of_an_array_is_its_own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row_of_job(ARRAY, job).get("NodeList") for job in ("93", "94", "9")] == ["n[0-1]", "n[2-3]", None]
    assert [target(row_of_job(ARRAY, job), job) for job in ("93", "94", "95")] == ["93_2", "93_1", "95"]
    assert target({"JobId": "7", "HetJobId": "7"}, "7") == "7"
    monkeypatch.setattr(scontrol, "ask", lambda *command, within_s=0: "State=IDLE" if "node" in command else ARRAY)
    place = SlurmPlace("93", nodes=("n0", "n1"), job_nodes=("n0", "n1", "n2"))
    assert [given_up(place, node) for node in ("n0", "n1")] == ["", ""]
    assert "SLURM has taken it out of job 93, which holds n[0-1]" in given_up(place, "n2")
    assert given_up(place, "n3") == "", "a node of another job of the same launch: it was never in this one"
    with pytest.raises(scontrol.SlurmUnavailable, match="does not show it"):
        given_up(replace(place, job="99"), "n0")
    ours = row_of_job(ARRAY, "93")
    for waiting, follows in (
        ("96|96|afterany:93_2(unfulfilled)|u", True),
        ("96|96|afterany:93_20(unfulfilled)|u", False),
        ("96|96|afterok:93_*(unfulfilled)|u", False),
        ("96|96|singleton(unfulfilled)|t", True),
        ("95|93|singleton(unfulfilled)|t", False),
    ):
        assert _follows(waiting.split("|", 3), "93_2", ours) is follows, waiting


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("7 JobName=my job", "my job"),
        ("7 JobName=x JobId=5", "x JobId=5"),
        (
            "7 JobName=x UserId=root(0) Requeue=0 ArrayJobId=3 ArrayTaskId=1",
            "x UserId=root(0) Requeue=0 ArrayJobId=3 ArrayTaskId=1",
        ),
        ("7 JobName=two\nlines", "two\nlines"),
        ("7 JobName=x HetJobIdSet=1", "x HetJobIdSet=1"),
        ("7 HetJobId=7 HetJobOffset=0 JobName=hs93 HetJobIdSet=7-8", "hs93"),
        ("7 HetJobId=7 HetJobOffset=0 JobName=h HetJobIdSet=1 HetJobIdSet=7-8", "h HetJobIdSet=1"),
    ],
)
@pytest.mark.parametrize(
    "command",
    ["/tmp/t.sh", "/t.sh 16 Requeue=0 BatchFlag=0 Features=big Reservation=mine", "/t.sh a\nJobId=7 Requeue=0", "(null)"],
)
def test_what_a_user_wrote_is_no_field_of_slurms(head: str, name: str, command: str) -> None:
    other = shown(head.replace("7 ", "8 ", 1), "Requeue=0", command)
    found = row_of_job(other + shown(head, "Requeue=1 BatchFlag=1 ReqNodeList=(null) Features=(null)", command), "7")
    read = ("JobId", "JobName", "UserId", "Requeue", "BatchFlag", "Features", "Reservation", "ArrayJobId", "NodeList")
    assert [found.get(key) for key in read] == ["7", name, "ann(1)", "1", "1", "(null)", None, None, None]
    keyed = other.replace("QOS=(null)", "QOS=(null) WCKey=w Requeue=1 k")
    assert row_of_job(keyed, "8")["Requeue"] == "0"


def test_a_note_on_a_node_is_not_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NodeName=n1 NodeAddr=10.0.0.1 State=IDLE+DRAIN Reason=x State=DOWN NodeAddr=9 Comment=State=DOWN"
    monkeypatch.setattr(scontrol, "ask", lambda *command, within_s=0: text)
    found = scontrol.show("node", "n1")
    assert (found["State"], found["NodeAddr"]) == ("IDLE+DRAIN", "10.0.0.1")


def test_a_step_that_is_too_small_or_has_odd_places() -> None:
    said: list[str] = []
    place = read_place(STEP)
    assert place is not None

    def fitting(*words: str) -> LaunchOptions:
        return _fitting(parse_launch([*words, "t.py"], STEP), place, said.append)

    with pytest.raises(UsageError, match=r"needs 4 nodes, and step 17\.2 has 3: .* srun --nodes=4, or give --nnodes 3"):
        fitting("--nnodes", "4")
    assert fitting("--nnodes", "2:4").max_nodes == 4 and fitting().node_rank == 1 and said == []
    assert fitting("--node-rank", "0").node_rank == 1
    assert said == ["rsup: --node-rank 0 has no effect: this is node 1 of step 17.2"]
    assert fitting("--node-rank", "2", "--rdzv-endpoint", "n0:5").node_rank == 2, "the user's own meeting"


@pytest.mark.parametrize("text", ["foo", "80", "5-", "0-9", "9-5", "1-70000", "-5-6"])
def test_a_range_of_ports_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match=f"RSUP_PORT_RANGE={text} is no range of ports; write it as 10000-29999"):
        meeting_ports(SlurmPlace("17"), {"RSUP_PORT_RANGE": text})


def test_low_ports_are_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_first_port_for_all", lambda: 1024)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="ports below 1024 are root's"):
        meeting_ports(SlurmPlace("17"), {"RSUP_PORT_RANGE": "80-80"})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert meeting_ports(SlurmPlace("17"), {"RSUP_PORT_RANGE": "80-80"}) == (80, 80)


def test_nodes_that_slurm_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def ask(*command: str, within_s: float = 0) -> str:
        if command[-1] in ("n1", "n2"):
            return "NodeName=n1"
        raise scontrol.SlurmUnavailable(f"{' '.join(command)}: Node {command[-1]} not found")

    monkeypatch.setattr(scontrol, "ask", ask)
    assert _known(["n1", "n9", "a b", "n2"], said.append) == ("n1", "n2")
    assert said == [f"rsup: SLURM knows no node '{name}', so that one is not excluded" for name in ("n9", "a b")]


def test_one_node_that_slurm_does_not_know_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_place(STEP)
    assert read is not None and (read.nodes, read.job_nodes) == (("n0", "n1", "n2"), ("n0", "n1", "n2", "n3"))
    place: SlurmPlace = read
    job_list = "n[0-1]"

    def ask(*command: str, within_s: float = 0) -> str:
        if "job" in command:
            return shown("17 JobName=t", f"NodeList={job_list}")
        if command[-1] == "other":
            raise scontrol.SlurmUnavailable("Node other not found")
        if command[-1] == "slow":
            raise scontrol.SlurmSilent("no answer within 5 s")
        return f"NodeName={command[-1]} State={'DOWN+DRAIN' if command[-1] == 'n1' else 'IDLE'}"

    def found(*silent: str) -> list[str]:
        answered = threading.Event()
        watch = NodeWatch(place, answered.set)
        watch._ask(silent)
        names = [name for name, _ in watch.take()]
        assert answered.is_set() is bool(names)
        return names

    monkeypatch.setattr(scontrol, "ask", ask)
    assert found("other", "n0", "n1", "n2", "n9") == ["n1", "n2"]
    assert found("n1", "slow", "n2") == ["n1"], "what was found before SLURM fell silent counts, the rest is asked again"
    job_list = "(null)"
    assert found("n0", "n2") == [], "no list, so nothing was taken out of it"


def test_results_that_cannot_be_used(tmp_path: Path) -> None:
    path, place = tmp_path / "result", SlurmPlace("17")
    with pytest.raises(NoResult, match="No such file"):
        read_outcome(path, place)
    for text in ("", "[]", '{"exit_code": "x"}', "\x00", '{"exit_code": 999}'):
        path.write_text(text)
        with pytest.raises(NoResult, match="is no result file of rsup launch"):
            read_outcome(path, place)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NoResult, match="is no result file of rsup launch"):
        read_outcome(tmp_path / "fifo", place)
    path.write_text('{"exit_code": 16, "avoid_nodes": ["n1", 5]}')
    assert (read_outcome(path, place).exit_code, read_outcome(path, place).nodes) == (16, ("n1",))


def test_a_result_of_another_job_or_start_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result"
    place = read_place(STEP)
    assert place is not None

    def write(**environ: str) -> None:
        for name in STEP:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert write_results(JobResult(16, "sdc", 1, node="n1"), "17", 1, tmp_path, path, avoid_nodes=["n1"]) == []

    for environ in (STEP, BATCH, {}):  # {}: a container that hides SLURM's variables
        write(**environ)
        assert read_outcome(path, place).exit_code == 16
    write(**STEP | {"SLURM_JOB_ID": "16"})
    with pytest.raises(NoResult, match=r"result is of job 16; the launch has not ended by itself, and SLURM is told nothing"):
        read_outcome(path, place)
    write(**STEP)
    with pytest.raises(NoResult, match=r"result is of an earlier start of job 17; the launch has not ended by itself"):
        read_outcome(path, replace(place, num_restarts=1))
    for odd in ("5", '["x"]', '{"job": 17, "restarts": "0"}'):
        path.write_text(f'{{"exit_code": 16, "slurm": {odd}}}')
        with pytest.raises(NoResult, match="SLURM is told nothing"):
            read_outcome(path, place)


def test_a_launch_leaves_no_earlier_result_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, path = tmp_path / "t.py", tmp_path / "result"
    script.touch()
    monkeypatch.setenv("RSUP_STATE_DIR", str(tmp_path / "state"))

    def is_left(text: str, environ: dict[str, str]) -> bool:
        path.write_text(text)
        for name in STEP:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        check(parse_launch(["--nnodes", "1", "--result-file", str(path), str(script)], {}))
        return path.exists()

    of_this_step = {"job": "17", "restarts": 0, "step": "2"}
    for of, environ, left in (
        (of_this_step, STEP, True),  # another node has ended already
        (of_this_step, STEP | {"SLURM_RESTART_COUNT": "1"}, False),
        (of_this_step, STEP | {"SLURM_STEP_ID": "3"}, False),
        (of_this_step | {"job": "16"}, STEP, False),
        (of_this_step | {"step": ""}, BATCH, False),  # two launches of one script
        (None, STEP, False),
        (None, {}, False),
    ):
        assert is_left(json.dumps({"exit_code": 16, "slurm": of}), environ) is left, (of, environ)
    assert is_left("print('somebody typed the wrong name')", {}) and is_left('{"some": "json"}', {})


def test_finish_says_what_is_wrong_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711_3")
    with pytest.raises(UsageError, match="SLURM_JOB_ID is '4711_3', which is no job's number"):
        main(["result"])
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UsageError, match="SLURM_JOB_ID is not set"):
        main(["result"])
