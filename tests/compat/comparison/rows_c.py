"""Rows C: ports, names and the coming together of nodes. All nodes of a job are launchers on this host."""

import signal
import socket
from collections.abc import Callable
from pathlib import Path

from tests.compat.comparison.launches import Job, Launched, free_port, launch, one_line, script, within
from tests.compat.comparison.left_running import living
from tests.compat.comparison.row import Peer, Row, Seen

PRINTS = "print('rank', rank, 'of', world, flush=True)\n"
STAYS = "say(f'up-{rank}-{restart}', os.getpid()); wait_for('finish')\n"
"""Runs until the recipe makes a file `finish`; `up-RANK-RESTART` has its pid."""
CONNECTS = "import socket\nsocket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])), 5)\n"
MEET = "say(f'up-{rank}-{restart}'); [wait_for(f'up-{other}-{restart}') for other in range(world)]\n"


def _patience_s(peer: Peer, torchrun_s: float) -> float:
    """How long to wait for what is right: rsup has all the time that a busy machine may need, torchrun was seen to need more
    than anybody wants to watch."""
    return torchrun_s if peer.name == "torchrun" else 40.0


def _up(folder: Path, *ranks: int, restart: int = 0, within_s: float = 30.0) -> bool:
    return within(within_s, lambda: all((folder / f"up-{rank}-{restart}").exists() for rank in ranks))


def _finish(folder: Path, nodes: list[Launched]) -> list[int | None]:
    (folder / "finish").touch()
    return [node.wait(20) for node in nodes]


def _ended(launched: Launched, code: int | None) -> str:
    return f"still waiting after {launched.age_s:.0f} s" if code is None else f"exit {code} after {launched.took_s:.1f} s"


# ---------------------------------------------------------------------------------------------------------------- ports


def port_29500_is_taken(peer: Peer, folder: Path) -> Seen:
    with socket.socket() as held:
        try:
            held.bind(("127.0.0.1", 29500))
            held.listen()
        except OSError:
            pass  # somebody else holds it: as good
        done = launch(peer, folder, "--nproc-per-node", "2", script(folder, PRINTS))
        code = done.wait(30)
    return Seen(code == 0, f"exit {code}, on a free port" if code == 0 else f"exit {code}")


def master_port_is_taken(listens: bool) -> Callable[[Peer, Path], Seen]:
    def recipe(peer: Peer, folder: Path) -> Seen:
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            if listens:
                held.listen()
            port = str(held.getsockname()[1])
            done = launch(peer, folder, "--master-port", port, script(folder, PRINTS))
            code = done.wait(30)
        if not listens:
            return Seen(code == 0, f"exit {code}: a socket that does not listen is in nobody's way")
        lines = done.lines(f"port {port} is in use by process")
        said = len(lines) == 1 and "--master-port" in lines[0] and "Traceback" not in done.text
        return Seen(
            code == 2 and said,
            f"exit {code} after {done.took_s:.1f} s, {'one line that names the holder' if said else 'a traceback'}",
        )

    return recipe


def two_jobs_on_one_host(peer: Peer, folder: Path) -> Seen:
    name = script(
        folder, "say(f'{sys.argv[1]}-{rank}'); wait_for('a-0'); wait_for('b-0'); print('port', os.environ['MASTER_PORT'])\n"
    )
    jobs = [Job(peer, folder, script=(name, letter)) for letter in "ab"]
    nodes = [job.node(rank) for rank in (0, 1) for job in jobs]
    codes = [node.wait(30) for node in nodes]
    ports = {line for node in nodes for line in node.lines("port ")}
    return Seen(codes == [0] * 4 and len(ports) == 2, f"exit {codes}, {len(ports)} stores")


def the_second_node_checks_no_port(peer: Peer, folder: Path) -> Seen:
    job = Job(peer, folder, script=(script(folder, PRINTS),))
    nodes = [job.node(rank) for rank in (1, 0)]
    codes = [node.wait(30) for node in nodes]
    alarm = any(node.lines("in use") for node in nodes)
    return Seen(codes == [0, 0] and not alarm, f"exit {codes}, {'an' if alarm else 'no'} alarm about the port")


