"""Gives each rank a seat that fits it, where exchanging two at a time is not enough. Pure."""

from collections.abc import Callable


def match(num_ranks: int, num_places: int, fits: Callable[[int, int], bool]) -> list[int] | None:
    """A place for each rank, no place twice; None if there is none for some rank. Ranks keep the place of their own number
    where that is possible, and those beyond the ranks' own are taken last. Source: Kuhn, "The Hungarian method", 1955."""
    owner: dict[int, int] = {}

    def seat(rank: int, tried: set[int]) -> bool:
        for place in sorted(range(num_places), key=lambda place: (place != rank, place)):
            if place in tried or not fits(rank, place):
                continue
            tried.add(place)
            if place not in owner or seat(owner[place], tried):
                owner[place] = rank
                return True
        return False

    if not all(seat(rank, set()) for rank in range(num_ranks)):
        return None
    places = {rank: place for place, rank in owner.items()}
    return [places[rank] for rank in range(num_ranks)]
