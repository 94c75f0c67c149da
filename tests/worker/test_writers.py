"""Where the numbers of a run go. Each writer's files are read back with its own reader."""

import json
import math
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rsup.worker
from rsup.worker.observe.contract import Point, Writer
from rsup.worker.observe.writers import WriterOptions, make_writers
from rsup.worker.observe.writers import opentelemetry as opentelemetry_writer
from rsup.worker.observe.writers import tensorboard as tensorboard_files
from rsup.worker.observe.writers import wandb as wandb_run
from rsup.worker.observe.writers.background import BackgroundWriter, Row
from rsup.worker.observe.writers.supervisor import SupervisorWriter, kind_of
from tests.worker.written_files import scalars, wandb_rows

GLOBAL_BATCH_SIZE = 8


@pytest.fixture
def warnings_said() -> list[str]:
    return []


def writers_of(options: WriterOptions, said: list[str], resumed_at: int = 0) -> list[Writer]:
    made = make_writers(
        options,
        warn=said.append,
        run_name="job.1",
        config={"num_layers": 2},
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
    assert record_file.crc32c(long) == slow(long)


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
    assert len(warnings_said) == 1 and "gs:/bucket/tb is no folder of this host" in warnings_said[0]
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------- the thread behind them


class StuckSink:
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.was_entered = threading.Event()
        self.taken: list[int] = []
        self.failure = ""

    def open(self) -> None:
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
    writer = BackgroundWriter("Stuck", sink, warnings_said.append, close_within_s=0.01)
    writer.close()
    sink.may_go_on.set()
    assert warnings_said == ["Stuck did not end within 0 s: its last points may be missing"]


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
    write(second, [3, 4])
    second.close()
    assert len(warnings_said) == 1
    ids, rows = wandb_rows(tmp_path / "wandb")
    assert ids == {json.loads((tmp_path / wandb_run.ID_FILE).read_text())["id"]}
    assert [row["lm loss"] for row in rows] == [1, 2, 3, 3, 4]
    assert [row["_step"] for row in rows] == [row["iteration"] for row in rows] == [1, 2, 3, 3, 4]
    assert [row["samples vs steps"] for row in rows] == [8, 16, 24, 24, 32]


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


def test_an_endpoint_that_is_none_is_said(warnings_said: list[str]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    assert writers_of(WriterOptions(otel_endpoint="collector:4318"), warnings_said) == []
    assert warnings_said == ["OpenTelemetry is not written to: 'collector:4318' is no http:// or https:// address"]


# ----------------------------------------------------------------------------------------------------- the rest of it


def test_the_supervisor_hears_each_kind_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rsup.worker, "report_metrics", lambda *given: heard.append(given))
    points = [Point("lm loss", 2.0), Point("mem-reserved-bytes", 4.0), Point("optimizer-time", 0.5), Point("grad-norm", 1.0)]
    SupervisorWriter().write(3, 24, points)
    assert heard == [
        (3, {"lm loss": 2.0, "grad-norm": 1.0}, 24, "training"),
        (3, {"mem-reserved-bytes": 4.0}, 24, "memory"),
        (3, {"optimizer-time": 0.5}, 24, "timers"),
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
