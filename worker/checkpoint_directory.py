"""A directory of checkpoints on disk: who may commit to it, what a whole checkpoint is, which ones stay. No torch.

    DIR/iter_0000020/               a durable checkpoint: its files, and commit.json naming each with size and SHA-256
    DIR/iter_0000030.tmp-attempt2-TOKEN/  one that is being written, by that claim of attempt 2; never read
    DIR/latest_checkpointed_iteration.txt
    DIR/fence.json                  the job and attempt that own the directory; changed under a lock on DIR/fence.lock

The rename from `.tmp-...` is the commit: before it every file and the folder are synced, after it the parent is. It happens
under the lock and only for the owner, so a stale attempt, or a job whose directory another has taken, never commits.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rsup.supervisor.wire import EXIT_NO_REQUEUE, RsupError, UsageError

COMMIT_FILE = "commit.json"
FENCE_FILE = "fence.json"
LATEST_FILE = "latest_checkpointed_iteration.txt"
_COMMIT_FORMAT = 1
_NAME = re.compile(r"iter_(\d{7,})")
_HASH_CHUNK_BYTES = 4 << 20
_RUN = re.compile(r"\.\d+$")
_PROCESS = re.compile(r"-\d+-\d+$")
_RANDOM_NAME = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class CheckpointError(RsupError):
    """A checkpoint could not be written or read; the ones before it are as they were."""


class StaleAttempt(CheckpointError):
    """A newer attempt of this job owns the directory: this process must not commit, and has to end."""


class DirectoryTaken(CheckpointError):
    """Another job owns the directory. Trying again would fight over it, hence no requeue."""

    exit_code = EXIT_NO_REQUEUE


class Damaged(CheckpointError):
    """A checkpoint is not whole."""


@dataclass(frozen=True)
class Owner:
    """One claim on the directory. `token` tells two claims of the same attempt (an in-process restart) apart."""

    job_key: str
    attempt: int
    token: str = ""
    took_from: str = ""
    """Name of the other job that owned it until now; empty: nobody, or one without a name."""


def job_name(job_key: str) -> str:
    """What the runs of one job have in common: of rsup's key `ID.RUN` the id, of the key of a torchrun its run id, which it
    has with its process. Empty where nobody chose a name, as for torchrun's own random ones."""
    name = _RUN.sub("", job_key) if _RUN.search(job_key) else _PROCESS.sub("", job_key)
    is_named = name not in ("none", "alone") and not _RANDOM_NAME.fullmatch(name)
    return name if is_named or _RUN.search(job_key) else ""


@dataclass(frozen=True)
class Commit:
    """What `commit.json` says. `files` maps a name to (size in bytes, SHA-256); `progress` is the trainer's own."""

    job_key: str
    attempt: int
    iteration: int
    world_size: int
    files: dict[str, tuple[int, str]]
    progress: dict[str, Any]


