"""Dumps of tensors: files hold what was computed, hooks change no bit and stay nowhere, and nothing fills a disk."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rsup.worker.observe import tensor_dump
from rsup.worker.observe.dump_files import append_lines, left_in_cgroups, memory_for_dumps_bytes, write_dump
from rsup.worker.observe.dump_hooks import Collected
from rsup.worker.observe.dump_plan import LABELS, DumpPlan, MicroBatchChoice, ModelPosition
from rsup.worker.observe.tensor_dump import TensorDumps
from rsup.worker.observe.tokens_per_expert import ExpertPlace, lines_until, place_of
from rsup.worker.reference.command_line import parse_options
from rsup.worker.reference.dumping import make_dumps

ALL: dict[str, int] = dict.fromkeys(("activations", "dgrads", "wgrads", "params"), 2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Two layers that share an input, one behind a changed tensor, one that is called with a keyword and is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        mixed = self.left(hidden).relu_() + self.right(hidden)
        out: torch.Tensor = checkpoint(self._rest, mixed, use_reentrant=False)
        return out.square().mean()

    def _rest(self, mixed: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(input=self.dropout(mixed))
        return out


class Run:
    """Four iterations of two micro-batches."""

    def __init__(self, plan: DumpPlan | None, num_iterations: int = 4, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.said: list[str] = []
        self.written: list[Path] = []
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.parameters: dict[int, dict[str, torch.Tensor]] = {}
        options.setdefault("warn", self.said.append)
        self.dumps = TensorDumps(plan, [self.model], **options) if plan else None
        for iteration in range(1, num_iterations + 1):
            self.iterate(iteration)

    def iterate(self, iteration: int) -> None:
        if self.dumps is None:
            self.compute(iteration)
            return
        with self.dumps.iteration(iteration):
            self.compute(iteration)
        self.written += self.dumps.write()

    def compute(self, iteration: int, num_passes: int = 2) -> None:
        """The pass is made twice, as by a rerun; the second counts."""
        before = torch.get_rng_state()
        for _ in range(num_passes):
            torch.set_rng_state(before)
            self.optimizer.zero_grad()
            if self.dumps is not None:
                self.dumps.begin_pass()
            for number in range(2):
                if self.dumps is not None:
                    self.dumps.micro_batch(number, 2)
                self.model(torch.tensor([iteration % 5, number])).backward()
        if self.dumps is not None:
            self.dumps.gradients()
        self.gradients[iteration] = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.optimizer.step()
        if self.dumps is not None:
            self.dumps.updated()
        self.parameters[iteration] = {n: p.detach().clone() for n, p in self.model.named_parameters()}


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def plain() -> Run:
    return Run(None)


def test_what_is_dumped_is_what_was_computed_and_no_bit_is_another(plain: Run, tmp_path: Path) -> None:
    run = Run(DumpPlan(tmp_path, ALL))
    assert equal(run.parameters[4], plain.parameters[4]) and not run.said
    assert sorted(str(path.relative_to(tmp_path)) for path in run.written) == sorted(
        f"{label}/iter_000000{iteration}/mp_rank_00.pth" for label in ALL for iteration in (2, 4)
    )
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"mp_rank_00.pth"}
    for iteration in (2, 4):
        place = f"iter_000000{iteration}/mp_rank_00.pth"
        assert equal(read(tmp_path / "wgrads" / place)["model_chunk0"], plain.gradients[iteration])
        assert equal(read(tmp_path / "params" / place)["model_chunk0"], plain.parameters[iteration])
    activations = read(tmp_path / "activations/iter_0000002/mp_rank_00.pth")["model_chunk0"]
    assert set(activations) == {
        *(f"{name}/{key}" for name in ("words", "left", "right") for key in ("input0", "output0")),
        "last/input",
        "last/output0",
    }
    assert activations["words/input0"].tolist() == [2, 1], "the last micro-batch"
    assert torch.equal(activations["left/input0"], activations["words/output0"])
    kept = plain.parameters[1]
    left = nn.functional.linear(activations["left/input0"], kept["left.weight"], kept["left.bias"])
    assert torch.equal(activations["left/output0"], left), "though it is changed in place behind the layer"


def test_data_gradients_are_each_modules_own(tmp_path: Path) -> None:
    run = Run(DumpPlan(tmp_path, {"dgrads": 1}, MicroBatchChoice.ALL), num_iterations=1)
    found = read(run.written[0])["model_chunk0"]
    names = {f"{key}/micro_batch{number}" for number in (0, 1) for key in _DGRADS}
    assert set(found) == names
    torch.manual_seed(0)
    weights = Net().state_dict()
    for number in ("micro_batch0", "micro_batch1"):
        for name in ("left", "right"):
            assert torch.allclose(
                found[f"{name}/input0/{number}"], found[f"{name}/output0/{number}"] @ weights[f"{name}.weight"]
            )
        assert not torch.equal(found[f"left/input0/{number}"], found[f"right/input0/{number}"])
        both = found[f"left/input0/{number}"] + found[f"right/input0/{number}"]
        assert torch.allclose(found[f"words/output0/{number}"], both) and both.any()
    bias = found["last/output0/micro_batch0"].sum(0) + found["last/output0/micro_batch1"].sum(0)
    assert torch.allclose(bias, run.gradients[1]["last.bias"])


_DGRADS = ("words/output0", "left/input0", "left/output0", "right/input0", "right/output0", "last/input", "last/output0")


def test_a_predicate_chooses_modules_and_all_micro_batches_can_be_kept(plain: Run, tmp_path: Path) -> None:
    plan = DumpPlan(tmp_path, {"activations": 3}, MicroBatchChoice.ALL)
    run = Run(plan, is_watched=lambda name, module: name == "right" or isinstance(module, nn.Dropout))
    assert equal(run.parameters[4], plain.parameters[4])
    (path,) = run.written
    assert set(read(path)["model_chunk0"]) == {
        f"{name}/{key}/micro_batch{number}"
        for name in ("right", "dropout")
        for key in ("input0", "output0")
        for number in (0, 1)
    }
    nobody = Run(plan, num_iterations=3, is_watched=lambda name, module: False)
    assert not nobody.written and nobody.said == [
        "no activations or data gradients are dumped: no module of the model is chosen"
    ]


def test_a_predicate_that_raises_is_one_warning_and_no_hook_stays(plain: Run, tmp_path: Path) -> None:
    def fail(name: str, module: nn.Module) -> bool:
        if name == "right":
            raise ValueError("in vain")
        return True

    run = Run(DumpPlan(tmp_path, {"activations": 1, "params": 2}), num_iterations=4, is_watched=fail)
    assert equal(run.parameters[4], plain.parameters[4]) and not hooks_of(run.model)
    assert run.said == ["no activations or data gradients are dumped: is_watched failed: ValueError: in vain"]
    assert len(run.written) == 2, "the parameters"


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_an_interval_of_0_is_said_by_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options([f"--save={tmp_path}", "--save-activations-interval=0", "--save-wgrads-interval=2"])
    said: list[str] = []
    made = [make_dumps(options, cast(Any, SimpleNamespace(rank=rank, world_size=2)), Net(), said.append) for rank in range(2)]
    assert said == ["activations are not dumped: their interval is 0, and has to be 1 or more"]
    assert capsys.readouterr().err == "" and all(one.due(2) and not one.due(3) for one in made)


def test_hooks_leave_nothing_behind_and_an_exception_no_dump(tmp_path: Path) -> None:
    run = Run(DumpPlan(tmp_path, ALL), num_iterations=1)
    assert run.dumps is not None and not run.written
    with run.dumps.iteration(2):
        assert hooks_of(run.model) > 0
        loss = run.model(torch.tensor([1, 2]))
        run.model(torch.tensor([1, 2])).backward()
    assert hooks_of(run.model) == 0
    files = run.dumps.write()
    found = read(files[1])
    loss.backward()
    assert len(files) == 2 and run.dumps.write() == [], "a backward that comes late is nobody's"
    with pytest.raises(ValueError), run.dumps.iteration(4):
        run.model(torch.tensor([1, 2])).backward()
        raise ValueError("the data end")
    assert hooks_of(run.model) == 0 and run.dumps.write() == [] and found
    with run.dumps.iteration(6), pytest.raises(AssertionError, match="iteration 6 has not ended"), run.dumps.iteration(8):
        pass


def test_what_counts_is_the_micro_batch_of_the_forward_and_the_last_pass(tmp_path: Path) -> None:
    """Forwards of both micro-batches before their backwards, as in pipelines; a pass that another follows; a late backward."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    ones, plan = torch.ones(1, requires_grad=True), DumpPlan(tmp_path, {"activations": 1, "dgrads": 1}, MicroBatchChoice.ALL)
    dumps = TensorDumps(plan, [model], warn=pytest.fail)
    with dumps.iteration(1):
        dumps.begin_pass()
        model[1](ones)
        dumps.begin_pass()
        outs = []
        for number in (0, 1):
            dumps.micro_batch(number, 2)
            outs.append(model[0](ones))
        late = model[0](ones)
        for number, out in enumerate(outs):
            (out * (number + 1)).backward()
    activations, dgrads = (read(path)["model_chunk0"] for path in dumps.write())
    assert set(activations) == {f"0/{key}/micro_batch{number}" for key in ("input0", "output0") for number in (0, 1)}
    assert [float(dgrads[f"0/output0/micro_batch{number}"]) for number in (0, 1)] == [1, 2]

    with dumps.iteration(2):
        late.backward()
    assert dumps.write() == [], "nothing of it was computed in that iteration"

    last = TensorDumps(DumpPlan(tmp_path, plan.intervals), [model], warn=pytest.fail)
    with last.iteration(2):
        for number in (0, 1):
            last.micro_batch(number, 2)
            model[number](ones).backward()
    assert all(set(read(path)["model_chunk0"]) == {"1/input0", "1/output0"} for path in last.write())


