"""Packing: every row at its own index of a pass of its own size, and as few passes as that allows."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeline.packing import Seats, pack, seats
from pipeline.velocity import Place


def place(num_rows: int, index: int) -> Place:
    return Place(num_rows=num_rows, index=index)


@st.composite
def places(draw: st.DrawFn) -> list[Place]:
    """Of one move: one row or two, somewhere."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=2))
    return [place(size, draw(st.integers(0, size - 1))) for size in sizes]


def test_a_row_sits_at_its_own_index() -> None:
    assert seats([place(8, 5)]) == Seats(sizes=(8,), taken=((0, 5),))


def test_two_rows_of_a_move_share_a_pass_if_they_can() -> None:
    assert seats([place(8, 5), place(8, 1)]) == Seats(sizes=(8,), taken=((0, 5), (0, 1)))
    assert seats([place(8, 5), place(8, 5)]) == Seats(sizes=(8, 8), taken=((0, 5), (1, 5)))
    assert seats([place(8, 1), place(4, 1)]) == Seats(sizes=(8, 4), taken=((0, 1), (1, 1)))


def test_a_pass_that_is_too_large_is_replaced_by_the_largest_allowed() -> None:
    assert seats([place(8, 5), place(8, 2)], max_rows=4) == Seats(sizes=(4,), taken=((0, 1), (0, 2)))
    assert seats([place(8, 5), place(8, 1)], max_rows=4) == Seats(sizes=(4, 4), taken=((0, 1), (1, 1)))
    assert seats([place(2, 1)], max_rows=4) == seats([place(2, 1)])


def test_rows_at_different_indices_share_a_pass_and_rows_at_one_do_not() -> None:
    own = [("a", seats([place(4, index)])) for index in (0, 1, 0, 2, 3, 1)]
    assert pack(own) == [[0, 1, 3, 4], [2, 5]]


def test_moves_of_other_kinds_or_sizes_share_none() -> None:
    own = [
        ("a", seats([place(4, 0)])),
        ("b", seats([place(4, 1)])),
        ("a", seats([place(8, 2)])),
        ("a", seats([place(4, 3)])),
    ]
    assert pack(own) == [[0, 3], [1], [2]]


def test_nothing_is_packed_into_nothing() -> None:
    assert pack([]) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), places()), max_size=30))
def test_every_move_is_in_one_micro_batch_and_no_seat_is_taken_twice(
    moves: list[tuple[str, list[Place]]],
) -> None:
    own = [(kind, seats(rows)) for kind, rows in moves]
    batches = pack(own)
    assert sorted(position for batch in batches for position in batch) == list(range(len(own)))
    for batch in batches:
        assert len({(own[position][0], own[position][1].sizes) for position in batch}) == 1
        taken = [seat for position in batch for seat in own[position][1].taken]
        assert len(taken) == len(set(taken))
    for (_, rows), (_, seated) in zip(moves, own, strict=True):
        at = [place(seated.sizes[of], index) for of, index in seated.taken]
        assert at == rows


@given(st.lists(st.integers(0, 7), min_size=1))
def test_single_rows_take_as_many_passes_as_their_most_frequent_index(indices: list[int]) -> None:
    batches = pack([("a", seats([place(8, index)])) for index in indices])
    assert len(batches) == max(Counter(indices).values())
