"""HTML as text: what others wrote (names, commands, errors) goes through `text`, so that it can never become markup. Pure."""

import html
import re
from collections.abc import Iterable, Sequence

from rsup.supervisor.render import clean, clean_block, moment

MAX_TEXT_CHARS = 2000
MAX_BLOCK_CHARS = 8000
WIDE_COLUMNS = 6
"""From so many on a table has no room on a telephone, which is said there."""
SHORT_CHARS = 4000
"""A table of at most so much markup is not torn apart between pages."""


def text(content: object) -> str:
    """Escaped, on one line, without control characters or overrides of the writing direction; cut where it is endless."""
    whole = clean(content)
    return html.escape(whole if len(whole) <= MAX_TEXT_CHARS else f"{whole[:MAX_TEXT_CHARS]} ...")


def block(content: object) -> str:
    """The same for text of several lines: their ends are kept."""
    whole = str(content)
    return html.escape(clean_block(whole if len(whole) <= MAX_BLOCK_CHARS else f"{whole[:MAX_BLOCK_CHARS]}\n..."))


def when(at: object) -> str:
    """A time of the JSON, to the second."""
    return f"<time>{text(moment(at))}</time>"


def section(identity: str, title: str, body: str, note: str = "") -> str:
    """A part of the page. `title` and `note` are plain text, `body` is markup."""
    small = f" <small>{text(note)}</small>" if note else ""
    return f'<section id="{identity}"><h2>{text(title)}{small}</h2>{body}</section>\n'


def unknown(what: str) -> str:
    """A line for what nobody knows; what stands in backticks is code."""
    marked = re.sub("`([^`]*)`", r"<code>\1</code>", text(what))
    return f'<p class="unknown">{marked}</p>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = (), caption: str = "") -> str:
    """Cells are markup already; an empty one is a dash. `right`: columns of numbers."""
    sides = [' class="n"' if column in right else "" for column in range(len(headings))]
    head = "".join(f'<th scope="col"{side}>{text(name)}</th>' for name, side in zip(headings, sides, strict=True))
    lines = (
        "".join(f"<td{side}>{cell or '–'}</td>" for cell, side in zip(row, sides, strict=True))
        for row in rows
    )  # fmt: skip
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    is_wide, is_short = len(headings) >= WIDE_COLUMNS, len(body) <= SHORT_CHARS
    style = f"scroll{' wide' if is_wide else ''}{' short' if is_short else ''}"
    return f'<div class="{style}"><table>{said}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names with values; values are plain text, those that are empty are left out."""
    items = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs if value)
    return f'<dl class="facts">{items}</dl>'


def details(summary: str, body: str) -> str:
    """What is shown once somebody opens it; `body` is markup."""
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def ranges(numbers: Iterable[int], most: int = 12) -> str:
    """`0-7, 9`; the rest beyond `most` ranges is `...`."""
    found: list[list[int]] = []
    for one in sorted(set(numbers)):
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in found[:most]]
    return ", ".join([*parts, *(["..."] if len(found) > most else [])])
