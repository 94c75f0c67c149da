"""Every option that the design's seed names for the training loop: its default, and that it has an effect or is refused.

`section` is where the seed names it. A default of `ANY` means that the seed gives none. An option is implemented (its
effect is tested here), still to come (the parser refuses it by name), or belongs to the launcher.
"""

import dataclasses
import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import nvidia_resiliency_ext.inprocess
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from rsup.supervisor import wire
from rsup.supervisor.heartbeat_board import Board, SlotSample
from rsup.supervisor.wire import UsageError
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.optimizer_graph import OptimizerGraph
from rsup.worker.inprocess.entry_store import AttemptStore
from rsup.worker.inprocess.groups import OldGroups
from rsup.worker.inprocess.job_store import JobStore
from rsup.worker.inprocess.leftovers import Leftovers
from rsup.worker.inprocess.settings import InProcessSettings
from rsup.worker.inprocess.timings import RestartTimings
from rsup.worker.inprocess.wrapping import _Run
from rsup.worker.observe.timers import Timers
from rsup.worker.reference import graph_training
from rsup.worker.reference.command_line import make_parser, parse_options
from rsup.worker.reference.hooks import make_sections
from rsup.worker.reference.later_options import STILL_TO_COME
from rsup.worker.reference.options import Options
from rsup.worker.reference.ranks import joined
from rsup.worker.reference.run_parts import log_options
from rsup.worker.reference.trainer import Trainer
from rsup.worker.rerun.contract import RankDevice

ANY = object()
IMPLEMENTED, LATER, LAUNCHER = "implemented", "still to come", "launcher"

SEED_FLAGS = [
    # flag, default, section, where it is
    ("--no-check-for-nan-in-loss-and-grad", False, "1.1", IMPLEMENTED),
    ("--check-for-spiky-loss", False, "1.1", IMPLEMENTED),
    ("--check-for-large-grads", False, "1.1", IMPLEMENTED),
    ("--result-rejected-tracker-filename", None, "1.1", IMPLEMENTED),
    ("--rerun-mode", "validate_results", "1.1", IMPLEMENTED),
    ("--error-injection-rate", 0, "1.1", IMPLEMENTED),
    ("--error-injection-type", "transient_error", "1.1", IMPLEMENTED),
    ("--ft-param-rank_section_timeouts", ANY, "1.2", LAUNCHER),
    ("--ft-param-rank_out_of_section_timeout", ANY, "1.2", LAUNCHER),
    ("--ft-num-warmup-iters", 5, "1.2", IMPLEMENTED),
    ("--calc-ft-timeouts", False, "1.2", IMPLEMENTED),
    ("--enable-ft-package", False, "1.2", IMPLEMENTED),
    ("--inprocess-restart", False, "1.3", IMPLEMENTED),
    ("--inprocess-granularity", "node", "1.3", IMPLEMENTED),
    ("--inprocess-max-iterations", None, "1.3", IMPLEMENTED),
    ("--inprocess-monitor-thread-interval", 1.0, "1.3", IMPLEMENTED),
    ("--inprocess-monitor-process-interval", 1.0, "1.3", IMPLEMENTED),
    ("--inprocess-progress-watchdog-interval", 1.0, "1.3", IMPLEMENTED),
    ("--inprocess-heartbeat-interval", 30.0, "1.3", IMPLEMENTED),
    ("--inprocess-heartbeat-timeout", 60.0, "1.3", IMPLEMENTED),
    ("--inprocess-soft-timeout", 60.0, "1.3", IMPLEMENTED),
    ("--inprocess-hard-timeout", 90.0, "1.3", IMPLEMENTED),
    ("--inprocess-barrier-timeout", 120.0, "1.3", IMPLEMENTED),
    ("--inprocess-completion-timeout", 120.0, "1.3", IMPLEMENTED),
    ("--inprocess-last-call-wait", 0.0, "1.3", IMPLEMENTED),
    ("--inprocess-termination-grace-time", 1.0, "1.3", IMPLEMENTED),
    ("--inprocess-active-world-size", None, "1.3", IMPLEMENTED),
    ("--inprocess-empty-cuda-cache", False, "1.3", IMPLEMENTED),
    ("--exit-signal-handler", False, "1.4", IMPLEMENTED),
    ("--save", None, "1.4", IMPLEMENTED),
    ("--save-interval", None, "1.4", IMPLEMENTED),
    ("--non-persistent-save-interval", None, "1.4", IMPLEMENTED),
    ("--exit-duration-in-mins", None, "1.4", IMPLEMENTED),
    ("--exit-interval", None, "1.4", IMPLEMENTED),
    ("--phase-transition-iterations", (), "1.4", IMPLEMENTED),
    ("--log-interval", ANY, "2.1", IMPLEMENTED),
    ("--log-throughput", False, "2.1", IMPLEMENTED),
    ("--log-num-zeros-in-grad", False, "2.1", IMPLEMENTED),
    ("--log-energy", False, "2.1", IMPLEMENTED),
    ("--tensorboard-log-interval", 1, "2.1", IMPLEMENTED),
    ("--log-loss-scale-to-tensorboard", True, "2.1", IMPLEMENTED),
    ("--log-world-size-to-tensorboard", False, "2.1", IMPLEMENTED),
    ("--log-memory-to-tensorboard", False, "2.1", IMPLEMENTED),
    ("--timing-log-level", 0, "2.2", IMPLEMENTED),
    ("--timing-log-option", "minmax", "2.2", IMPLEMENTED),
    ("--no-barrier-with-level-1-timing", False, "2.2", IMPLEMENTED),
    ("--log-straggler", False, "2.2", IMPLEMENTED),
    ("--log-memory-interval", None, "2.3", IMPLEMENTED),
    ("--save-grads", False, "2.4", IMPLEMENTED),
    ("--save-wgrads", False, "2.4", IMPLEMENTED),
    ("--cuda-graph-impl", "none", "3", IMPLEMENTED),
    ("--cuda-graph-warmup-steps", 3, "3.1", IMPLEMENTED),
    ("--cuda-graph-use-single-mempool", True, "3.1", IMPLEMENTED),
    ("--optimizer-cuda-graph", False, "3.2", IMPLEMENTED),
    ("--cuda-graph-modules", (), "3.3", LATER),
    ("--attention-dropout", ANY, "3.3", IMPLEMENTED),
    ("--hidden-dropout", ANY, "3.3", IMPLEMENTED),
    ("--moe-input-jitter-eps", None, "3.3", LATER),
    ("--cpu-offloading", False, "3.3", LATER),
    ("--fine-grained-offloading-max-inflight-offloads", None, "3.3", IMPLEMENTED),
    ("--moe-expert-rank-capacity-factor", None, "5", LATER),
    ("--empty-unused-memory-level", 0, "5", IMPLEMENTED),
]
NAMES = {where: [flag for flag, _, _, place in SEED_FLAGS if place == where] for where in (IMPLEMENTED, LATER, LAUNCHER)}


