"""Another cluster, begun on the weights that a first one left on disk: what does it sample from?

Run as a process of its own, since Ray knows one cluster per process. Prints the replica's version and digest, and a
rollout's manifest and log-probs as JSON.
"""

import json
import sys
from pathlib import Path

import ray
from clusters import cluster, free_port
from learning import Learning, manifests, sampled

if __name__ == "__main__":
    with (
        cluster(free_port()) as port,
        Learning("learning", port, Path(sys.argv[1])).running(num_replicas=1) as app,
        app.client() as client,
    ):
        group = sampled(client)
        (manifest,), columns = manifests(group), ("log_prob_video", "log_prob_audio")
        table = ray.get(group.samples[0].trajectory)
        print(
            json.dumps(
                {
                    "versions": sorted(app.versions()),
                    "manifest": manifest,
                    "log_probs": {name: table.column(name).to_pylist() for name in columns},
                }
            )
        )
