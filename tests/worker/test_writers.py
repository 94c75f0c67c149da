"""Where the numbers of a run go. Each writer's files are read back with its own reader."""

import gc
import json
import logging
import math
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rsup.worker
from rsup.supervisor.wire import UsageError
from rsup.worker.observe import writers
from rsup.worker.observe.closing import close_writers
from rsup.worker.observe.contract import Point, Writer
from rsup.worker.observe.error_text import shortened
from rsup.worker.observe.straggler_sensors import SensorWatch
from rsup.worker.observe.writers import WriterOptions, background, make_writers, wandb_journal
from rsup.worker.observe.writers import opentelemetry as opentelemetry_writer
from rsup.worker.observe.writers import tensorboard as tensorboard_files
from rsup.worker.observe.writers import wandb as wandb_run
from rsup.worker.observe.writers.background import BackgroundWriter, Row
from rsup.worker.observe.writers.credentials import without_credentials
from rsup.worker.observe.writers.supervisor import SupervisorWriter, kind_of
from rsup.worker.reference.command_line import make_parser, parse_options
from rsup.worker.reference.run_parts import hyperparameters
from tests.worker.written_files import scalars, wandb_records, wandb_rows

GLOBAL_BATCH_SIZE = 8


@pytest.fixture
def warnings_said() -> list[str]:
    return []


def writers_of(options: WriterOptions, said: list[str], resumed_at: int = 0) -> list[Writer]:
    made = make_writers(
        options,
        warn=said.append,
        run_name="job.1",
        config={"num_layers": 2, "endpoint": "http://me:secret@host:1"},
        resumed_at=resumed_at,
        resumed_samples=resumed_at * GLOBAL_BATCH_SIZE,
    )
    return [writer for writer in made if not isinstance(writer, SupervisorWriter)]


def write(writer: Writer, iterations: Sequence[int], offset: float = 0.0) -> None:
    for iteration in iterations:
        loss = Point("lm loss", iteration + offset, vs_samples=True)
        writer.write(iteration, iteration * GLOBAL_BATCH_SIZE, [loss, Point("iteration-time", 0.25)])


# --------------------------------------------------------------------------------------------------------- TensorBoard


def test_a_run_that_was_interrupted_gives_one_curve_over_iterations_and_one_over_samples(
    tmp_path: Path, warnings_said: list[str]
) -> None:
    options = WriterOptions(tensorboard_dir=tmp_path / "tb")
    (first,) = writers_of(options, warnings_said)
    write(first, range(1, 8))
    first.write(8, 64, [Point("grad-norm", math.nan), Point("learning-rate", math.inf)])
    first.close()
    (second,) = writers_of(options, warnings_said, resumed_at=5)
    write(second, range(6, 11), offset=0.5)
    second.flush()
    flushed = scalars(tmp_path / "tb")
    second.close()
    second.close()
    write(second, [11])

    expected = [(i, i + (0.5 if i > 5 else 0.0)) for i in range(1, 11)]
    assert flushed["lm loss"] == expected
    times = [(i, 0.25) for i in range(1, 11)]
    assert {tag: points for tag, points in scalars(tmp_path / "tb").items() if points} == {
        "lm loss": expected,
        "iteration-time": times,
    }
    over_samples = scalars(tmp_path / "tb" / tensorboard_files.SAMPLES_FOLDER)
    assert over_samples == {"lm loss vs samples": [(i * GLOBAL_BATCH_SIZE, value) for i, value in expected]}
    assert warnings_said == []


def test_a_run_that_died_before_its_first_checkpoint_begins_its_curve_anew(tmp_path: Path, warnings_said: list[str]) -> None:
    for offset in (0.0, 0.5):
        (writer,) = writers_of(WriterOptions(tensorboard_dir=tmp_path), warnings_said)
        write(writer, [1, 2], offset)
        writer.close()
    assert scalars(tmp_path)["lm loss"] == [(1, 1.5), (2, 2.5)]


