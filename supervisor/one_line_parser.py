"""The parser of every command's options: what is wrong with them is said in one line, without argparse's usage text."""

import argparse
from typing import NoReturn

from rsup.supervisor.wire import UsageError


class OneLineParser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with argparse's message, and where to look."""
        raise UsageError(f"{message}; see `{self.prog} --help`")