def test_no_flag_is_forgotten_or_named_twice() -> None:
    assert len({flag for flag, *_ in SEED_FLAGS}) == len(SEED_FLAGS)
    assert sorted(NAMES[LATER]) == sorted(STILL_TO_COME)
    assert sorted(NAMES[IMPLEMENTED]) == sorted(EFFECTS)


@pytest.mark.parametrize("flag", NAMES[IMPLEMENTED])
def test_the_default_is_the_seeds(flag: str) -> None:
    (default,) = (default for name, default, *_ in SEED_FLAGS if name == flag)
    (option,) = (option for option in dataclasses.fields(Options) if f"--{option.name.replace('_', '-')}" == flag)
    parsed = getattr(parse_options([]), option.name)
    assert default is ANY or (parsed == default and type(parsed) is type(default))


@pytest.mark.parametrize("flag", NAMES[LATER])
def test_what_is_still_to_come_is_refused_by_name(flag: str) -> None:
    for argument in (flag, f"{flag}=1"):
        with pytest.raises(UsageError, match=f"^{flag} is not available yet$"):
            parse_options([argument])
    assert flag not in make_parser().format_help()


@pytest.mark.parametrize("flag", NAMES[LAUNCHER])
def test_the_launchers_options_are_sent_there(flag: str) -> None:
    for argument in (flag, flag.replace("_", "-"), f"{flag}=1"):
        with pytest.raises(UsageError, match="is an option of rsup launch"):
            parse_options([argument])


# ------------------------------------------------------------------------------------------------------------- effects


