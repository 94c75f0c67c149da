"""A warm standby: an interpreter that has imported torch and waits to become a rank. Run by its path.

    python -u standby_process.py FD KIND PRELOAD WORD...     KIND: script | module; WORD...: the script and its arguments

Theory. It sets `sys.path` as the cold start of that script would, imports what training imports late, says so on the socket
FD, and waits. `go` brings an environment and the three standard descriptors; then the script runs in this process as
`__main__`, and sees what a cold start shows it, save that more modules are imported already.

That is only right if the script would have imported torch in this very environment. So torch (and what `--preload` names) is
hidden from `sys.modules` again until the script asks for it: its first import looks at what the script changed before. If that
could matter, or torch was replaced on disk meanwhile, the process executes the cold start in its own place, with the same pid,
the original environment and working directory, and leaves a line that says why. Until then the script has only run what stands
before its first import of torch. What plain `import torch` does not load (`torch._dynamo`, say) stays hidden longer, until it
is asked for: a variable that its import reads may still be set before, and then the cold start takes over too.

Only the standard library: it runs in the ranks' interpreter, whatever that has installed.
"""

# ruff: noqa: E402  sys.path comes first

import sys


def _cold_path0(kind: str, words: list[str]) -> str:
    """`sys.path[0]` of the cold start; before anything else is imported, or our own folder would offer its modules."""
    import os

    return os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(words[0]))


if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path[0] = _cold_path0(sys.argv[2], sys.argv[4:])

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

LATE = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.distributed.checkpoint")
"""What training imports; constructing DDP alone pulls in `torch._dynamo`."""
OURS = "rsup.worker"
CAP_SYS_NICE = 1 << 23
FULL_NICE_RANGE = 20
OOM_FIRST = "1000"
MAX_MESSAGE_BYTES = 64 << 20
NUM_STREAMS = 3

INERT_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning sets it whenever it is imported
    }
)
"""Read when CUDA starts or is asked for, not when torch is imported."""
TORCH_PREFIXES = ("TORCH", "PYTORCH_", "TRITON_")
GPU_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/", "/dev/accel")
INERT_PREFIXES = ("NCCL_", "TORCH_NCCL_", "MASTER_", "GLOO_")
LIBRARY_PREFIXES = ("ACCELERATE_", "HF_", "TOKENIZERS_", "TRANSFORMERS_", "WANDB_")
"""Read by libraries that torch does not load: they matter only if something else was imported ahead too."""


def main() -> None:
    """Import, wait, become the rank."""
    link = socket.socket(fileno=int(sys.argv[1]))
    kind, preload, words = sys.argv[2], [word for word in sys.argv[3].split(",") if word], sys.argv[4:]
    warm = WarmInterpreter(kind, words)
    with _in_the_background():
        warm.prepare(preload)
        _send(link, {"problems": warm.problems, "opened_gpu": warm.opened_gpu})
        message, descriptors = _receive(link)
    link.close()
    if message is None:
        os._exit(0)  # not needed any more: nothing to clean up
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    warm.become_rank(message["env"], message["report"])


