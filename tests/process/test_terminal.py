"""`rsup launch` of one rank on a terminal, as a user has it: a session of its own whose controlling terminal is a pty."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

RSUP = [sys.executable, "-m", "rsup.launcher", "launch", "--nproc-per-node"]


def set_columns(fd: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))


class Screen:
    """Somebody at a terminal of 100 columns."""

    def __init__(self, *arguments: str, tostop: bool = False, shell: str = "") -> None:
        """`shell`: a line for bash, in which `"$@"` is the launch; so launched, it has job control."""
        self.text = ""
        command = [*RSUP, *arguments]
        if shell:
            command = ["bash", "-mc", shell, "bash", *command]
        self.pid, self.fd = pty.fork()
        if not self.pid:  # pragma: no cover
            set_columns(0, 100)
            if tostop:
                mode = termios.tcgetattr(0)
                mode[3] |= termios.TOSTOP
                termios.tcsetattr(0, termios.TCSANOW, mode)
            os.execvp(command[0], command)

    def resize(self, columns: int) -> None:
        set_columns(self.fd, columns)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str, within_s: float = 60.0) -> "re.Match[str]":
        """Read the screen until it shows that, and return the match."""
        give_up = time.monotonic() + within_s
        while True:
            match = re.search(pattern, self.text)
            if match:
                return match
            assert time.monotonic() < give_up, f"{pattern!r} is not on the screen:\n{self.text[-3000:]}"
            self.read(0.1)

    def read(self, within_s: float) -> bool:
        """Take what comes; False at the end."""
        if select.select([self.fd], [], [], within_s)[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:
                return False
            self.text += data.decode(errors="replace")
            return bool(data)
        return True

    def ends(self, within_s: float = 60.0) -> int:
        """Read on to the end; the exit code."""
        give_up = time.monotonic() + within_s
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                while self.read(0.1) and select.select([self.fd], [], [], 0)[0]:
                    pass
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < give_up, f"still running:\n{self.text[-3000:]}"
            self.read(0.1)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)
            give_up = time.monotonic() + 20
            while not os.waitpid(self.pid, os.WNOHANG)[0]:
                if time.monotonic() > give_up:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    break
                self.read(0.1)
        os.close(self.fd)


@pytest.fixture
def screens(own_directories: Path) -> Iterator[list[Screen]]:
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        screen.close()


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_a_person_and_one_rank(screens: list[Screen], own_directories: Path) -> None:
    """Prompt, debugger, size and its change, colours; the order of both streams; and the report of the failure."""
    text = (
        "import os, signal, sys\n"
        "print('ttys', [os.isatty(i) for i in range(3)], os.get_terminal_size(1).columns, os.get_terminal_size(2).columns)\n"
        "def resized(*_): print('resized to', os.get_terminal_size(1).columns, flush=True)\n"
        "signal.signal(signal.SIGWINCH, resized)\n"
        "name = input('who is there? ')\n"
        "for i in range(3):\n"
        "    print('out', i); print('err', i, file=sys.stderr)\n"
        "secret = name * 2\n"
        "breakpoint()\n"
        "assert input() == 'go on'\n"
        "sys.stderr.write('\\x1b[31mabout to fail\\x1b[0m\\n')\n"
        "raise RuntimeError('\\x1b[1mbroken on purpose\\x1b[0m')\n"
    )
    screen = Screen("1", "--job-id", "t", script(own_directories, text))
    screens.append(screen)
    screen.wait_for(r"who is there\? ")
    screen.wait_for(r"ttys \[True, True, True\] 100 100")
    screen.type("anna\r")
    screen.wait_for(r"\(Pdb\) ")
    assert re.search(r"out 0\s+err 0\s+out 1\s+err 1\s+out 2\s+err 2", screen.text)
    screen.type("p 'it is ' + secret\r")
    screen.wait_for("it is annaanna")
    screen.type("c\r")
    screen.resize(77)
    screen.wait_for("resized to 77")
    screen.type("go on\r")
    assert screen.ends() == 1
    report = screen.text.rpartition("job t failed")[2]
    assert "broken on purpose" in report and "about to fail" in report and "\x1b[31m" not in report
    assert "\x1b[31mabout to fail\x1b[0m\r\n" in screen.text
    assert screen.text.count("\r\r") == 0


def test_control_c_reaches_the_rank_once(screens: list[Screen], own_directories: Path) -> None:
    text = (
        "import signal, sys, time\n"
        "count = 0\n"
        "def interrupted(*_):\n"
        "    global count; count += 1\n"
        "signal.signal(signal.SIGINT, interrupted)\n"
        "print('ready', flush=True)\n"
        "while not count: time.sleep(0.01)\n"
        "time.sleep(0.5)  # for a second one, were there one\n"
        "print('interrupted', count, flush=True)\n"
    )
    screen = Screen("1", script(own_directories, text))
    screens.append(screen)
    screen.wait_for("ready")
    screen.type("\x03")
    screen.wait_for("interrupted 1")
    assert screen.ends() == 130


def test_a_progress_bar_is_drawn_as_it_comes(screens: list[Screen], own_directories: Path) -> None:
    text = (
        "import os, sys, time\n"
        "for i in range(4):\n"
        "    sys.stderr.write(f'\\r{i} of 3'); sys.stderr.flush()\n"
        f"    while not os.path.exists({str(own_directories)!r} + f'/seen{{i}}'): time.sleep(0.01)\n"
        "sys.stderr.write('\\n')\n"
    )
    screen = Screen("1", script(own_directories, text))
    screens.append(screen)
    for i in range(4):
        screen.wait_for(f"\r{i} of 3$")
        (own_directories / f"seen{i}").touch()
    assert screen.ends() == 0
    assert "\r0 of 3\r1 of 3\r2 of 3\r3 of 3\r\n" in screen.text


def test_a_killed_rank_leaves_no_terminal_without_echo(screens: list[Screen], own_directories: Path) -> None:
    go = own_directories / "go"
    text = (
        f"import os, time, tty\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "tty.setraw(0)\nprint('raw', flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    screen = Screen("1", script(own_directories, text))
    screens.append(screen)
    before = termios.tcgetattr(screen.fd)[:4]
    go.touch()
    assert screen.ends() == 137 and "raw" in screen.text
    assert termios.tcgetattr(screen.fd)[:4] == before


def test_a_stopped_screen_stops_no_training(screens: list[Screen], own_directories: Path) -> None:
    """Ctrl-S: the launcher still sees the rank's end, and nothing is lost when the screen goes on."""
    done = own_directories / "done"
    text = (
        f"import sys\nprint('ready', flush=True)\ninput()\nfor i in range(20000): print('line', i)\nopen({str(done)!r}, 'w')\n"
    )
    screen = Screen("1", script(own_directories, text))
    screens.append(screen)
    screen.wait_for("ready")
    screen.type("\x13")
    screen.type("go\r")
    give_up = time.monotonic() + 60
    while not done.exists():
        assert time.monotonic() < give_up, "the rank waits for the screen"
        time.sleep(0.02)
    screen.type("\x11")
    assert screen.ends() == 0
    assert len(re.findall(r"line \d+\r\n", screen.text)) == 20000


