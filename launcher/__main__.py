"""`python -m rsup.launcher` is `rsup`."""

import sys

from rsup.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
