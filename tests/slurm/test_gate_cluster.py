"""The gate on a real cluster: what a prolog refuses, and above all what it must not."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, refused_job
from tests.slurm.node_side import NodeSide, Signer, refusal


class Site:
    """A cluster whose prolog and epilog are ours; every node has four GPUs, `n1-0` and so on."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.signer = slurm, Signer()
        self.nodes = {name: NodeSide(folder / name, name, self.signer) for name in slurm.names}
        for name, node in self.nodes.items():
            node.boards({str(index): [f"{name}-{index}"] for index in range(4)})
            node.tell()
        for slot in ("prolog", "epilog"):
            for node in self.nodes.values():
                node.hook(slot)
            slurm.hook(slot, f"export RSUP_NODE_ROOT={folder}/$SLURMD_NODENAME\nexec $RSUP_NODE_ROOT/{slot}.sh")

    def starts(self, *nodes: str, gpus: int = 4) -> bool:
        """Whether a job on those nodes begins; a refused srun is not requeued."""
        where = ["-w", ",".join(nodes), f"-N{len(nodes)}"]
        done = self.slurm.run("srun", *where, f"--gres=gpu:{gpus}", "echo", "begun", check=False)
        return done.stdout.split() == ["begun"] * len(nodes)

    def is_idle(self, *nodes: str) -> None:
        """Wait for the epilogs' end: no node is drained, whatever the hooks made of it."""

        def is_over(node: str) -> bool:
            return not self.slurm.state(node)[0].startswith(("completing", "allocated", "mixed"))

        for node in nodes:
            self.slurm.wait(partial(is_over, node), "the epilog")
            assert self.slurm.state(node) == ("idle", "")


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path) -> Iterator[Site]:
    for part in (tmp_path, *tmp_path.parents[:2]):
        part.chmod(0o755)
    yield Site(slurm, tmp_path)


def spoiled(node: NodeSide) -> dict[str, tuple[Callable[[], object], str]]:
    """What may be wrong on a node, how it comes about, and what the log says of it."""
    against = {"nodes": {node.name: refusal()}}
    sound, signer = node.signer.snapshot(**against), node.signer
    fleet = {f"n{number}": refusal() for number in range(30)}
    three = {f"n{number}": refusal() for number in range(3)} | against["nodes"]

    def put(data: bytes) -> Callable[[], object]:
        return lambda: node.places.snapshot.write_bytes(data)

    return {
        "no snapshot": (node.places.snapshot.unlink, "there is no snapshot"),
        "old": (lambda: node.settings(mode="enforce", max_age_s=0.001), "no supervisor has confirmed"),
        "cut off": (put(sound[:-40]), "signature is wrong"),
        "cut off in its first line": (put(sound[:30]), "cut off in its first line"),
        "signed by another key": (put(Signer().snapshot(**against)), "signed by key"),
        "against the whole fleet": (put(signer.snapshot(nodes=fleet, max_refused=40)), "refuses 30 of 40"),
        "above the guard's limit": (put(signer.snapshot(nodes=three)), "limit of 2"),
        "of another cluster": (put(signer.snapshot(**against, cluster="other")), "of cluster other"),
        "no key": ((node.places.root / "etc/rsup/supervisor.pub").unlink, "no public key"),
        "a slip in the settings": (lambda: node.places.settings.write_text("mode = enforce"), "node.toml"),
        "no interpreter": (lambda: node.python(""), "exit 127"),
        "half upgraded": (lambda: node.python('echo "ImportError: no name x" >&2; exit 1'), "exit 1 ImportError"),
        "a crash": (lambda: node.python("kill -SEGV $$"), "exit 139"),
        "hangs, ignores TERM": (lambda: node.python("trap '' TERM; sleep 30 & wait; wait"), "exit 137"),
        "anything else": (lambda: node.python("echo rsup:Q-1 GPU 3; exit 3"), "exit 3"),
        "nothing": (lambda: None, "refused: rsup:Q-17"),
    }


def test_ignorance_and_a_broken_deployment_refuse_nobody(site: Site) -> None:
    """Rules 2 to 5 and 8: a sound snapshot refuses each node, which runs its job in each of these cases, four at a time."""
    names = list(site.nodes)
    cases = list(spoiled(site.nodes["n0"]))
    for first in range(0, len(cases) - 1, len(names)):
        turn = dict(zip(names, cases[first : first + len(names)], strict=True))
        for name, case in turn.items():
            node = site.nodes[name]
            node.tell(nodes={name: refusal()})
            (node.places.root / "etc/rsup/supervisor.pub").write_bytes(site.signer.public)
            node.settings(mode="enforce")
            node.python()
            spoiled(node)[case][0]()
        for _ in range(3):
            has_begun = site.starts(*names)
            site.is_idle(*[name for name, case in turn.items() if case != "nothing"])
            if not any(site.nodes[name].was_slow for name in names):
                break
            site.slurm.resume_drained()
        assert has_begun == ("nothing" not in turn.values()), turn
        said = {name: [line for line in site.nodes[name].log().splitlines() if " prolog " in line] for name in names}
        for name, case in turn.items():
            assert spoiled(site.nodes[name])[case][1] in said[name][-1], (case, said[name])
    site.slurm.wait(lambda: site.slurm.state(names[-1])[0] == "drained", "the sound one to be refused")


