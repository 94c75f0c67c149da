"""`--logs-specs NAME`: a class of an installed package (entry point group `torchrun.logs_specs`) says where ranks log to.

The class is torch's `LogsSpecs`; what it returns from `reify` is torch's `LogsDest`. It is loaded in the launcher's process,
and torch with it, only where the option is given. The launcher still owns the pipes: files that the class names are written
by the launcher, so a full disk costs bytes and no training.
"""

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.log_options import STREAMS, LogOptions, RankFiles, StreamPlace
from rsup.launcher.option_table import BadValue, did_you_mean
from rsup.supervisor.wire import RsupError

GROUP = "torchrun.logs_specs"


class LogsSpecsError(RsupError):
    """--logs-specs NAME: WHAT it could not do; correct it, or leave the option out"""


def find_logs_specs(name: str) -> metadata.EntryPoint:
    """The entry point of that name. Raise `BadValue` if no installed package has one."""
    points = metadata.entry_points(group=GROUP)
    if name not in points.names:
        known = sorted(points.names)
        hint = did_you_mean(name, known)
        raise BadValue(f"--logs-specs {name}: no installed package has an entry point {GROUP} of that name{hint}")
    return points[name]


class LogsSpecs:
    """An instance of the user's class. Its methods run in the agent's loop, once an attempt."""

    def __init__(self, options: LaunchOptions) -> None:
        """Raise `LogsSpecsError` if it cannot be loaded or made."""
        assert options.logs_specs is not None
        self._name = options.logs_specs
        point = find_logs_specs(self._name)
        try:
            from torch.distributed.elastic.multiprocessing import Std

            self._specs: Any = point.load()(
                log_dir=str(options.log_dir) if options.log_dir else None,
                redirects={rank: Std(value) for rank, value in enumerate(options.redirects)},
                tee={rank: Std(value) for rank, value in enumerate(options.tee)},
                local_ranks_filter=set(options.local_ranks_filter) if options.local_ranks_filter else None,
            )
        except Exception as error:  # code of others: whatever it raises
            raise self._failed("cannot be loaded", error) from error

    def files_of(self, environments: Mapping[int, Mapping[str, str]], options: LogOptions) -> dict[int, RankFiles]:
        """Where the streams of each local rank go in this attempt. Raise `LogsSpecsError`."""
        given = {local_rank: dict(environment) for local_rank, environment in environments.items()}
        try:
            dest = self._specs.reify(given)
            return {local_rank: _rank_files(dest, local_rank, given[local_rank], environments, options) for local_rank in given}
        except Exception as error:  # code of others: whatever it raises, or returns
            raise self._failed("cannot say where ranks log to", error) from error

    def _failed(self, what: str, error: Exception) -> LogsSpecsError:
        return LogsSpecsError(f"--logs-specs {self._name} {what}: {type(error).__name__}: {error}")


def _rank_files(
    dest: Any, local_rank: int, after: dict[str, str], before: Mapping[int, Mapping[str, str]], options: LogOptions
) -> RankFiles:
    """torch's meaning: an empty path is the console; a teed stream goes to its file, and to the console with a prefix."""
    added = {name: value for name, value in after.items() if before[local_rank].get(name) != value}
    rank = int(after.get("RANK", local_rank))
    files = {"stdout": dest.stdouts.get(local_rank), "stderr": dest.stderrs.get(local_rank)}
    tees = {"stdout": dest.tee_stdouts.get(local_rank), "stderr": dest.tee_stderrs.get(local_rank)}
    filtered = {"stdout": dest.filtered_stdout, "stderr": dest.filtered_stderr}
    teed = {stream: bool(tees[stream]) and tees[stream] != os.devnull for stream in STREAMS}
    error_file = dest.error_files.get(local_rank)
    return RankFiles(
        places={
            stream: StreamPlace(
                to_file=_path(files[stream]) is not None,
                to_console=not files[stream] or teed[stream],
                prefix=options.prefix(local_rank, rank) if teed[stream] else b"",
                needles=options.needles(stream) if teed[stream] and _path(filtered[stream]) else (),
                json=options.json_lines(local_rank, rank, stream, int(after.get("RSUP_ATTEMPT", 1))),
            )
            for stream in STREAMS
        },
        files={stream: _path(files[stream]) for stream in STREAMS},
        filtered={stream: _path(filtered[stream]) for stream in STREAMS},
        error_file=_path(error_file),
        environment=added,
    )


def _path(text: str | None) -> Path | None:
    """None for the console, and for what is thrown away."""
    return Path(text) if text and not text.startswith(os.devnull) else None