class Odd(nn.Module):
    """Takes what no file can hold, and what it can."""

    def forward(self, x: torch.Tensor, **more: Any) -> tuple[torch.Tensor, Any]:
        return x * 2, more


def test_values_that_are_no_tensors(tmp_path: Path) -> None:
    said: list[str] = []
    model = nn.ModuleDict({"odd": Odd()})
    dumps = TensorDumps(
        DumpPlan(tmp_path, {"activations": 1}), [model], is_watched=lambda name, m: name == "odd", warn=said.append
    )
    with dumps.iteration(1):
        model["odd"](
            torch.ones(2), scale=0.5, nothing=None, shape=(1, [torch.ones(1)]), table={"a": True}, dtype=torch.int8, it=said
        )
        model["odd"](torch.ones(2), scale=0.5, other=object())
    (path,) = dumps.write()
    found = read(path)["model_chunk0"]
    assert {key: found[f"odd/{key}"] for key in ("scale", "shape", "table", "dtype")} == {
        "scale": 0.5,
        "shape": (1, [torch.ones(1)]),
        "table": {"a": True},
        "dtype": torch.int8,
    }
    assert found.keys() == {*(f"odd/{key}" for key in ("input0", "output0", "scale", "shape", "table", "dtype", "it"))}
    assert said == ["values that no file can hold are left out of dumps: odd/other (object)"]


