"""Which layers a version is made of, what a replica at another must apply, and what is kept."""

import pytest

from deployments.weights.shelf import Layer, WeightShelf
from schemas.errors import Problem
from schemas.weights import Publication

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q"]}


def layer(version: int, update: str, *names: str, num_bytes: int = 10) -> Layer:
    tensors = {name: {"dtype": "float32", "shape": [2]} for name in names or ("a",)}
    return Layer(
        publication=Publication.model_validate(
            {
                "version": version,
                "update": update,
                "lora_config": LORA if update == "lora" else None,
                "tensors": tensors,
                "digests": dict.fromkeys(tensors, "0" * 32),
            }
        ),
        chunks=(f"bytes of {version}",),
        num_bytes=num_bytes,
    )


def shelf_of(*layers: Layer, max_bytes: int = 1000, keep_versions: int = 100) -> WeightShelf:
    shelf = WeightShelf(max_bytes=max_bytes, keep_versions=keep_versions)
    for each in layers:
        shelf.add(each)
    return shelf


def versions(layers: tuple[Layer, ...]) -> list[int]:
    return [each.version for each in layers]


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([("full",)], [1]),
        ([("full",), ("full",)], [2]),
        ([("full",), ("lora",)], [1, 2]),
        ([("full",), ("lora",), ("lora",)], [1, 3]),
        ([("full",), ("lora",), ("partial", "a")], [1, 2, 3]),
        ([("full",), ("lora",), ("full",)], [3]),
        ([("partial", "a"), ("partial", "b")], [1, 2]),
        ([("partial", "a"), ("partial", "a", "b")], [2]),
        ([("partial", "a", "b"), ("partial", "a")], [1, 2]),
    ],
)
def test_a_version_is_made_of_the_layers_that_no_later_one_covers(
    updates: list[tuple[str, ...]], expected: list[int]
) -> None:
    shelf = shelf_of(*(layer(k, *update) for k, update in enumerate(updates, start=1)))
    assert versions(shelf.layers_of(len(updates))) == expected


def test_the_checkpoint_itself_needs_no_layer_and_an_unknown_version_is_an_error() -> None:
    shelf = shelf_of(layer(3, "full"))
    assert shelf.layers_of(0) == ()
    with pytest.raises(KeyError):
        shelf.layers_of(2)


def test_old_versions_go_by_number_and_by_bytes_and_take_only_what_no_other_needs() -> None:
    shelf = shelf_of(layer(1, "full", num_bytes=100), layer(2, "lora"), layer(3, "lora"), keep_versions=2)
    assert shelf.versions == (2, 3)
    assert shelf.num_bytes == 120, "the full layer is below both adapters"
    dropped = shelf.add(layer(4, "lora"))
    assert versions(tuple(dropped)) == [2]
    dropped = shelf.add(layer(5, "full", num_bytes=950))
    assert shelf.versions == (5,) and shelf.num_bytes == 950, "one version more would not fit"
    assert sorted(versions(tuple(dropped))) == [1, 3, 4]


def test_fifty_adapters_keep_as_many_bytes_as_two() -> None:
    shelf = shelf_of(layer(1, "full", num_bytes=100), keep_versions=2)
    sizes = []
    for version in range(2, 52):
        shelf.add(layer(version, "lora"))
        sizes.append(shelf.num_bytes)
    assert sizes[1:] == [120] * 49


def test_an_update_that_does_not_fit_beside_what_is_sampled_from_is_refused_with_the_numbers() -> None:
    shelf = shelf_of(layer(1, "full", num_bytes=300), layer(2, "full", num_bytes=600))
    with pytest.raises(ValueError) as refusal:
        shelf.make_room(401)
    problem = Problem.of(refusal.value)
    assert problem is not None and problem.code == "weights_refused"
    assert "1001 bytes in all, and weights.max_bytes is 1000" in problem.rule
    assert shelf.versions == (1, 2), "nothing was let go for it"


def test_earlier_versions_make_room_for_an_update_before_it_comes() -> None:
    shelf = shelf_of(layer(1, "full", num_bytes=300), layer(2, "full", num_bytes=600))
    shelf.make_room(100)
    assert shelf.versions == (1, 2)
    shelf.make_room(400)
    assert shelf.versions == (2,)