def test_checksums_are_those_of_the_standard() -> None:
    record_file = pytest.importorskip("rsup.worker.observe.writers.record_file")
    assert record_file.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert record_file.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4
    assert record_file.crc32c(bytes(range(32))) == 0x46DD794E
    slow = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").crc32c
    long = bytes(i * i % 251 for i in range(1500))
    for size in (511, 512, 513, 514, 1024, 1027, 1500):
        assert record_file.crc32c(long[:size]) == slow(long[:size])
    assert record_file._PARTS.nbytes == 512 * 1024, "a long record once took a kilobyte for each of its bytes, for good"


def test_what_is_no_finite_number_is_written_as_it_is(tmp_path: Path, warnings_said: list[str]) -> None:
    (writer,) = writers_of(WriterOptions(tensorboard_dir=tmp_path), warnings_said)
    writer.write(1, 8, [Point("lm loss", math.nan), Point("grad-norm", math.inf), Point("num-zeros", -0.0)])
    writer.close()
    found = scalars(tmp_path)
    assert math.isnan(found["lm loss"][0][1]) and found["grad-norm"] == [(1, math.inf)] and found["num-zeros"] == [(1, 0.0)]


def test_a_full_disk_costs_one_warning(tmp_path: Path, warnings_said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.full").symlink_to("/dev/full")
    monkeypatch.setattr(tensorboard_files, "_file_name", lambda: "events.full")
    (writer,) = writers_of(WriterOptions(tensorboard_dir=tmp_path), warnings_said)
    for iteration in range(1, 4):
        writer.write(iteration, 8, [Point("lm loss", 1.0)])
        writer.flush()
    writer.close()
    assert len(warnings_said) == 1
    assert "TensorBoard cannot be opened, nothing more goes there" in warnings_said[0] and "No space left" in warnings_said[0]


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path, warnings_said: list[str]) -> None:
    (tmp_path / "file").touch()
    (writer,) = writers_of(WriterOptions(tensorboard_dir=tmp_path / "file" / "tb"), warnings_said)
    write(writer, [1, 2])
    writer.close()
    assert len(warnings_said) == 1 and "Not a directory" in warnings_said[0]