# ---------------------------------------------------------------------------------------------------------------- names


def endpoint_is(host: str, ranks: tuple[int | None, int | None]) -> Callable[[Peer, Path], Seen]:
    def recipe(peer: Peer, folder: Path) -> Seen:
        name = script(
            folder,
            "import socket\nsocket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])), 5)\n"
            + PRINTS,
        )
        job = Job(peer, folder, script=(name,), host=host)
        nodes = [job.node(rank) for rank in ranks]
        codes = [node.wait(40) for node in nodes]
        return Seen(codes == [0, 0], f"exit {codes}")

    return recipe


def endpoint_of_nobody(peer: Peer, folder: Path) -> Seen:
    """As with an address that a router or a service maps to the first node: only that node's rank says who it is."""
    job = Job(peer, folder, script=(script(folder, PRINTS),), host="192.0.2.1")
    first = job.node(0)
    job.host = "127.0.0.1"
    second = job.node(1)
    codes = [node.wait(_patience_s(peer, 3)) for node in (first, second)]
    said = bool(first.lines("192.0.2.1 is no address of this host"))
    what = f"exit {codes}" if None not in codes else f"still waiting after {second.age_s:.0f} s"
    return Seen(codes == [0, 0] and said, f"{what}, {'said' if said else 'not said'}")


def endpoint_does_not_resolve(peer: Peer, folder: Path) -> Seen:
    job = Job(
        peer, folder, ("--nnodes", "2", "--rdzv-conf", "join_timeout=2"), (script(folder, PRINTS),), "no-such-host.invalid"
    )
    node = job.node(1)
    code = node.wait(_patience_s(peer, 4))
    said = bool(node.lines("no-such-host.invalid has no address here")) and "Traceback" not in node.text
    return Seen(code == 1 and said, f"{_ended(node, code)}, {'says which name' if said else 'does not say which name'}")


def no_endpoint(*options: str) -> Callable[[Peer, Path], Seen]:
    def recipe(peer: Peer, folder: Path) -> Seen:
        done = launch(peer, folder, "--nnodes", "2", *options, script(folder, PRINTS))
        code = done.wait(_patience_s(peer, 4))
        said = one_line(done, "--rdzv-endpoint")
        return Seen(code == 2 and said, f"{_ended(done, code)}{', one line' if said else ''}")

    return recipe


def nnodes_upside_down(peer: Peer, folder: Path) -> Seen:
    done = launch(peer, folder, "--nnodes", "3:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", script(folder, PRINTS))
    code = done.wait(20)
    said = one_line(done, "2:3")
    return Seen(code == 2 and said, f"exit {code}, {'one line' if said else 'a traceback'}")


def ipv6_endpoint(peer: Peer, folder: Path) -> Seen:
    return endpoint_is("[::1]", (0, 1))(peer, folder)


def other_rendezvous_at_the_same_port(peer: Peer, folder: Path) -> Seen:
    job = Job(peer, folder, ("--nnodes", "2", "--rdzv-id", "one"), (script(folder, STAYS),))
    nodes = [job.node(0), job.node(1)]
    _up(folder, 0, 1)
    other = Job(peer, folder, ("--nnodes", "2", "--rdzv-id", "two"), job.script, port=job.port).node(1)
    code = other.wait(10)
    said = one_line(other, "--rdzv-id one", "--rdzv-id two")
    codes = _finish(folder, nodes)
    return Seen(
        code == 2 and said and codes == [0, 0],
        f"the stranger: exit {code}, {'one line' if said else 'unclear'}; the job: {codes}",
    )


# ------------------------------------------------------------------------------------------------------- losing a node


