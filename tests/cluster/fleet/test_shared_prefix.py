"""A shared prefix through the graph: fewer steps, the same samples, on whatever replicas they land."""

import ray
from apps import App, until

from schemas.trajectory import read_trajectory

REQUEST = {
    "prompt": "a river",
    "num_samples": 4,
    "seed": 3,
    "shared_initial_noise": True,
    "stochastic_steps": [3, 4],
    "return_steps": "all",
    "media": False,
}


def rows(app: App) -> int:
    return sum(status["stats"]["rows"] for status in app.ask("Denoiser"))


def test_a_group_with_a_shared_prefix_equals_one_without_and_takes_fewer_steps(four: App) -> None:
    with four.client() as client:
        until(lambda: not four.held())
        before = rows(four)
        (apart,) = client.gather([client.submit(REQUEST)])
        between = rows(four)
        (shared,) = client.gather([client.submit({**REQUEST, "shared_prefix": True})])
        apart.raise_if_failed()
        shared.raise_if_failed()
        assert between - before == 4 * 6
        assert rows(four) - between == 3 + 4 * 3, "three steps once, the other three by each sample"
        for one, other in zip(apart.samples, shared.samples, strict=True):
            one_table, other_table = ray.get([one.trajectory, other.trajectory])
            assert one_table.equals(other_table)
            manifests = [read_trajectory(table).manifest for table in (one_table, other_table)]
            assert manifests[0]["log_probs_video"] == manifests[1]["log_probs_video"]
            assert manifests[1]["attempt"] == 1
