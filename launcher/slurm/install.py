"""`rsup slurm install`: writes a node's hooks and settings, shows the lines for slurm.conf, and says what is unsafe in one that
is there. Never changes slurm.conf, never starts anything; a second run changes only what differs, and no settings. What was
asked is looked at before anything is written: a hook with an interpreter that is not there lets every job in.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rsup.launcher.slurm.gate import read_key
from rsup.launcher.slurm.gres_order import CONF_PLACES
from rsup.launcher.slurm.hook_text import HOOKS, hook_text
from rsup.launcher.slurm.node_link import NodeLink
from rsup.launcher.slurm.node_settings import (
    MODES,
    NodePlaces,
    NodeProblem,
    NodeSettings,
    places_of,
    read_settings,
    write_atomically,
)
from rsup.launcher.slurm.slurm_conf import HOOK_KEYS, LEVELS, OFF, UNSAFE, check_conf, check_files, read_conf
from rsup.launcher.slurm.snapshot_file import public_key_of
from rsup.supervisor.one_line_parser import OneLineParser
from rsup.supervisor.wire import RsupError, UsageError

HOOK_FOLDER = Path("/usr/libexec/rsup")
PYTHON_WITHIN_S = 60.0
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
    """The verb: 0, or 1 if something was not done as asked; with `--check` if something is unsafe, or keeps the gate from
    working."""
    given = _parser().parse_args(list(words))
    places, out = places_of(os.environ), print
    hooks = {name: str(given.hooks / name) for name in HOOKS}
    if not given.hooks.is_absolute():
        raise UsageError(f"--hooks {str(given.hooks)!r}: an absolute path is wanted, which slurm.conf can name")
    conf = _conf_path(given.slurm_conf)
    differs: list[str] = []
    if not given.check:
        key = check_given(given)
        differs = _differences(places, given)
        for line in [*write_node(places, given, key), *differs]:
            out(line)
        out("\nfor slurm.conf (SchedulerParameters and PrologFlags: beside what is there), then scontrol reconfigure:\n")
        out(LINES.format(hooks=given.hooks) + "\n")
    if conf is None:
        out("no slurm.conf here to look at; name it with --slurm-conf")
        return 1 if given.check or differs else 0
    is_well = _report(conf, hooks, read_settings(places.settings))
    return 0 if (is_well if given.check else not differs) else 1


def check_given(given: argparse.Namespace) -> str:
    """The text of the public key, empty for none. Raise `UsageError` for what would leave a gate that lets all in."""
    _check_python(given.python)
    for address in given.supervisor:
        try:
            NodeLink(_plain(address), "")
        except NodeProblem as problem:
            raise UsageError(f"--supervisor: {problem}") from None
    if given.public_key is None:
        return ""
    try:
        content = given.public_key.read_bytes()
        public_key_of(content)
    except OSError as error:
        raise UsageError(f"cannot read --public-key {given.public_key}: {error.strerror}") from None
    except NodeProblem as problem:
        raise UsageError(f"--public-key {given.public_key}: {problem}") from None
    if given.public_key.with_name(f"{given.public_key.name}.pub").exists():  # a private key of before those were marked
        raise UsageError(f"--public-key {given.public_key}: its public part is beside it, {given.public_key}.pub: copy that")
    text: str = content.decode("ascii")
    return text


def _check_python(python: str) -> None:
    if "\n" in python or not python.startswith("/"):
        raise UsageError(f"--python {python!r}: the interpreter's absolute path is wanted, since hooks have no PATH")
    command = [python, "-I", "-c", "import cryptography.hazmat.primitives.asymmetric.ed25519, rsup.launcher.slurm.prolog"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd="/", timeout=PYTHON_WITHIN_S)
    except OSError as error:
        raise UsageError(f"--python {python}: {error.strerror}; the hooks would let every job in") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"--python {python}: it has not answered within {PYTHON_WITHIN_S:g} s") from None
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise UsageError(f"--python {python} cannot load rsup: {last[:200]}; the hooks would let every job in")


def _differences(places: NodePlaces, given: argparse.Namespace) -> list[str]:
    """What was asked of settings that are there already and say otherwise: they are the operator's, and are kept."""
    if not places.settings.exists():
        return []
    there = read_settings(places.settings)
    found = []
    if given.supervisor and tuple(given.supervisor) != there.supervisor:
        found.append(f"supervisor is {', '.join(there.supervisor) or 'not set'}, not {', '.join(given.supervisor)}")
    if given.mode is not None and given.mode != there.mode:
        found.append(f"mode is {there.mode}, not {given.mode}")
    return [f"not as asked: {places.settings} is kept, and its {one}; edit it" for one in found]