def node_gets(number: int, signum: int) -> Callable[[Peer, Path], Seen]:
    """A node's launcher gets a signal; the other's ranks would wait for its ranks for ever."""

    def recipe(peer: Peer, folder: Path) -> Seen:
        job = Job(peer, folder, script=(script(folder, STAYS), "rank"))
        nodes = [job.node(0), job.node(1)]
        _up(folder, 0, 1)
        nodes[number].process.send_signal(signum)
        codes = [node.wait(_patience_s(peer, 5)) for node in (nodes[number], nodes[1 - number])]
        left = [pid for pid in living(folder, "rank") if pid not in [node.process.pid for node in nodes]]
        right = codes[1] not in (None, 0) and not left
        survivor = "still running 5 s later" if codes[1] is None else f"exit {codes[1]}"
        return Seen(right, f"the other node: {survivor}; ranks that live on: {len(left)}")

    return recipe


def rank_fails_on_the_other_node(peer: Peer, folder: Path) -> Seen:
    name = script(folder, f"{MEET}if rank == 1: sys.exit(11)\ntime.sleep(60)\n")
    nodes = _two(peer, folder, name)
    _up(folder, 0, 1)
    codes = [nodes[rank].wait(_patience_s(peer, 4)) for rank in (1, 0)]
    what = [f"exit {code}" if code is not None else "still running 4 s later" for code in codes]
    return Seen(codes == [11, 11], f"its node: {what[0]}; the other: {what[1]}")


def _two(peer: Peer, folder: Path, name: str, *options: str) -> list[Launched]:
    job = Job(peer, folder, ("--nnodes", "2", *options), (name,))
    return [job.node(0), job.node(1)]


def early_finisher(peer: Peer, folder: Path) -> Seen:
    name = script(
        folder,
        f"if rank == 0: sys.exit(0)\ntime.sleep(3)\n{CONNECTS}print('store lives', flush=True)\n",
    )
    nodes = _two(peer, folder, name)
    codes = [node.wait(20) for node in nodes]
    lives = bool(nodes[1].lines("store lives"))
    return Seen(codes == [0, 0] and lives, f"exit {codes}, the store {'outlives its node’s rank' if lives else 'is gone'}")


# ------------------------------------------------------------------------------------------------------------ restarts


def failing_by_turns(peer: Peer, folder: Path) -> Seen:
    """Rank 0 ends the first start, rank 1 the second; every rank notes what it was told."""
    name = script(
        folder,
        "say(f'told-{rank}-{restart}-{os.getpid()}', f\"{restart} {os.environ['MASTER_PORT']}\")\n"
        "import glob\nstarts = lambda rank: len(glob.glob(f'told-{rank}-*[0-9]'))\n"
        "mine = starts(rank)\n"
        "while starts(1 - rank) < mine: time.sleep(0.02)\n"
        "if mine == 1 + rank: sys.exit(3 + mine)\n"
        "if mine < 3: time.sleep(60)\n",
    )
    nodes = _two(peer, folder, name, "--max-restarts", "3")
    codes = [node.wait(_patience_s(peer, 15)) for node in nodes]
    told = {rank: sorted(path.read_text() for path in folder.glob(f"told-{rank}-*")) for rank in (0, 1)}
    restarts = [[text.split()[0] for text in told[rank]] for rank in (0, 1)]
    stores = {text.split()[1] for text in told[0]}
    same = restarts[0] == restarts[1] == ["0", "1", "2"]
    counts = " and ".join(",".join(of_rank) for of_rank in restarts)
    return Seen(
        codes == [0, 0] and same and told[0] == told[1] and len(stores) == 3,
        f"exit {codes}; TORCHELASTIC_RESTART_COUNT {counts}; stores: {len(stores)}",
    )


