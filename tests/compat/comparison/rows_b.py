"""Rows B: the command line and the environment."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.compat.comparison.launches import Job, Launched, free_port, launch, one_line, script, within
from tests.compat.comparison.row import Peer, Row, Seen

SHOW = "import json; say(f'seen-{rank}-{restart}', json.dumps([sys.argv[1:], dict(os.environ)]))\n"
"""The rank leaves its arguments and its environment."""
WITHIN_S = 40.0
Case = tuple[list[str], list[str]]
"""Words for the launcher (the script is `seen.py`), and what the script must get as arguments."""


def seen(folder: Path, rank: int = 0, restart: int = 0) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that a rank got; removes what it left. Nothing, where it never ran."""
    path = folder / f"seen-{rank}-{restart}"
    if not path.exists():
        return ["(never started)"], {}
    arguments, environment = json.loads(path.read_text())
    path.unlink()
    return arguments, environment


def arguments_arrive(*cases: Case) -> Callable[[Peer, Path], Seen]:
    """The script gets exactly these arguments, in every case."""

    def recipe(peer: Peer, folder: Path) -> Seen:
        script(folder, SHOW, "seen.py")
        for words, expected in cases:
            launched = launch(peer, folder, *words)
            code = launched.wait(WITHIN_S)
            arguments, _ = seen(folder)
            if code != 0 or arguments != expected:
                return Seen(False, f"`{' '.join(words)}`: exit {code}, the script gets {arguments}{_complaint(launched.text)}")
        return Seen(True, f"arrives unchanged, {len(cases)} ways of writing it")

    return recipe


def _complaint(text: str) -> str:
    line = next((line for line in text.splitlines() if "error:" in line), "")
    return f" ({line.partition('error: ')[2][:60]})" if line else ""


def refused(*cases: tuple[dict[str, str], list[str], str]) -> Callable[[Peer, Path], Seen]:
    """Environment, words and what the refusal must name: exit code 2 and one line, in every case."""

    def recipe(peer: Peer, folder: Path) -> Seen:
        script(folder, SHOW, "seen.py")
        for env, words, named in cases:
            launched = launch(peer, folder, *words, "seen.py", env=env)
            code = launched.wait(WITHIN_S)
            if code != 2 or not one_line(launched, named):
                shown = " ".join([*(f"{name}={value}" for name, value in env.items()), *words])
                return Seen(False, f"`{shown}`: exit {code}, {_lines(launched.text)}")
        return Seen(True, f"exit 2 and one line, {len(cases)} values")

    return recipe


def _lines(text: str) -> str:
    count = len(text.splitlines())
    return f"{count} lines{', a traceback' if 'Traceback' in text else ''}"


def switches_by_environment(peer: Peer, folder: Path) -> Seen:
    """`PET_*` switches in every spelling of true and false; a wrong one is refused in one line."""
    script(folder, SHOW, "seen.py")
    for name, value, words in (
        ("PET_STANDALONE", "true", ["seen.py"]),
        ("PET_RUN_PATH", "True", ["seen.py"]),
        ("PET_MODULE", "yes", ["seen"]),
        ("PET_NO_PYTHON", "off", ["seen.py"]),
        ("PET_MODULE", "0", ["seen.py"]),
    ):
        launched = launch(peer, folder, *words, env={name: value})
        code = launched.wait(WITHIN_S)
        if code != 0 or seen(folder)[0]:
            return Seen(False, f"{name}={value}: exit {code}, {_lines(launched.text)}")
    wrong = launch(peer, folder, "seen.py", env={"PET_STANDALONE": "maybe"})
    if wrong.wait(WITHIN_S) != 2 or not one_line(wrong, "PET_STANDALONE=maybe"):
        return Seen(False, f"PET_STANDALONE=maybe: {_lines(wrong.text)}")
    return Seen(True, "1, true, yes, off, 0 are understood, the rest is refused in one line")


def threads(peer: Peer, folder: Path) -> Seen:
    """OMP_NUM_THREADS: 1 for several ranks, said in one line; the user's own stays; `auto` shares the cores out."""
    name = script(folder, SHOW)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    for given, expected in ((None, "1"), ("7", "7"), ("auto", str(share))):
        launched = launch(peer, folder, "--nproc-per-node", "2", name, env={"OMP_NUM_THREADS": given} if given else _no_omp())
        code = launched.wait(WITHIN_S)
        got = [seen(folder, rank)[1].get("OMP_NUM_THREADS") for rank in range(2)]
        said = launched.lines("OMP_NUM_THREADS")
        if code != 0 or got != [expected] * 2 or len(said) > 1:
            return Seen(False, f"OMP_NUM_THREADS={given}: ranks get {got[0]}, {len(said)} lines about it")
    return Seen(True, f"1, said in one line; the user's own stays; `auto` is {share}")


def _no_omp() -> dict[str, str]:
    return {"OMP_NUM_THREADS": ""} if "OMP_NUM_THREADS" in os.environ else {}


