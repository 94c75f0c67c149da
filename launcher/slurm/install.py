"""`rsup slurm install`: writes a node's hooks and settings, shows the lines for slurm.conf, and says what is unsafe in one that
is there. Never changes slurm.conf, never starts anything; a second run changes only what differs, and no settings.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rsup.launcher.slurm.hook_text import HOOKS, hook_text
from rsup.launcher.slurm.node_settings import MODES, NodePlaces, places_of, read_settings, write_atomically
from rsup.launcher.slurm.slurm_conf import HOOK_KEYS, UNSAFE, check_conf, check_files, read_conf
from rsup.supervisor.wire import RsupError, UsageError

HOOK_FOLDER = Path("/usr/libexec/rsup")
CONF_PLACES = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/usr/local/etc/slurm.conf")
LINES = """\
Prolog={hooks}/prolog
Epilog={hooks}/epilog
PrologEpilogTimeout=20
PrologFlags=Alloc,DeferBatch
SchedulerParameters=nohold_on_prolog_fail
HealthCheckProgram={hooks}/healthcheck
HealthCheckInterval=60
HealthCheckNodeState=CYCLE,ANY
RequeueExit=88"""
SETTINGS = """\
# Of this node's gate: rsup slurm install wrote it, rsup slurm prolog, epilog and healthcheck read it.
supervisor = [{supervisors}]
# observe: say what would be refused, and let all in. enforce: refuse.
mode = "{mode}"
# What cannot be answered (no snapshot, an old one): accept or refuse.
on_unknown = "accept"
"""


def main(words: Sequence[str]) -> int:
    """The verb: 0, or 1 if something unsafe was found."""
    given = _parser().parse_args(list(words))
    places, out = places_of(os.environ), print
    hooks = {name: str(given.hooks / name) for name in HOOKS}
    if not given.check:
        for line in write_node(places, given):
            out(line)
        out("\nfor slurm.conf (SchedulerParameters and PrologFlags: beside what is there), then scontrol reconfigure:\n")
        out(LINES.format(hooks=given.hooks) + "\n")
    conf = _conf_path(given.slurm_conf)
    if conf is None:
        out("no slurm.conf here to look at; name it with --slurm-conf")
        return 0
    return _report(conf, hooks)


def write_node(places: NodePlaces, given: argparse.Namespace) -> list[str]:
    """Write what differs; a line for each file. Raise `UsageError` for what makes no sense, `RsupError` where it cannot."""
    if "\n" in given.python or not given.python.startswith("/"):
        raise UsageError(f"--python {given.python!r}: the interpreter's absolute path is wanted, since hooks have no PATH")
    lines: list[str] = []
    try:
        for name in HOOKS:
            lines.append(_write(places.under(str(given.hooks / name)), hook_text(name, given.python), 0o755, given.dry_run))
        lines.append(
            _write(places.under("/usr/lib/tmpfiles.d/rsup.conf"), "d /run/rsup 0755 root root -\n", 0o644, given.dry_run)
        )
        if not given.dry_run:
            for folder, mode in ((places.run, 0o755), (places.jobs, 0o755), (places.spool, 0o700), (places.log.parent, 0o755)):
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                folder.chmod(mode)
        lines.append(_write_settings(places, given))
        settings = read_settings(places.settings)
        if given.public_key is not None:
            text = given.public_key.read_text()
            lines.append(_write(places.under(settings.public_key_file), text, 0o644, given.dry_run))
        for path, what in ((settings.public_key_file, "signing-key.pub"), (settings.token_file, "rsup slurm node-token")):
            if not places.under(path).exists():
                lines.append(f"missing  {path}: from the supervisor's host, {what}")
    except OSError as error:
        raise RsupError(f"cannot write {error.filename}: {error.strerror}; this needs root") from None
    return lines


def _write_settings(places: NodePlaces, given: argparse.Namespace) -> str:
    if places.settings.exists():
        problem = read_settings(places.settings).problem
        return f"kept     {places.settings}" + (f": {problem}; until then the gate lets all in" if problem else "")
    text = SETTINGS.format(supervisors=", ".join(f'"{_plain(one)}"' for one in given.supervisor), mode=given.mode)
    return _write(places.settings, text, 0o644, given.dry_run)


def _plain(text: str) -> str:
    if not text.isprintable() or '"' in text or "\\" in text:
        raise UsageError(f"--supervisor {text!r}: no address; write http://HOST:PORT")
    return text


def _write(path: Path, text: str, mode: int, is_trial: bool) -> str:
    try:
        if path.read_text() == text and path.stat().st_mode & 0o777 == mode:
            return f"same     {path}"
        word = "changed "
    except (OSError, UnicodeDecodeError):
        word = "written "
    if is_trial:
        return f"to write {path}"
    write_atomically(path, text.encode(), mode)
    return f"{word} {path}"


def _conf_path(given: Path | None) -> Path | None:
    if given is not None:
        return given
    named = os.environ.get("SLURM_CONF")
    return next((Path(name) for name in ((named,) if named else CONF_PLACES) if Path(name).exists()), None)


def _report(path: Path, hooks: dict[str, str]) -> int:
    try:
        conf = read_conf(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name slurm.conf with --slurm-conf") from None
    found = [*check_conf(conf, hooks), *check_files(conf)]
    print(f"{path}: " + (f"{len(found)} things to look at" if found else "nothing to say against it"))
    for one in found:
        print(f"  {one.level}: {one.key} {one.text}")
    return 1 if any(one.level == UNSAFE for one in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rsup slurm install",
        allow_abbrev=False,
        description=f"Write this node's hooks ({', '.join(HOOK_KEYS)}) and settings, and check slurm.conf. Root, on each node.",
    )
    parser.add_argument("--supervisor", action="append", default=[], metavar="URL", help="its REST address; may come again")
    parser.add_argument("--mode", choices=MODES, default="observe", help="for new settings (default: observe)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has rsup (default: this one)")
    parser.add_argument("--hooks", type=Path, default=HOOK_FOLDER, metavar="DIR", help=f"default: {HOOK_FOLDER}")
    parser.add_argument("--public-key", type=Path, metavar="FILE", help="the supervisor's signing-key.pub, to be copied")
    parser.add_argument("--slurm-conf", type=Path, metavar="FILE", help="default: SLURM_CONF, else where SLURM has it")
    parser.add_argument("--check", action="store_true", help="write nothing, only look at slurm.conf; 1 if something is unsafe")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")
    return parser