class WarmInterpreter:
    """What was imported ahead, and the start of the script."""

    def __init__(self, kind: str, words: Sequence[str]) -> None:
        self._kind = kind
        self._words = list(words)
        self._hidden: dict[str, ModuleType] = {}
        self._files: list[tuple[str, int, int]] = []
        self._known: frozenset[str] = frozenset()
        self._has_preloaded = False
        self._late: dict[str, ModuleType] = {}
        self._late_reads: frozenset[str] = frozenset()
        """Names of variables that the import of the late modules looks at."""
        self.problems: list[str] = []
        self.opened_gpu = ""
        """The module whose import opened a GPU: waiting like this would hold its memory."""

    def prepare(self, preload: Sequence[str]) -> None:
        """Import `preload` and what training imports late, and hide it. A module that is missing or fails is only noted."""
        before = set(sys.modules)
        names = [*preload, *LATE] if "torch" in preload else [*LATE, *preload]
        num_first = names.index("torch") + 1
        self._import(names[:num_first], preload)
        early = set(sys.modules)
        with _reads_of_environment() as reads:
            self._import([*names[num_first:], OURS], preload)
        self._late_reads = frozenset(reads)
        self._late = {name: module for name, module in sys.modules.items() if name not in early and _is_of_torch(name)}
        self._has_preloaded = any(name.partition(".")[0] not in ("torch", "rsup") for name in preload)
        roots = {"torch", *(name.partition(".")[0] for name in preload)} - {"rsup"}
        self._hidden = {
            name: module for name, module in sys.modules.items() if name not in before and name.partition(".")[0] in roots
        }
        self._files = [
            _signature(sys.modules[root].__file__) for root in roots if getattr(sys.modules.get(root), "__file__", None)
        ]

    def _import(self, names: Sequence[str], preload: Sequence[str]) -> None:
        for name in names:
            gc.disable()  # it finds nothing in an import, and takes a quarter of its time
            try:
                importlib.import_module(name)
            except Exception as error:  # whatever a module raises
                if name in preload or name == "torch":
                    self.problems.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            finally:
                gc.enable()
            if not self.opened_gpu and _has_opened_gpu():
                self.opened_gpu = name

    def become_rank(self, environment: dict[str, str], report: str) -> None:
        """Run the script. `report`: file for the reason if the cold start takes over."""
        _set_environment(environment)
        sys.orig_argv = self._cold_argv()
        cold = ColdStart(self._cold_argv(), environment, os.getcwd(), report)
        late_attributes = _hide(self._late)
        early = {name: module for name, module in self._hidden.items() if name not in self._late}
        _hide(early)
        self._known = frozenset(sys.modules)
        if any(_signature(path) != (path, *rest) for path, *rest in self._files):
            cold.take_over("a module imported ahead was replaced on disk")
        path = list(sys.path)
        roots = frozenset(name.partition(".")[0] for name in (*self._hidden, *self._known))
        inert = INERT_PREFIXES if self._has_preloaded else INERT_PREFIXES + LIBRARY_PREFIXES
        watched = WatchedEnvironment(environment, self._late_reads, cold)

        def late_is_back() -> None:
            _show(late_attributes)
            watched.end()

        late = Guard(self._late, lambda: None, cold, late_is_back)
        Guard(early, lambda: _what_changed(environment, path, self._known, roots, inert), cold, late.begin).begin()
        _close_own_main()
        run = _run_module if self._kind == "module" else _run_script
        run(self._words)

    def _cold_argv(self) -> list[str]:
        return [sys.executable, "-u", *(["-m"] if self._kind == "module" else []), *self._words]


class ColdStart:
    """The way back: the same script in the same process as if it had never been warm."""

    def __init__(self, argv: list[str], environment: dict[str, str], folder: str, report: str) -> None:
        self._argv = argv
        self._environment = environment
        self._folder = folder
        self._report = report
        self._pid = os.getpid()
        self._ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._cpus = os.sched_getaffinity(0)
        self._umask = os.umask(0o22)
        os.umask(self._umask)

    def take_over(self, reason: str, preload: Sequence[str] = ()) -> None:
        """Execute it. `preload`: what standbys of this script had better import first. Returns only in a process that the
        script forked: there is nothing to start again in that one."""
        if os.getpid() != self._pid:
            return
        self.leave_word(reason, preload, is_cold=True)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._undo_what_exec_keeps()
        os.execve(self._argv[0], self._argv, self._environment)

    def leave_word(self, reason: str, preload: Sequence[str] = (), *, is_cold: bool) -> None:
        """Tell the agent."""
        with contextlib.suppress(OSError):
            with open(f"{self._report}.new", "w", encoding="ascii") as file:
                json.dump({"reason": reason, "preload": list(preload), "is_cold": is_cold}, file)
            os.replace(f"{self._report}.new", self._report)

    def _undo_what_exec_keeps(self) -> None:
        """Ignored signals (Python's own SIGPIPE and SIGXFSZ, too), mask, umask, CPUs, folder, inheritable descriptors."""
        for number in signal.valid_signals():
            kept = number in self._ignored and number not in (signal.SIGPIPE, signal.SIGXFSZ)
            if signal.getsignal(number) is signal.SIG_IGN and not kept:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        os.umask(self._umask)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        for number_text in os.listdir("/proc/self/fd"):
            if int(number_text) >= NUM_STREAMS:
                with contextlib.suppress(OSError):
                    os.set_inheritable(int(number_text), False)


