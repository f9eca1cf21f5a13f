"""The choice of batches, driven alone with any arrivals: every sample takes its steps, and no batch is a wrong one."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batching import MIN_FILL, Buckets, admit, choose

KINDS = {"a": (1, 10), "b": (2, 10), "c": (1, 100), "d": (5, 1)}
"""Rows and tokens of the samples of a key; those of one key are alike."""


@dataclass(eq=False)
class Stub:
    """A sample as the choice sees it."""

    batch_key: str
    num_steps: int = 1
    arrives_at: int = 0
    """Tick before which it is not there."""
    leaves_at: int | None = None
    """Tick at which it is cancelled or expires."""
    steps: list[int] = field(default_factory=list)
    """Ticks at which it was stepped."""

    @property
    def num_rows(self) -> int:
        return KINDS[self.batch_key][0]

    @property
    def num_tokens(self) -> int:
        return KINDS[self.batch_key][1]

    @property
    def done(self) -> bool:
        return len(self.steps) == self.num_steps


buckets = st.builds(
    lambda sizes, max_tokens: Buckets(sizes=tuple(sorted(sizes)), max_tokens=max_tokens),
    st.sets(st.integers(1, 12), min_size=1, max_size=4),
    st.none() | st.integers(1, 1000),
)
stubs = st.lists(
    st.builds(
        Stub,
        batch_key=st.sampled_from(sorted(KINDS)),
        num_steps=st.integers(1, 5),
        arrives_at=st.integers(0, 20),
        leaves_at=st.none() | st.integers(0, 40),
    ),
    max_size=15,
)


def share(stub: Stub, of: Buckets) -> float:
    """Of a largest pass of the stub's tokens."""
    return stub.num_rows / of.allowed(stub.num_tokens)[-1]


@given(stubs, buckets)
@settings(max_examples=300)
def test_any_arrivals_and_departures_leave_every_sample_its_steps_in_batches_that_are_right(
    arriving: list[Stub], of: Buckets
) -> None:
    arriving = sorted(arriving, key=lambda stub: stub.arrives_at)
    waiting: list[Stub] = []
    active: list[Stub] = []
    finished: list[Stub] = []
    left: list[Stub] = []
    # Each tick with an active sample moves at least one, so this many are enough for all.
    for tick in range(21 + sum(stub.num_steps for stub in arriving)):
        waiting += [stub for stub in arriving if stub.arrives_at == tick]
        left += [
            stub for stub in [*active, *waiting] if stub.leaves_at is not None and stub.leaves_at <= tick
        ]
        waiting, active = ([stub for stub in held if stub not in left] for held in (waiting, active))

        admitted = admit(active, waiting, of)
        assert admitted == waiting[: len(admitted)], "first come, first served"
        assert admitted or active or not waiting, "somebody waits and nobody works"
        waiting, active = waiting[len(admitted) :], active + admitted
        held = sum(share(stub, of) for stub in active)
        assert held <= 1 + 1e-6 or len(active) == 1
        if waiting and active:
            assert held + share(waiting[0], of) > 1

        batch = choose(active, of)
        assert bool(batch) == bool(active)
        if not batch:
            continue
        assert batch[0] is active[0], "the oldest is in every batch"
        assert len({stub.batch_key for stub in batch}) == 1
        assert [stub for stub in active if stub in batch] == batch, "each at most once, oldest first"
        num_rows, sizes = sum(stub.num_rows for stub in batch), of.allowed(batch[0].num_tokens)
        assert num_rows <= sizes[-1] or len(batch) == 1
        for stub in batch:
            assert not stub.done
            stub.steps.append(tick)
        finished += [stub for stub in active if stub.done]
        active = [stub for stub in active if not stub.done]

    assert sorted(map(id, [*finished, *left])) == sorted(map(id, arriving))
    for stub in arriving:
        assert stub.steps == sorted(set(stub.steps))
        assert len(stub.steps) == stub.num_steps or stub in left


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 15), buckets)
def test_a_batch_is_full_enough_or_has_the_smallest_size_and_leaves_nothing_out_that_would_fill_it(
    key: str, count: int, of: Buckets
) -> None:
    active = [Stub(key) for _ in range(count)]
    batch = choose(active, of)
    sizes, own = of.allowed(active[0].num_tokens), active[0].num_rows
    num_rows = len(batch) * own
    size = of.split(num_rows, active[0].num_tokens)[-1]
    fills = num_rows % size == 0 or num_rows >= MIN_FILL * size
    assert fills or size == sizes[0] or len(batch) == 1 or num_rows > size - own
    if len(batch) < count:
        assert num_rows + own > sizes[-1] or num_rows + own > size, "one more would have fitted"