# --------------------------------------------------------------------------------------------------------------- room


def test_what_does_not_fit_is_refused_and_training_goes_on(plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 40]
    monkeypatch.setattr(tensor_dump, "free_disk_bytes", lambda folder: free[0])
    run = Run(DumpPlan(tmp_path, ALL, keep_free_bytes=1 << 20), num_iterations=2)
    assert len(run.written) == 4
    free[0] = (1 << 20) + 230  # what is collected first still fits
    run.iterate(3)
    run.iterate(4)
    assert equal(run.parameters[4], plain.parameters[4])
    names = [path.parts[-3] for path in run.written[4:]]
    assert 0 < len(names) < 4 and len(run.said) == 4 - len(names)
    room = "there is room for 230 B on the disk, of which 1.0 MB stay free"
    assert all("of iteration 4 are not dumped" in text and room in text for text in run.said)
    run.iterate(6)
    assert len(run.said) == 4 - len(names), "said once, until there was room again"
    run.written = run.written[: 4 + len(names)]
    free[0] = 1 << 40
    run.iterate(5)
    run.iterate(6)
    assert len(run.written) == 8 + len(names), "there is room again"
    before = read(tmp_path / "activations/iter_0000006/mp_rank_00.pth")["model_chunk0"].values()
    free[0] = (1 << 20) + 100
    run.iterate(7)
    run.iterate(8)
    told = next(text for text in run.said if "activations of iteration 8" in text)
    assert f"they take {sum(t.numel() * t.element_size() for t in before)} B or more" in told, "known before the first copy"


