"""The choice of batches, driven alone with any arrivals: every sample takes its steps, and no batch is a wrong one."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batching import Buckets, admit, choose


@dataclass(eq=False)
class Stub:
    """A sample as the choice sees it."""

    batch_key: str
    num_rows: int
    num_steps: int
    arrives_at: int = 0
    """Tick before which it is not there."""
    steps: list[int] = field(default_factory=list)
    """Ticks at which it was stepped."""

    @property
    def done(self) -> bool:
        return len(self.steps) == self.num_steps


buckets = st.sets(st.integers(1, 12), min_size=1, max_size=4).map(
    lambda sizes: Buckets(sizes=tuple(sorted(sizes)))
)
stubs = st.lists(
    st.builds(
        Stub,
        batch_key=st.sampled_from("abc"),
        num_rows=st.integers(1, 15),
        num_steps=st.integers(1, 5),
        arrives_at=st.integers(0, 20),
    ),
    max_size=15,
)


@given(stubs, buckets)
@settings(max_examples=300, deadline=None)
def test_any_arrivals_are_stepped_to_their_end_in_batches_that_are_right(
    arriving: list[Stub], of: Buckets
) -> None:
    arriving = sorted(arriving, key=lambda stub: stub.arrives_at)
    waiting: list[Stub] = []
    active: list[Stub] = []
    finished: list[Stub] = []
    # Each tick with an active sample moves at least one, so this many are enough for all.
    for tick in range(21 + sum(stub.num_steps for stub in arriving)):
        waiting += [stub for stub in arriving if stub.arrives_at == tick]

        admitted = admit(active, waiting, of)
        assert admitted == waiting[: len(admitted)], "first come, first served"
        assert admitted or active or not waiting, "somebody waits and nobody works"
        waiting, active = waiting[len(admitted) :], active + admitted
        assert sum(stub.num_rows for stub in active) <= of.capacity or len(active) == 1
        if waiting and active:
            assert sum(stub.num_rows for stub in active) + waiting[0].num_rows > of.capacity

        batch = choose(active, of)
        assert bool(batch) == bool(active)
        if not batch:
            continue
        assert batch[0] is active[0], "the oldest is in every batch"
        assert len({stub.batch_key for stub in batch}) == 1
        assert [stub for stub in active if stub in batch] == batch, "each at most once, oldest first"
        num_rows = sum(stub.num_rows for stub in batch)
        assert num_rows <= of.capacity or len(batch) == 1
        for stub in batch:
            assert not stub.done
            stub.steps.append(tick)
        finished += [stub for stub in active if stub.done]
        active = [stub for stub in active if not stub.done]

    assert sorted(map(id, finished)) == sorted(map(id, arriving))
    for stub in arriving:
        assert stub.steps == sorted(set(stub.steps)) and len(stub.steps) == stub.num_steps


@given(stubs, buckets)
@settings(deadline=None)
def test_a_batch_leaves_out_only_what_has_another_key_or_does_not_fit(
    active: list[Stub], of: Buckets
) -> None:
    batch = choose(active, of)
    free = of.capacity - sum(stub.num_rows for stub in batch)
    for stub in active:
        if stub not in batch and stub.batch_key == batch[0].batch_key:
            assert stub.num_rows > free


@given(st.integers(0, 60), buckets)
def test_passes_hold_their_rows_never_exceed_capacity_and_waste_as_little_as_they_can(
    num_rows: int, of: Buckets
) -> None:
    passes = of.split(num_rows)
    assert all(size in of.sizes for size in passes) and max(passes, default=0) <= of.capacity
    assert sum(passes) >= num_rows
    *full, last = passes or [0]
    assert full == [of.capacity] * len(full)
    rest = num_rows - sum(full)
    assert 0 < rest <= last or num_rows == 0
    assert not [size for size in of.sizes if rest <= size < last]


def test_a_sample_of_more_rows_than_the_largest_pass_runs_alone_in_several() -> None:
    of = Buckets(sizes=(1, 2))
    wide, narrow = Stub("a", 5, 1), Stub("a", 1, 1)
    assert admit([], [wide, narrow], of) == [wide]
    assert admit([narrow], [wide], of) == []
    assert choose([wide, narrow], of) == [wide]
    assert of.split(5) == [2, 2, 1]


def test_a_wide_sample_is_not_overtaken_by_narrow_ones_that_came_later() -> None:
    of = Buckets(sizes=(4,))
    running, wide, narrow = Stub("a", 2, 9), Stub("a", 4, 1), Stub("a", 1, 1)
    assert admit([running], [wide, narrow], of) == []


def test_a_younger_sample_joins_the_oldest_ones_batch_past_one_of_another_key() -> None:
    oldest, other, younger = Stub("a", 1, 1), Stub("b", 1, 1), Stub("a", 1, 1)
    assert choose([oldest, other, younger], Buckets(sizes=(4,))) == [oldest, younger]


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 4, 8)])
def test_nothing_to_do_is_an_empty_batch(sizes: tuple[int, ...]) -> None:
    assert choose([], Buckets(sizes=sizes)) == []
    assert admit([], [], Buckets(sizes=sizes)) == []
    assert Buckets(sizes=sizes).split(0) == []