class CheckpointDirectory:
    """The directory, seen by the one rank that claims, commits and prunes; reading needs no claim."""

    def __init__(self, path: Path, keep: int = 3) -> None:
        assert keep >= 1
        self.path = path
        self.keep = keep

    def make(self) -> None:
        """Create it where it is missing, and try to write to it; raise `UsageError` if that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except (FileExistsError, NotADirectoryError):
            raise UsageError(
                f"cannot save to {self.path}: it is or lies below a file; choose a directory with --save"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot save to {self.path}: {error.strerror}; choose another directory with --save") from None

    # ------------------------------------------------------------------------------------------------------- ownership

    def claim(self, job_key: str, attempt: int, on_purpose: bool = False) -> Owner:
        """Take the directory for an attempt of a job and clear away what unfinished saves left.

        Raises `StaleAttempt` for an older attempt than the owner's, `DirectoryTaken` if another job has taken the directory
        from this attempt before, or has checkpoints in it and somebody has not asked for them `on_purpose`.
        """
        owner = Owner(job_key, attempt, secrets.token_hex(8))
        with self._locked():
            fence = self._read_fence()
            former = self._former_owners(fence, owner)
            other = self._other_job(fence, job_key)
            if other and not on_purpose and any(self.path.glob("iter_*")):
                raise DirectoryTaken(self._holds_text(fence, other, job_key))
            owner = replace(owner, took_from=other)
            content = {"job_key": job_key, "attempt": attempt, "token": owner.token, "since_us": time.time_ns() // 1000}
            try:
                write_durably(self.path / FENCE_FILE, json.dumps({**content, "former": former}, indent=1) + "\n")
            except OSError as error:
                raise CheckpointError(f"cannot write {self.path / FENCE_FILE}: {error.strerror}") from None
            self._remove_leftovers()
        return owner

    def _former_owners(self, fence: dict[str, Any], owner: Owner) -> dict[str, int]:
        """Jobs that `owner` displaces or that were displaced before, each with its last attempt; raises if it may not."""
        former: dict[str, int] = dict(fence.get("former", {}))
        if fence.get("job_key") == owner.job_key:
            if fence["attempt"] > owner.attempt:
                raise StaleAttempt(self._stale_text(owner.attempt, fence))
        elif fence:
            if former.get(owner.job_key, 0) >= owner.attempt:
                raise DirectoryTaken(self._taken_text(fence))
            former[fence["job_key"]] = fence["attempt"]
        former.pop(owner.job_key, None)
        return former

    @staticmethod
    def _other_job(fence: dict[str, Any], job_key: str) -> str:
        """Name of the job that owns the directory, if that is another one than ours and both have a name."""
        theirs, ours = job_name(fence.get("job_key", "")), job_name(job_key)
        return theirs if ours and theirs != ours else ""

    def _holds_text(self, fence: dict[str, Any], other: str, job_key: str) -> str:
        found = self.iterations()
        newest = f", the newest of iteration {found[0]}" if found else ""
        as_it = f", or launch it as that job (--job-id {other} --resume)" if _RUN.search(fence["job_key"]) else ""
        return (
            f"{self.path} holds checkpoints of job {other}{newest}, and this is job {job_name(job_key)}: give it a --save of "
            f"its own; to go on from them on purpose add --load {self.path}{as_it}"
        )

    def check_owner(self, owner: Owner) -> None:
        """Raise `StaleAttempt` or `DirectoryTaken` if that claim does not hold any more."""
        fence = self._read_fence()
        if fence.get("token") == owner.token:
            return
        if fence.get("job_key") == owner.job_key:
            raise StaleAttempt(self._stale_text(owner.attempt, fence))
        raise DirectoryTaken(self._taken_text(fence))

    def _stale_text(self, attempt: int, fence: dict[str, Any]) -> str:
        newer = f"attempt {fence.get('attempt')} of this job has taken {self.path}"
        return f"{newer}: attempt {attempt} may not commit there and ends"

    def _taken_text(self, fence: dict[str, Any]) -> str:
        return (
            f"job {fence.get('job_key')} has taken the checkpoint directory {self.path}: "
            "this job may not commit there; give each job its own --save"
        )

    def _read_fence(self) -> dict[str, Any]:
        path = self.path / FENCE_FILE
        try:
            fence = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; remove it if no job uses the directory") from None
        whole = isinstance(fence, dict) and isinstance(fence.get("job_key"), str) and isinstance(fence.get("attempt"), int)
        if not whole:
            raise CheckpointError(f"{path} is damaged; remove it if no job uses the directory")
        return dict(fence)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            fd = os.open(self.path / "fence.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CheckpointError(f"cannot lock {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    # --------------------------------------------------------------------------------------------------------- writing

    def temporary(self, owner: Owner, iteration: int) -> Path:
        """Where that claim writes the checkpoint of `iteration`. Not where an earlier claim of the same attempt does: after an
        in-process restart its thread may still be at it."""
        return self.path / f"{folder_name(iteration)}.tmp-attempt{owner.attempt}-{owner.token[:8]}"

    def make_temporary(self, owner: Owner, iteration: int) -> Path:
        """Make that folder, empty."""
        path = self.temporary(owner, iteration)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    def commit(self, owner: Owner, commit: Commit) -> Path:
        """Make the written checkpoint durable and current; return its path. The files in it are synced already.

        Raises `StaleAttempt`, `DirectoryTaken`, or `OSError` of a full or failing disk; then nothing has changed. Once it has
        its name it counts: that the pointer file or the pruning of old ones then fails is no failure of the save.
        """
        temporary = self.temporary(owner, commit.iteration)
        with self._locked():
            self.check_owner(owner)
            write_durably(temporary / COMMIT_FILE, _commit_text(commit))
            final = self.path / folder_name(commit.iteration)
            if final.exists():  # skipped as damaged, or of a run that went another way
                final.rename(self.path / f"{final.name}.deleted-{owner.token}")
            temporary.rename(final)
            sync_directory(self.path)
            with contextlib.suppress(OSError):
                write_durably(self.path / LATEST_FILE, f"{commit.iteration}\n")
                self._prune(commit.iteration)
        return final

    def discard(self, owner: Owner, iteration: int) -> None:
        """Remove what a failed save has written."""
        shutil.rmtree(self.temporary(owner, iteration), ignore_errors=True)

    def _prune(self, newest: int) -> None:
        for iteration in [i for i in self.iterations() if i <= newest][self.keep :]:
            folder = self.path / folder_name(iteration)
            folder.rename(folder.with_name(f"{folder.name}.deleted-{secrets.token_hex(4)}"))
        for folder in self.path.glob("iter_*.deleted-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        for pattern in ("iter_*.tmp-attempt*", "iter_*.deleted-*"):
            for folder in self.path.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)

    # --------------------------------------------------------------------------------------------------------- reading

    def iterations(self) -> list[int]:
        """Iterations that have a checkpoint folder, newest first; whether it is whole is another question."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.path.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def folder(self, iteration: int) -> Path:
        """Where the durable checkpoint of `iteration` is."""
        return self.path / folder_name(iteration)


