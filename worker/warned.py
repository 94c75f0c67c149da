"""Warnings of what only watches a training: they never raise into it, also where warnings are errors (`python -W error`)."""

import sys
import warnings


def warn_safely(text: str, stacklevel: int) -> None:
    """A `RuntimeWarning` at that frame (1: the caller); a line on standard error where that would be an error."""
    try:
        warnings.warn(f"rsup: {text}", RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning:
        sys.stderr.write(f"warning: rsup: {text}\n")
