"""The supervisor daemon: `python -m rsup.supervisor.main --embedded ...`, or `rsup serve`.

Order of starting: lock, sockets for agents, store, loop, then everything that nobody waits for (REST, token, supervisor.json).
The sockets are bound before the store's libraries are imported; what agents send meanwhile waits in the queue.
"""

import logging
import os
import sys
from collections.abc import Sequence

from rsup.supervisor import config
from rsup.supervisor.wire import RsupError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a supervisor until it is told to stop or has nothing left to do; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        from rsup.supervisor.daemon import Daemon

        settings = config.load(arguments)
        debug = settings.debug
        return Daemon(settings).run()
    except RsupError as error:
        if debug:
            raise
        if logging.getLogger().handlers and not sys.stderr.isatty():
            logging.getLogger(__name__).error("%s", error)
        else:
            print(f"rsup: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