class FakeAgent:
    """A board with one slot, and the agent's end of a rank's socket."""

    def __init__(self, folder: Path) -> None:
        self.board = Board.create(1, folder, shared_memory=folder)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(folder / "rank.sock"))
        self._listener.listen()
        self._listener.settimeout(60)
        self.environment = {
            "RSUP_BOARD": str(self.board.path),
            "RSUP_RANK_SOCKET": str(folder / "rank.sock"),
            "RSUP_ATTEMPT": "1",
            "RSUP_JOB_ID": "job",
        }
        self._link: socket.socket | None = None

    def accept(self) -> None:
        """Wait for the rank; the link of the one before goes."""
        if self._link is not None:
            self._link.close()
        self._link, _ = self._listener.accept()
        self._link.settimeout(60)

    def send(self, message: wire.AgentToRank) -> None:
        assert self._link is not None
        self._link.send(wire.encode(message))

    def receive_all(self) -> list[wire.RankToAgent]:
        """All that the rank has sent; it has ended."""
        assert self._link is not None
        messages = []
        while data := self._link.recv(wire.MAX_RANK_MESSAGE_BYTES):
            messages.append(wire.decode_rank_to_agent(data))
        return messages

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._listener.close()
        self.board.close()


@dataclass
class Bench:
    """What an effect is shown with."""

    runs: object
    agent: FakeAgent
    save: Path

    def text(self, *arguments: str) -> str:
        """Output of a run of one rank."""
        run = self.runs.run(1, *arguments)
        assert run.codes() == [0], run.text()
        return run.text()

    def slot(self, *arguments: str) -> SlotSample:
        """The rank's slot after a run under the fake agent."""
        run = self.runs.start(1, "--save", str(self.save), *arguments, environment=self.agent.environment)
        self.agent.accept()
        assert run.finish() == [0], run.text()
        return self.agent.board.read(0)

    def digest(self, *arguments: str) -> str:
        """Digest of a short run."""
        return self.text("--iterations", "3", *arguments).splitlines()[-1]


@pytest.fixture
def bench(runs, own_directories: Path, tmp_path: Path) -> Iterator[Bench]:
    agent = FakeAgent(own_directories)
    yield Bench(runs, agent, tmp_path / "save")
    agent.close()


def entered(sample: SlotSample) -> dict[str, int]:
    return {section.name: section.entered for section in sample.sections}


def sections_only_when_enabled(bench: Bench) -> None:
    sample = bench.slot("--iterations", "8")
    assert entered(sample) == {} and sample.iteration == 8
    bench.save = bench.save.with_name("enabled")
    sample = bench.slot("--iterations", "8", "--save-interval", "4", "--enable-ft-package")
    assert {"setup", "step", "checkpointing"} <= set(entered(sample))
    assert entered(sample)["setup"] == 1 and sample.checkpoints == 2 and sample.train_steps == 8
    assert not any(section.open_since_ns for section in sample.sections)


def warmup_steps_are_outside(bench: Bench) -> None:
    for warmup, steps in (("5", 3), ("2", 6), ("0", 8)):
        bench.save = bench.save.with_name(f"warmup-{warmup}")
        sample = bench.slot("--iterations", "8", "--enable-ft-package", "--ft-num-warmup-iters", warmup)
        assert entered(sample)["step"] == steps


