"""`python -m tests.compat.comparison [ROW ...]`: run every row, or those named (`8c`, or a group, `A`), with torchrun and with
rsup, and print the table. Exit 1 if rsup was wrong in one."""

import sys
from pathlib import Path

from tests.compat.comparison import playing
from tests.compat.comparison.row import RSUP, TORCHRUN, Peer, Row

HEAD = "| row | complaint | right | torchrun | rsup |\n|---|---|---|---|---|"


def main(words: list[str]) -> int:
    """Play and print. A row that both get right, or that torchrun has no like of, has no entry for torchrun."""
    print(HEAD, flush=True)
    num_wrong = 0
    for row in _wanted(words):
        torchrun, _ = _cell(row, TORCHRUN) if row.torchrun_fails else ("", True)
        rsup, right = _cell(row, RSUP)
        num_wrong += not right
        cells = (row.number, row.title, row.right, torchrun, rsup)
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
    return 1 if num_wrong else 0


def _wanted(words: list[str]) -> list[Row]:
    groups = {path.stem.removeprefix("rows_").upper(): path.stem for path in Path(__file__).parent.glob(playing.MODULES)}
    if not words:
        return playing.all_rows()
    rows = [row for word in words if word.upper() in groups for row in playing.rows_of(groups[word.upper()])]
    return rows + [row for row in playing.all_rows() if row.number in words]


def _cell(row: Row, peer: Peer) -> tuple[str, bool]:
    seen = playing.play(row, peer)
    return f"{'' if seen.right else '**wrong**: '}{seen.text}", seen.right


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
