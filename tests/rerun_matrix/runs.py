"""The runs of the matrix: what breaks in each, and what the right answer is. From a seed; no torch."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

NUM_ITERATIONS = 6
SAVE_INTERVAL = 2
MODEL = "norm.weight"


@dataclass(frozen=True)
class Expected:
    """The ground truth. `verdicts`: the sequences of verdicts that are right (mostly one). `accused`: all devices that
    verdicts of `persistent` name, none else. `ends`: `finished`, `left`, `no second device`, `no device left`. `result`: whose
    parameters the run ends with: `undisturbed`, `skipped` (the poisoned iterations left out), or empty where nothing is said.
    """

    verdicts: tuple[tuple[str, ...], ...]
    accused: frozenset[str] = frozenset()
    ends: str = "finished"
    result: str = "undisturbed"
    may_stay_open: bool = False
    """It depends on the placements whether a device that never failed computes the data of enough ranks."""
    may_be_undecided_first: bool = False
    """Audits of iterations in which the difference is hardly larger than the tolerance."""


@dataclass(frozen=True)
class Run:
    """One training run. Devices D0, D1, ... serve ranks 0, 1, ...; S0, S1, ... are spares."""

    name: str
    number: int
    world_size: int
    faults: tuple[str, ...]
    expected: Expected
    dropout: bool = False
    own_position: bool = False
    """The loader has a position of its own that does not follow from the samples consumed."""
    kill_at: tuple[int, int, int] | None = None
    """(attempt, iteration, pass): all ranks die at the head of that pass."""
    num_spares: int = 1
    models: tuple[tuple[str, str], ...] = ()
    """Devices of another model than the others."""
    on_application: str = "exit"
    on_transient: str = "continue"
    audit_interval: int = 0

    def __str__(self) -> str:
        extras = [
            "dropout" if self.dropout else "",
            "own position" if self.own_position else "",
            f"killed in attempt {self.kill_at[0]} at {self.kill_at[1]}/{self.kill_at[2]}" if self.kill_at else "",
        ]
        return f"#{self.number} {self.name}, {self.world_size} ranks, {' + '.join(self.faults) or 'no fault'}" + "".join(
            f", {text}" for text in extras if text
        )

    @property
    def devices(self) -> list[str]:
        """Those that serve ranks at the start."""
        return [f"D{rank}" for rank in range(self.world_size)]

    @property
    def spares(self) -> list[str]:
        """Those that do not."""
        return [f"S{i}" for i in range(self.num_spares)]


VISIBLE = (
    "kind=nan,site=loss",
    "kind=inf,site=loss",
    f"kind=nan,site=grad,param={MODEL}",
    f"kind=inf,site=grad,param={MODEL}",
    f"kind=bitflip,site=grad,bit=30,param={MODEL}",
    "kind=bitflip,site=grad,bit=30,param=out.weight",
)
SILENT = ("kind=scale,factor=1.5,site=grad,param=out.weight", "kind=bitflip,bit=22,site=grad,param=out.weight")
Make = Callable[[random.Random], Run]


def _run(name: str, world_size: int, faults: list[str], expected: Expected, **options: object) -> Run:
    return replace(Run(name, 0, world_size, tuple(faults), expected), **options)  # type: ignore[arg-type]


def _truth(
    verdicts: str | list[str], accused: str | list[str] = "", ends: str = "finished", result: str = "undisturbed"
) -> Expected:
    one = (verdicts,) if isinstance(verdicts, str) and verdicts else tuple(verdicts)
    names = accused.split() if isinstance(accused, str) else accused
    return Expected((one,), frozenset(names), ends, result if ends == "finished" else "")


def _iteration(draw: random.Random) -> int:
    return draw.randint(1, NUM_ITERATIONS)


def healthy(draw: random.Random) -> Run:
    return _run("healthy", draw.choice((1, 2, 3, 4)), [], _truth([]))


def transient(draw: random.Random) -> Run:
    world_size = draw.choice((1, 2, 3, 4))
    fault = f"rank={draw.randrange(world_size)},iteration={_iteration(draw)},{draw.choice(VISIBLE)}"
    return _run("transient", world_size, [fault], _truth("transient"), on_transient=draw.choice(("continue", "restart")))


def transients(draw: random.Random) -> Run:
    world_size, iteration = draw.choice((2, 3, 4)), _iteration(draw)
    ranks = draw.sample(range(world_size), draw.randint(2, world_size))
    faults = [f"rank={rank},iteration={iteration},{draw.choice(VISIBLE)}" for rank in ranks]
    return _run("transient on several ranks", world_size, faults, _truth("transient"))


def _since(draw: random.Random) -> str:
    first = _iteration(draw)
    return f",from={first}" if first > 1 else ""


def persistent(draw: random.Random) -> Run:
    world_size = draw.choice((2, 3, 3, 4))
    device = f"D{draw.randrange(world_size)}"
    fault = f"device={device},{draw.choice(VISIBLE)}{_since(draw)}"
    return _run("persistent", world_size, [fault], _truth("persistent", device))


def two_devices(draw: random.Random) -> Run:
    first = draw.randrange(4)
    second = (first + draw.randint(1, 3)) % 4
    faults = [f"device=D{n},{draw.choice(VISIBLE)}" for n in (first, second)]
    accused = frozenset({f"D{first}", f"D{second}"})
    return _run(
        "two faulty devices",
        4,
        faults,
        Expected((("persistent",), ("persistent", "persistent")), accused),
        num_spares=2,
    )


def faulty_neighbours(draw: random.Random) -> Run:
    """Two of three: the only witness is the third."""
    first = draw.randrange(3)
    second = (first + 1) % 3
    faults = [f"device=D{n},{draw.choice(VISIBLE)}" for n in (first, second)]
    accused = frozenset({f"D{first}", f"D{second}"})
    return _run(
        "suspect neighbour fails too",
        3,
        faults,
        Expected((("persistent",), ("persistent", "persistent")), accused),
        num_spares=2,
    )


def silent_neighbour(draw: random.Random) -> Run:
    """The rank that computes the suspect's data has a device that is wrong in silence: no proof of anything, but no accusation
    of a healthy one either."""
    world_size = draw.choice((3, 4))
    bad = draw.randrange(world_size)
    iteration = _iteration(draw)
    faults = [f"kind=nan-data,iteration={iteration},rank={(bad - 1) % world_size}", f"device=D{bad},{draw.choice(SILENT)}"]
    return _run(
        "silent neighbour",
        world_size,
        faults,
        Expected((("application",),), ends="left", result=""),
        num_spares=1,
    )


def data_dependent(draw: random.Random) -> Run:
    world_size = draw.choice((2, 3, 4))
    device = f"D{draw.randrange(world_size)}"
    modulus = draw.choice((2, 2, 3))
    fault = f"device={device},{draw.choice(VISIBLE)},when={draw.randrange(modulus)}/{modulus}"
    return _run("data-dependent", world_size, [fault], Expected((("persistent",),), frozenset({device})))


def application(draw: random.Random) -> Run:
    world_size = draw.choice((2, 3, 4))
    fault = f"kind=nan-data,iteration={_iteration(draw)},rank={draw.randrange(world_size)}"
    if draw.random() < 0.5:
        return _run("application", world_size, [fault], _truth("application", ends="left"))
    return _run("application", world_size, [fault], _truth("application", result="skipped"), on_application="skip")


def applications(draw: random.Random) -> Run:
    world_size = draw.choice((3, 4))
    iteration = _iteration(draw)
    ranks = draw.sample(range(world_size), draw.randint(2, world_size - 1))
    faults = [f"kind=nan-data,iteration={iteration},rank={rank}" for rank in ranks]
    return _run(
        "application on several ranks", world_size, faults, _truth("application", result="skipped"), on_application="skip"
    )


def application_everywhere(draw: random.Random) -> Run:
    """Every rank fails: rotation cannot tell, a device that has not failed can; without a spare nobody can."""
    world_size = draw.choice((2, 3))
    iteration = _iteration(draw)
    faults = [f"kind=nan-data,iteration={iteration},rank={rank}" for rank in range(world_size)]
    num_spares = draw.choice((0, 1))
    expected = _truth([], ends="no second device")
    if num_spares:
        expected = replace(_truth("application", result="skipped"), may_stay_open=True)
    return _run("application on every rank", world_size, faults, expected, on_application="skip", num_spares=num_spares)


def every_device(draw: random.Random) -> Run:
    """All boards are bad and there is no other: the same picture as bad data everywhere."""
    world_size = draw.choice((2, 3))
    faults = [f"device=D{rank},kind=nan,site=loss" for rank in range(world_size)]
    expected = _truth([], ends="no second device")
    return _run("every device, no spare", world_size, faults, expected, on_application="skip", num_spares=0)


def alone_corrupted(draw: random.Random) -> Run:
    """No replica to compare with, but NaN in a parameter was there before the iteration."""
    kind = draw.choice(("nan", "inf"))
    fault = f"rank=0,iteration={_iteration(draw)},kind={kind},site=param,param={MODEL}"
    return _run("one rank, corrupted state", 1, [fault], _truth("corrupted state"))


def alone_persistent(draw: random.Random) -> Run:
    fault = f"device=D0,{draw.choice(VISIBLE)}{_since(draw)}"
    if draw.random() < 0.7:
        return _run("one rank, moved", 1, [fault], _truth("persistent", "D0"))
    return _run("one rank, no second device", 1, [fault], _truth([], ends="no second device"), num_spares=0)


def alone_application(draw: random.Random) -> Run:
    fault = f"kind=nan-data,iteration={_iteration(draw)}"
    if draw.random() < 0.7:
        return _run("one rank, moved", 1, [fault], _truth("application", result="skipped"), on_application="skip")
    return _run("one rank, no second device", 1, [fault], _truth([], ends="no second device"), num_spares=0)


def corrupted(draw: random.Random) -> Run:
    world_size = draw.choice((2, 3, 4))
    kind = draw.choice(("nan", "inf"))
    fault = f"rank={draw.randrange(world_size)},iteration={_iteration(draw)},kind={kind},site=param,param={MODEL}"
    return _run("corrupted state", world_size, [fault], _truth("corrupted state"))


def one_after_another(draw: random.Random) -> Run:
    """Bad data first, then a device that breaks."""
    world_size = draw.choice((2, 3, 4))
    iteration = draw.randint(1, 3)
    device = f"D{draw.randrange(world_size)}"
    faults = [
        f"kind=nan-data,iteration={iteration},rank={draw.randrange(world_size)}",
        f"device={device},{draw.choice(VISIBLE)},from={iteration + 1}",
    ]
    return _run(
        "one after another",
        world_size,
        faults,
        _truth(["application", "persistent"], device, result="skipped"),
        on_application="skip",
    )


def together(draw: random.Random) -> Run:
    """Bad data of one rank and a bad device of another in one iteration: first the device goes, then the data are judged."""
    world_size = draw.choice((3, 4))
    iteration = _iteration(draw)
    bad, poisoned = draw.sample(range(world_size), 2)
    faults = [f"kind=nan-data,iteration={iteration},rank={poisoned}", f"device=D{bad},{draw.choice(VISIBLE)},from={iteration}"]
    return _run(
        "data and device together",
        world_size,
        faults,
        _truth(["persistent", "application"], f"D{bad}", result="skipped"),
        on_application="skip",
    )


def with_a_transient(draw: random.Random) -> Run:
    world_size = draw.choice((3, 4))
    iteration = _iteration(draw)
    bad, struck = draw.sample(range(world_size), 2)
    faults = [
        f"rank={struck},iteration={iteration},{draw.choice(VISIBLE)}",
        f"device=D{bad},{draw.choice(VISIBLE)},from={iteration}",
    ]
    return _run("transient and device together", world_size, faults, _truth("persistent", f"D{bad}"))


def silent(draw: random.Random) -> Run:
    """Nothing shows, so nothing may be said."""
    world_size = draw.choice((2, 3))
    fault = f"device=D{draw.randrange(world_size)},{draw.choice(SILENT)}"
    return _run("silent, no audit", world_size, [fault], _truth([], result=""))


def audited(draw: random.Random) -> Run:
    world_size = draw.choice((3, 4))
    device = f"D{draw.randrange(world_size)}"
    fault = f"device={device},{draw.choice(SILENT)},from=2"
    truth = Expected((("persistent",),), frozenset({device}), result="", may_be_undecided_first=True)
    return _run("silent, audited", world_size, [fault], truth, audit_interval=1)


def audited_healthy(draw: random.Random) -> Run:
    return _run("healthy, audited", draw.choice((2, 3, 4)), [], _truth([]), audit_interval=draw.choice((1, 2)))


def unlike_suspect(draw: random.Random) -> Run:
    """The suspect's model has no like among the peers; the spare is one."""
    world_size = draw.choice((2, 3))
    rank = draw.randrange(world_size)
    fault = f"device=D{rank},{draw.choice(VISIBLE)}{_since(draw)}"
    return _run(
        "no like device among the ranks",
        world_size,
        [fault],
        _truth("persistent", f"D{rank}"),
        models=((f"D{rank}", "other"), ("S0", "other")),
    )


