"""Which samples share the next forward pass, and how many rows it has. Touches no tensor.

Samples can share a pass when their keys (geometry, plan of passes) are equal; they may be at different steps. The
oldest sample is always in the next batch, so none starves. A batch has one of a few fixed sizes, since a row's bits
depend on it, and is bounded in tokens too, so that small pictures are batched wide and large ones still fit.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

MIN_FILL = 0.75
"""Share of a batch that real rows must have, unless there is no smaller size: rows cost time whether they are used or
not, and the samples that are left out take the next pass."""


class Batchable(Protocol):
    """What the choice looks at."""

    @property
    def batch_key(self) -> Hashable:
        """Equal for samples that can share a forward pass."""

    @property
    def num_rows(self) -> int:
        """Rows of the sample in a forward pass."""

    @property
    def num_tokens(self) -> int:
        """Video and audio tokens of one row."""


S = TypeVar("S", bound=Batchable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The sizes that a forward pass may have."""

    sizes: tuple[int, ...]
    """In rows, ascending."""
    max_tokens: int | None = None
    """Bound on rows times tokens of a forward pass; the smallest size is allowed whatever it takes."""

    def allowed(self, num_tokens: int) -> tuple[int, ...]:
        """The sizes that fit rows of ``num_tokens`` tokens."""
        if self.max_tokens is None:
            return self.sizes
        smallest, *larger = self.sizes
        return (smallest, *(size for size in larger if size * num_tokens <= self.max_tokens))

    def split(self, num_rows: int, num_tokens: int) -> list[int]:
        """Sizes of the passes that ``num_rows`` rows take: one, unless they are more than the largest holds."""
        sizes = self.allowed(num_tokens)
        full, rest = divmod(num_rows, sizes[-1])
        return [sizes[-1]] * full + ([_fit(sizes, rest)] if rest else [])


def admit(active: Sequence[S], waiting: Sequence[S], buckets: Buckets) -> list[S]:
    """The waiting samples that may start now, in order: while each would still fit a largest pass with the active.

    One may always start when none is active, even if its rows take several passes.
    """
    held = sum(_share(sample, buckets) for sample in active)
    admitted: list[S] = []
    for sample in waiting:
        held += _share(sample, buckets)
        if held > 1 + 1e-9 and (active or admitted):
            break
        admitted.append(sample)
    return admitted


def choose(active: Sequence[S], buckets: Buckets) -> list[S]:
    """The samples of the next forward pass, from ``active`` ordered oldest first; empty when there is none."""
    if not active:
        return []
    oldest = active[0]
    sizes = buckets.allowed(oldest.num_tokens)
    alike = [sample for sample in active if sample.batch_key == oldest.batch_key]
    most = max(1, sizes[-1] // oldest.num_rows)
    chosen = alike[:most]
    num_rows = len(chosen) * oldest.num_rows
    smaller = [size for size in sizes if size < num_rows]
    if smaller and num_rows <= sizes[-1] and num_rows < MIN_FILL * _fit(sizes, num_rows):
        chosen = chosen[: max(1, smaller[-1] // oldest.num_rows)]
    return chosen


def _fit(sizes: Sequence[int], num_rows: int) -> int:
    return next(size for size in sizes if num_rows <= size)


def _share(sample: Batchable, buckets: Buckets) -> float:
    """Share of a largest forward pass that the sample takes."""
    return sample.num_rows / buckets.allowed(sample.num_tokens)[-1]