def two_digit_ranks(peer: Peer, folder: Path) -> Seen:
    """`10:3` and `0-7:3` for `--redirects`, `--tee` and the environment: those ranks' output goes to files, no other's."""
    name = script(folder, "print('word', rank)\n")
    for words, env, quiet in (
        (["-r", "10:3"], {}, [10]),
        (["--redirects", "0-9:1,10:3"], {}, list(range(11))),
        ([], {"PET_REDIRECTS": "9-10:3"}, [9, 10]),
    ):
        launched = launch(peer, folder, "--nproc-per-node", "11", "--log-dir", str(folder / "logs"), *words, name, env=env)
        code = launched.wait(WITHIN_S)
        shown = sorted(int(rank) for line in launched.lines("word") for rank in re.findall(r"\bword (\d+)", line))
        if code != 0 or shown != [rank for rank in range(11) if rank not in quiet]:
            return Seen(False, f"`{' '.join(words) or env}`: exit {code}, {_lines(launched.text)}")
    wrong = launch(peer, folder, "-r", "3-1:3", name)
    if wrong.wait(WITHIN_S) != 2 or not one_line(wrong, "3-1"):
        return Seen(False, f"`-r 3-1:3`: {_lines(wrong.text)}")
    return Seen(True, "ranks of any length, and ranges")


def node_rank_holds(peer: Peer, folder: Path) -> Seen:
    """Node rank 1 joins first; after a restart the nodes still are where they were."""
    text = (
        "say(f'node-{rank}-{restart}', os.environ['WORD']); [wait_for(f'node-{other}-{restart}') for other in range(2)]\n"
        "if restart == 0: sys.exit(3)\n"
    )
    job = Job(peer, folder, ("--nnodes", "2", "--max-restarts", "1"), (script(folder, text),))
    second = job.node(1, WORD="one")
    if peer.name == "torchrun":  # the one that comes first holds its store, and becomes rank 0
        within(WITHIN_S, lambda: _is_listened_at(job.port))
    first = job.node(0, WORD="zero")
    for restart in range(2):
        within(WITHIN_S, lambda restart=restart: len(list(folder.glob(f"node-?-{restart}"))) == 2)  # type: ignore[misc]
        if (folder / f"node-0-{restart}").read_text() != "zero":
            end(first, second)
            return Seen(False, f"attempt {restart + 1}: node rank 1 has RANK 0")
    codes = [launched.wait(WITHIN_S) for launched in (first, second)]
    return Seen(codes == [0, 0], f"node rank 0 has RANK 0, before and after a restart; exit {codes}")


def _is_listened_at(port: int) -> bool:
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    return any(words[1].endswith(f":{port:04X}") and words[3] == "0A" for words in map(str.split, lines))


def run_ids(peer: Peer, folder: Path) -> Seen:
    """Job ids with slashes, dots, spaces and letters of other alphabets: the ranks see them as given, paths stay inside."""
    script(folder, SHOW, "seen.py")
    logs = folder / "logs" / "below"
    for number, run_id in enumerate(("a/b", "../../up", "rück 日", "x" * 300), 1):
        launched = launch(peer, folder, "--rdzv-id", run_id, "--log-dir", str(logs), "-r", "3", "seen.py")
        code = launched.wait(WITHIN_S)
        _, environment = seen(folder)
        trees = sorted(path.parent for path in folder.rglob("attempt_0"))
        if code != 0:
            return Seen(False, f"--rdzv-id {run_id[:12]}: exit {code}, {_lines(launched.text)}")
        if (told := environment.get("TORCHELASTIC_RUN_ID")) != run_id:
            return Seen(False, f"--rdzv-id {run_id[:12]}: ranks are told {told}")
        if len(trees) != number or any(tree.parent != logs for tree in trees):
            return Seen(
                False, f"--rdzv-id {run_id[:12]}: its logs go to {trees[0].parent.relative_to(logs)}/ of the log directory"
            )
    return Seen(True, "TORCHELASTIC_RUN_ID as given, directories by a cleaned name")


def rdzv_conf(peer: Peer, folder: Path) -> Seen:
    """Two `--rdzv-conf` add up: one gives the time to wait for a second node; an unknown key is refused."""
    name = script(folder, SHOW)
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--node-rank", "0"]
    waiting = launch(peer, folder, *words, "--rdzv-conf", "join_timeout=1", "--rdzv-conf", "last_call_timeout=5", name)
    code = waiting.wait(8.0 if peer.name == "torchrun" else WITHIN_S)
    if code is None:
        end(waiting)
        return Seen(False, f"the second flag wins: still waiting after {waiting.age_s:.0f} s with join_timeout=1")
    wrong = launch(peer, folder, "--rdzv-conf", "join_timeot=1", name)
    if wrong.wait(WITHIN_S) != 2 or not one_line(wrong, "join_timeot", "join_timeout"):
        return Seen(False, f"an unknown key: {_lines(wrong.text)}")
    return Seen(code != 0, f"gave up after {waiting.took_s:.0f} s, as the first flag says; an unknown key is refused")


def end(*launched: Launched) -> None:
    """Kill launchers that would sit there for long."""
    for one in launched:
        one.process.kill()
        one.process.wait()


