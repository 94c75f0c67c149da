"""`rsup memory-estimate`, as it is typed."""

import json
from pathlib import Path
from typing import Any

import pytest

from rsup.launcher.cli import main

TINY = [
    "--num-layers",
    "2",
    "--hidden-size",
    "8",
    "--num-attention-heads",
    "2",
    "--vocab-size",
    "32",
    "--ffn-hidden-size",
    "16",
]
STEP = ["--seq-length", "4", "--micro-batch-size", "2", "--num-gpus", "1,8", "--gpu-memory", "80"]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["memory-estimate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["memory-estimate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err.removeprefix("rsup memory-estimate: ").strip()


def test_a_model_given_by_options(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *TINY, *STEP)
    assert found["parameters"]["total"] == 1360
    assert found["bytes"]["weights"] + found["bytes"]["gradients"] + found["bytes"]["optimizer"] == 24_480
    assert found["bytes"]["megatron_activations"] == 5376
    assert [(fit["num_gpus"], fit["fits"]) for fit in found["fits"]] == [(1, True), (8, True)]
    assert answer(capsys, *TINY, *STEP, "--optimizer", "sgd-fp32")["bytes"]["optimizer"] == 0


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory-estimate", *TINY, *STEP]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("theoretical memory footprints: weight and optimizer=0.02 MB,")
    assert lines[-3:] == ["GPUS  80 GB EACH", "1     one rank (0.0 GB)", "8     DP8 (0.0 GB)"]


def test_a_hugging_face_folder_and_a_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    layout = ["--world-size", "8", "--use-distributed-optimizer", "--num-gpus", "1,8", "--seq-length", "4096"]
    found = answer(capsys, str(tmp_path), *layout)
    sizes = found["bytes"]
    assert found["parameters"]["total"] == 6_738_415_616
    assert sizes["megatron_total"] - sizes["megatron_activations"] == pytest.approx(50_538_117_120)
    assert sizes["megatron_activations"] == pytest.approx(19_494_425_395.2)
    assert [fit["fits"] for fit in found["fits"]] == [False, True, True, True] or found["fits"][0]["bytes"]["total"] > 74e9
    longer = answer(capsys, str(tmp_path / "config.json"), *layout, "--num-layers", "33")
    assert longer["parameters"]["total"] == 6_738_415_616 + 202_383_360


def test_descriptions_in_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32, "num_experts": 4}
    fields |= {"moe_router_topk": 1, "moe_layers": 2}
    (tmp_path / "model.json").write_text(json.dumps(fields))
    (tmp_path / "model.yaml").write_text("\n".join(f"{name}: {value}" for name, value in fields.items()))
    one, other = (answer(capsys, str(tmp_path / f"model.{kind}"), *STEP) for kind in ("json", "yaml"))
    assert one == other
    assert one["model"]["moe_layers"] == [True, False, True, False]
    listed = answer(capsys, str(tmp_path / "model.json"), *STEP, "--moe-layers", "0,0,0,1")
    assert listed["model"]["moe_layers"] == [False, False, False, True]


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {"broken.json": "{", "list.json": "[1]", "broken.yaml": "a: [", "few.json": '{"num_layers": 2}'}
    files["no_heads.json"] = json.dumps({name: value for name, value in LLAMA.items() if name != "num_attention_heads"})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    expected = {
        "broken.json": "no JSON",
        "list.json": "a description is a table of names and values",
        "broken.yaml": "neither JSON nor YAML",
        "bytes.json": "neither JSON nor YAML",
        "few.json": "the description lacks hidden_size and num_attention_heads and vocab_size",
        "no_heads.json": "the configuration lacks num_attention_heads or n_head",
        "absent.json": "No such file or directory",
    }
    for name, text in expected.items():
        path = tmp_path / name
        assert refusal(capsys, str(path)).startswith(f"{path}: {text}")
    assert refusal(capsys).startswith("give a MODEL, or its dimensions")
    assert refusal(capsys, *TINY, "--world-size", "4", "--tensor-model-parallel-size", "3").startswith(
        "4 ranks are no multiple"
    )
    assert refusal(capsys, *TINY, "--seq-length", "0").startswith("argument --seq-length: 0 is not 1 or more")
    assert refusal(capsys, *TINY, "--num-gpus", "0").startswith("argument --num-gpus: 0 is not 1 or more")
    assert refusal(capsys, *TINY, "--gpu-memory", "big").startswith("argument --gpu-memory: invalid list of sizes value: 'big'")
    assert (
        refusal(capsys, *TINY, "--gpu-memory", "nan")
        == "argument --gpu-memory: nan is no size; see `rsup memory-estimate --help`"
    )
    assert refusal(capsys, *TINY, "--optimizer", "magic").startswith("argument --optimizer: invalid choice: 'magic'")
