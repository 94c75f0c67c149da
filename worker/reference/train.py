"""Entry of the reference trainer: `python -m rsup.worker.reference.train`, under rsup launch, torchrun, or alone.

Its last line on rank 0 is `digest SHA256-OF-ALL-PARAMETERS`.
"""

import contextlib
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import rsup.worker
from rsup.supervisor.wire import DECLARABLE_EXIT_CODES, RsupError, UsageError
from rsup.worker.checkpoint_directory import CheckpointDirectory, DirectoryTaken, StaleAttempt
from rsup.worker.inprocess.entry import current_entry
from rsup.worker.inprocess.faults import may_pass
from rsup.worker.reference.command_line import doubts, parse_options
from rsup.worker.reference.hooks import Sections, make_sections
from rsup.worker.reference.options import Options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say; return the exit code. Raises `RsupError` for what a person can put right."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_options(given)
    if fault := os.environ.get("FT_SIM_FAULT_DESC"):
        raise UsageError(f"FT_SIM_FAULT_DESC={fault} has no effect here: use --fault rank=R,iteration=I,kind=K, or unset it")
    if options.save_dir is not None:
        CheckpointDirectory(options.save_dir).make()
    rsup.worker.init()
    if os.environ.get("RANK", "0") == "0":
        for text in doubts(options):
            print(f"warning: {text}", file=sys.stderr)
            rsup.worker.note("warning", text)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not options.inprocess_restart:
        return _enter(given)
    from rsup.worker.inprocess import restartable

    _import_all(options)
    exit_code = restartable(_enter, options.inprocess_settings)(given)
    return exit_code or 0  # of a rank in reserve: None


def _import_all(options: Options) -> None:
    """What training needs, once: an import in the function can be interrupted, and a module that is half imported stays broken.

    Python looks for garbage many times meanwhile and finds none: without that, it takes a quarter less time.
    """
    if "rsup.worker.reference.trainer" in sys.modules:
        return
    gc.disable()
    try:
        import torch._dynamo  # by optimizers and DDP, when they are first made
        import torch._inductor.config  # by torch.use_deterministic_algorithms

        import rsup.worker.reference.trainer  # noqa: F401

        if options.save_dir is not None:
            import torch.distributed.checkpoint  # noqa: F401  # by the first save
    finally:
        gc.freeze()  # modules are no garbage
        gc.enable()


def _enter(arguments: Sequence[str]) -> int:
    """Train on the ranks that the environment names now. Nothing here may outlive it."""
    options = parse_options(arguments)
    sections = make_sections(options.enable_ft_package, options.ft_num_warmup_iters)
    entry = current_entry()
    if entry is not None:
        entry.at_restart(sections.on_shutdown)
    sections.on_setup()
    return _run(options, sections)


def _run(options: Options, sections: Sections) -> int:
    _import_all(options)  # torch is imported here: wrong usage was answered before it
    from rsup.worker.deterministic import make_deterministic
    from rsup.worker.reference.ranks import choose_device, joined, rank_device
    from rsup.worker.reference.trainer import Trainer

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(options.device, local_rank)
    deterministic = options.deterministic_mode if options.deterministic_mode is not None else device.type == "cpu"
    if deterministic:
        make_deterministic()
    mine = rank_device(device, local_rank)
    rsup.worker.device_used(mine.uuid)
    with joined(device, options.distributed_timeout_minutes * 60) as ranks:
        trainer = Trainer(options, ranks, sections, deterministic, mine)
        exit_code = trainer.train()
        digest = trainer.digest()
    if ranks.rank == 0:
        sys.stdout.write(f"digest {digest}\n")
        sys.stdout.flush()
    return exit_code


def run_as_program() -> NoReturn:
    """Run, say errors in one line a node, and end the process.

    It ends without Python's and torch's clean-up: that takes 0.8 s, and after an error waits for threads that are stuck.
    """
    warnings.filterwarnings("ignore", "The pynvml package is deprecated")  # of torch, once a rank
    try:
        exit_code = main()
    except RsupError as error:
        exit_code = error.exit_code
        _print_one_line(error)
        if exit_code in DECLARABLE_EXIT_CODES and not may_pass(error):
            rsup.worker.declare_exit(exit_code, str(error))
    except Exception as error:  # the outermost frame of the process
        exit_code = 1
        _print_error(error)
        _write_error_file(error)
    rsup.worker.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(exit_code)


def _print_one_line(error: RsupError) -> None:
    """Say it once a node where all ranks have it alike, else on each rank that has it."""
    if not isinstance(error, UsageError | StaleAttempt | DirectoryTaken):
        print(f"rsup.worker.reference.train: error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"rsup.worker.reference.train: error: {error}", file=sys.stderr)


def _print_error(error: Exception) -> None:
    """A traceback; but one line where only the connection to another rank broke, which is the one to look at."""
    lost = next((text for text in ("Connection closed by peer", "Connection reset by peer") if text in str(error)), "")
    if lost:
        print(f"rank {os.environ.get('RANK', '0')}: another rank is gone: {lost}", file=sys.stderr)
    else:
        traceback.print_exc()


def _write_error_file(error: Exception) -> None:
    """Tell the launcher what was raised, in the file that torchrun's contract names."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


if __name__ == "__main__":
    run_as_program()