def limits_are_kept_beside_the_checkpoints(bench: Bench) -> None:
    for flags, written in (((), False), (("--calc-ft-timeouts",), True)):
        bench.save = bench.save.with_name(f"limits-{written}")
        options = ("--iterations", "1000000", "--enable-ft-package", "--exit-signal-handler", "--log-interval", "5")
        run = bench.runs.start(1, "--save", str(bench.save), *options, *flags, environment=bench.agent.environment)
        bench.agent.accept()
        bench.agent.send(wire.LimitsNow(wire.Limits(sections={"step": 12.5, "setup": 60.0}, calculated=["step"])))
        bench.agent.send(wire.SaveNow("behind the limits"))
        run.wait_for(lambda run=run: "is durable" in run.text(), "a save that was asked for when the rank had the limits")
        run.signal(0, signal.SIGTERM)
        assert run.finish() == [0]
        assert (bench.save / "ft_state.json").exists() == written
    state = json.loads((bench.save / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert state["section"] == {"step": 12.5, "setup": 60.0}
    assert state["calculated_sections"] == ["step"] and state["out_of_section"] is None


def the_signal_saves(bench: Bench) -> None:
    for flags, code in (((), -signal.SIGTERM), (("--exit-signal-handler",), 0)):
        run = bench.runs.start(1, "--iterations", "1000000", "--save", str(bench.save), *flags)
        run.wait_for(lambda run=run: re.search(r"iteration +1/", run.text()) is not None, "training")
        run.signal(0, signal.SIGTERM)
        assert run.finish() == [code]
    assert len(list(bench.save.glob("iter_*"))) == 1


def checkpoints_are_written(bench: Bench) -> None:
    bench.text("--iterations", "3")
    assert not bench.save.exists()
    bench.text("--iterations", "3", "--save", str(bench.save))
    assert [path.name for path in bench.save.glob("iter_*")] == ["iter_0000003"]


def checkpoints_come_at_intervals(bench: Bench) -> None:
    bench.text("--iterations", "5", "--save", str(bench.save), "--save-interval", "2")
    assert sorted(path.name for path in bench.save.glob("iter_*")) == ["iter_0000002", "iter_0000004", "iter_0000005"]


def local_checkpoints_come_at_intervals(bench: Bench) -> None:
    options = ("--iterations", "7", "--save-interval", "4", "--non-persistent-save-interval", "2", "--no-async-save")
    local = ("--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", str(bench.save.with_name("local")))
    text = bench.text(*options, *local, "--save", str(bench.save))
    assert re.findall(r"local checkpoint of iteration (\d+) is whole", text) == ["2", "6"]  # at 4 there is a durable one


TINY = "num-layers=1 hidden-size=16 num-attention-heads=2 seq-length=16 micro-batch-size=2 iterations=1 eval-iters=1"
EMPTYING = """
import sys
import rsup.worker.reference.evaluate as evaluate, rsup.worker.reference.training_step as training_step
from rsup.worker.reference.train import run_as_program
def told(level, at_level, device):
    print(f"level {level} at {at_level}")
evaluate.empty_unused_memory = training_step.empty_unused_memory = told
sys.argv = ["train", *%r]
run_as_program()
"""


def unused_memory_is_emptied_at_levels(bench: Bench) -> None:
    """That level 1 empties at 1 and level 2 at both: `test_optimizer_offload.py`."""
    script = bench.save.with_name("emptying.py")
    arguments = [*(f"--{option}" for option in TINY.split()), "--empty-unused-memory-level", "2"]
    script.write_text(EMPTYING % (arguments,))
    run = bench.runs.start(1, script=script)
    assert run.finish() == [0], run.text()
    assert re.findall(r"level 2 at (\d)", run.text()) == ["1", "2", "1"]  # backward pass, optimizer, evaluation step


def the_duration_ends_it(bench: Bench) -> None:
    assert "the time budget is used up" in bench.text("--iterations", "1000000", "--exit-duration-in-mins", "0.005")


def the_interval_ends_it(bench: Bench) -> None:
    assert "leaving after iteration 4:" in bench.text("--iterations", "10", "--exit-interval", "4")


def a_phase_ends_it(bench: Bench) -> None:
    assert "leaving after iteration 3: iteration 3 ends a phase" in bench.text(
        "--iterations", "10", "--phase-transition-iterations", "3,7", "--save", str(bench.save)
    )


def lines_come_at_intervals(bench: Bench) -> None:
    said = re.findall(r"iteration +(\d+)/", bench.text("--iterations", "9", "--log-interval", "4"))
    assert said == ["1", "4", "8"]


def attention_dropout_changes_the_result(bench: Bench) -> None:
    none = ("--hidden-dropout", "0", "--attention-dropout")
    assert bench.digest(*none, "0") != bench.digest(*none, "0.5")


def hidden_dropout_changes_the_result(bench: Bench) -> None:
    none = ("--attention-dropout", "0", "--hidden-dropout")
    assert bench.digest(*none, "0") != bench.digest(*none, "0.5")


TRANSIENT = "--fault=rank=0,iteration=3,kind=nan,site=loss"


def the_mode_decides_what_a_rejection_does(bench: Bench) -> None:
    """P1, S1, S19: every mode's name is taken, and each does something else."""
    faulty = ("--iterations", "5", "--save", str(bench.save), TRANSIENT)
    disabled = bench.runs.run(1, *faulty, "--rerun-mode", "disabled")
    assert disabled.codes() == [1] and "NaN in loss at iteration 3" in disabled.text()
    said = bench.text(*faulty, "--fault=rank=0,iteration=4,kind=nan,site=loss", "--rerun-mode", "validate_results")
    assert "iteration 4 (found on rank 0): transient" in said
    for name in ("report_stats", "report_determinism_stats"):
        assert "determinism of 'loss': 5 samples, all identical" in bench.text("--iterations", "5", "--rerun-mode", name)
    assert "--rerun-mode audit and" in bench.runs.run(1, "--rerun-mode", "audit").text()


def nan_can_be_let_through(bench: Bench) -> None:
    poisoned = ("--iterations", "5", "--log-interval", "1", "--fault=kind=nan-data,iteration=3")
    text = bench.text(*poisoned, "--no-check-for-nan-in-loss-and-grad")
    assert "lm loss: nan" in text and "rerun:" not in text


def large_values_are_found(bench: Bench, flag: str, site: str) -> None:
    for flags, is_found in (((), False), ((flag,), True)):
        save = ("--save", str(bench.save.with_name(f"found-{is_found}")))
        fault = f"--fault=rank=0,iteration=110,kind=scale,factor=1e6,site={site}"
        text = bench.text("--iterations", "112", *save, fault, *flags)
        assert ("rerun: iteration 110 (found on rank 0): transient" in text) == is_found and "injected fault" in text


def spiky_losses_are_found(bench: Bench) -> None:
    """P26."""
    large_values_are_found(bench, "--check-for-spiky-loss", "loss")


def large_gradients_are_found(bench: Bench) -> None:
    large_values_are_found(bench, "--check-for-large-grads", "grad")


def rejections_are_written(bench: Bench) -> None:
    name = bench.save.with_name("rejected")
    bench.text("--iterations", "5", "--save", str(bench.save), TRANSIENT, "--result-rejected-tracker-filename", str(name))
    (file,) = name.parent.glob("rejected*")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["iteration"] for line in lines} == {3}
    assert [line["status"] for line in lines][:2] == ["INITIAL_RUN", "FIRST_RERUN_NOT_REPRODUCIBLE"]


def errors_are_injected_at_a_rate(bench: Bench) -> None:
    assert "rerun:" not in bench.text("--iterations", "10")
    assert "transient" in bench.text("--iterations", "10", "--error-injection-rate", "4")


def errors_are_injected_of_a_type(bench: Bench) -> None:
    for kind, code in (("transient_error", 0), ("persistent_error", 16), ("correct_result", 16)):
        save = bench.save.with_name(kind)
        injection = ("--error-injection-rate", "4", "--error-injection-type", kind)
        assert bench.runs.run(1, "--iterations", "10", "--save", str(save), *injection).codes() == [code]


def training_is_entered_again(bench: Bench) -> None:
    """With the flag an exception ends an entry, without it the process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("rsup/entry/port/1", str(store.port))  # as a keeper says it
    store.set("rsup/entry/port/2", str(store.port))
    fault = ("--iterations", "3", "--save", str(bench.save), "--fault", "rank=0,iteration=2,kind=exception")
    environment = {**bench.agent.environment, "MASTER_PORT": str(store.port)}
    for flags, code in ((), 1), (("--inprocess-restart",), 0):
        run = bench.runs.start(1, *fault, *flags, job=f"job{code}", environment={**environment, "RSUP_JOB_ID": f"j{code}"})
        bench.agent.accept()
        assert run.finish() == [code], run.text()
    entered = [message.entry for message in bench.agent.receive_all() if isinstance(message, wire.RankEntered)]
    assert entered == [1, 2]


def wrapper_of(*arguments: str) -> tuple[dict[str, Any], InProcessSettings]:
    """What NVRx's Wrapper is made with for that command line, on four ranks."""
    settings = parse_options(["--inprocess-restart", *arguments], world_size=4).inprocess_settings
    run = _Run.__new__(_Run)
    run._settings, run._world_size, run._local_world_size, run._death = settings, 4, 2, 0
    run._attempt_store, run._store = AttemptStore("127.0.0.1", 1), JobStore("127.0.0.1", 1)
    run._timings = RestartTimings()
    run._groups = OldGroups(run._timings)
    run._leftovers = Leftovers(run._store, print, lambda *_: None, settings.hard_timeout)
    made: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvidia_resiliency_ext.inprocess, "Wrapper", lambda **parts: made.update(parts))
        run._wrapper()
    return made, settings