class Guard(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for the hidden modules until the first of them is imported; then it puts them back, or starts cold."""

    def __init__(
        self,
        hidden: dict[str, ModuleType],
        what_changed: Callable[[], "Change | None"],
        cold: ColdStart,
        then: Callable[[], object],
    ) -> None:
        """`then` is called when they have been put back."""
        self._hidden = hidden
        self._what_changed = what_changed
        self._cold = cold
        self._then = then

    def begin(self) -> None:
        """From now on; the modules are hidden already."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for a hidden module; asking for one (`importlib.util.find_spec`) is not yet importing it."""
        module = self._hidden.get(fullname)
        if module is None:
            return None
        real = module.__spec__
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=real.origin if real else None)
        spec.submodule_search_locations = real.submodule_search_locations if real else None
        spec.has_location = bool(real and real.has_location)
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module imported ahead; or the cold start, which does not return."""
        if change := self._what_changed():
            self._cold.take_over(change.reason, change.preload)
        module = self._hidden[spec.name]
        self._spec_of_module = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put everything back: it has been executed long ago."""
        module.__spec__ = self._spec_of_module
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        for name, hidden in self._hidden.items():
            sys.modules.setdefault(name, hidden)
        self._then()


class WatchedEnvironment:
    """Between torch and its late modules: a variable that their import reads is not to change, or the start must be cold."""

    def __init__(self, environment: dict[str, str], names: frozenset[str], cold: ColdStart) -> None:
        self._environment = environment
        self._names = names
        self._cold = cold
        self._calls = os.putenv, os.unsetenv
        os.putenv, os.unsetenv = self._putenv, self._unsetenv

    def end(self) -> None:
        """The late modules are there: what is set from now on comes after their import in a cold start too."""
        os.putenv, os.unsetenv = self._calls

    def _putenv(self, name: Any, value: Any) -> None:
        self._calls[0](name, value)
        self._look(os.fsdecode(name), os.fsdecode(value))

    def _unsetenv(self, name: Any) -> None:
        self._calls[1](name)
        self._look(os.fsdecode(name), None)

    def _look(self, name: str, value: str | None) -> None:
        read = name in self._names or name.startswith(TORCH_PREFIXES)
        matters = read and name not in INERT_NAMES and not name.startswith(INERT_PREFIXES)
        if not matters or self._environment.get(name) == value or "torch" not in sys.modules:
            return
        reason = f"the script changes {name}, which a part of torch that was imported ahead has read"
        if sys.modules["torch"].distributed.is_available() and sys.modules["torch.distributed"].is_initialized():
            self._cold.leave_word(f"{reason}; it has no effect in this attempt", is_cold=False)  # peers wait for us already
        else:
            self._cold.take_over(reason)


class Change(NamedTuple):
    """Why torch may not have been imported ahead; `preload`: what could be imported ahead of it, in that order."""

    reason: str
    preload: Sequence[str] = ()


def _what_changed(
    environment: dict[str, str], path: list[str], known: frozenset[str], roots: frozenset[str], inert: tuple[str, ...]
) -> Change | None:
    """What the script did before its first import of torch that could have led that import elsewhere; None: nothing."""
    names = sorted(
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name not in INERT_NAMES and not name.startswith(inert)
    )
    if names:
        some = f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
        return Change(f"the script changes {some} before it imports torch")
    if [entry for entry in sys.path if entry in path] != path:
        return Change("the script removes entries of sys.path or moves them before it imports torch")
    for entry in sys.path:
        if entry not in path and (shadow := _offered(entry) & roots):
            return Change(f"the script adds {entry} to sys.path before it imports torch, and that has a {min(shadow)} too")
    if native := [name for name in sys.modules if name not in known and _is_foreign_native(sys.modules[name])]:
        own = _own_imports(known) or [native[0].partition(".")[0]]
        return Change(f"the script imports {native[0]} before torch: --preload {','.join(own)},torch keeps that order", own)
    return None


def _own_imports(known: frozenset[str]) -> list[str]:
    """The installed packages that the script itself has imported, in order: what brought in all the others."""
    new = dict.fromkeys(name.partition(".")[0] for name in list(sys.modules) if name not in known)
    named = {
        str(getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", "")).partition(".")[0]
        for value in list(sys.modules["__main__"].__dict__.values())
    }
    installed = [name for name in new if "-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")]
    under_way = [name for name in installed if getattr(sys.modules[name].__spec__, "_initializing", False)][:1]
    return [name for name in installed if name in named or name in under_way]


@contextlib.contextmanager
def _reads_of_environment() -> Iterator[set[str]]:
    """The names of the variables that are looked up in `os.environ`."""
    names: set[str] = set()
    encode = os.environ.encodekey

    def note(name: Any) -> Any:
        names.add(str(name))
        return encode(name)

    os.environ.encodekey = note
    try:
        yield names
    finally:
        os.environ.encodekey = encode


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "functorch")