def test_a_bad_gpu_keeps_off_the_jobs_that_got_it_and_no_others(site: Site) -> None:
    node = site.nodes["n1"]
    bad = {"devices": {"n1-3": refusal(node="n1", serial="1650"), "n2-0": refusal(verdict="avoid", node="n2")}}
    for one in site.nodes.values():
        one.tell(**bad)
    assert site.starts("n1", gpus=1) and site.starts("n2"), "index 0 is healthy, a suspect is only avoided"
    assert site.slurm.run("srun", "-w", "n1", "echo", "begun").stdout == "begun\n", "a job without GPUs"

    # A quarantine by reservation is where the supervisor wants its node tested, also where the gate enforces.
    quarantine = ["reservationname=rsup_q_n1", "nodes=n1", "starttime=now", "duration=infinite", "users=root"]
    site.slurm.run("scontrol", "create", "reservation", *quarantine, "flags=maint,ignore_jobs")
    test = site.slurm.run("srun", "-w", "n1", "--gres=gpu:4", "--reservation=rsup_q_n1", "echo", "begun", check=False)
    assert test.stdout == "begun\n", test.stderr
    site.slurm.run("scontrol", "delete", "reservationname=rsup_q_n1")
    site.is_idle("n1")

    node.settings(mode="observe")
    assert site.starts("n1")
    observed = node.refusals()[-1]
    assert (observed["kind"], observed["device"]) == ("prolog-refused", "n1-3") and observed["detail"].startswith("observe:")

    # A GPU fell off and the others moved up: index 0 may be n1-0 or n1-3. Only one of them is refused, so nobody is sure.
    node.settings(mode="enforce")
    node.boards({"0": ["n1-0", "n1-3"], "1": ["n1-1"], "2": ["n1-2"], "3": ["n1-9"]})
    assert site.starts("n1", gpus=1)
    assert "may be n1-0 or n1-3" in node.refusals()[-1]["detail"]
    node.boards({str(index): [f"n1-{index}"] for index in range(4)}, boot="another boot")
    assert site.starts("n1"), "an inventory of another boot says nothing"
    node.boards({str(index): [f"n1-{index}"] for index in range(4)})

    job = refused_job(site.slurm, node, "echo on $SLURM_JOB_NODELIST", "--nodelist=n1", "--gres=gpu:4")
    log = (site.slurm.folder / "log" / "slurmd.n1.log").read_text(errors="replace")
    assert "rsup:Q-17 GPU 3 serial 1650 SDC vote 3/3 jobs; rsup nodes why n1" in log, "SLURM's log has the line"
    assert node.refusals()[-1]["job"] == str(job) and node.refusals()[-1]["detail"].startswith("enforce:")
    site.slurm.wait(lambda: site.slurm.job(job)["JobState"] == "PENDING", "the job to be requeued, not held")
    assert site.slurm.job(job)["Priority"] != "0"


def test_the_epilog_tells_what_happened_since_the_start_and_never_fails(site: Site) -> None:
    node = site.nodes["n0"]
    kernel = node.places.kernel_log

    def line(sequence: int, index: int, code: int) -> str:
        return f"4,{sequence},123,-;NVRM: Xid (PCI:0000:{index + 16:02x}:00): {code}, pid=1\n"

    kernel.write_text(line(10, 0, 31) + "6,11,124,-;something else\n")
    kernel.chmod(0o666)
    devices = [{"uuid": f"n0-{index}", "health": {"ecc_uncorrected": int(index in (0, 3))}} for index in range(4)]
    node.places.devices.write_text(json.dumps(devices))
    text = line(12, 0, 79) + line(13, 3, 48)
    job = site.slurm.submit(f"printf '{text}' >> {kernel}; exit 3", "-w", "n0", "--gres=gpu:2")
    site.slurm.wait_job(job)
    site.is_idle("n0")
    found = {(one["kind"], one["device"], one["code"]): one for one in node.events()}
    assert set(found) == {("job-end", None, 3), ("xid", "n0-0", 79), ("ecc", "n0-0", "uncorrectable")}, (
        "of its GPUs, since its start"
    )
    assert all(one["job"] == str(job) for one in found.values())
    assert "exit 3:0, GPUs n0-0 n0-1" in found["job-end", None, 3]["detail"]
    assert not list(node.places.jobs.iterdir())

    node.python("")
    assert site.starts("n0")
    site.slurm.wait(lambda: "epilog node=n0" in node.log(), "the epilog")
    site.is_idle("n0")
