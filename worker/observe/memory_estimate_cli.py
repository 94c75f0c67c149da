"""`rsup memory-estimate`: what a model needs of a GPU's memory, and what fits on how many GPUs. Needs no GPU and no torch."""

import argparse
import dataclasses
import json
import stat
import typing
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.wire import UsageError
from rsup.worker.observe.activation_memory import Recompute, StepShape
from rsup.worker.observe.flops import training_flops
from rsup.worker.observe.hf_config import described_by_hugging_face
from rsup.worker.observe.memory_estimate import MEGATRON_ADAM, MIB, OPTIMIZERS, MemoryEstimate, estimate, report_lines
from rsup.worker.observe.memory_fit import GPU_SIZES_GB, NUMBERS_OF_GPUS, RESERVE_GB, Fit, fits
from rsup.worker.observe.model_description import MOST, DescriptionError, ModelDescription, described
from rsup.worker.observe.parallel_layout import ParallelLayout, Sharding, check_model, check_sequence
from rsup.worker.observe.parameter_count import parameter_counts

_MAX_FILE_BYTES = 4 << 20
_MAX_YAML_CHARS = 64 << 10
"""Reading YAML takes a second for some 100 KB."""
_YAML_ERRORS = (AttributeError, LookupError, TypeError, OverflowError)
"""What PyYAML lets through of a value that is not of the kind that its tag says."""
_ABOUT = """What a model needs of a GPU's memory, and what fits on how many GPUs.

MODEL is a Hugging Face config.json (or the folder it is in), or a JSON or YAML file with fields named as the options below:
num_layers, hidden_size, num_attention_heads and vocab_size at least. Options take precedence over the file.
"""


def main(argv: Sequence[str]) -> int:
    """Run `rsup memory-estimate ARGV`; return the exit code. Raise `RsupError`, in one line, for what it cannot answer."""
    arguments = _parser().parse_args(list(argv))
    if arguments.reserve >= min(arguments.gpu_memory):
        raise UsageError(f"--reserve {arguments.reserve:g} leaves nothing of a GPU with {min(arguments.gpu_memory):g} GB")
    model = _model(arguments)
    layout = _layout(arguments)
    check_model(layout, model)
    check_sequence(layout, arguments.seq_length)
    shape = StepShape(
        arguments.seq_length,
        arguments.micro_batch_size,
        arguments.num_microbatches,
        Recompute(arguments.recompute_granularity),
        not arguments.no_flash_attention,
        arguments.dropout,
    )
    kind = OPTIMIZERS[arguments.optimizer]
    found = estimate(model, layout, shape, kind)
    sharding = layout.sharding if layout.sharding is not Sharding.NONE else Sharding.OPTIMIZER
    table = fits(
        model,
        shape,
        kind=kind,
        gpu_sizes_gb=arguments.gpu_memory,
        numbers=arguments.num_gpus,
        reserve_gb=arguments.reserve,
        shards=sharding,
    )
    if arguments.json:
        print(json.dumps(_as_json(model, layout, shape, found, table), indent=1))
    else:
        lines = [
            *report_lines(model, layout, shape, kind),
            *_parts(found, shape),
            "",
            *_table(table, arguments.reserve, sharding),
        ]
        print("\n".join(lines))
    return 0


