"""Sizes from pixels to tokens, and the answers to sizes that cannot be."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import Problem
from schemas.geometry import Geometry, geometry
from tests.cards import ltx23_card

CARD = ltx23_card()
SIZES: dict[str, Any] = {"height": 512, "width": 768, "num_frames": 121, "frame_rate": 24.0}


def _problem(card: Any = CARD, **sizes: Any) -> Problem:
    with pytest.raises(ValueError, match="invalid_request") as caught:
        geometry(card, **SIZES | sizes)
    problem = Problem.of(caught.value)
    assert problem is not None
    return problem


def test_the_official_size_has_its_known_tokens() -> None:
    assert geometry(CARD, **SIZES) == Geometry(
        height=512,
        width=768,
        num_frames=121,
        frame_rate=24.0,
        latent_frames=16,
        latent_height=16,
        latent_width=24,
        num_video_tokens=6144,
        video_channels=128,
        audio_frames=126,
        audio_latent_channels=8,
        audio_mel_bins=16,
        audio_channels=128,
    )


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"num_frames": 120}, "num_frames must be 8k + 1, got 120; use 113 or 121"),
        ({"num_frames": 0}, "num_frames must be 8k + 1, got 0; use 1"),
        ({"num_frames": 2}, "num_frames must be 8k + 1, got 2; use 1 or 9"),
        ({"height": 500}, "height must be a multiple of 32, got 500; use 480 or 512"),
        ({"width": 31}, "width must be a multiple of 32, got 31; use 32"),
        ({"width": -32}, "width must be a multiple of 32, got -32; use 32"),
        ({"frame_rate": 0.0}, "frame_rate must be finite and greater than 0, got 0.0"),
        ({"frame_rate": float("nan")}, 'frame_rate must be finite and greater than 0, got "nan"'),
    ],
)
def test_a_wrong_size_is_answered_with_the_nearest_right_ones(sizes: dict[str, Any], sentence: str) -> None:
    assert str(_problem(**sizes)) == sentence


def test_the_ratios_and_patches_are_the_cards() -> None:
    card = ltx23_card(spatial_ratio=16, patch_size=2, temporal_ratio=4, patch_size_t=2)
    sizes = geometry(card, height=64, width=96, num_frames=13, frame_rate=24.0)
    assert (sizes.latent_frames, sizes.latent_height, sizes.latent_width) == (4, 4, 6)
    assert sizes.num_video_tokens == 2 * 2 * 3
    assert _problem(card, height=48).remedy == "use 32 or 64"
    assert str(_problem(card, num_frames=9)) == "num_frames must be 8k + 5, got 9; use 5 or 13"


def test_too_many_video_tokens_are_answered_with_the_longest_video_that_fits() -> None:
    problem = _problem(num_frames=241)
    assert problem.field == "num_frames"
    assert "at most 8192 video tokens, but gives 11904" in problem.rule
    assert problem.remedy == "use at most 161, or a smaller height or width"
    assert geometry(CARD, **SIZES | {"num_frames": 161}).num_video_tokens <= 8192
    assert _problem(height=32 * 100, width=32 * 100).remedy == "use a smaller height or width"


def test_a_video_too_short_for_audio_is_answered_with_the_shortest_that_is_not() -> None:
    problem = _problem(num_frames=1, frame_rate=60.0)
    assert problem.field == "num_frames"
    assert problem.remedy == "use at least 9, or a lower frame_rate"
    assert geometry(CARD, **SIZES | {"num_frames": 9, "frame_rate": 60.0}).audio_frames == 4


def test_a_video_too_long_for_audio_is_answered_with_the_longest_that_is_not() -> None:
    problem = _problem(height=32, width=32, num_frames=801)
    assert problem.remedy == "use at most 489, or a higher frame_rate"
    assert geometry(CARD, height=32, width=32, num_frames=489, frame_rate=24.0).audio_frames == 509
    assert _problem(num_frames=9, frame_rate=1e-300).remedy == "use a higher frame_rate"


@given(
    height=st.integers(-100, 5000),
    width=st.integers(-100, 5000),
    num_frames=st.integers(-100, 5000) | st.integers(10**300, 10**320),
    frame_rate=st.floats(),
)
def test_any_size_is_either_refused_by_name_or_within_limits(
    height: int, width: int, num_frames: int, frame_rate: float
) -> None:
    try:
        sizes = geometry(CARD, height=height, width=width, num_frames=num_frames, frame_rate=frame_rate)
    except ValueError as error:
        problem = Problem.of(error)
        assert problem is not None
        assert problem.field in ("height", "width", "num_frames", "frame_rate")
    else:
        assert 1 <= sizes.num_video_tokens <= CARD.limits.max_video_tokens
        assert 1 <= sizes.audio_frames <= CARD.limits.max_audio_tokens
        assert sizes.audio_frames == round(num_frames / frame_rate * (16000 / 160 / 4.0))


@given(
    num_frames=st.integers(1, 5000),
    frame_rate=st.floats(0.1, 1000),
    size=st.sampled_from([(32, 32), (512, 768), (1024, 1024)]),
)
def test_the_number_of_frames_in_a_remedy_is_right(
    num_frames: int, frame_rate: float, size: tuple[int, int]
) -> None:
    height, width = size
    try:
        geometry(CARD, height=height, width=width, num_frames=num_frames, frame_rate=frame_rate)
    except ValueError as error:
        problem = Problem.of(error)
        assert problem is not None
        named = [int(word.strip(",")) for word in problem.remedy.split() if word.strip(",").isdigit()]
        for frames in named:
            assert frames % 8 == 1
            if "at least" in problem.remedy or "at most" in problem.remedy:
                _one_step_inside(problem, height, width, frames, frame_rate)


def _one_step_inside(problem: Problem, height: int, width: int, frames: int, frame_rate: float) -> None:
    """The named number of frames no longer breaks the same rule, and its neighbour towards the wrong one does."""
    about = "video tokens" if "video tokens" in problem.rule else "audio token"
    outwards = -8 if "at least" in problem.remedy else 8
    for at, breaks in ((frames, False), (frames + outwards, True)):
        try:
            geometry(CARD, height=height, width=width, num_frames=at, frame_rate=frame_rate)
        except ValueError as error:
            assert (about in str(error)) == breaks or at < 1
        else:
            assert not breaks
