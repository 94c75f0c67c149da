"""Cores for ranks, on made-up machines: a sysfs tree and PCI addresses as NVML gives them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rsup.launcher.inventory import Inventory
from rsup.launcher.numa_binding import MODES, bind, cpu_list, cpu_text
from rsup.launcher.processes import spawn_rank
from rsup.launcher.rank_seats import choose_seats
from rsup.launcher.visible_devices import read_visible
from rsup.supervisor.wire import AvoidedDevice, Device, StartAttempt

EVERYTHING = range(64)


def gpu(number: int) -> Device:
    return Device(f"GPU-{number}", model="H200", pci_bus_id=f"00000000:{0xA0 + number:02X}:00.0")


def cpu(number: int) -> Device:
    return Device(f"CPU-{number}", model="CPU")


class Machine:
    """Two sockets of two NUMA nodes of 8 cores with two threads each; caches of 4 cores. Thread 2 of core c is 32 + c."""

    def __init__(self, root: Path, gpus: Sequence[int]) -> None:
        """`gpus[i]`: the NUMA node of GPU i."""
        self.root = root
        self.write("devices/system/node/online", "0-3")
        for node in range(4):
            first = 8 * node
            self.write(f"devices/system/node/node{node}/cpulist", f"{first}-{first + 7},{first + 32}-{first + 39}")
        for number in range(64):
            core = number % 32
            base = f"devices/system/cpu/cpu{number}"
            self.write(f"{base}/topology/physical_package_id", str(core // 16))
            self.write(f"{base}/topology/thread_siblings_list", f"{core},{core + 32}")
            group = core // 4 * 4
            for index, (kind, level, shared) in enumerate(
                (
                    ("Instruction", 1, f"{core},{core + 32}"),
                    ("Data", 1, f"{core},{core + 32}"),
                    ("Unified", 3, f"{group}-{group + 3},{group + 32}-{group + 35}"),
                )
            ):
                self.write(f"{base}/cache/index{index}/type", kind)
                self.write(f"{base}/cache/index{index}/level", str(level))
                self.write(f"{base}/cache/index{index}/shared_cpu_list", shared)
        for number, node in enumerate(gpus):
            self.write(f"bus/pci/devices/0000:{0xA0 + number:02x}:00.0/numa_node", str(node))

    def write(self, path: str, text: str) -> None:
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_text(text + "\n")


def bound(
    machine: Machine, mode: str, devices: list[Device], listed: list[Device] | None = None, allowed: Sequence[int] = EVERYTHING
) -> list[str]:
    result = bind(mode, devices, devices if listed is None else listed, allowed, machine.root)
    assert not result.warning, result.warning
    return [cpu_text(cpus or ()) for cpus in result.cpus]


@pytest.mark.parametrize(("text", "cpus"), [("0-2,4", {0, 1, 2, 4}), ("7", {7}), ("", set()), ("1,\n", {1})])
def test_lists_of_cores(text: str, cpus: set[int]) -> None:
    assert cpu_list(text) == cpus
    assert cpu_list(cpu_text(cpus)) == cpus
    with pytest.raises(ValueError, match="no list of cores"):
        cpu_list("1-x")


def test_modes_with_gpus(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=(0, 0, 1, 2))
    four = [gpu(i) for i in range(4)]
    assert bound(machine, "node", four) == ["0-7,32-39", "0-7,32-39", "8-15,40-47", "16-23,48-55"]
    assert bound(machine, "socket", four) == ["0-15,32-47"] * 3 + ["16-31,48-63"]
    assert bound(machine, "exclusive", four) == ["0-3,32-35", "4-7,36-39", "8-15,40-47", "16-23,48-55"]
    assert bound(machine, "core-complex", four) == ["0-3,32-35", "4-7,36-39", "8-11,40-43", "16-19,48-51"]


def test_cores_are_shared_among_all_gpus_that_are_seen_not_only_those_in_use(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=(0, 0, 0))
    assert bound(machine, "exclusive", [gpu(2)], [gpu(0), gpu(1), gpu(2)]) == ["6-7,38-39"]
    assert bound(machine, "exclusive", [gpu(0), gpu(1)], [gpu(0), gpu(1), gpu(2)]) == ["0-2,32-34", "3-5,35-37"]
    assert bound(machine, "exclusive", [gpu(0), gpu(0)], [gpu(0)]) == ["0-3,32-35", "4-7,36-39"]


def test_the_launchers_own_mask_is_respected(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=(0, 1))
    allowed = [0, 1, 2, 8, 32, 40]
    two = [gpu(0), gpu(1)]
    assert bound(machine, "node", two, allowed=allowed) == ["0-2,32", "8,40"]
    assert bound(machine, "exclusive", two, allowed=allowed) == ["0-2,32", "8,40"]
    assert bound(machine, "core-complex", two, allowed=allowed) == ["0-2,32", "8,40"]
    assert bound(machine, "socket", two, allowed=allowed) == ["0-2,8,32,40"] * 2
    outside = bind("node", two, two, [8, 9], tmp_path, first_rank=4)
    assert outside.cpus == (None, frozenset({8, 9}))
    assert outside.warning.startswith("--numa-binding node: not bound are rank 4: none of the cores of NUMA node 0 may be used")
    assert outside.line == "bound to cores (--numa-binding node): rank 5 to 8-9 (NUMA node 1)"


def test_without_gpus_ranks_are_spread_over_the_nodes(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=())
    assert bound(machine, "node", [cpu(0), cpu(1)], []) == ["0-7,32-39", "16-23,48-55"]
    assert bound(machine, "exclusive", [cpu(i) for i in range(8)], [])[:3] == ["0-3,32-35", "4-7,36-39", "8-11,40-43"]
    assert bound(machine, "node", [cpu(0), cpu(1)], [], allowed=range(8)) == ["0-7"] * 2
    together = bind("node", [cpu(i) for i in range(5)], [], EVERYTHING, tmp_path)
    assert "ranks 0-1 to 0-7,32-39 (NUMA node 0), rank 2 to" in together.line


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("bus/pci/devices/0000:a0:00.0/numa_node", "numa_node: No such file"),
        ("devices/system/node/online", "has no effect"),
        ("cpu", ""),
    ],
)
def test_what_the_machine_does_not_tell_costs_the_binding_only(tmp_path: Path, mode: str, damage: str, words: str) -> None:
    machine = Machine(tmp_path, gpus=(0, 0))
    if damage == "cpu":
        for path in (tmp_path / "devices/system/cpu").rglob("*"):
            if path.is_file():
                path.write_text("?")
    else:
        (machine.root / damage).unlink()
    found = bind(mode, [gpu(0)], [gpu(0)], EVERYTHING, tmp_path)
    if damage == "cpu" and mode == "node":
        assert found.cpus == (cpu_list("0-7,32-39"),) and not found.warning
    else:
        assert found.cpus == (None,) and words in found.warning and "\n" not in found.warning


def test_a_gpu_of_no_node(tmp_path: Path) -> None:
    two_nodes = Machine(tmp_path, gpus=(-1, 1))
    found = bind("node", [gpu(0), gpu(1)], [gpu(0), gpu(1)], EVERYTHING, two_nodes.root)
    assert found.cpus[0] is None and found.cpus[1] and "does not say" in found.warning
    (tmp_path / "devices/system/node/online").write_text("0")  # one node: the kernel says -1 there too
    assert bound(two_nodes, "node", [gpu(0)]) == ["0-7,32-39"]


def test_too_few_cores_for_each_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=(0, 0, 0))
    found = bind("exclusive", [gpu(i) for i in range(3)], [gpu(i) for i in range(3)], [0, 1, 32], machine.root)
    assert found.cpus == (None,) * 3 and "2 cores for 3 ranks or GPUs" in found.warning and "and 2 more" in found.warning


def start(num_ranks: int, avoid: list[AvoidedDevice]) -> StartAttempt:
    return StartAttempt(1, "", 1, 1, 0, num_ranks, num_ranks, 0, 1, "h", 1, "j", 1, 0, avoid=avoid)


def test_the_binding_follows_the_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, gpus=(0, 1, 2))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(EVERYTHING))
    inventory = Inventory(read_visible(None, None, [gpu(0), gpu(1), gpu(2)]))
    as_found = choose_seats(start(2, []), "node", inventory, sysfs=machine.root)
    assert as_found.cpu_texts == ["0-7,32-39", "8-15,40-47"] and as_found.environment == {}
    moved = choose_seats(start(2, [AvoidedDevice("GPU-0", "it is suspect")]), "node", inventory, sysfs=machine.root)
    assert moved.device_names == ["GPU-2", "GPU-1"] and moved.cpu_texts == ["16-23,48-55", "8-15,40-47"]
    assert moved.environment == {"CUDA_VISIBLE_DEVICES": "2,1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    flagged = choose_seats(
        start(2, [AvoidedDevice("GPU-0", "its loss was NaN", rank=0, ordinal=0)]), "node", inventory, sysfs=machine.root
    )
    assert flagged.ordinals == (1, 0) and flagged.cpu_texts == ["8-15,40-47", "16-23,48-55"]
    assert flagged.device_behind(0, 0) == "GPU-2"
    assert choose_seats(start(2, []), None, inventory, sysfs=machine.root).cpu_texts == []


def test_a_rank_is_bound_before_its_program_starts(tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-S", "-c", "import os; print(os.sched_getaffinity(0))"]
        rank = spawn_rank(
            command, os.environ, local_rank=0, stdin=None, stdout_fd=out.fileno(), stderr_fd=2, cpus=frozenset({one})
        )
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        rank.close()
    assert (tmp_path / "out").read_text() == f"{{{one}}}\n"


def test_torch_binds_alike(tmp_path: Path) -> None:
    """The same made-up machine given to torch's own functions, with its paths led there."""
    torch_binding = pytest.importorskip("torch.numa.binding")
    assert {mode.value for mode in torch_binding.AffinityMode} == set(MODES)
    machine = Machine(tmp_path, gpus=(0, 0, 1, 2))
    script = f"""
import builtins, os
from types import SimpleNamespace
import torch, torch.numa.binding as binding
real_open, real_listdir = builtins.open, os.listdir
lead = lambda path: {str(tmp_path)!r} + str(path)[4:] if str(path).startswith("/sys/") else path
builtins.open = lambda path, *a, **k: real_open(lead(path), *a, **k)
os.listdir = lambda path=".": real_listdir(lead(path))
os.sched_getaffinity = lambda pid: set(range(64))
torch.cuda.device_count = lambda: 4
torch.cuda.get_device_properties = lambda i: SimpleNamespace(pci_domain_id=0, pci_bus_id=0xA0 + i, pci_device_id=0)
for mode in binding.AffinityMode:
    for index in range(4):
        cpus = binding._get_logical_cpus_to_bind_to(gpu_index=index, numa_options=binding.NumaOptions(mode))
        print(mode.value, index, binding._get_ranges_str_from_ints(cpus))
"""
    machine.write("devices/system/node/possible", "0-3")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    theirs = done.stdout.split("\n")[:-1]
    ours = [
        f"{mode} {index} {cpus}"
        for mode in MODES
        for index, cpus in enumerate(bound(machine, mode, [gpu(i) for i in range(4)]))
    ]
    assert theirs == ours