def reaches_nvrx(name: str) -> Callable[[Bench], None]:
    """The time goes to NVRx's parameter of that name; what NVRx does with it is its own tests' business."""

    def effect(bench: Bench) -> None:
        seconds = {"heartbeat_timeout": 45.5, "monitor_process_interval": 0.25}.get(name, 2.5)  # times have an order
        made, _ = wrapper_of(f"--inprocess-{name.replace('_', '-')}", str(seconds))
        assert made[name] == timedelta(seconds=seconds) != wrapper_of()[0][name]

    return effect


def entries_are_limited(bench: Bench) -> None:
    def limits(*arguments: str) -> int | None:
        (found,) = [part for part in wrapper_of(*arguments)[0]["initialize"].instances if hasattr(part, "max_iterations")]
        most: int | None = found.max_iterations
        return most

    assert limits() is None
    assert limits("--inprocess-max-iterations", "7") == 7


def reserves_are_kept(bench: Bench) -> None:
    assert type(wrapper_of()[0]["rank_assignment"]).__name__ == "SameSeats"
    made, settings = wrapper_of("--inprocess-active-world-size", "2")
    assert (settings.reserves(4), made["rank_assignment"].layers[0].max_ranks) == (2, 2)


def reserves_are_nodes_or_ranks(bench: Bench) -> None:
    active = ("--inprocess-active-world-size", "2")
    for granularity, num_layers in (("node", 2), ("rank", 1)):
        made, _ = wrapper_of(*active, "--inprocess-granularity", granularity)
        assert len(made["rank_assignment"].layers) == num_layers


