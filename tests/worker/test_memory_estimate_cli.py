"""`rsup memory-estimate`, as it is typed."""

import json
import os
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
    none_left = "--reserve 8 leaves nothing of a GPU with"
    assert refusal(capsys, *TINY, "--gpu-memory", "80,0", "--reserve", "8") == f"{none_left} 0 GB"
    assert refusal(capsys, *TINY, "--gpu-memory", "80,8", "--reserve", "8") == f"{none_left} 8 GB"
    assert refusal(capsys, *TINY, "--gpu-memory", "0", "--reserve", "0").startswith("--reserve 0 leaves nothing")
    assert refusal(capsys, *TINY, "--optimizer", "magic").startswith("argument --optimizer: invalid choice: 'magic'")


QWEN: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}
DEEP: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2048},
}


def test_odd_values_in_files_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What an earlier release answered with a traceback, a wrong figure, or never."""
    doubled = "".join(f"- &v{i} [*v{i - 1}, *v{i - 1}]\n" for i in range(1, 60))
    bomb = f"num_layers:\n- &v0 [1, 1]\n{doubled}hidden_size: 8\nnum_attention_heads: 2\nvocab_size: 32\n"
    odd: list[tuple[str, dict[str, Any] | str, str]] = [
        ("config.json", {**LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0; it should be 1 or more"),
        ("config.json", {**LLAMA, "num_hidden_layers": 3 * 10**9}, "num_hidden_layers is 3000000000; it should be 10000"),
        ("config.json", {**LLAMA, "hidden_size": 10**200}, "hidden_size is 1"),
        ("config.json", {**LLAMA, "tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it should be true"),
        ("config.json", {**LLAMA, "attention_bias": "no"}, "attention_bias is 'no'; it should be true or false"),
        ("config.json", {**QWEN, "decoder_sparse_step": 0}, "decoder_sparse_step is 0; it should be 1 or more"),
        ("config.json", {**QWEN, "mlp_only_layers": 5}, "mlp_only_layers is 5; it should be a list of whole numbers"),
        ("config.json", {**QWEN, "mlp_only_layers": [[1]]}, "mlp_only_layers is [[1]]; it should be a list of whole numbers"),
        ("config.json", {**QWEN, "num_experts": 10**9}, "num_experts is 1e+09; it should be 20000 or less"),
        ("config.json", {**DEEP, "moe_layer_freq": 0}, "moe_layer_freq is 0; it should be 1 or more"),
        ("config.json", "[" * 100_000, "no JSON"),
        ("model.yaml", "[" * 100_000, "no JSON, and no YAML description has more than"),
        ("model.yaml", "[" * 400, "neither JSON nor YAML"),
        ("model.yaml", "num_layers: 2024-99-99", "neither JSON nor YAML: month must be in 1..12"),
        ("model.yaml", "num_layers: !!timestamp x", "neither JSON nor YAML"),
        ("model.yaml", "1: 2", "unknown field 1"),
        ("model.yaml", '"a\\nb": 2', "unknown field 'a\\nb'"),
        ("model.yaml", bomb, "num_layers is [[1, 1], [[1, 1], [1, 1]], "),
    ]  # fmt: skip
    for name, content, said in odd:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        assert refusal(capsys, str(path)).startswith(f"{path}: {said}"), said
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/zero")):
        assert refusal(capsys, str(special)) == f"{special}: no file"
    assert refusal(capsys, "x" * 5000).endswith("File name too long")
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert "moe_layers: 0 is not 1 or more" in refusal(capsys, str(tmp_path), "--moe-layers", "0")
    many = ["--num-layers", "1000000000", "--num-experts", "4", "--moe-router-topk", "1", "--moe-layers", "2"]
    assert "num_layers is 1000000000; it should be 10000 or less" in refusal(capsys, *TINY, *many)
    assert "is more than 1000000000" in refusal(capsys, *TINY, "--seq-length", str(10**200))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--world-size 8 --pipeline-model-parallel-size 8", "8 pipeline stages are more than the model's 2 layers"),
        ("--num-virtual-stages-per-pipeline-rank 7", "7 model chunks of a stage need more than one pipeline stage"),
        (
            "--world-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "2 pipeline stages of 2 chunks are more than the model's 2 layers",
        ),
        ("--world-size 3 --tensor-model-parallel-size 3", "num_attention_heads 2 is not divisible by tensor 3"),
        (
            "--num-attention-heads 4 --num-query-groups 2 --world-size 4 --tensor-model-parallel-size 4",
            "",
        ),
        (
            "--hidden-size 12 --num-attention-heads 6 --num-query-groups 3 --world-size 2 --tensor-model-parallel-size 2",
            "num_query_groups 3 and tensor 2 do not divide each other",
        ),
        (
            "--num-experts 4 --moe-router-topk 1 --world-size 8 --expert-model-parallel-size 8",
            "num_experts 4 is not divisible by expert 8",
        ),
        ("--world-size 8 --expert-model-parallel-size 8", "num_experts 0 is not divisible by expert 8"),
        ("--world-size 3 --context-parallel-size 3", "seq_length 4 is not divisible by 2 x context 3"),
        (
            "--world-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 5",
            "seq_length 5 is not divisible by tensor 2",
        ),
    ],
)
def test_a_layout_that_the_model_does_not_fit(capsys: pytest.CaptureFixture[str], options: str, said: str) -> None:
    if said:
        assert refusal(capsys, *TINY, *STEP, *options.split()) == said
    else:
        assert answer(capsys, *TINY, *STEP, *options.split())["layout"]["tensor"] == 4, "a group on two ranks each"


def test_many_experts_take_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    experts = ["--num-experts", "15120", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "4"]
    found = answer(capsys, *TINY, "--num-gpus", "16,30240", "--seq-length", "4", *experts)
    assert [fit["fits"] for fit in found["fits"]] == [True] * 4