# --------------------------------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="rsup memory-estimate",
        description=_ABOUT,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a config.json, its folder, or a description")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    step = parser.add_argument_group("the step")
    step.add_argument("--seq-length", type=_whole, default=4096, metavar="N", help="tokens of a sample (default 4096)")
    step.add_argument("--micro-batch-size", type=_whole, default=1, metavar="N", help="samples at a time (default 1)")
    step.add_argument("--num-microbatches", type=_whole, metavar="N", help="micro-batches of a step, if fewer than stages")
    step.add_argument("--recompute-granularity", choices=list(map(str, Recompute)), default="none", help="default none")
    step.add_argument("--no-flash-attention", action="store_true", help="attention's scores are in memory")
    step.add_argument("--dropout", action="store_true", help="there are dropout masks to keep")
    kinds = "; ".join(f"{kind.name}: {kind.unsharded} bytes, {kind.meaning}" for kind in OPTIMIZERS.values())
    step.add_argument("--optimizer", choices=list(OPTIMIZERS), default=MEGATRON_ADAM.name, metavar="KIND", help=kinds)
    _add_layout(parser.add_argument_group("the layout"))
    table = parser.add_argument_group("the table")
    table.add_argument("--gpu-memory", type=_sizes, default=GPU_SIZES_GB, metavar="GB,...", help="GPUs' memory (80,141)")
    table.add_argument("--num-gpus", type=_numbers, default=NUMBERS_OF_GPUS, metavar="N,...", help="how many to try")
    table.add_argument("--reserve", type=_size, default=RESERVE_GB, metavar="GB", help=f"not to be used ({RESERVE_GB:g})")
    fields = parser.add_argument_group("the model")
    for name, kind in typing.get_type_hints(ModelDescription).items():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            fields.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        elif kind is int:
            fields.add_argument(flag, type=int, metavar="N")
        elif kind is str:
            fields.add_argument(flag, metavar="NAME")
        else:
            fields.add_argument(flag, type=_pattern, metavar="N|0,1,...", help="every Nth layer, or for each one 0 or 1")
    return parser