def the_cache_is_emptied(bench: Bench) -> None:
    for flags, emptied in (((), 0), (("--inprocess-empty-cuda-cache",), 1)):
        made, _ = wrapper_of(*flags)
        calls: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.cuda.is_initialized", lambda: True)
            patch.setattr("rsup.worker.inprocess.callbacks.devices_in_use", list)
            patch.setattr("torch.cuda.empty_cache", lambda calls=calls: calls.append(1))
            made["finalize"]._clean_up = lambda: None
            made["finalize"]._leave()
        assert len(calls) == emptied


IN_PROCESS_TIMES = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "progress_watchdog_interval",
    "heartbeat_interval",
    "heartbeat_timeout",
    "completion_timeout",
    "last_call_wait",
    "termination_grace_time",
)


def soft_hard_and_barrier_are_passed_on(bench: Bench) -> None:
    times = ("--inprocess-soft-timeout", "3", "--inprocess-hard-timeout", "4", "--inprocess-barrier-timeout", "70")
    made, _ = wrapper_of(*times)
    assert [made[f"{name}_timeout"].total_seconds() for name in ("soft", "hard", "barrier")] == [3, 4, 70]


def made_of(*arguments: str) -> tuple[Trainer, dict[str, dict[str, Any]]]:
    """A trainer of one rank, and what its graphs were made with: `training`, `evaluation`, `optimizer`."""
    options = parse_options([*(f"--{option}" for option in TINY.split()), "--device", "cpu", *arguments], world_size=1)
    made: dict[str, dict[str, Any]] = {}

    class Recorded(FullIterationGraph):
        def __init__(self, *parts: Any, **chosen: Any) -> None:
            made[chosen["name"]] = chosen
            super().__init__(*parts, **chosen)

    class RecordedOptimizer(OptimizerGraph):
        def __init__(self, *parts: Any, **chosen: Any) -> None:
            made["optimizer"] = chosen
            super().__init__(*parts, **chosen)

    with pytest.MonkeyPatch.context() as patch, joined(torch.device("cpu"), 30) as ranks:
        patch.setattr(graph_training, "FullIterationGraph", Recorded)
        patch.setattr(graph_training, "OptimizerGraph", RecordedOptimizer)
        return Trainer(options, ranks, make_sections(False, 0), False, RankDevice("CPU-a")), made


GRAPH = ("--cuda-graph-impl", "full_iteration")


def iterations_become_a_graph(bench: Bench) -> None:
    """That both ways give the same: `test_graph_trainer.py`."""
    assert made_of()[1] == {}
    assert set(made_of(*GRAPH)[1]) == {"training", "evaluation", "optimizer"}


def the_graphs_warm_up(bench: Bench) -> None:
    for flags, steps in (((), 3), (("--cuda-graph-warmup-steps", "5"), 5)):
        assert {chosen["warmup_steps"] for chosen in made_of(*GRAPH, *flags)[1].values()} == {steps}


def the_graphs_share_memory(bench: Bench) -> None:
    for flags, shared in (((), True), (("--no-cuda-graph-use-single-mempool",), False)):
        made = made_of(*GRAPH, *flags)[1]
        (capture,) = {chosen["capture"] for chosen in made.values()}
        assert capture.use_single_mempool is shared


def the_optimizer_becomes_a_graph(bench: Bench) -> None:
    for flags, captures in (((), False), (("--optimizer-cuda-graph",), True)):
        assert made_of(*GRAPH, *flags)[1]["optimizer"]["captures"] is captures