def folder_name(iteration: int) -> str:
    """Name of the checkpoint folder of `iteration`, as Megatron-LM spells it."""
    return f"iter_{iteration:07d}"


def _commit_text(commit: Commit) -> str:
    body: dict[str, Any] = {
        "format": _COMMIT_FORMAT,
        "job_key": commit.job_key,
        "attempt": commit.attempt,
        "iteration": commit.iteration,
        "world_size": commit.world_size,
        "committed_us": time.time_ns() // 1000,
        "progress": commit.progress,
        "files": {name: list(entry) for name, entry in sorted(commit.files.items())},
    }
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1) + "\n"


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_commit(folder: Path) -> Commit:
    """The commit record of a checkpoint; raise `Damaged` saying why there is none that can be trusted."""
    try:
        body = json.loads((folder / COMMIT_FILE).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"it has no {COMMIT_FILE}") from None
    except OSError as error:
        raise Damaged(f"{COMMIT_FILE} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Damaged(f"{COMMIT_FILE} is cut short or garbled") from None
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        raise Damaged(f"{COMMIT_FILE} does not match its checksum")
    if body["format"] != _COMMIT_FORMAT:
        raise Damaged(f"{COMMIT_FILE} has format {body['format']}, and this release reads {_COMMIT_FORMAT}")
    if folder.name != folder_name(body["iteration"]):
        raise Damaged(f"{COMMIT_FILE} is of iteration {body['iteration']}")
    files = {name: (int(size), str(digest)) for name, (size, digest) in body["files"].items()}
    return Commit(body["job_key"], body["attempt"], body["iteration"], body["world_size"], files, body["progress"])


def verify_files(folder: Path, commit: Commit, names: Iterable[str]) -> None:
    """Raise `Damaged` for the first of these files whose size or content is not what was committed."""
    for name in names:
        size_bytes, digest = commit.files[name]
        try:
            found = (folder / name).stat().st_size
            if found != size_bytes:
                raise Damaged(f"{name} has {found} bytes instead of {size_bytes}")
            if file_digest(folder / name) != digest:
                raise Damaged(f"{name} does not match its checksum")
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Replace a small file atomically; it has the new content on disk, or the old one, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