def one_more_than_needed(peer: Peer, folder: Path) -> Seen:
    """Five launchers, four needed: the fifth waits, and takes the place of a node that is killed."""
    job = Job(peer, folder, ("--nnodes", "4", "--max-restarts", "2"), (script(folder, STAYS),))
    nodes = [job.node(rank) for rank in (0, 1, 2, 3)]
    _up(folder, 0, 1, 2, 3)
    spare = job.node(None)
    waits = within(10, lambda: spare.lines("is a spare"))
    nodes[2].process.kill()
    again = _up(folder, 0, 1, 2, 3, restart=1, within_s=15)
    codes = _finish(folder, [nodes[0], nodes[1], nodes[3], spare])
    return Seen(
        bool(waits) and again and codes == [0] * 4, f"the spare {'took over' if again else 'did not take over'}; exit {codes}"
    )


def numbered_spare_comes_first(peer: Peer, folder: Path) -> Seen:
    """Its node rank lies beyond the number of nodes, as SLURM's fifth node of four: it must not take a place at the start."""
    job = Job(peer, folder, script=(script(folder, "say(f'is-{rank}', sys.argv[1]); wait_for('finish')\n"),))
    nodes = []
    for rank, name in ((0, "a"), (2, "spare"), (1, "b")):
        node = Job(peer, folder, job.options, (*job.script, name), port=job.port).node(rank)
        within(5, lambda node=node: node.lines("see rsup status"))  # type: ignore[misc]
        nodes.append(node)
    within(15, lambda: all((folder / f"is-{rank}").exists() for rank in (0, 1)))
    got = [(folder / f"is-{rank}").read_text() for rank in (0, 1)]
    codes = _finish(folder, nodes)
    return Seen(got == ["a", "b"] and codes == [0] * 3, f"ranks 0 and 1 run on {got}; exit {codes}")


def wrong_launch_beside_a_job(peer: Peer, folder: Path) -> Seen:
    """Local errors, and a spare that is told to stop, leave the job alone."""
    job = Job(peer, folder, script=(script(folder, STAYS),))
    nodes = [job.node(0), job.node(1)]
    _up(folder, 0, 1)
    wrong = Job(peer, folder, ("--nnodes", "3"), job.script, port=job.port).node(2)
    refused = wrong.wait(10)
    said = one_line(wrong, "--nnodes 2", "--nnodes 3") or bool(wrong.lines("give all nodes the same"))
    spare = job.node(None)
    within(10, lambda: spare.lines("is a spare"))
    spare.process.send_signal(signal.SIGTERM)
    left = spare.wait(10)
    codes = _finish(folder, nodes)
    return Seen(
        refused == 2 and said and left == 143 and codes == [0, 0], f"wrong --nnodes: {refused}, spare: {left}, job: {codes}"
    )


def three_of_two_to_four(peer: Peer, folder: Path) -> Seen:
    job = Job(peer, folder, ("--nnodes", "2:4", "--rdzv-conf", "last_call_timeout=1"), (script(folder, PRINTS),))
    nodes = [job.node(None) for _ in range(3)]
    codes = [node.wait(20) for node in nodes]
    worlds = {line.split()[-1] for node in nodes for line in node.lines("rank ") if line.startswith("rank")}
    return Seen(codes == [0] * 3 and worlds == {"3"}, f"exit {codes}, world size {worlds}")


def one_of_two(peer: Peer, folder: Path) -> Seen:
    node = Job(peer, folder, ("--nnodes", "2", "--rdzv-conf", "join_timeout=2"), (script(folder, PRINTS),)).node(0)
    code = node.wait(_patience_s(peer, 5))
    said = bool(node.lines("1 of at least 2 nodes came together in 2 s")) and "Traceback" not in node.text
    return Seen(code == 1 and said, f"{_ended(node, code)}, {'says what was missing' if said else 'a traceback'}")


