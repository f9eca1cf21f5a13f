"""Which stored moves share forward passes when they are scored again, and where their rows stand there.

A row's bits depend on its place, the number of rows of its pass and its index among them, and not on what the other
rows hold. So moves of different steps and trajectories may share a pass, each row at the index where it stood; two rows
with one index never do. Touches no tensor.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pipeline.velocity import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """Where the rows of one move stand: in one forward pass, or in several where they cannot share one."""

    sizes: tuple[int, ...]
    """Rows of each of the passes, padding included."""
    taken: tuple[tuple[int, int], ...]
    """Per row of the move: which of the passes, and the index there."""


def seats(places: Sequence[Place], max_rows: int | None = None) -> Seats:
    """The seats of a move whose rows stood at ``places``: at the same indices of passes of the same sizes, as few as
    hold them.

    A pass of more than ``max_rows`` rows is replaced by one of ``max_rows``, and the indices are taken modulo that.
    """
    sizes: list[int] = []
    taken: list[tuple[int, int]] = []
    for place in places:
        num_rows = place.num_rows if max_rows is None else min(place.num_rows, max_rows)
        index = place.index % num_rows
        alike = (i for i, size in enumerate(sizes) if size == num_rows and (i, index) not in taken)
        chosen = next(alike, len(sizes))
        if chosen == len(sizes):
            sizes.append(num_rows)
        taken.append((chosen, index))
    return Seats(sizes=tuple(sizes), taken=tuple(taken))


def pack(moves: Sequence[tuple[Hashable, Seats]]) -> list[list[int]]:
    """Micro-batches of moves, as their positions in ``moves``, which gives each one's kind and seats.

    Moves of a micro-batch have one kind and the same sizes of passes, and no seat twice. So all passes of a micro-batch
    together, one per size, hold every row of its moves, and no move has rows in two micro-batches.
    """
    batches: dict[Hashable, list[list[int]]] = defaultdict(list)
    first_free: dict[Hashable, int] = defaultdict(int)
    for position, (kind, own) in enumerate(moves):
        key = (kind, own.sizes)
        at = max(first_free[key, seat] for seat in own.taken)
        if at == len(batches[key]):
            batches[key].append([])
        batches[key][at].append(position)
        for seat in own.taken:
            first_free[key, seat] = at + 1
    return [batch for of_one_key in batches.values() for batch in of_one_key]
