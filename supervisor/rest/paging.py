"""Cursor pagination: `{"items": [...], "next_cursor": "..." | null}`. A cursor is opaque but to the route that gave it."""

from typing import Annotated, Any

from fastapi import Query

MAX_PAGE = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="at most this many items")]
NumberCursor = Annotated[str, Query(pattern="^[0-9]{0,18}$", description="`next_cursor` of the page before")]
NameCursor = Annotated[str, Query(max_length=300, pattern=r"^[^\x00-\x1f]*$", description="`next_cursor` of the page before")]
Name = Annotated[str, Query(max_length=300, pattern=r"^[^\x00-\x1f]*$")]


def page(items: list[dict[str, Any]], following: int | str | None) -> dict[str, Any]:
    """One page of a list."""
    return {"items": items, "next_cursor": None if following is None else str(following)}