def test_ranks_of_a_node_share_its_memory_and_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them looks at the same free bytes before any has taken some."""
    monkeypatch.setattr(tensor_dump, "memory_for_dumps_bytes", lambda: 800)
    monkeypatch.setattr(tensor_dump, "free_disk_bytes", lambda folder: 1000)
    plan = DumpPlan(tmp_path, {"params": 1}, keep_free_bytes=0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    shares = [dataclasses.replace(plan, num_writers_of_node=number) for number in (0, 1, 2)]
    assert [TensorDumps(one, [], warn=pytest.fail)._budget_bytes() for one in shares] == [100, 800, 400]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert TensorDumps(plan, [], warn=pytest.fail)._budget_bytes() == 800


def test_what_an_iteration_did_not_come_to_is_said(tmp_path: Path) -> None:
    """An overflow updates nothing, a rejected iteration has no gradients, and one that is left out has nothing."""
    run = Run(DumpPlan(tmp_path, {"wgrads": 1, "params": 1}), num_iterations=1)
    dumps = run.dumps
    assert dumps is not None and len(run.written) == 2
    with dumps.iteration(2):
        dumps.gradients()
    assert [path.parts[-3] for path in dumps.write(2)] == ["wgrads"]
    with dumps.iteration(3):
        pass
    assert dumps.write(3) == dumps.write(3) == dumps.write(4) == []
    assert [text.replace(f" are not dumped to {tmp_path}", "") for text in run.said] == [
        "params of iteration 2: its parameters were not updated",
        "wgrads of iteration 3: its gradients were not used",
        "wgrads of iteration 4: it was left out",
        "params of iteration 4: it was left out",
    ]
    replica = DumpPlan(tmp_path, {"params": 1}, position=ModelPosition(is_writer=False))
    assert TensorDumps(replica, [run.model], warn=pytest.fail).write(5) == [], "one rank says it"


def test_what_turns_out_to_be_too_large_is_dropped_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [(1 << 30) + 200]
    monkeypatch.setattr(tensor_dump, "free_disk_bytes", lambda folder: free[0])
    run = Run(DumpPlan(tmp_path, {"activations": 1, "params": 1}), num_iterations=1)
    assert run.written == [] and len(run.said) == 2 and "activations of iteration 1" in run.said[0]
    assert run.dumps is not None
    free[0] = 2 << 30
    with run.dumps.iteration(2):
        run.compute(2)
        free[0] = (1 << 30) + 200  # somebody else has filled the disk
    assert run.dumps.write() == [] and all("1.0 GB of the disk are to stay free" in text for text in run.said[2:])
    assert len(run.said) == 4 and not list(tmp_path.rglob("*.pth"))
    collected = Collected(100)
    for number in range(10):
        collected.put("params", "model_chunk0", "one", torch.full((20,), float(number)))
    assert collected.sizes == {"params": 80} and collected.content["params"]["model_chunk0"]["one"][0] == 9
    collected.put("params", "model_chunk0", "other", torch.ones(20))
    assert not collected.content and not collected.sizes and "160 B" in collected.refused["params"]


def test_a_disk_that_fills_up_meanwhile_costs_the_file_and_nothing_else(
    plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fails)
        run = Run(DumpPlan(tmp_path, {"wgrads": 2, "params": 4}))
        patch.setattr(torch, "save", _raise_as_torch)
        run.iterate(6)
    assert [text.split(":")[0] for text in run.said] == [
        f"{label} of iteration {iteration} are not dumped to {tmp_path}"
        for label, iteration in (("wgrads", 2), ("params", 4), ("wgrads", 6))
    ]
    assert "No space left on device" in run.said[0] and "PytorchStreamWriter" in run.said[-1] and not run.written
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [] and equal(run.parameters[4], plain.parameters[4])
    (tmp_path / "file").touch()
    below = Run(DumpPlan(tmp_path / "file", {"wgrads": 2}), num_iterations=2)
    below.iterate(4)
    assert len(below.said) == 1 and not below.written


def test_a_full_disk_is_named_in_the_systems_words(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00.pth.unfinished").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_dump(tmp_path / "iter_0000001" / "mp_rank_00.pth", {"model_chunk0": {"w": torch.ones(100_000)}})


def _raise_as_torch(content: Any, file: Any) -> None:
    raise RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0\nframes")


def test_limits_of_cgroups_count(tmp_path: Path) -> None:
    for path, limit, used, stat in (
        ("a", "1000", "400", "anon 1\ninactive_file 50\n"),
        ("a/b", "max", "1", ""),
        ("a/b/c", "90", "100", ""),
    ):
        folder = tmp_path / path
        folder.mkdir()
        for name, text in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat)):
            (folder / name).write_text(f"{text}\n")
    assert list(left_in_cgroups("4:memory:/x\n0::/a/b/c\n", tmp_path)) == [0, 650]
    assert list(left_in_cgroups("0::/\n", tmp_path)) == list(left_in_cgroups("", tmp_path)) == []
    assert memory_for_dumps_bytes() > 0


# --------------------------------------------------------------------------------------------------------------- plan


def test_places_and_intervals(tmp_path: Path) -> None:
    plan = DumpPlan(tmp_path, {"wgrads": 0, "params": 3, "weights": 2, "tokens_per_expert": 2}, rank=5)
    said: list[str] = []
    dumps = TensorDumps(plan, [nn.Linear(1, 1)], warn=said.append)
    assert said == [
        f"nothing is dumped as 'weights': there are {', '.join(LABELS)}",
        "wgrads are not dumped: their interval is 0, and has to be 1 or more",
    ]
    assert [sorted(plan.due(i)) for i in (1, 2, 3, 6)] == [
        [],
        ["tokens_per_expert"],
        ["params"],
        ["params", "tokens_per_expert"],
    ]
    assert not dumps.due(4 + 1) and dumps.due(4)
    assert plan.tokens_path == tmp_path / "tokens_per_expert/rank5.jsonl"
    position = ModelPosition(1, 2, 4, 3, 8, is_writer=False)
    replica = DumpPlan(tmp_path, plan.intervals, position=position)
    assert replica.path("params", 12).relative_to(tmp_path) == Path("params/iter_0000012/mp_rank_01_002_003.pth")
    assert replica.due(6) == plan.due(6) and replica.due_here(6) == {"tokens_per_expert"}


def test_main_grad_counts_more_and_chunks_are_numbered(tmp_path: Path) -> None:
    chunks = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1)]
    for chunk in chunks:
        chunk.weight.grad = torch.ones(1, 1)
    chunks[0].weight.main_grad = torch.full((1, 1), 2.0)  # type: ignore[attr-defined]
    dumps = TensorDumps(DumpPlan(tmp_path, {"wgrads": 1}), chunks, warn=pytest.fail)
    with dumps.iteration(1):
        dumps.gradients()
    (path,) = dumps.write()
    found = read(path)
    assert {chunk: {name: float(one) for name, one in of.items()} for chunk, of in found.items()} == {
        "model_chunk0": {"weight": 2.0},
        "model_chunk1": {"weight": 1.0},
    }


# ---------------------------------------------------------------------------------------------------- tokens per expert


class Grouped(nn.Module):
    def forward(self, hidden: torch.Tensor, counts: Any) -> torch.Tensor:
        return hidden


def nested(*names: str) -> nn.Module:
    """A model with a `Grouped` of each of these names."""
    model = nn.Module()
    for name in names:
        place = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.add_module(last, Grouped())
    return model


def test_tokens_per_expert_have_a_line_for_each_layer(tmp_path: Path) -> None:
    decoder = "decoder.layers.{}.mlp.experts.linear_fc1"
    mtp = "mtp.layers.1.mtp_model_layer.layers.0.mlp.experts.linear_fc1"
    model = nested(
        decoder.format(10), decoder.format(3), mtp, "decoder.layers.3.mlp.experts.linear_fc2", "odd.experts.linear_fc1"
    )
    model.scale = nn.Parameter(torch.ones(1))
    said: list[str] = []
    plan = DumpPlan(tmp_path, {"tokens_per_expert": 2, "params": 2}, rank=1, position=ModelPosition(is_writer=False))
    dumps = TensorDumps(plan, [model], warn=said.append)
    modules = dict(model.named_modules())

    def iterate(iteration: int) -> None:
        with dumps.iteration(iteration):
            buffer = torch.zeros(2, dtype=torch.int64)
            for num_micro_batches in (3, 2):
                dumps.begin_pass()
                for number in range(num_micro_batches):
                    dumps.micro_batch(number, 2)
                    for name, module in modules.items():
                        if isinstance(module, Grouped):
                            counts = [iteration, number]
                            module(torch.ones(1), buffer.copy_(torch.tensor(counts)) if "3" in name else counts)
                    modules[mtp](torch.ones(1), [7, number])  # once more, as in a recomputation
            dumps.updated()
        dumps.write()

    for iteration in (1, 2, 4):
        iterate(iteration)
    path = tmp_path / "tokens_per_expert/rank1.jsonl"
    assert path.read_text().splitlines()[:3] == [
        '{"iter":2,"block":"decoder","layer":3,"tpe":[[2,0],[2,1]]}',
        '{"iter":2,"block":"decoder","layer":10,"tpe":[[2,0],[2,1]]}',
        '{"iter":2,"block":"mtp","mtp_idx":1,"layer":0,"tpe":[[7,0],[7,1]]}',
    ]
    assert len(path.read_text().splitlines()) == 6
    assert said == [
        "tokens per expert are not counted in odd.experts.linear_fc1: which layer that is cannot be told from its name"
    ]
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["rank1.jsonl"]
    with path.open("a") as file:
        file.write('{"iter":6,"blo')  # the process was killed
    dumps.resumed(2)
    iterate(4)
    assert [json.loads(line)["iter"] for line in path.read_text().splitlines()] == [2, 2, 2, 4, 4, 4]


def test_names_of_layers_and_lines_that_are_no_lines(tmp_path: Path) -> None:
    assert place_of("module.blocks.2.mlp.experts.linear_fc1") == ExpertPlace("decoder", 0, 2)
    assert place_of("decoder.layers.2.mlp.linear_fc1") is None
    assert lines_until('{"iter":3}\nnot ours\n{"iter":4}\n{"iter', 3) == '{"iter":3}\nnot ours\n'
    path = tmp_path / "a" / "lines"
    path.parent.mkdir()
    path.write_bytes(b"one\n" + b"x" * 5000)
    append_lines(path, ["two"])
    assert path.read_text() == "one\ntwo\n"
    path.write_bytes(b"torn")
    append_lines(path, ["three"])
    assert path.read_text() == "three\n"


def test_a_model_without_experts_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    dumps = TensorDumps(DumpPlan(tmp_path, {"tokens_per_expert": 1}), [nn.Linear(1, 1)], warn=said.append)
    for iteration in (1, 2):
        with dumps.iteration(iteration):
            pass
        assert dumps.write() == []
    assert said == ["tokens per expert are not counted: the model has no layer of experts that is known by its name"]
