"""Why a file cannot be read back, in words for people. No torch."""

import pickle

_SIGNS = ("Weights only load failed", "PytorchStreamReader", "metadata is None", "failed finding central directory")
"""How torch's readers begin to say that a file is damaged. They go on with advice to trust it (`weights_only=False`), which
would run what is in it."""


def why_unreadable(error: BaseException) -> str:
    """One line: that the file is damaged, where torch's or pickle's error means that; else the error's own first line."""
    if is_damage(error):
        return "it is damaged"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def is_damage(error: BaseException) -> bool:
    """Whether an error of torch's or pickle's reader comes from the file's content."""
    text = str(error)
    return isinstance(error, pickle.UnpicklingError | EOFError) or any(sign in text for sign in _SIGNS)
