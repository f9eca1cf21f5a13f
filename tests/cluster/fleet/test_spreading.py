"""A group is a burst of calls: it is submitted without a wait, and lands evenly on the denoisers."""

from itertools import pairwise

import pytest
from apps import NUM_DENOISERS, App, until
from variants import SLOWLY

BURST = 4 * NUM_DENOISERS
SLOTS = 16 * NUM_DENOISERS
"""Calls that the four denoisers take at a time."""


@pytest.fixture(autouse=True)
def all_there(four: App) -> None:
    """A denoiser that another test killed is back."""
    until(lambda: len(four.ask("Denoiser")) == NUM_DENOISERS)


def calls_of(app: App) -> dict[str, int]:
    return {status["replica_id"]: status["num_calls"] for status in app.ask("Denoiser")}


@pytest.mark.parametrize("guidance", [None, {"video": 3.0, "audio": 3.0}], ids=["plain", "guided"])
def test_bursts_land_evenly(four: App, guidance: dict[str, float] | None) -> None:
    request = {"prompt": "a burst", "num_samples": BURST, "num_inference_steps": 2, "media": False}
    counts = [calls_of(four)]
    with four.client() as client:
        for _ in range(4):
            group = client.submit(request | ({"guidance": guidance} if guidance else {}))
            client.gather([group], timeout_s=120)
            assert not group.problems
            counts.append(calls_of(four))
    shares = [sorted(after[key] - before[key] for key in after) for before, after in pairwise(counts)]
    assert shares == [[4] * NUM_DENOISERS] * 4


def test_a_burst_through_the_ingress_lands_evenly(four: App) -> None:
    before = calls_of(four)
    with four.http() as http:
        answer = http.post(
            "/v1/rollouts",
            json={"prompt": "a burst", "num_samples": 8, "num_inference_steps": 2, "media": False},
        )
    assert answer.status_code == 200
    after = calls_of(four)
    assert [after[key] - before[key] for key in after] == [2] * NUM_DENOISERS


def test_submit_returns_before_anything_has_begun_even_for_ten_times_the_slots(four: App) -> None:
    """The encoding is slow; how long submit takes is a benchmark's to say."""
    request = {"prompt": f"a crowd arrives {SLOWLY}", "num_samples": 64, "media": False}
    with four.client(max_bytes_in_flight=2**34) as client:
        before = calls_of(four)
        groups = [client.submit(request) for _ in range(10 * SLOTS // 64)]
        assert sum(len(group.samples) for group in groups) == 10 * SLOTS
        assert not any(sample.settled.done() for group in groups for sample in group.samples)
        assert calls_of(four) == before
        for group in groups:
            group.cancel()
        client.gather(groups, timeout_s=120)
    four.idle()