def elastic_node_is_told_to_stop(peer: Peer, folder: Path) -> Seen:
    """A preempted node of an elastic job: it saves and leaves, the others go on; no restart is spent."""
    last_call_s = 1 if peer.name == "rsup" else 6  # torchrun's second node comes later
    options = ("--nnodes", "1:2", "--rdzv-conf", f"last_call_timeout={last_call_s}")
    job = Job(peer, folder, options, (script(folder, STAYS),))
    nodes = [job.node(0), job.node(1)]
    _up(folder, 0, 1)
    nodes[1].process.send_signal(signal.SIGTERM)
    left = nodes[1].wait(_patience_s(peer, 5))
    again = _up(folder, 0, restart=1, within_s=_patience_s(peer, 1))
    (folder / "finish").touch()
    code = nodes[0].wait(_patience_s(peer, 1))
    went_on = f"the other forms anew, exit {code}" if again else "the other knows nothing of it"
    return Seen(left == 143 and again and code == 0, f"its node: exit {left}; {went_on}")


ROWS = (
    Row(
        "21",
        "second job on a host, port 29500 taken",
        port_29500_is_taken,
        False,
        "single node: a free port held by the launcher",
    ),
    Row("21+", "`--master-port` taken", master_port_is_taken(True), True, "exit 2 at once, one line that names the holder"),
    Row("21++", "`--master-port` bound, not listening", master_port_is_taken(False), False, "no false alarm"),
    Row("21+++", "two jobs of two nodes on one host", two_jobs_on_one_host, False, "both run"),
    Row("23", '"port in use" on nodes that host nothing', the_second_node_checks_no_port, False, "only the hosting node looks"),
    Row("25", "the endpoint is an alias of the host", endpoint_is("127.0.0.2", (None, None)), False, "somebody hosts"),
    Row("25+", "the same, with node ranks", endpoint_is(socket.gethostname(), (0, 1)), False, "node rank 0 hosts"),
    Row("25++", "the endpoint is an address of no node", endpoint_of_nobody, True, "node rank 0 hosts and says so"),
    Row("25+++", "the endpoint's name does not resolve", endpoint_does_not_resolve, True, "says which name, ends in time"),
    Row("25++++", "an IPv6 endpoint", ipv6_endpoint, False, "works"),
    Row("27", "several nodes, no endpoint", no_endpoint("--rdzv-backend", "c10d"), True, "exit 2 at once, one line"),
    Row("27+", "`--standalone --nnodes 2`", no_endpoint("--standalone"), True, "exit 2 at once, one line"),
    Row("27++", "`--nnodes 3:2`", nnodes_upside_down, True, "exit 2, one line"),
    Row("28", "a node is killed", node_gets(1, signal.SIGKILL), True, "the others stop within seconds, no rank is left"),
    Row("28+", "the first node is killed", node_gets(0, signal.SIGKILL), False, "the same"),
    Row("28++", "a node is told to stop", node_gets(1, signal.SIGTERM), True, "the job stops everywhere"),
    Row(
        "28+++",
        "a node of an elastic job is told to stop",
        elastic_node_is_told_to_stop,
        True,
        "it leaves, the others form anew",
    ),
    Row(
        "29",
        "a rank fails on another node",
        rank_fails_on_the_other_node,
        True,
        "all stop within seconds, exit code of that rank",
    ),
    Row("30", "the first node's ranks end first", early_finisher, False, "the store outlives all ranks, nobody waits 300 s"),
    Row(
        "31",
        "stale store and counts after restarts; two nodes fail by turns",
        failing_by_turns,
        True,
        "one restart number, a new store each time",
    ),
    Row("34", "five launchers, four needed", one_more_than_needed, False, "the spare waits, then takes over"),
    Row("34+", "a spare that comes first, by number", numbered_spare_comes_first, False, "it still is the spare"),
    Row("34++", "a wrong launch, a stopped spare", wrong_launch_beside_a_job, False, "the job does not notice"),
    Row("34+++", "another `--rdzv-id` at the job's port", other_rendezvous_at_the_same_port, False, "refused in one line"),
    Row("35", "`--nnodes 2:4`, three join", three_of_two_to_four, False, "starts with three after the last call"),
    Row("35+", "one of two nodes comes", one_of_two, True, "ends at the join timeout and says who is missing"),
)