def copies_in_flight_are_limited(bench: Bench) -> None:
    assert made_of()[0].module.offload is None
    limit = ("--activation-offload", "--fine-grained-offloading-max-inflight-offloads", "2")
    offload = made_of(*GRAPH, *limit)[0].module.offload
    assert offload is not None and offload.max_inflight == 2


IN_THE_LOG = {
    "--log-throughput": ("log_throughput", True),
    "--log-energy": ("log_energy", True),
    "--log-memory-to-tensorboard": ("log_memory", True),
    "--log-world-size-to-tensorboard": ("log_world_size", True),
    "--no-log-loss-scale-to-tensorboard": ("log_loss_scale", False),
    "--tensorboard-log-interval=3": ("writer_interval", 3),
    "--timing-log-option=all": ("timer_option", "all"),
}
"""What a flag changes in the training log's options. That each of these works: `test_training_log.py`."""


def reaches_the_log(argument: str) -> Callable[[Bench], None]:
    def reaches(bench: Bench) -> None:
        field, value = IN_THE_LOG[argument]
        made = [log_options(parse_options(words)) for words in ([], [argument])]
        assert [getattr(options, field) == value for options in made] == [False, True]

    return reaches


def zeros_are_counted(bench: Bench) -> None:
    for flags, is_counted in (((), False), (("--log-num-zeros-in-grad",), True)):
        assert (re.search(r"num zeros: \d+ \|", bench.text("--iterations", "1", *flags)) is not None) == is_counted


def memory_is_reported_at_intervals(bench: Bench) -> None:
    said = re.findall(r"\(after (\d+) iterations\) memory", bench.text("--iterations", "8", "--log-memory-interval", "3"))
    assert said == ["1", "3", "6"]


def stragglers_are_looked_for(bench: Bench) -> None:
    for flags, is_said in (((), False), (("--log-straggler",), True)):
        assert (" stragglers, iterations" in bench.text("--iterations", "4", "--log-interval", "2", *flags)) == is_said


def timers_have_levels(bench: Bench) -> None:
    seen = [bench.text("--iterations", "2", "--timing-log-level", level) for level in "012"]
    assert ["forward-backward .." in text for text in seen] == [False, True, True]
    assert ["forward-compute .." in text for text in seen] == [False, False, True]


def ranks_meet_at_timers(bench: Bench) -> None:
    for flags, meet in (((), True), (("--no-barrier-with-level-1-timing",), False)):
        timers = made_of("--timing-log-level", "1", *flags)[0]._observed.timers
        assert isinstance(timers, Timers) and timers._barrier_with_level_1 is meet


def gradients_are_dumped(bench: Bench) -> None:
    for flag, labels in (("--save-wgrads", {"wgrads"}), ("--save-grads", {"wgrads", "dgrads"})):
        save = bench.save.with_name(flag)
        bench.text("--iterations", "2", "--save", str(save), "--save-interval", "2", flag)
        assert {path.parts[-3] for path in save.glob("*/iter_0000002/mp_rank_00.pth")} == labels