def _add_layout(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--world-size", type=_whole, default=1, metavar="N", help="ranks in all (default 1)")
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        group.add_argument(f"--{name}-parallel-size", type=_whole, default=1, metavar="N")
    group.add_argument("--expert-tensor-parallel-size", type=_whole, metavar="N")
    group.add_argument("--num-virtual-stages-per-pipeline-rank", type=_whole, metavar="N")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true", help="the same as the next with optim")
    group.add_argument(
        "--data-parallel-sharding-strategy",
        choices=list(map(str, Sharding)),
        help="what data-parallel ranks divide: optim (ZeRO-1), optim_grads (ZeRO-2), optim_grads_params (ZeRO-3, FSDP)",
    )


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    if value > MOST:
        raise argparse.ArgumentTypeError(f"{value:.4g} is more than {MOST}")
    return value


def _sizes(text: str) -> tuple[float, ...]:
    return tuple(_size(part) for part in text.split(","))


def _size(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no size")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_whole(part) for part in text.split(","))


def _pattern(text: str) -> int | list[int]:
    return [int(part) for part in text.split(",")] if "," in text else int(text)


for _kind, _name in (
    (_whole, "count"),
    (_size, "size"),
    (_sizes, "list of sizes"),
    (_numbers, "list of counts"),
    (_pattern, "pattern"),
):
    _kind.__name__ = _name  # argparse says "invalid count value: 'x'"


def _layout(arguments: argparse.Namespace) -> ParallelLayout:
    sharding = arguments.data_parallel_sharding_strategy or ("optim" if arguments.use_distributed_optimizer else "no_shard")
    return ParallelLayout(
        arguments.world_size,
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        arguments.num_virtual_stages_per_pipeline_rank,
        arguments.context_parallel_size,
        arguments.expert_model_parallel_size,
        arguments.expert_tensor_parallel_size,
        arguments.sequence_parallel,
        Sharding(sharding),
    )


# ------------------------------------------------------------------------------------------------------------- model


def _model(arguments: argparse.Namespace) -> ModelDescription:
    names = [field.name for field in dataclasses.fields(ModelDescription)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.model is None:
        if not given:
            raise UsageError("give a MODEL, or its dimensions; see `rsup memory-estimate --help`")
        return described(given, "the options")
    path = Path(arguments.model)
    path, read = _read(path)
    if not {"model_type", "architectures", "text_config", "llm_config"} & read.keys():
        return described({**read, **given}, str(path))
    model = described_by_hugging_face(read, str(path))
    if not given:
        return model
    fields = {name: getattr(model, name) for name in names} | given
    if isinstance(fields["moe_layers"], tuple):
        fields["moe_layers"] = [int(has_experts) for has_experts in fields["moe_layers"]]
    if fields["moe_layers"] == []:
        del fields["moe_layers"]
    return described(fields, str(path))


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file that is meant, and what it says."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            path = path / "config.json"
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device may have no end
            raise DescriptionError(f"{path}: no file")
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise DescriptionError(f"{path}: no description has more than {_MAX_FILE_BYTES} bytes")
        text = content.decode()
    except OSError as error:
        raise DescriptionError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DescriptionError(f"{path}: neither JSON nor YAML") from None
    found = _parsed(path, text)
    if not isinstance(found, dict):
        raise DescriptionError(f"{path}: a description is a table of names and values")
    return path, found


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix == ".json":
            raise DescriptionError(f"{path}: no JSON: {error}") from None
    if len(text) > _MAX_YAML_CHARS:
        raise DescriptionError(f"{path}: no JSON, and no YAML description has more than {_MAX_YAML_CHARS} characters")
    import yaml  # nobody else needs it

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError, *_YAML_ERRORS) as error:
        raise DescriptionError(f"{path}: neither JSON nor YAML: {' '.join(str(error).split())[:500]}") from None


# ------------------------------------------------------------------------------------------------------------ output


def _parts(found: MemoryEstimate, shape: StepShape) -> list[str]:
    rows = [
        ("weights", found.weights),
        ("gradients", found.gradients),
        ("optimizer", found.optimizer),
        (f"activations, {shape.recompute} recomputed", found.activations),
        ("in all", found.total),
        ("activations as Megatron-LM reports them", found.megatron_activations),
        ("in all as Megatron-LM reports it", found.megatron_total),
    ]
    width = max(len(name) for name, _ in rows)
    return ["", *(f"{name:{width}}  {float(size) / 1e9:10.2f} GB  {float(size) / MIB:12.2f} MB" for name, size in rows)]


def _table(table: Sequence[Fit], reserve_gb: float, sharding: Sharding) -> list[str]:
    sizes = list(dict.fromkeys(fit.gpu_gb for fit in table))
    cells = [["GPUS", *(f"{size:g} GB EACH" for size in sizes)]]
    for num_gpus in dict.fromkeys(fit.num_gpus for fit in table):
        cells.append([str(num_gpus), *(_cell(fit) for fit in table if fit.num_gpus == num_gpus)])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [f"what fits, {reserve_gb:g} GB of each GPU left to others, data-parallel sharding {sharding}:", *lines]


def _cell(fit: Fit) -> str:
    return f"{fit.described} ({float(fit.estimate.total) / 1e9:.1f} GB)"


def _as_json(
    model: ModelDescription, layout: ParallelLayout, shape: StepShape, found: MemoryEstimate, table: Sequence[Fit]
) -> dict[str, Any]:
    counts = parameter_counts(model)
    return {
        "model": dataclasses.asdict(model),
        "parameters": dataclasses.asdict(counts),
        "flops_per_sample": training_flops(model, shape.seq_length, shape.seq_length**2),
        "layout": dataclasses.asdict(layout) | {"data": layout.data},
        "step": dataclasses.asdict(shape),
        "bytes": _sizes_of(found),
        "fits": [
            {
                "num_gpus": fit.num_gpus,
                "gpu_gb": fit.gpu_gb,
                "fits": fit.layout is not None,
                "layout": None if fit.layout is None else dataclasses.asdict(fit.layout),
                "recompute": str(fit.shape.recompute),
                "bytes": _sizes_of(fit.estimate),
            }
            for fit in table
        ],
    }


def _sizes_of(found: MemoryEstimate) -> dict[str, float]:
    names = ("weights", "gradients", "optimizer", "activations", "total", "megatron_activations", "megatron_total")
    sizes: dict[str, Fraction] = {name: Fraction(getattr(found, name)) for name in names}
    return {name: float(size) if size.denominator > 1 else int(size) for name, size in sizes.items()}
