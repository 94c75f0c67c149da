"""The launcher as a function, with the contract of torchrun's `main`.

The options are read in the caller's process, so that errors are raised here and devices are counted by the torch that the
caller has imported. The launcher itself is a process of its own (`python_api_child`): the agent needs a main thread, signals
and children for itself. It dies with the caller's thread (parent-death signal), and reports over a pipe.
"""

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from rsup.launcher import launch_checks
from rsup.launcher.console_relay import ConsoleRelay
from rsup.launcher.error_file import write_refusal
from rsup.launcher.event_log import NO_HANDLER, check_handler, lines_of, record_event
from rsup.launcher.launch_options import LaunchOptions
from rsup.launcher.launch_parser import HelpWanted, parse_launch
from rsup.launcher.option_table import BadValue, CommandLineError
from rsup.launcher.pipe_drain import PipeDrain
from rsup.launcher.python_api_errors import LaunchError, job_error
from rsup.launcher.stop_signals import PASSED_ON
from rsup.launcher.torch_devices import counters_of_the_caller
from rsup.supervisor.wire import RsupError, UsageError

CHILD = "rsup.launcher.python_api_child"
END_MARGIN_S = 15.0
"""Beyond the ranks' grace: how long a launcher that was told to stop gets before it is killed."""


def run(args: Sequence[object] | None) -> None:
    """`rsup.launcher.main`."""
    options = read_options([_word(argument) for argument in (sys.argv[1:] if args is None else args)])
    for note in (*options.notes, *launch_checks.notes_of_preload(options)):
        print(f"rsup launch: note: {note}", file=sys.stderr)
    run_options(options)


def _word(argument: object) -> str:
    """An argument as a command line would have it. Raises `BadValue` for what is neither text, a path nor a number."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, bytes | os.PathLike):
        return os.fsdecode(argument)
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return str(argument)
    raise BadValue(f"argument {argument!r} is of type {type(argument).__name__}; give text, a path or a number")


def read_options(words: list[str]) -> LaunchOptions:
    """Options that can be run. Raises as `rsup.launcher.main`."""
    try:
        options = parse_launch(words, os.environ, counters_of_the_caller())
        launch_checks.check(options)
        check_handler(options.event_log_handler)
    except HelpWanted:
        from rsup.launcher.options_page import help_text

        print(help_text(), end="")
        raise SystemExit(0) from None
    except CommandLineError as error:
        write_refusal(error, os.environ)
        print(f"rsup launch: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except RsupError as error:
        write_refusal(error, os.environ)
        if isinstance(error, UsageError) and not isinstance(error, ValueError | RuntimeError):
            raise BadValue(str(error)) from None
        raise
    return options


def run_options(options: LaunchOptions) -> None:
    """Run a launch whose options have been read and checked. Raises as `rsup.launcher.main`."""
    with contextlib.ExitStack() as stack:
        launcher = _Launcher(options, stack)
        result = launcher.wait()
    if result["exit_code"]:
        raise job_error(options, result)


class _Launcher:
    """The process, until it has ended. `stack` ends it and closes everything, whatever happens."""

    def __init__(self, options: LaunchOptions, stack: contextlib.ExitStack) -> None:
        if not sys.executable:
            raise LaunchError("this program has no Python interpreter to run the launcher with (sys.executable is empty)")
        self._handler = options.event_log_handler
        self._grace_s = max(options.shutdown_timeout, options.stop_grace) + END_MARGIN_S
        self._result: dict[str, Any] = {}
        self._unread = b""
        self._signals = (*options.signals_to_handle, *PASSED_ON)
        consoles = ConsoleRelay(stack)
        reader, writer = os.pipe()
        self._report: PipeDrain | None = PipeDrain(reader, self._hear, "rsup-report")
        stack.callback(self._finish)
        orders, ours = os.pipe()
        with contextlib.ExitStack() as theirs:
            for fd in (writer, orders):
                theirs.callback(os.close, fd)
            theirs.callback(consoles.close_writer_ends)
            to_child = theirs.enter_context(open(ours, "wb"))
            self._process = self._start(orders, writer, consoles)
            stack.callback(self._end)
            self._pidfd = os.pidfd_open(self._process.pid)
            stack.callback(os.close, self._pidfd)
            with contextlib.suppress(BrokenPipeError):  # it has died: its exit code says more
                to_child.write(pickle.dumps((os.getpid(), replace(options, report_fd=writer))))
                to_child.flush()
        consoles.start()
        self._report.start()

    def _start(self, orders: int, report: int, consoles: ConsoleRelay) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", CHILD, str(orders)],
                stdout=consoles.fds[0],
                stderr=consoles.fds[1],
                pass_fds=(orders, report),
                start_new_session=True,  # the terminal's ^C reaches it through us, once
            )
        except OSError as error:
            raise LaunchError(f"cannot start the launcher with {sys.executable}: {error.strerror}") from None

    def wait(self) -> dict[str, Any]:
        """The result, once the process has ended. Signals to the caller are passed on meanwhile."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        with _passing_on(self._signals, self._pass_on):
            ended.poll()
        code = self._process.wait()
        self._finish()
        if not self._result:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise LaunchError(f"the launcher's process {how} before it said how the job went", 128 - code if code < 0 else code)
        return self._result

    def _pass_on(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def _hear(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        for message in lines_of(lines):
            if "result" in message:
                self._result = self._result or message["result"]
            elif _is_wanted(message["event"], self._handler):
                self._record(message["event"])

    def _record(self, event: dict[str, Any]) -> None:
        try:
            record_event(event, self._handler)
        except Exception as error:  # a handler of others: whatever it raises, the job's result is still to be heard
            print(f"rsup: an event was not recorded: {type(error).__name__}: {error}", file=sys.stderr)

    def _finish(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            report.finish()

    def _end(self) -> None:
        """Told to leave by an exception in the caller: the ranks get their grace."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _is_wanted(event: dict[str, Any], handler: str) -> bool:
    """All events for a real handler. Where there is none, torchrun's `main` still calls torch's `record` for the agent's last
    one; that is worth it where torch's events have been imported, for those who have put something in the place of `record`."""
    is_agents_last = event["source"] == "AGENT" and event["metadata"]["duration_ms"] is None
    return handler != NO_HANDLER or (is_agents_last and "torch.distributed.elastic.events" in sys.modules)


@contextlib.contextmanager
def _passing_on(signals: Sequence[int], pass_on: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile signals to this process go to `pass_on` instead; in the main thread, elsewhere Python has no handlers."""
    before: dict[int, Any] = {}

    def handle(signum: int, frame: FrameType | None) -> None:
        pass_on(signum)

    if threading.current_thread() is threading.main_thread():
        for signum in signals:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # nohup
            if signal.getsignal(signum) is not None:  # not Python's: it could not be put back
                before[signum] = signal.signal(signum, handle)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
