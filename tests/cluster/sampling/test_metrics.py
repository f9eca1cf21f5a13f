"""What the denoiser exports: its counters grow by what was sampled, and its gauges stay while nothing is."""

import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields

import httpx
import pytest
import ray
from apps import EXPORT_S, App, until

from deployments.metrics import PREFIX, Rates

NUM_SAMPLES, NUM_STEPS = 3, 5
IDLE_S = 25.0
"""Longer than the 20 s after which a gauge that is not set again is exported no more."""
_LINE = re.compile(rf"^ray_{PREFIX}(\w+)\{{(.*)\}} (\S+)$", re.MULTILINE)

Metrics = dict[str, float]


@pytest.fixture
def metrics(plain: App, metrics_port: int) -> Callable[[], Metrics]:
    """``metrics()``: what the denoisers of the app export at this moment, by name, added up."""

    def metrics() -> Metrics:
        text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30).text
        found: Metrics = defaultdict(float)
        for name, tags, value in _LINE.findall(text):
            if f'application="{plain.name}"' in tags:
                found[name] += float(value)
        return found

    return metrics


def test_counters_grow_by_what_was_sampled_and_gauges_outlive_idleness(
    plain: App, metrics: Callable[[], Metrics]
) -> None:
    plain.idle()
    time.sleep(3 * EXPORT_S)  # what was sampled before has been exported
    before = metrics()
    request = {"prompt": "a red ball", "num_samples": NUM_SAMPLES, "num_inference_steps": NUM_STEPS}
    with plain.client() as client:
        (group,) = client.gather([client.submit({**request, "media": False})])
        group.raise_if_failed()
        tables = ray.get([sample.trajectory for sample in group.samples])
    expected = {
        "done": NUM_SAMPLES,
        "rows": NUM_SAMPLES * NUM_STEPS,
        "bytes": sum(table.nbytes for table in tables),
        "cancelled": 0,
        "expired": 0,
        "failed": 0,
    }

    def grown() -> dict[str, float]:
        now = metrics()
        return {name: now[f"{name}_total"] - before[f"{name}_total"] for name in expected}

    until(lambda: grown() == expected, timeout_s=30)
    assert expected["bytes"] > 0

    time.sleep(IDLE_S)
    assert grown() == expected, "nothing is counted twice"
    now = metrics()
    gauges = {field.name for field in fields(Rates)} | {"samples_held"}
    assert gauges <= now.keys()
    assert {now[name] for name in gauges} == {0.0}, "of a time in which nothing was sampled"
