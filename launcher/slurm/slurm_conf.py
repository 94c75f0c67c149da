"""What is unsafe or missing in a slurm.conf, as far as the hooks go. Pure but for `read_conf`.

Where the rules come from: measured on 22.05 unless a version is named; docs/slurm.md says what happens otherwise.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_INCLUDES = 50
MAX_HOOK_CHARS = 1 << 20
LEVELS = UNSAFE, OFF, ADVICE = ("unsafe", "off", "advice")
HOOK_KEYS = {"prolog": "Prolog", "epilog": "Epilog", "healthcheck": "HealthCheckProgram"}
_KEY = re.compile(r"\s*([A-Za-z0-9_]+)\s*=\s*(.*)")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Finding:
    """`level`: UNSAFE (jobs or nodes may be lost), OFF (rsup does not run there) or ADVICE. `text`: what is so, what
    follows, what to write."""

    level: str
    key: str
    text: str


Conf = Mapping[str, tuple[str, ...]]
"""Values by key in lower case, in order; NodeName and the like are left out."""


def parse_conf(text: str, include: Callable[[str], str] | None = None) -> dict[str, tuple[str, ...]]:
    """slurm.conf: comments, continued lines, `include FILE` (by `include`, which gives that file's text)."""
    found: dict[str, tuple[str, ...]] = {}
    for line in conf_lines(text, include):
        match = _KEY.match(line)
        if match is not None:
            key, value = match[1].lower(), match[2].strip().strip('"')
            found[key] = (*found.get(key, ()), value)
    return found


def conf_lines(text: str, include: Callable[[str], str] | None = None) -> Iterator[str]:
    """The lines of one of SLURM's files without comments, continued ones joined, included ones in their place."""
    num_includes = 0
    pending = [line for line in re.sub(r"\\\n", " ", text).splitlines()]
    while pending:
        line = re.sub(r"(?<!\\)#.*", "", pending.pop(0)).strip()
        words = line.split(None, 1)
        if len(words) == 2 and words[0].lower() == "include" and include is not None and num_includes < MAX_INCLUDES:
            num_includes += 1
            pending[:0] = re.sub(r"\\\n", " ", include(words[1].strip())).splitlines()
            continue
        if line:
            yield line


def include_beside(path: Path) -> Callable[[str], str]:
    """What gives the text of a file that `path` includes: relative names are beside it, missing ones count as empty."""

    def include(name: str) -> str:
        try:
            return (path.parent / name).read_text(errors="replace")
        except OSError:
            return ""

    return include


def read_conf(path: Path) -> dict[str, tuple[str, ...]]:
    """The file and what it includes. Raise OSError."""
    return parse_conf(path.read_text(errors="replace"), include_beside(path))


def check_conf(
    conf: Conf, hooks: Mapping[str, str], *, box_s: int = 7, round_s: int = 46, whole_node: bool = False
) -> list[Finding]:
    """All that is to be said. `hooks`: path of each of our scripts by slot. `box_s`, `round_s`: what prolog and epilog, and the
    healthcheck, take at most. `whole_node`: of node.toml."""
    found = [*_hooks(conf, hooks), *_timeouts(conf, box_s), *_refusals(conf), *_health(conf, round_s), *_states(conf)]
    found += _gpus(conf, whole_node)
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def _last(conf: Conf, key: str) -> str:
    return (conf.get(key.lower()) or ("",))[-1]


def _words(conf: Conf, key: str) -> set[str]:
    return {word.strip().lower() for word in _last(conf, key).split(",") if word.strip()}


def _number(conf: Conf, key: str, default: int) -> int:
    text = _last(conf, key)
    return int(text) if text.isdecimal() else default


def _hooks(conf: Conf, hooks: Mapping[str, str]) -> Iterator[Finding]:
    for slot, path in hooks.items():
        key = HOOK_KEYS[slot]
        given = [part.strip() for value in conf.get(key.lower(), ()) for part in value.split(",") if part.strip()]
        if not given:
            if slot == "healthcheck":
                text = f"is not set: write {key}={path}, or use the systemd timer; without either the gate decides nothing"
                yield Finding(ADVICE, key, text)
            else:
                yield Finding(OFF, key, f"is not set: nothing of rsup runs there; write {key}={path}")
        for name in given:
            if slot != "healthcheck" and (_GLOB.search(name) or name.endswith(".d")):
                yield _several(key, name, path)
    if "rsup" in _last(conf, "PrologSlurmctld"):
        text = "is no gate: a refusal there requeues the job, which then gets the same nodes again; take rsup out of it"
        yield Finding(UNSAFE, "PrologSlurmctld", text)


def _several(key: str, name: str, path: str) -> Finding:
    return Finding(
        UNSAFE,
        key,
        f"{name} is a pattern or a folder: SLURM runs the files of a pattern in reverse alphabetical order and drains the node "
        f"for each that fails, for a missing one too; name rsup's file to come last (00-rsup), or write {key}={path}",
    )


def _gpus(conf: Conf, whole_node: bool) -> Iterator[Finding]:
    if whole_node or "gpu" in _words(conf, "GresTypes"):
        return
    text = "has no gpu: SLURM gives hooks no SLURM_JOB_GPUS, so that a verdict against a GPU refuses no job"
    yield Finding(ADVICE, "GresTypes", f"{text}; where jobs have whole nodes write whole_node = true into node.toml")


def _timeouts(conf: Conf, box_s: int) -> Iterator[Finding]:
    limit = _number(conf, "PrologEpilogTimeout", 0) or _number(conf, "PrologTimeout", 0)
    if limit == 0:
        text = "is not set: SLURM waits for ever for a prolog that hangs; write PrologEpilogTimeout=20"
        yield Finding(UNSAFE, "PrologEpilogTimeout", text)
    elif limit <= box_s:
        text = f"is {limit} s: rsup's hooks end after {box_s} s, and SLURM drains a node whose hook it must kill; write 20"
        yield Finding(UNSAFE, "PrologEpilogTimeout", text)
    for key, default in (("MessageTimeout", 10), ("BatchStartTimeout", 10)):
        if _number(conf, key, default) <= box_s:
            text = f"is {_number(conf, key, default)} s, less than a prolog may take ({box_s} s): nodes are then taken for dead"
            yield Finding(UNSAFE, key, f"{text}; write {key}={max(10, default)} or more")


def _refusals(conf: Conf) -> Iterator[Finding]:
    scheduler, flags = _words(conf, "SchedulerParameters"), _words(conf, "PrologFlags")
    if "nohold_on_prolog_fail" not in scheduler:
        yield Finding(
            UNSAFE,
            "SchedulerParameters",
            "lacks nohold_on_prolog_fail: a job that a prolog refuses is held until somebody releases it; add the word",
        )
    if not flags & {"alloc", "contain", "x11", "nohold", "forcerequeueonfail", "runinjob"}:
        text = "lacks Alloc: prologs of further nodes run only at the first srun, when the batch script has begun"
        yield Finding(UNSAFE, "PrologFlags", f"{text}; write PrologFlags=Alloc,DeferBatch")
    elif "deferbatch" not in flags:
        text = "lacks DeferBatch: the batch script starts on its first node while another node still refuses"
        yield Finding(ADVICE, "PrologFlags", f"{text}; write PrologFlags=Alloc,DeferBatch (22.05 and later)")
    if _last(conf, "JobRequeue") == "0":
        text = "is 0: jobs that a prolog refuses fail, unless they say --requeue; write JobRequeue=1"
        yield Finding(UNSAFE, "JobRequeue", text)
    if "88" not in _words(conf, "RequeueExit"):
        text = "lacks 88: a launch that asks to be requeued ends its job; write RequeueExit=88"
        yield Finding(ADVICE, "RequeueExit", text)
    expire = re.search(r"cred_expire=(\d+)", _last(conf, "AuthInfo"))
    if expire is None or int(expire[1]) > 60:
        text = "lacks cred_expire=30: a requeued job waits so long before it starts again, by itself 120 s"
        text += "; add it (AuthInfo=cred_expire=30)"
        yield Finding(ADVICE, "AuthInfo", text)


def _health(conf: Conf, round_s: int) -> Iterator[Finding]:
    if not _last(conf, "HealthCheckProgram"):
        return
    every = _number(conf, "HealthCheckInterval", 0)
    if every == 0:
        text = "is not set, so the healthcheck never runs; write HealthCheckInterval=60"
        yield Finding(UNSAFE, "HealthCheckInterval", text)
    elif every <= round_s:
        text = f"is {every} s, less than a round may take ({round_s} s); write 60 or more"
        yield Finding(ADVICE, "HealthCheckInterval", text)
    if "cycle" not in _words(conf, "HealthCheckNodeState"):
        text = "lacks CYCLE: all nodes ask at the same moment; write HealthCheckNodeState=CYCLE,ANY"
        yield Finding(ADVICE, "HealthCheckNodeState", text)


def _states(conf: Conf) -> Iterator[Finding]:
    if _last(conf, "ReturnToService") == "2":
        text = "is 2: a node that somebody sets down comes back by itself; drains stay, and rsup only drains; 1 keeps both"
        yield Finding(ADVICE, "ReturnToService", text)


def check_files(conf: Conf, hooks: Mapping[str, str]) -> list[Finding]:
    """What is wrong with the hooks' files on this node: SLURM drains it for one that is missing or cannot be run, and runs it
    as root, whoever may write it; and whether rsup is in them. `hooks`: as for `check_conf`."""
    found: list[Finding] = []
    for slot, key in HOOK_KEYS.items():
        names = [part.strip() for value in conf.get(key.lower(), ()) for part in value.split(",") if part.strip()]
        for name in names:
            if not name.startswith("/") or _GLOB.search(name):
                continue
            if Path(name).is_dir():
                if not name.endswith(".d"):  # that one is named already
                    found.append(_several(key, name, hooks[slot]))
            elif text := _file_problem(Path(name), slot):
                found.append(Finding(UNSAFE, key, f"{name} {text}"))
        if names and not any(_runs_ours(name, slot, hooks[slot]) for name in names):
            text = f"runs {', '.join(names)[:200]}, where rsup's {slot} is not named: nothing of rsup runs there"
            level = ADVICE if slot == "healthcheck" else OFF  # the systemd timer does it too
            found.append(Finding(level, key, f"{text}; write {key}={hooks[slot]}, or call it from there"))
    return found


def _runs_ours(name: str, slot: str, hook: str) -> bool:
    """Whether the hook is ours, or a site's that names ours; True where that cannot be seen."""
    if name == hook:
        return True
    folder = Path(name)
    try:
        if _GLOB.search(name):
            paths = [path for path in folder.parent.glob(folder.name) if path.is_file()]
        else:
            paths = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else [folder]
        texts = [path.read_text(errors="replace")[:MAX_HOOK_CHARS] for path in paths]
    except (OSError, ValueError, NotImplementedError):
        return True  # what is wrong with it is said elsewhere
    words = (hook, f"rsup.launcher.slurm.{slot}", f"rsup slurm {slot}", "rsup gate")
    return any(word in text for text in texts for word in words)


def _file_problem(path: Path, slot: str) -> str:
    follows = "the healthcheck never runs" if slot == "healthcheck" else "SLURM drains this node"
    try:
        status = path.stat()
    except OSError as error:
        return f"is not to be had on this node ({error.strerror}): {follows}"
    if not os.access(path, os.X_OK):
        return f"cannot be run: {follows}; chmod 755 it"
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        return "can be written by others, and SLURM runs it as root; chown root and chmod go-w it"
    return ""
