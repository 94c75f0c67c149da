"""Options about how long ranks have to end: by signal, and before the scheduler ends everything."""

import signal
import time
from collections.abc import Mapping, Sequence

from rsup.launcher.option_table import Option
from rsup.launcher.option_values import UNLIMITED_WORDS, OptionValues
from rsup.launcher.scheduler_deadline import VARIABLE, is_moved, read_end_time

GRACE_OPTIONS: Sequence[Option] = (
    Option(
        ("--signal-grace",),
        default="",
        joins=True,
        meaning="`SIGNAL=SECONDS[,...]`: from that signal to the launcher until its ranks are killed, where it is not"
        " `--shutdown-timeout`. As `SIGTERM=110,SIGINT=10`.",
    ),
    Option(
        ("--deadline",),
        env="RSUP_DEADLINE",
        shown_default=f"`{VARIABLE}`",
        meaning="When the scheduler ends the job, in seconds since 1970, or `+SECONDS` from now on (a pod's"
        " `activeDeadlineSeconds`); `none`: never. No grace goes beyond it, and ranks learn of it as `RSUP_DEADLINE`, to save"
        " and leave in time.",
    ),
    Option(
        ("--deadline-margin",),
        default="5",
        meaning="Seconds before `--deadline` at which ranks are killed, for the launcher to clean up and report.",
    ),
)


def read_signal_graces(values: OptionValues) -> dict[signal.Signals, float]:
    """Seconds by signal. `TERM` is as good as `SIGTERM`."""
    graces = {}
    for part in filter(None, (word.strip() for word in values.text("signal_grace").split(","))):
        word, equals, seconds = part.partition("=")
        name = word.strip().upper()
        name = name if name.startswith("SIG") else "SIG" + name
        if not equals or name not in signal.Signals.__members__:
            values.fail("signal_grace", f"{part!r} is not SIGNAL=SECONDS, like SIGTERM=110")
        graces[signal.Signals[name]] = values.number("signal_grace", seconds, at_least=0)
    return graces


def read_deadline(values: OptionValues, environ: Mapping[str, str]) -> float | None:
    """Seconds since 1970; None: the job has no end that we know of. A note says so if it is so long over that it is ignored."""
    text = values.maybe_text("deadline")
    if text is None:
        end_s, source = read_end_time(environ), f"{VARIABLE}={environ.get(VARIABLE)}"
    elif text.strip().lower() in UNLIMITED_WORDS:
        return None
    elif text.strip().startswith("+"):
        return time.time() + values.number("deadline", text.strip()[1:], at_least=0, above=0)
    else:
        end_s, source = values.number("deadline", text, at_least=1), values.settings["deadline"].source
    if end_s is not None and is_moved(end_s, time.time()):
        values.notes.append(f"{source} is in the past: it is ignored, and no grace is shortened")
    return end_s