def test_in_the_background_the_keys_are_the_shells(screens: list[Screen], own_directories: Path) -> None:
    """And `stty tostop` stops the launcher no more than it stops a rank."""
    text = "import sys\nprint('got', repr(sys.stdin.readline()), flush=True)\nsys.exit(3)\n"
    shell = '"$@" & read line; echo "shell got $line"; wait $!; echo "code $?"'
    screen = Screen("1", script(own_directories, text), tostop=True, shell=shell)
    screens.append(screen)
    screen.wait_for("got ''")
    screen.type("mine\r")
    screen.wait_for("shell got mine")
    screen.wait_for("code 3")
    assert screen.ends() == 0


def test_tee_and_redirects_still_go_to_files(screens: list[Screen], own_directories: Path) -> None:
    text = "import os, sys\nprint([os.isatty(i) for i in range(3)])\nprint('to err', file=sys.stderr)\n"
    logs = own_directories / "logs"
    screen = Screen("1", "--log-dir", str(logs), "--tee", "1", "--redirects", "2", script(own_directories, text))
    screens.append(screen)
    assert screen.ends() == 0
    assert "[default0]:[True, False, False]" in screen.text and "to err" not in screen.text
    (folder,) = logs.glob("*/attempt_0/0")
    assert (folder / "stdout.log").read_text() == "[True, False, False]\n" and (folder / "stderr.log").read_text() == "to err\n"


def test_a_restart_gets_the_terminal_as_it_was(screens: list[Screen], own_directories: Path) -> None:
    text = (
        "import os, sys, termios, tty\n"
        "print('echo', bool(termios.tcgetattr(0)[3] & termios.ECHO), [os.isatty(i) for i in range(3)], flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    tty.setraw(0); os.kill(os.getpid(), 9)\n"
        "print('said', input('again? '))\n"
    )
    screen = Screen("1", "--max-restarts", "1", script(own_directories, text))
    screens.append(screen)
    screen.wait_for(r"again\? ")
    assert len(re.findall(r"echo True \[True, True, True\]", screen.text)) == 2
    screen.wait_for(re.escape("killed by SIGKILL (restart 1 of 1)"))
    screen.type("yes\r")
    screen.wait_for("said yes")
    assert screen.ends() == 0


def test_two_ranks_have_no_terminal(screens: list[Screen], own_directories: Path) -> None:
    text = "import json, os\nprint(json.dumps([os.isatty(i) for i in range(3)]), flush=True)\n"
    screen = Screen("2", script(own_directories, text))
    screens.append(screen)
    assert screen.ends() == 0
    assert [json.loads(found) for found in re.findall(r"\[\w+, \w+, \w+\]", screen.text)] == [[False] * 3] * 2
