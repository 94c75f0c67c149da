"""PostgreSQL's own dump of a store, by the program `pg_dump` where it is installed.

Passwords go by the environment: everybody on the host may read a command line.
"""

import os
import shutil
import subprocess
from pathlib import Path

from sqlalchemy import URL

from rsup.supervisor.database import describe, is_secret
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
    address, environment = _address_of(url)
    arriving = target.with_name(f".{target.name}.arriving-{os.getpid()}")
    arriving.touch(mode=0o600)
    try:
        done = subprocess.run(
            [command, "--format=custom", f"--file={arriving}", f"--dbname={address}"],
            env=os.environ | environment,
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


def _address_of(url: URL) -> tuple[str, dict[str, str]]:
    """The URL without any password, and the environment that has it. libpq knows no variable for other secrets."""
    secrets = {name: value for name, value in url.query.items() if is_secret(name)}
    password = url.password or secrets.pop("password", None)
    if secrets:
        raise StoreError(f"pg_dump cannot be given {', '.join(secrets)} safely: name a file that does not end in .dump")
    options = {name: value for name, value in url.query.items() if not is_secret(name)}
    bare = url.set(drivername="postgresql", password=None, query=options)
    return bare.render_as_string(hide_password=False), {"PGPASSWORD": str(password)} if password else {}
