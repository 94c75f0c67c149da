"""PostgreSQL's own dump of a store, by the program `pg_dump` where it is installed. The password goes by the environment."""

import os
import shutil
import subprocess
from pathlib import Path

from sqlalchemy import URL

from rsup.supervisor.database import describe
from rsup.supervisor.store import StoreError

SUFFIXES = (".dump", ".pgdump")


def program() -> str:
    """Path of `pg_dump`, empty where there is none."""
    return shutil.which("pg_dump") or ""


def dump(url: URL, target: Path) -> None:
    """Write a dump that `pg_restore` reads, mode 0600, whole or not at all. Raise `StoreError`."""
    command = program()
    if not command:
        raise StoreError(
            "pg_dump is not installed here: name a file that does not end in .dump, and rsup makes the copy itself"
        )
    address = url.set(drivername="postgresql", password=None).render_as_string(hide_password=False)
    environment = os.environ | ({"PGPASSWORD": url.password} if url.password else {})
    arriving = target.with_name(f".{target.name}.arriving-{os.getpid()}")
    arriving.touch(mode=0o600)
    try:
        done = subprocess.run(
            [command, "--format=custom", f"--file={arriving}", f"--dbname={address}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode:
            why = " ".join(done.stderr.split())[-500:] or f"exit code {done.returncode}"
            raise StoreError(f"pg_dump of {describe(url)} failed: {why}")
        arriving.replace(target)
    finally:
        arriving.unlink(missing_ok=True)