def unlike_neighbour(draw: random.Random) -> Run:
    """The next rank's device is of another model: the data go to the one after it."""
    rank = draw.randrange(4)
    fault = f"device=D{rank},{draw.choice(VISIBLE)}"
    return _run(
        "unlike neighbour",
        4,
        [fault],
        _truth("persistent", f"D{rank}"),
        models=((f"D{(rank + 1) % 4}", "other"),),
    )


CATEGORIES: dict[Make, int] = {
    healthy: 10,
    transient: 36,
    transients: 16,
    persistent: 40,
    two_devices: 16,
    faulty_neighbours: 12,
    silent_neighbour: 10,
    data_dependent: 24,
    application: 24,
    applications: 12,
    application_everywhere: 10,
    every_device: 6,
    alone_corrupted: 8,
    alone_persistent: 12,
    alone_application: 10,
    corrupted: 16,
    one_after_another: 10,
    together: 12,
    with_a_transient: 10,
    silent: 6,
    audited: 16,
    audited_healthy: 8,
    unlike_suspect: 10,
    unlike_neighbour: 8,
}


MOVING = (application_everywhere, every_device, alone_persistent, alone_application, unlike_suspect)
"""Where another placement has to decide."""


def all_runs(seed: int = 0, part: int = 1) -> list[Run]:
    """The matrix; with `part` n, every n-th run of each category, at least one."""
    runs = list(_numbered(seed))
    first_of = {run.name: run.number for run in reversed(runs)}
    return [run for run in runs if run.number % part == 0 or run.number == first_of[run.name]]


def _numbered(seed: int) -> Iterator[Run]:
    number = 0
    for make, count in CATEGORIES.items():
        for index in range(count):
            draw = random.Random(f"{seed}:{make.__name__}:{index}")
            run = make(draw)
            killed = None
            if draw.random() < 0.25 and run.faults:
                killed = (1, _fault_iteration(run), draw.choice((2, 3)))
                if make in MOVING and draw.random() < 0.6:  # in the replay from the checkpoint
                    killed = (2, _fault_iteration(run), 1)
                if "transient" in run.name or "corrupted" in run.name:  # over before anybody could tell
                    run = replace(run, expected=replace(run.expected, verdicts=(*run.expected.verdicts, ())))
            yield replace(run, number=number, dropout=draw.random() < 0.5, own_position=draw.random() < 0.4, kill_at=killed)
            number += 1


def _fault_iteration(run: Run) -> int:
    """The iteration in which it first strikes, as far as it is known."""
    found = [1]
    for part in run.faults[0].split(","):
        key, _, value = part.partition("=")
        if key in ("iteration", "from"):
            found = [int(value)]
    return found[0]
