"""`python -m rsup.worker.device_test`: see `command`."""

import signal
import sys

from rsup.supervisor.wire import RsupError
from rsup.worker.device_test.command import main


def _leave(number: int, frame: object) -> None:
    """Told to end: as an exception, so that the processes it started are ended too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    try:
        sys.exit(main(sys.argv[1:]))
    except RsupError as error:
        print(f"rsup devices test: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