def test_an_address_is_no_folder(tmp_path: Path, warnings_said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert writers_of(WriterOptions(tensorboard_dir=Path("gs://bucket/tb")), warnings_said) == []
    assert len(warnings_said) == 1 and "gs://bucket/tb is no folder of this host" in warnings_said[0]
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------- the thread behind them


class StuckSink:
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.was_entered = threading.Event()
        self.taken: list[int] = []
        self.failure = ""

    def open(self, remark: Callable[[str], None]) -> None:
        self.was_entered.set()
        self.may_go_on.wait(30)

    def put(self, rows: Sequence[Row]) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        self.taken += [row.iteration for row in rows]

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_a_sink_that_stands_still_holds_up_nobody_and_what_is_left_out_is_said(warnings_said: list[str]) -> None:
    sink = StuckSink()
    writer = BackgroundWriter("Slow", sink, warnings_said.append, max_pending=3)
    write(writer, range(1, 7))
    assert sink.was_entered.wait(30) and sink.taken == []
    sink.may_go_on.set()
    writer.close()
    assert sink.taken == [1, 2, 3]
    assert [text.partition(":")[0] for text in warnings_said] == [
        "Slow is slower than the training",
        "Slow lacks 3 rows, which it could not take in time",
    ]


def test_one_that_never_ends_is_left_behind(warnings_said: list[str]) -> None:
    sink = StuckSink()
    writer = BackgroundWriter("Stuck", sink, warnings_said.append)
    writer.close(0.01)
    sink.may_go_on.set()
    assert warnings_said == ["Stuck did not end in time (0 s): its last points may be missing"]


def test_a_sink_that_fails_is_warned_of_on_the_training_thread(warnings_said: list[str]) -> None:
    sink = StuckSink()
    sink.failure = "no more of this"
    sink.may_go_on.set()
    said_on: list[int] = []
    writer = BackgroundWriter("Broken", sink, lambda text: said_on.append(threading.get_ident()))
    write(writer, [1])
    writer.flush()
    write(writer, [2, 3])
    writer.close()
    assert said_on == [threading.get_ident()]


class Counted(threading.Event):
    """An event that counts who waited for it."""

    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waits += 1
        return super().wait(timeout)


def test_a_flush_waits_once_in_vain_and_for_weights_and_biases_never(
    warnings_said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every save and every evaluation flushes: a sink that stands still would cost each of them ten seconds."""
    monkeypatch.setattr(background, "FLUSH_WITHIN_S", 0.01)
    sinks = [StuckSink(), StuckSink()]
    stuck = BackgroundWriter("Stuck", sinks[0], warnings_said.append)
    other = BackgroundWriter("Other", sinks[1], pytest.fail, waits_at_flush=False)
    counted = []
    for writer in (stuck, other):
        writer._work.flushed = Counted()
        counted.append(writer._work.flushed)
        for _ in range(3):
            writer.flush()
    assert [event.num_waits for event in counted] == [1, 0]
    assert warnings_said == [
        "Stuck was not flushed within 0.01 s: training waits for it no more, and what is newest there may come late"
    ]
    for sink, writer in zip(sinks, (stuck, other), strict=True):
        sink.may_go_on.set()
        writer.close()


class Loop:
    """A trainer, as far as anybody here knows it."""

    def warn(self, text: str) -> None:
        pass


def test_a_thread_that_never_ends_keeps_no_trainer_alive() -> None:
    """In-process restart makes a new one: the old model's memory has to go."""
    may_end = threading.Event()

    class Sink(StuckSink):
        def open(self, remark: Callable[[str], None]) -> None:
            may_end.wait(30)

    class Provider:
        def get_meter(self, name: str) -> None: ...

        def force_flush(self) -> None:
            may_end.wait(30)

        shutdown = force_flush

    class Nvml:
        def nvmlInit(self) -> None:
            may_end.wait(30)

    def enter() -> "tuple[weakref.ref[Loop], list[threading.Thread]]":
        loop = Loop()
        before = set(threading.enumerate())
        writer = BackgroundWriter("Stuck", Sink(), loop.warn)
        metrics = opentelemetry_writer.OpenTelemetryWriter(loop.warn, "job", provider=Provider())
        watch = SensorWatch("GPU-1", loop.warn, Nvml())
        watch.start()
        metrics._is_mine = True
        metrics.begin_close()
        close_writers([writer, metrics], loop.warn, 0.0)
        watch.stop()
        return weakref.ref(loop), [thread for thread in threading.enumerate() if thread not in before]

    gone, threads = enter()
    gc.collect()
    assert len(threads) == 3 and all(thread.is_alive() for thread in threads)
    assert gone() is None
    may_end.set()
    for thread in threads:
        thread.join(30)


def test_writers_that_an_interruption_leaves_behind_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writers, "_wandb", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_writers(
            WriterOptions(tensorboard_dir=tmp_path, wandb_project="x"), warn=pytest.fail, run_name="", config={}, resumed_at=0
        )
    assert "rsup-TensorBoard" not in {thread.name for thread in threading.enumerate()}


def test_both_files_are_closed_where_the_disk_is_full_for_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    files = tensorboard_files.TensorBoardFiles(tmp_path, 0, 0)
    row = Row(1, 8, 0.0, [Point("lm loss", 1.0, vs_samples=True)])
    files.open(print)
    files.put([row])
    first, second = files._by_iteration._records, files._by_samples._records
    assert first is not None and second is not None
    first._file.close()
    first._file = open("/dev/full", "wb")  # noqa: SIM115
    first.write(b"what waits for the disk")
    with pytest.raises(OSError, match="No space left"):
        files.close()
    assert first._file.closed and second._file.closed


def test_values_have_the_time_at_which_they_were_true(tmp_path: Path, warnings_said: list[str]) -> None:
    (writer,) = writers_of(WriterOptions(tensorboard_dir=tmp_path), warnings_said)
    for iteration in (1, 2):
        writer.write(iteration, 8 * iteration, [Point("lm loss", 1.0)], at_s=1000.5 + iteration)
    writer.close()
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulators.EventAccumulator(str(tmp_path)).Reload()
    assert [event.wall_time for event in read.Scalars("lm loss")] == [1001.5, 1002.5]


# ------------------------------------------------------------------------------------------------------ Weights & Biases


def test_wandb_keeps_what_a_server_does_not_take_and_goes_on_with_the_same_run(
    tmp_path: Path, warnings_said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    options = WriterOptions(wandb_project="tiny", save_dir=tmp_path)
    (first,) = writers_of(options, warnings_said)
    write(first, [1, 2, 3])
    first.close()
    assert len(warnings_said) == 1 and "cannot be reached" in warnings_said[0]

    monkeypatch.setenv("WANDB_MODE", "offline")
    (second,) = writers_of(options, warnings_said, resumed_at=2)
    second.write(3, 24, [Point("lm loss", 3)], at_s=1234.5)
    second.write(3, 24, [Point("iteration-time", 0.25)])
    write(second, [4])
    second.close()
    assert len(warnings_said) == 1
    assert not (tmp_path / wandb_journal.JOURNAL_FILE).exists(), "both ended in order"
    ids, rows = wandb_rows(tmp_path / "wandb")
    assert ids == {json.loads((tmp_path / wandb_run.ID_FILE).read_text())["id"]}
    assert [row["lm loss"] for row in rows] == [1, 2, 3, 3, 4]
    assert [row["_step"] for row in rows] == [row["iteration"] for row in rows] == [1, 2, 3, 3, 4]
    assert [row["samples vs steps"] for row in rows] == [8, 16, 24, 24, 32]
    assert rows[3]["_timestamp"] == 1234.5
    newest = max((tmp_path / "wandb").rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    assert {record.run.host for record in map(records.FromString, wandb_records(newest)) if record.HasField("run")} == {"-"}
    for told in ("secret", os.getcwd(), "wandb-metadata"):
        assert told.encode() not in newest.read_bytes(), told
    assert not list((tmp_path / "wandb").rglob("wandb-metadata.json")) + list((tmp_path / "wandb").rglob("requirements.txt"))


class TakingSink(StuckSink):
    """Takes all rows as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.may_go_on.set()

    def put(self, rows: Sequence[Row]) -> None:
        self.rows += rows


def journaled(folder: Path, sink: StuckSink, said: list[str], resumed_at: int, project: str = "tiny") -> BackgroundWriter:
    journal = wandb_journal.Journal(folder, project, resumed_at)
    return BackgroundWriter("W&B", wandb_journal.JournaledRun("W&B", journal, sink), said.append)


def test_what_a_killed_process_had_not_handed_on_is_sent_by_the_one_that_resumes(
    tmp_path: Path, warnings_said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last block of W&B's file, and all rows while W&B is being opened, die with it."""
    monkeypatch.setattr(wandb_journal, "MAX_ROWS", 4)
    killed, file = StuckSink(), tmp_path / wandb_journal.JOURNAL_FILE
    first = journaled(tmp_path, killed, warnings_said, 0)
    for iteration in range(1, 14):
        first.write(iteration, 8 * iteration, [Point("lm loss", math.nan if iteration == 10 else 1.5, True)], at_s=100.5)
        first.flush()  # a save: it waits for this disk, and for no server
    left = file.read_text()
    assert killed.taken == [] and 4 <= len(left.splitlines()) - 1 <= 8, "it does not grow with the run"

    for project, resumed_at in (("other", 11), ("tiny", 0)):
        file.write_text(left)
        nothing = TakingSink()
        journaled(tmp_path, nothing, warnings_said, resumed_at, project).close()
        assert nothing.rows == [] and not file.exists()
    file.write_text(left + '[14, 8, 1.0, [["lm lo')
    sink = TakingSink()
    second = journaled(tmp_path, sink, warnings_said, 11)
    write(second, [12])
    second.close()
    assert [row.iteration for row in sink.rows] == [6, 7, 8, 9, 10, 11, 12] and not file.exists()
    assert sink.rows[5] == Row(11, 88, 100.5, [Point("lm loss", 1.5)]) and math.isnan(sink.rows[4].points[0].value)

    failing = TakingSink()
    failing.put = StuckSink.put.__get__(failing)  # type: ignore[method-assign]
    failing.failure = "gone"
    third = journaled(tmp_path, failing, warnings_said, 12)
    write(third, [13])
    third.close()
    assert warnings_said == ["W&B cannot be written, nothing more goes there: RuntimeError: gone"] and file.exists()
    fourth = journaled(tmp_path, TakingSink(), warnings_said, 13)
    fourth.flush()
    killed.may_go_on.set()
    first.close()
    assert file.exists(), "one that ends late, after a restart in the same process, does not drop what is another's"
    fourth.close()
    (tmp_path / "file").touch()
    sink = TakingSink()
    fifth = journaled(tmp_path / "file", sink, warnings_said, 0)
    write(fifth, [1])
    fifth.close()
    assert len(sink.rows) == 1 and "no copy is kept" in warnings_said[-1] and len(warnings_said) == 2


def test_a_wandb_folder_that_cannot_be_made_is_one_warning(tmp_path: Path, warnings_said: list[str]) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    for one in writers_of(WriterOptions(wandb_project="tiny", wandb_save_dir=folder), warnings_said):
        write(one, [1])
        one.close()
    assert warnings_said == [f"Weights & Biases is not written to: {folder} cannot be made: Not a directory"]


def test_options_of_wandb_need_a_project() -> None:
    for name in ("--wandb-exp-name", "--wandb-entity", "--wandb-save-dir"):
        with pytest.raises(UsageError, match=f"{name} needs --wandb-project"):
            parse_options([name, "x"])
        parse_options([name, "x", "--wandb-project", "tiny"])
    assert "(default )" not in make_parser().format_help()


def test_what_tensorboard_has_taken_is_visible_though_nothing_follows(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    files = tensorboard_files.TensorBoardFiles(tmp_path, 0, 0)
    files.open(print)
    files.put([Row(1, 8, 0.0, [Point("lm loss", 1.0)])])
    assert scalars(tmp_path)["lm loss"] == [(1, 1.0)]
    files.close()


def test_a_run_that_is_not_over_is_waited_for() -> None:
    """After an in-process restart the next one has the same id, and wandb refuses an id in use."""
    runs, begun = wandb_run._OpenRuns(), threading.Event()
    runs.enter("one", 30)

    def again() -> None:
        runs.enter("one", 30)
        begun.set()

    thread = threading.Thread(target=again)
    thread.start()
    runs.enter("two", 0.0)
    assert not begun.is_set()
    runs.leave("one")
    runs.leave("two")
    thread.join(30)
    assert begun.is_set() and runs._ids == ["one"]


def test_what_weights_and_biases_shows_of_the_options_are_hyperparameters() -> None:
    given = ["--save", "/secret/a", "--data-path", "/secret/b", "--otel-endpoint", "http://me:secret@host:4318", "--lr", "0.5"]
    shown = hyperparameters(parse_options(given))
    assert shown["lr"] == 0.5 and not [name for name, value in shown.items() if "secret" in str(value)]
    assert not [name for name in shown if re.search("dir|path|save|^load|wandb|otel|endpoint|signal|fault", name)]
    for text, without in (
        ("http://me:secret@host:1/a", "http://host:1/a"),
        ("cannot reach https://a:b@c@host", "cannot reach https://host"),
        ("me@host http://host/a@b", "me@host http://host/a@b"),
    ):
        assert without_credentials(text) == without


def test_a_run_is_the_same_for_attempts_of_a_job_and_for_what_resumes_its_checkpoints(tmp_path: Path) -> None:
    made = wandb_run.run_id_of(tmp_path, "project", "job.1", 0)
    assert wandb_run.run_id_of(tmp_path, "project", "job.1", 0) == made  # it died before its first checkpoint
    assert wandb_run.run_id_of(tmp_path, "project", "other.1", 10) == made
    assert wandb_run.run_id_of(tmp_path, "elsewhere", "other.1", 10) != made
    (tmp_path / wandb_run.ID_FILE).write_text("{half a")
    again = wandb_run.run_id_of(tmp_path, "project", "job.1", 10)
    assert again != made
    assert wandb_run.run_id_of(tmp_path, "project", "other.1", 0) != again
    assert wandb_run.run_id_of(None, "project", "job.1", 10) != wandb_run.run_id_of(None, "project", "job.1", 10)


# --------------------------------------------------------------------------------------------------------- OpenTelemetry


def exported(reader: Any) -> dict[str, list[Any]]:
    data = json.loads(reader.get_metrics_data().to_json())
    metrics = [metric for of in data["resource_metrics"] for scope in of["scope_metrics"] for metric in scope["metrics"]]
    return {metric["name"]: metric["data"]["data_points"] for metric in metrics}


def test_opentelemetry_has_gauges_of_what_is_known_last_and_counters_of_what_is_new(warnings_said: list[str]) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    reader = pytest.importorskip("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
    provider = sdk.MeterProvider([reader], shutdown_on_exit=False)
    writer = opentelemetry_writer.OpenTelemetryWriter(warnings_said.append, "job", ["lm loss"], provider=provider)
    points = [
        Point("lm loss", 2.5),
        Point("iteration-time", 0.25),
        Point("mem-allocated-bytes", 3e9),
        Point("skipped-iterations", 0.0),
        Point("nan-iterations", 2.0),
        Point("grad-norm", 0.0),
        Point("lm loss validation", 2.0),
    ]
    writer.write(1, 8, points)
    writer.write(2, 16, [*points, Point("lm loss", 1.5)])
    writer.write_end_to_end({"train_iterations": 2, "app_run_type": "training"})
    writer.flush()
    found = exported(reader)
    assert [(point["attributes"], point["value"]) for point in found["rsup.training.loss"]] == [({"loss": "lm loss"}, 1.5)]
    assert [point["sum"] for point in found["rsup.training.step_duration_ms"]] == [500.0]
    assert found["rsup.training.memory_allocated_gb"][0]["value"] == 3.0
    assert found["rsup.training.nan_iters"][0]["value"] == 4.0
    assert "rsup.training.skipped_iters" not in found
    assert found["rsup.training.grad_norm"][0]["value"] == 0.0
    assert found["rsup.training.lm_loss_validation"][0]["value"] == 2.0
    assert found["rsup.training.iteration"][0]["value"] == 2
    assert found["rsup.end_to_end.train_iterations"][0]["value"] == 2
    assert found["rsup.end_to_end.info"][0]["attributes"] == {"app_run_type": "training"}
    writer.close()  # the provider is the application's
    writer.write(3, 24, points)
    assert exported(reader)["rsup.training.iteration"][0]["value"] == 3
    provider.shutdown()
    assert warnings_said == []


def test_a_nan_is_no_failed_export(warnings_said: list[str]) -> None:
    """Else no flush would wait for the collector again, and the one warning would be used up."""
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    writer = opentelemetry_writer.OpenTelemetryWriter(warnings_said.append, "job", provider=provider)
    writer._complaints.begin()
    writer.write(1, 8, [Point("lm loss", math.nan), Point("grad-norm", math.inf), Point("learning-rate", 0.5)])
    provider.get_meter("other").create_gauge("other").set(math.nan)  # what the application does itself
    writer.flush()
    found = exported(reader)
    writer._complaints.end()
    provider.shutdown()
    assert found["rsup.training.learning_rate"][0]["value"] == 0.5 and "rsup.training.grad_norm" not in found
    assert warnings_said == [] and writer._complaints.first == ""


def test_a_collector_that_does_not_answer_is_said_once(
    warnings_said: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr(opentelemetry_writer, "EXPORT_WITHIN_S", 0.2)
    (writer,) = writers_of(WriterOptions(otel_endpoint="http://127.0.0.1:9"), warnings_said)
    for iteration in (1, 2, 3):
        write(writer, [iteration])
        writer.flush()
    writer.close()
    assert len(warnings_said) == 1 and warnings_said[0].startswith("OpenTelemetry cannot export, and goes on trying: ")
    assert not caplog.records


def test_a_long_complaint_ends_behind_a_word() -> None:
    complaints = opentelemetry_writer._Complaints()
    text = "cannot export\n" + "a metrics batch, " * 20
    record = logging.LogRecord("opentelemetry.exporter", logging.ERROR, "", 0, text, None, None)
    complaints.emit(record)
    assert complaints.first == "cannot export " + "a metrics batch, " * 16 + "a metrics ..."
    assert shortened("x" * 301) == "x" * 300 + " ..." and shortened("x" * 300) == "x" * 300
    assert shortened("x" * 300 + " y") == "x" * 300 + " ..."


def test_an_endpoint_that_is_none_is_said(warnings_said: list[str]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    assert writers_of(WriterOptions(otel_endpoint="collector:4318"), warnings_said) == []
    assert warnings_said == ["OpenTelemetry is not written to: 'collector:4318' is no http:// or https:// address"]
    assert writers_of(WriterOptions(otel_endpoint="ftp://me:secret@collector"), warnings_said) == []
    assert "'ftp://collector' is no" in warnings_said[1]


def test_an_instrument_that_raises_is_left_out_and_the_others_are_not(warnings_said: list[str]) -> None:
    class Meter:
        def create_gauge(self, name: str, unit: str) -> Any:
            def take(value: float, attributes: Mapping[str, str] | None) -> None:
                if "grad" in name:
                    raise RuntimeError("in vain")
                taken.setdefault(name, []).append(value)

            return SimpleNamespace(set=take)

    taken: dict[str, list[float]] = {}
    provider = SimpleNamespace(get_meter=lambda name: Meter())
    writer = opentelemetry_writer.OpenTelemetryWriter(warnings_said.append, "job", provider=provider)
    for iteration in (1, 2):
        writer.write(iteration, 8, [Point("grad-norm", 1.0), Point("learning-rate", 0.5)])
    assert taken["rsup.training.learning_rate"] == [0.5, 0.5]
    assert warnings_said == ["OpenTelemetry takes no more of rsup.training.grad_norm: in vain"]


# ----------------------------------------------------------------------------------------------------- the rest of it


def test_the_supervisor_hears_each_kind_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rsup.worker, "report_metrics", lambda *given, at_s, warn: heard.append((*given, at_s, warn)))
    points = [Point("lm loss", 2.0), Point("mem-reserved-bytes", 4.0), Point("optimizer-time", 0.5), Point("grad-norm", 1.0)]
    SupervisorWriter(print).write(3, 24, points, at_s=9.5)
    assert heard == [
        (3, {"lm loss": 2.0, "grad-norm": 1.0}, 24, "training", 9.5, print),
        (3, {"mem-reserved-bytes": 4.0}, 24, "memory", 9.5, print),
        (3, {"optimizer-time": 0.5}, 24, "timers", 9.5, print),
    ]
    kinds = [kind_of(key) for key in ("iteration-time", "power/gpu", "lm loss validation ppl")]
    assert kinds == ["training", "energy", "validation"]


def test_packages_that_are_missing_are_named(tmp_path: Path, warnings_said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensorboard_files.EVENT_MODULE, "wandb", "opentelemetry.metrics"):
        monkeypatch.setitem(sys.modules, module, None)
    options = WriterOptions(tensorboard_dir=tmp_path, wandb_project="tiny", otel=True)
    assert writers_of(options, warnings_said) == []
    extras = [text.rpartition(" ")[2] for text in warnings_said]
    assert extras == ["'rsup[tensorboard]'", "'rsup[wandb]'", "'rsup[otel]'"]
    assert os.listdir(tmp_path) == []