def write_node(places: NodePlaces, given: argparse.Namespace, key: str) -> list[str]:
    """Write what differs; a line for each file. `key`: text of the public key. Raise `RsupError` where it cannot."""
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
        if key:
            lines.append(_write(places.under(settings.public_key_file), key, 0o644, given.dry_run))
        for path, what in ((settings.public_key_file, "signing-key.pub"), (settings.token_file, "rsup slurm node-token")):
            is_given = bool(key) and path == settings.public_key_file
            if not is_given and not places.under(path).exists():
                lines.append(f"missing  {places.under(path)}: from the supervisor's host, {what}")
        if not given.dry_run:
            lines += _key_problem(places, settings)
    except OSError as error:
        raise RsupError(f"cannot write {error.filename}: {error.strerror}; this needs root") from None
    return lines


def _key_problem(places: NodePlaces, settings: NodeSettings) -> list[str]:
    """Of the key that lies here, whoever put it."""
    if not places.under(settings.public_key_file).exists():
        return []
    try:
        read_key(places, settings)
    except NodeProblem as problem:
        return [f"unusable {problem}"]
    return []


def _write_settings(places: NodePlaces, given: argparse.Namespace) -> str:
    if places.settings.exists():
        problem = read_settings(places.settings).problem
        return f"kept     {places.settings}" + (f": {problem}; until then the gate lets all in" if problem else "")
    text = SETTINGS.format(supervisors=", ".join(f'"{_plain(one)}"' for one in given.supervisor), mode=given.mode or "observe")
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
    if named:
        return Path(named)  # one that is not there is said so
    return next((Path(name) for name in CONF_PLACES if Path(name).exists()), None)


def _report(path: Path, hooks: dict[str, str], settings: NodeSettings) -> bool:
    """Say what is found; whether it is well."""
    try:
        conf = read_conf(path)
        is_text = b"\0" not in path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name slurm.conf with --slurm-conf") from None
    if not conf or not is_text:
        raise UsageError(f"{path} is no slurm.conf: no text with lines KEY=VALUE; name the right one with --slurm-conf")
    found = [*check_conf(conf, hooks, whole_node=settings.whole_node), *check_files(conf, hooks)]
    found.sort(key=lambda one: LEVELS.index(one.level))
    print(f"{path}: " + (f"{len(found)} things to look at" if found else "nothing to say against it"))
    for one in found:
        print(f"  {one.level}: {one.key} {one.text}")
    return not any(one.level in (UNSAFE, OFF) for one in found)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="rsup slurm install",
        allow_abbrev=False,
        description=f"Write this node's hooks ({', '.join(HOOK_KEYS)}) and settings, and check slurm.conf. Root, on each node.",
    )
    parser.add_argument("--supervisor", action="append", default=[], metavar="URL", help="its REST address; may come again")
    parser.add_argument("--mode", choices=MODES, help="for new settings (default: observe)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has rsup (default: this one)")
    parser.add_argument("--hooks", type=Path, default=HOOK_FOLDER, metavar="DIR", help=f"default: {HOOK_FOLDER}")
    parser.add_argument("--public-key", type=Path, metavar="FILE", help="the supervisor's signing-key.pub, to be copied")
    parser.add_argument("--slurm-conf", type=Path, metavar="FILE", help="default: SLURM_CONF, else where SLURM has it")
    parser.add_argument("--check", action="store_true", help="only look at slurm.conf; 1 if something is unsafe or off")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")
    return parser