EFFECTS: dict[str, Callable[[Bench], None]] = {
    "--cuda-graph-impl": iterations_become_a_graph,
    "--cuda-graph-warmup-steps": the_graphs_warm_up,
    "--cuda-graph-use-single-mempool": the_graphs_share_memory,
    "--optimizer-cuda-graph": the_optimizer_becomes_a_graph,
    "--fine-grained-offloading-max-inflight-offloads": copies_in_flight_are_limited,
    "--inprocess-restart": training_is_entered_again,
    **{f"--inprocess-{name.replace('_', '-')}": reaches_nvrx(name) for name in IN_PROCESS_TIMES},
    **{f"--inprocess-{name}-timeout": soft_hard_and_barrier_are_passed_on for name in ("soft", "hard", "barrier")},
    "--inprocess-max-iterations": entries_are_limited,
    "--inprocess-active-world-size": reserves_are_kept,
    "--inprocess-granularity": reserves_are_nodes_or_ranks,
    "--inprocess-empty-cuda-cache": the_cache_is_emptied,
    "--rerun-mode": the_mode_decides_what_a_rejection_does,
    "--no-check-for-nan-in-loss-and-grad": nan_can_be_let_through,
    "--check-for-spiky-loss": spiky_losses_are_found,
    "--check-for-large-grads": large_gradients_are_found,
    "--result-rejected-tracker-filename": rejections_are_written,
    "--error-injection-rate": errors_are_injected_at_a_rate,
    "--error-injection-type": errors_are_injected_of_a_type,
    "--enable-ft-package": sections_only_when_enabled,
    "--ft-num-warmup-iters": warmup_steps_are_outside,
    "--calc-ft-timeouts": limits_are_kept_beside_the_checkpoints,
    "--exit-signal-handler": the_signal_saves,
    "--save": checkpoints_are_written,
    "--save-interval": checkpoints_come_at_intervals,
    "--non-persistent-save-interval": local_checkpoints_come_at_intervals,
    "--empty-unused-memory-level": unused_memory_is_emptied_at_levels,
    "--exit-duration-in-mins": the_duration_ends_it,
    "--exit-interval": the_interval_ends_it,
    "--phase-transition-iterations": a_phase_ends_it,
    "--log-interval": lines_come_at_intervals,
    "--log-throughput": reaches_the_log("--log-throughput"),
    "--log-energy": reaches_the_log("--log-energy"),
    "--log-memory-to-tensorboard": reaches_the_log("--log-memory-to-tensorboard"),
    "--log-world-size-to-tensorboard": reaches_the_log("--log-world-size-to-tensorboard"),
    "--log-loss-scale-to-tensorboard": reaches_the_log("--no-log-loss-scale-to-tensorboard"),
    "--tensorboard-log-interval": reaches_the_log("--tensorboard-log-interval=3"),
    "--timing-log-option": reaches_the_log("--timing-log-option=all"),
    "--timing-log-level": timers_have_levels,
    "--no-barrier-with-level-1-timing": ranks_meet_at_timers,
    "--log-num-zeros-in-grad": zeros_are_counted,
    "--log-memory-interval": memory_is_reported_at_intervals,
    "--log-straggler": stragglers_are_looked_for,
    "--save-grads": gradients_are_dumped,
    "--save-wgrads": gradients_are_dumped,
    "--attention-dropout": attention_dropout_changes_the_result,
    "--hidden-dropout": hidden_dropout_changes_the_result,
}


@pytest.mark.parametrize("flag", sorted(EFFECTS))
def test_it_has_an_effect(bench: Bench, flag: str) -> None:
    """P27: no flag is taken and forgotten."""
    EFFECTS[flag](bench)


# --------------------------------------------------------------------------------------------- asked for from outside


@pytest.mark.parametrize("leave", [False, True])
def test_a_request_is_taken_up_once_and_reported(bench: Bench, leave: bool) -> None:
    options = ("--iterations", "1000000", "--log-interval", "5", "--exit-signal-handler", "--save", str(bench.save))
    run = bench.runs.start(1, *options, environment=bench.agent.environment)
    bench.agent.accept()
    run.wait_for(lambda: re.search(r"iteration +5/", run.text()) is not None, "training")
    bench.agent.send(wire.SaveNow("request-1", leave))
    run.wait_for(lambda: "is durable" in run.text(), "the checkpoint")
    if not leave:
        run.signal(0, signal.SIGTERM)
    assert run.finish() == [0]
    messages = bench.agent.receive_all()
    saves = [message for message in messages if isinstance(message, wire.RankCheckpoint)]
    done = [message for message in messages if isinstance(message, wire.RankRequestDone)]
    assert [(message.request_id, message.done, message.message) for message in done] == [("request-1", True, "")]
    assert done[0].iteration == saves[0].iteration
    assert len(saves) == (1 if leave else 2)
    assert saves[0].path == str(bench.save / f"iter_{saves[0].iteration:07d}")
    assert ("asked to stop" in run.text()) == leave


def test_a_save_that_cannot_be_is_said_and_ends_the_request(bench: Bench) -> None:
    run = bench.runs.start(1, "--iterations", "1000000", "--exit-signal-handler", environment=bench.agent.environment)
    bench.agent.accept()
    bench.agent.send(wire.SaveNow("request-1"))
    run.wait_for(lambda: "the trainer has no --save" in run.text(), "the warning")
    run.signal(0, signal.SIGTERM)
    assert run.finish() == [0]
    messages = bench.agent.receive_all()
    (answer,) = [message for message in messages if isinstance(message, wire.RankRequestDone)]
    assert (answer.request_id, answer.done, answer.message) == ("request-1", False, "the trainer has no --save")
    assert any(isinstance(message, wire.RankNote) and "no --save" in message.text for message in messages)