def values_without_a_shell(peer: Peer, folder: Path) -> Seen:
    """Everything by `PET_*`, as in a pod's manifest: blanks, quotes and dollars arrive; what nothing filled in is named."""
    script(folder, SHOW, "seen.py")
    env = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_ID": 'it\'s $(HOME) "1"',
        "PET_ROLE": "a b",
        "PET_MAX_RESTARTS": "",
    }
    done = launch(peer, folder, "seen.py", env=env)
    code = done.wait(WITHIN_S)
    arguments = [seen(folder, rank) for rank in range(2)]
    right = all(e.get("TORCHELASTIC_RUN_ID") == env["PET_RDZV_ID"] and e.get("ROLE_NAME") == "a b" for _, e in arguments)
    if code != 0 or not right:
        return Seen(False, f"exit {code}, {_lines(done.text)}")
    wrong = launch(peer, folder, "seen.py", env={"PET_NODE_RANK": "$(JOB_COMPLETION_INDEX)"})
    if wrong.wait(WITHIN_S) != 2 or not one_line(wrong, "PET_NODE_RANK", "nothing has filled in"):
        return Seen(False, f"PET_NODE_RANK=$(...): {_lines(wrong.text)}")
    return Seen(True, "arrive as they are; a variable that nothing filled in is named")


def _cases() -> Iterator[tuple[dict[str, str], list[str], str]]:
    for value in ("0", "-1", "gpu", "1.5", "many"):
        yield {}, [f"--nproc-per-node={value}"], "--nproc-per-node"
    yield {"PET_NPROC_PER_NODE": "0"}, [], "PET_NPROC_PER_NODE=0"
    yield {}, ["--nnodes", "3:2"], "--nnodes"
    yield {}, ["--nnodes", "0"], "--nnodes"
    yield {}, ["--max-restarts", "-1"], "--max-restarts"
    yield {}, ["--master-port", "70000"], "--master-port"
    yield {}, ["--signals-to-handle", "SIGKILL"], "SIGKILL"


FLAGS = arguments_arrive(
    (["seen.py", "--r=16", "--log", "x"], ["--r=16", "--log", "x"]),
    (["--nproc_per_n", "1", "--redirect=0", "seen.py", "--nnodes", "2", "--r"], ["--nnodes", "2", "--r"]),
    (["seen.py", "-m", "--help", "-r", "9"], ["-m", "--help", "-r", "9"]),
)
DASHES = arguments_arrive(
    (["seen.py", "--", "--foo"], ["--", "--foo"]),
    (["--", "seen.py", "--foo"], ["--foo"]),
    (["--", "seen.py", "--foo", "--", "b"], ["--foo", "--", "b"]),
    (["--nproc-per-node", "1", "--", "seen.py", "--", "--", "x"], ["--", "--", "x"]),
)
DOLLARS = arguments_arrive(
    (["seen.py", "a$$b", "${local_rank}", "$rank", "$HOME", "${"], ["a$$b", "${local_rank}", "$rank", "$HOME", "${"]),
    (["-m", "seen", "${rank}", "$$"], ["${rank}", "$$"]),
    (["--run-path", "seen.py", "${role_name}"], ["${role_name}"]),
)
MODULES = arguments_arrive(
    (["-m", "seen", "-q", "--nproc-per-node", "3", "-m", "x"], ["-q", "--nproc-per-node", "3", "-m", "x"]),
    (["--module", "--nproc-per-node", "1", "seen", "-q"], ["-q"]),
)

ROWS: tuple[Row, ...] = (
    Row("9", "script arguments read as the launcher's", FLAGS, True, "nothing right of the script is the launcher's"),
    Row("10", "`--` after the script is eaten", DASHES, True, "only the `--` in front of the script is dropped"),
    Row("11", "`$$` and `${local_rank}` rewritten in arguments", DOLLARS, True, "arguments verbatim"),
    Row("12", "`PET_STANDALONE=true`", switches_by_environment, True, "true and false as 1 and 0; else one line"),
    Row("13", "OMP_NUM_THREADS forced to 1", threads, True, "1 for several ranks, in one line; `auto` shares the cores out"),
    Row("14", "`--nproc-per-node 0`, `gpu` without a GPU, and other bad values", refused(*_cases()), True, "exit 2, one line"),
    Row("15", "`-r 10:3` rejected", two_digit_ranks, True, "ranks of two digits, and ranges"),
    Row(
        "16",
        "`--node-rank` ignored with c10d",
        node_rank_holds,
        True,
        "the node rank holds, over restarts too",
        frozenset({"by chance"}),
    ),
    Row("18", "run id with `/`", run_ids, True, "any text; paths are made of a cleaned name"),
    Row("19", "a second `--rdzv-conf` overwrites the first", rdzv_conf, True, "they add up; unknown keys are refused"),
    Row("20", "`-m` with options of its own", MODULES, False, "what follows the module is the module's"),
    Row("20a", "values of a manifest go through layers of quotes", values_without_a_shell, True, "`PET_*` as they are"),
)