@given(st.integers(0, 60), st.sampled_from([1, 10, 100]), buckets)
def test_passes_hold_their_rows_within_rows_and_tokens_and_waste_as_little_as_they_can(
    num_rows: int, num_tokens: int, of: Buckets
) -> None:
    sizes, passes = of.allowed(num_tokens), of.split(num_rows, num_tokens)
    assert all(size in sizes for size in passes)
    assert all(
        size == of.sizes[0] or size * num_tokens <= (of.max_tokens or size * num_tokens) for size in passes
    )
    *full, last = passes or [0]
    assert full == [sizes[-1]] * len(full)
    rest = num_rows - sum(full)
    assert 0 < rest <= last or num_rows == 0
    assert not [size for size in sizes if rest <= size < last]


def test_a_sample_of_more_rows_than_the_largest_pass_runs_alone_in_several() -> None:
    of = Buckets(sizes=(1, 2))
    wide, narrow = Stub("d"), Stub("a")
    assert admit([], [wide, narrow], of) == [wide]
    assert admit([narrow], [wide], of) == []
    assert choose([wide, narrow], of) == [wide]
    assert of.split(wide.num_rows, wide.num_tokens) == [2, 2, 1]


def test_a_wide_sample_is_not_overtaken_by_narrow_ones_that_came_later() -> None:
    of = Buckets(sizes=(3,))
    running, wide, narrow = Stub("b"), Stub("b"), Stub("a")
    assert admit([running], [wide, narrow], of) == []


def test_a_younger_sample_joins_the_oldest_ones_batch_past_one_of_another_key() -> None:
    oldest, other, younger = Stub("a"), Stub("c"), Stub("a")
    assert choose([oldest, other, younger], Buckets(sizes=(2,))) == [oldest, younger]


def test_a_batch_that_would_be_mostly_padding_is_made_smaller_and_full() -> None:
    of, alike = Buckets(sizes=(1, 2, 4, 8)), [Stub("a") for _ in range(8)]
    assert [len(choose(alike[:count], of)) for count in range(1, 9)] == [1, 2, 3, 4, 4, 6, 7, 8]


def test_small_pictures_are_batched_wide_and_large_ones_still_fit() -> None:
    of = Buckets(sizes=(1, 2, 4, 8), max_tokens=100)
    assert of.allowed(10) == (1, 2, 4, 8)
    assert of.allowed(40) == (1, 2)
    assert of.allowed(1000) == (1,)
    small, large = [Stub("a") for _ in range(8)], [Stub("c") for _ in range(8)]
    assert len(admit([], small, of)) == 8 and len(admit([], large, of)) == 1
    assert len(admit([], [*small[:4], *large], of)) == 4, (
        "half a pass of small ones leaves no room for a large one"
    )


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 4, 8)])
def test_nothing_to_do_is_an_empty_batch(sizes: tuple[int, ...]) -> None:
    assert choose([], Buckets(sizes=sizes)) == []
    assert admit([], [], Buckets(sizes=sizes)) == []
    assert Buckets(sizes=sizes).split(0, 1) == []
