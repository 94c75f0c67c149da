"""`python -m rsup.supervisor.hardware.policy_check FILE`: exit code 0, or 2 and one line on stderr that says what is wrong."""

import sys

from rsup.supervisor.hardware.policy import load
from rsup.supervisor.wire import UsageError

if __name__ == "__main__":
    try:
        load(sys.argv[1])
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
