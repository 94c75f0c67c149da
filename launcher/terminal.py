"""A single rank keeps the launcher's terminal: it reads the terminal itself, and prints on a pseudo terminal before it.

So `input()`, `breakpoint()`, progress bars and colours work as without a launcher, the last lines are there for the failure
report, and a terminal that is stopped or slow costs the launcher's loop nothing: the log pump reads the pseudo terminal as it
reads pipes. It adds nothing to the bytes and takes no keys. Output descriptors are write-only, since a program that read keys
from its stderr would wait for ever. Programs that set the terminal's mode through their stdout (curses) set the wrong one's.

Keys stay the terminal's business: Ctrl-C is SIGINT to the launcher's process group, which the rank is not in, so it gets the
signal once, passed on. Its size is copied, and SIGWINCH passed on (`RankTerminal.copy_size`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import termios
import tty
from typing import Any

SIZE_BYTES = 8


class RankTerminal:
    """The pseudo terminal that stands before the terminal `fd`. Raise OSError where the machine has none left."""

    def __init__(self, fd: int) -> None:
        self._behind = fd
        self.reader, side = os.openpty()
        try:
            tty.setraw(side, termios.TCSANOW)  # the terminal itself turns line ends into what it needs
            self._copy_size_to(side)
            self.writer = os.open(os.ttyname(side), os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        except (OSError, termios.error) as error:
            os.close(self.reader)
            raise OSError(str(error)) from None
        finally:
            os.close(side)
        os.set_blocking(self.reader, False)
        self._control = os.dup(self.reader)  # the reader is closed by whoever reads it

    def close(self) -> None:
        """Sizes are copied no more."""
        os.close(self._control)

    def copy_size(self) -> None:
        """Give it the terminal's size."""
        self._copy_size_to(self._control)

    def _copy_size_to(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # no terminal any more
            size = fcntl.ioctl(self._behind, termios.TIOCGWINSZ, bytes(SIZE_BYTES))
            fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


class TerminalMode:
    """The mode of the terminal at `fd`, as it is now; `restore` undoes what a rank that was killed has left (no echo)."""

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._mode = _mode_of(fd) if has_keys(fd) else None

    def restore(self) -> None:
        """Put the mode back. Does nothing where it is unchanged, there is no terminal, or it is somebody else's turn."""
        if self._mode is None or not has_keys(self._fd):
            return
        if _mode_of(self._fd) != self._mode:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSANOW, self._mode)


class KeptTerminals:
    """The pseudo terminals of the rank that there is now, and the mode that its terminal had at the start."""

    def __init__(self) -> None:
        self._opened: dict[object, RankTerminal] = {}
        self._mode = TerminalMode()

    def __len__(self) -> int:
        return len(self._opened)

    def open(self, fd: int, shown_on: object) -> RankTerminal | None:
        """One before the terminal `fd`, where there is none for `shown_on` yet. Raise OSError if the machine has none left."""
        if shown_on in self._opened:
            return None
        self._opened[shown_on] = terminal = RankTerminal(fd)
        return terminal

    def writer(self, shown_on: object) -> int:
        """Where a rank writes that is shown there."""
        return self._opened[shown_on].writer

    def copy_size(self) -> bool:
        """Give them the size that the terminal has now; False if there is none."""
        for terminal in self._opened.values():
            terminal.copy_size()
        return bool(self._opened)

    def end_rank(self) -> None:
        """The rank is gone: what it did to the terminal's mode is undone."""
        self._mode.restore()
        while self._opened:
            self._opened.popitem()[1].close()


def has_keys(fd: int = 0) -> bool:
    """Whether the terminal at `fd` is there and its keys are ours: a launch in the background must not take the shell's."""
    if not os.isatty(fd):
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not the terminal of our session, so there is no foreground and no background
        return True


def ignore_background_stops() -> Any:
    """From the background, print on a terminal that is set to stop those who do (`stty tostop`). Main thread only; return what
    the signal did before."""
    return signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def _mode_of(fd: int) -> list[Any] | None:
    try:
        return termios.tcgetattr(fd)
    except termios.error:
        return None
