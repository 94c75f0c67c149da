"""Text for people: tables that fit the terminal, times and durations, and cleaning of text that others wrote.

No colour where the output is no terminal or `NO_COLOR` is set. Text from jobs (names, errors, stacks) may hold escape
sequences: everything printed goes through `clean`.
"""

import os
import shutil
import unicodedata
from collections.abc import Sequence
from typing import TextIO

COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
_ASCII = str.maketrans("▁▂▃▄▅▆▇█▓▒░·…–≈", "_.,-:=+#%+...-~")
"""What stands for the characters that are drawn with, where a terminal lacks them."""
STATE_COLOURS = {"running": "green", "ended": "dim", "stopping": "yellow", "waiting": "yellow", "collecting": "yellow"}


def clean(text: object) -> str:
    """`text` on one line without control characters, which could move the cursor or recolour the terminal."""
    return "".join(character if character.isprintable() else " " for character in str(text)).strip()


def clean_block(text: object) -> str:
    """The same for text of several lines (stacks, tracebacks): line ends are kept, tabs become spaces."""
    return "\n".join(clean_line(line) for line in str(text).expandtabs(4).splitlines())


def clean_line(line: str) -> str:
    """One line of a block: indentation is kept."""
    return "".join(character if character.isprintable() else " " for character in line).rstrip()


def fitting(text: str, encoding: str | None) -> str:
    """`text` in characters that `encoding` has (None: any): blocks become plain ones, what is left a question mark."""
    try:
        text.encode(encoding or "utf-8")
        return text
    except LookupError:
        return text
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding or "utf-8", "replace").decode(encoding or "utf-8")


def width_of(text: str) -> int:
    """Columns that `text` takes in a terminal: wide East Asian characters count two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def cut(text: str, width: int) -> str:
    """`text` in at most `width` columns, with `…` where something is missing."""
    if width_of(text) <= width:
        return text
    kept = ""
    for character in text:
        if width_of(kept + character) > max(0, width - 1):
            break
        kept += character
    return kept + "…"


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal, None where `stream` is none: then nothing is cut."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


class Paint:
    """Colours text, or leaves it alone."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __call__(self, text: str, colour: str) -> str:
        """`text` in that colour (a key of `COLOURS`, or empty)."""
        return f"\033[{COLOURS[colour]}m{text}\033[0m" if self.on and colour else text


PLAIN = Paint(False)


def paint_for(stream: TextIO) -> Paint:
    """Colour for a terminal, unless `NO_COLOR` is set or the terminal is dumb."""
    return Paint(stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    width: int | None = None,
    right: Sequence[int] = (),
    paint: Paint = PLAIN,
) -> str:
    """Lines of a table under `headings`. `right` names the columns (from 0) that are aligned right. With `width` the widest
    columns are cut until a line fits; the last column is not padded."""
    cells = [[clean("-" if cell is None or cell == "" else cell) for cell in row] for row in rows]
    widths = [max(width_of(line[column]) for line in [list(headings), *cells]) for column in range(len(headings))]
    if width is not None:
        widths = _fit(widths, [width_of(heading) for heading in headings], width)
    lines = [paint(_line(list(headings), widths, right), "dim")]
    lines += [_line(line, widths, right) for line in cells]
    return "\n".join(lines)


def _fit(widths: list[int], least: list[int], width: int) -> list[int]:
    """Take columns off the widest until the sum fits; none goes below its heading (or 4)."""
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > width:
        room = [size - max(4, minimum) for size, minimum in zip(widths, least, strict=True)]
        if max(room) <= 0:
            break
        widest = max((size, column) for column, size in enumerate(widths) if room[column] > 0)[1]
        widths[widest] -= 1
    return widths


def _line(cells: list[str], widths: list[int], right: Sequence[int]) -> str:
    parts = []
    for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        text = cut(cell, width)
        space = " " * (width - width_of(text))
        parts.append(space + text if column in right else text + space)
    return "  ".join(parts).rstrip()


def duration(seconds: object) -> str:
    """`12 ms`, `2.1 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`; `-` where unknown."""
    if not isinstance(seconds, int | float) or seconds < 0:
        return "-"
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for big, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= big:
            rest = whole % big // small
            return f"{whole // big} {unit} {rest} {part}" if rest else f"{whole // big} {unit}"
    return f"{whole} s"


def moment(text: object) -> str:
    """A time of the JSON (`2026-11-29T20:47:01.123456Z`) to the second; `-` where there is none."""
    return text.split(".")[0].rstrip("Z") + "Z" if isinstance(text, str) and text else "-"


def percent(ratio: object) -> str:
    """`97.3 %`, `-` where unknown."""
    return f"{ratio * 100:.1f} %" if isinstance(ratio, int | float) else "-"


def pieces(count: int) -> str:
    """`1 piece of evidence`, `2 pieces of evidence`."""
    return f"{plural(count, 'piece')} of evidence"


def plural(count: int, noun: str) -> str:
    """`1 attempt`, `2 attempts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
