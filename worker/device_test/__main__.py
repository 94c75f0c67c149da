"""`python -m rsup.worker.device_test`: see `command`."""

import sys

from rsup.supervisor.wire import RsupError
from rsup.worker.device_test.command import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RsupError as error:
        print(f"rsup devices test: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
