"""A supervisor's store in a process of its own, as if on another host: told what to do by lines, answers by lines."""

import os
import signal
import subprocess
import sys
from pathlib import Path

BUMP_S, STALE_S, COPY_S = 0.1, 5.0, 0.2
"""A process that stands still for a few seconds on a busy machine must not be taken for one that has died."""


class OtherHost:
    """Drives the process. `prefix` wraps its command (unshare); `host` empty: the real host name."""

    def __init__(self, database: Path, host: str, local_dir: Path, prefix: tuple[str, ...] = ()) -> None:
        environment = os.environ | {"RSUP_ASSUME_NETWORK_FS": "1", "RSUP_LOCAL_DIR": str(local_dir)}
        command = [*prefix, sys.executable, __file__, str(database), host]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.send(line)
        return self.answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    from store_story import event, holder, job_key, saved

    from rsup.supervisor.lease import Timing
    from rsup.supervisor.sql_store import SqlStore
    from rsup.supervisor.store import StoreError

    store = None
    for line in sys.stdin:
        verb, *words = line.split()
        try:
            if verb == "open":
                own = holder(sys.argv[2], rpc=f"tcp://{sys.argv[2]}:1", rest="http://x:2")
                timing = Timing(BUMP_S, STALE_S, float(words[0]) if words else COPY_S)
                store = SqlStore.open(Path(sys.argv[1]), holder=own, alone_may_migrate=False, timing=timing)
            elif verb == "commit":
                assert store is not None
                store.commit([saved(job_key()), *(event(job_key(), int(word)) for word in words)])
            elif verb == "close":
                assert store is not None
                store.close()
            print("done", flush=True)
        except StoreError as error:
            print(f"{type(error).__name__} {getattr(error, 'address', '')} {error}", flush=True)


if __name__ == "__main__":
    main()
