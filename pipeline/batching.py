"""Which samples share the next forward pass, and how many rows it has. Touches no tensor.

Samples can share a pass when their geometry and their plan of passes are equal; they may be at different steps. The
oldest sample is always in the next batch, so none starves. A batch has one of a few fixed sizes, since a row's bits
depend on it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Batchable(Protocol):
    """What the choice looks at."""

    @property
    def batch_key(self) -> Hashable:
        """Equal for samples that can share a forward pass."""

    @property
    def num_rows(self) -> int:
        """Rows of the sample in a forward pass."""


S = TypeVar("S", bound=Batchable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The sizes that a forward pass may have, in rows, ascending."""

    sizes: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """Rows of the largest forward pass."""
        return self.sizes[-1]

    def split(self, num_rows: int) -> list[int]:
        """Sizes of the passes that ``num_rows`` rows take: one, unless they are more than the largest holds."""
        full, rest = divmod(num_rows, self.capacity)
        return [self.capacity] * full + ([self._fit(rest)] if rest else [])

    def _fit(self, num_rows: int) -> int:
        return next(size for size in self.sizes if num_rows <= size)


def admit(active: Sequence[S], waiting: Sequence[S], buckets: Buckets) -> list[S]:
    """The waiting samples that may start now, in order: as many as the largest forward pass holds with the active.

    One may always start when none is active, even if its rows take several passes.
    """
    free = buckets.capacity - sum(sample.num_rows for sample in active)
    admitted: list[S] = []
    for sample in waiting:
        if sample.num_rows > free and (active or admitted):
            break
        admitted.append(sample)
        free -= sample.num_rows
    return admitted


def choose(active: Sequence[S], buckets: Buckets) -> list[S]:
    """The samples of the next forward pass, from ``active`` ordered oldest first; empty when there is none."""
    chosen: list[S] = []
    free = buckets.capacity
    for sample in active:
        if not chosen or (sample.batch_key == chosen[0].batch_key and sample.num_rows <= free):
            chosen.append(sample)
            free -= sample.num_rows
    return chosen