def _hide(modules: dict[str, ModuleType]) -> list[tuple[str, str]]:
    """Take modules out of `sys.modules`, and out of the packages that they are attributes of: those are returned."""
    attributes = []
    for name, module in modules.items():
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        package = sys.modules.get(parent) if parent not in modules else None
        if package is not None and package.__dict__.get(child) is module:
            delattr(package, child)
            attributes.append((parent, child))
    return attributes


def _show(attributes: list[tuple[str, str]]) -> None:
    for parent, child in attributes:
        setattr(sys.modules[parent], child, sys.modules[f"{parent}.{child}"])


def _has_opened_gpu() -> bool:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(GPU_DEVICES):
                return True
    return False


def _offered(entry: str) -> set[str]:
    try:
        return {name.partition(".")[0] for name in os.listdir(entry or ".")}
    except OSError:
        return set()


def _is_foreign_native(module: ModuleType) -> bool:
    """Whether it is a compiled module that is not Python's own: those load libraries, whose order can matter."""
    path = getattr(module, "__file__", None) or ""
    return path.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)) and "lib-dynload" not in path


def _signature(path: str | None) -> tuple[str, int, int]:
    try:
        found = os.stat(path or "")
    except OSError:
        return path or "", 0, 0
    return path or "", found.st_mtime_ns, found.st_ino


def _set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


# ------------------------------------------------------------------------------------------------------ the script


def _close_own_main() -> None:
    """Let go of this file as `__main__`: the script's module takes its place."""
    fresh = ModuleType("__main__")
    fresh.__dict__["__builtins__"] = sys.modules["builtins"]
    fresh.__dict__.setdefault("__annotations__", {})
    sys.modules["__main__"] = fresh


def _run_module(words: Sequence[str]) -> None:
    import runpy

    sys.argv = ["-m", *words[1:]]
    _call(lambda: runpy._run_module_as_main(words[0]), num_own_frames=2)  # type: ignore[attr-defined]


def _run_script(words: Sequence[str]) -> None:
    path = os.path.abspath(words[0])
    sys.argv = list(words)
    module = sys.modules["__main__"]
    module.__dict__.update(
        __file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path), __spec__=None
    )
    _call(lambda: exec(_compile(path), module.__dict__), num_own_frames=2)


def _compile(path: str) -> CodeType:
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _call(run: Callable[[], Any], num_own_frames: int) -> None:
    """Run the script; an exception is shown as the interpreter shows it, without the frames of this file."""
    try:
        run()
    except Exception as error:
        traceback: TracebackType | None = error.__traceback__
        for _ in range(num_own_frames):
            traceback = traceback.tb_next if traceback and traceback.tb_next else traceback
        if isinstance(error, SyntaxError) and error.filename == sys.modules["__main__"].__dict__.get("__file__"):
            traceback = None
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(1)


# ------------------------------------------------------------------------------------------------- socket, priority


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    link.sendall(struct.pack("!I", len(data)) + data)


def _receive(link: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The message with its descriptors; None if the agent is gone or has no use for us."""
    try:
        head, descriptors, _, _ = socket.recv_fds(link, 4, NUM_STREAMS)
        size = struct.unpack("!I", head)[0]
        data = b""
        while len(data) < size <= MAX_MESSAGE_BYTES:
            piece = link.recv(min(1 << 20, size - len(data)))
            if not piece:
                return None, []
            data += piece
        return json.loads(data), descriptors
    except (OSError, struct.error, ValueError):
        return None, []


@contextlib.contextmanager
def _in_the_background() -> Iterator[None]:
    """Idle priority, where it can be undone, and first to go when memory runs out."""
    adjustment = _read("/proc/self/oom_score_adj")
    _write("/proc/self/oom_score_adj", OOM_FIRST)
    is_idle = _can_undo_idle()
    if is_idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    yield
    if is_idle:
        for thread in os.listdir("/proc/self/task"):  # libraries may have started some
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
    _write("/proc/self/oom_score_adj", adjustment)


def _can_undo_idle() -> bool:
    """Leaving SCHED_IDLE asks for as much as lowering a nice value does."""
    import resource

    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    capabilities = next((line.split()[1] for line in _read("/proc/self/status").splitlines() if line.startswith("CapEff")), "0")
    allowed = resource.getrlimit(resource.RLIMIT_NICE)[0]
    needed = FULL_NICE_RANGE - os.getpriority(os.PRIO_PROCESS, 0)
    return bool(int(capabilities, 16) & CAP_SYS_NICE) or allowed == resource.RLIM_INFINITY or allowed >= needed


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(text.strip())


if __name__ == "__main__":
    main()
