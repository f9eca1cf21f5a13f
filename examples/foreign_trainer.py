"""A trainer that has nothing of this project: a handle by name, dicts in, Arrow out, numpy to read it.

    serve run serve_config.yaml                  # in a shell of its own
    python foreign_trainer.py                    # from anywhere; needs ray[serve], pyarrow and numpy

The app's archive makes the calls here, so it owns the trajectories: they are gone when its replica is. Read them soon, or run
RolloutClient in an actor of your own (collect_rollouts.py, own_configs/), which then owns them.
"""

import argparse
import json
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray import serve

REQUEST = {
    "prompt": "a cat plays the piano",
    "num_samples": 4,
    "seed": 7,
    "return_steps": "all",
    "media": False,
}


def tensor(table: pa.Table, column: str) -> np.ndarray:
    """The column as one array [rows, tokens, channels] over Ray's shared memory.

    Never write to it, nor to a torch tensor made of it: every other reader would see the change. bfloat16 comes as
    uint16, and the field's metadata says so: `torch.from_numpy(array.copy()).view(torch.bfloat16)`.
    """
    array: np.ndarray = table.column(column).chunk(0).to_numpy_ndarray()
    array.flags.writeable = False
    return array


def manifest_of(table: pa.Table) -> dict[str, Any]:
    """What else is known of the sample: seed, sigmas, policy version, log-probs of every step, ..."""
    manifest: dict[str, Any] = json.loads(table.schema.metadata[b"manifest"])
    return manifest


def log_prob(manifest: dict[str, Any]) -> float:
    """Of a whole sample, both modalities: the means per element, weighed by how many elements there are."""
    video, audio = (
        np.nansum(np.array(manifest[f"log_probs_{modality}"], dtype=np.float64))
        for modality in ("video", "audio")
    )
    n_video, n_audio = manifest["n_video"], manifest["n_audio"]
    return float((n_video * video + n_audio * audio) / (n_video + n_audio))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--address", default="auto", help="of the Ray cluster, host:port (default: RAY_ADDRESS)"
    )
    parser.add_argument("--app", default="default", help="name of the Serve application")
    args = parser.parse_args()

    ray.init(args.address, log_to_driver=False, logging_level="ERROR")
    app = serve.get_app_handle(args.app)
    rollout = app.rollout.remote(REQUEST).result(timeout_s=600)
    for sample in rollout["samples"]:
        if sample["problem"] is not None:
            print(f"sample {sample['sample_index']} failed: {sample['problem']}")
            continue
        table = ray.get(sample["trajectory"])
        manifest = manifest_of(table)
        print(
            f"sample {sample['sample_index']}",
            f"policy version {manifest['policy_version']}",
            f"video {tensor(table, 'video_latents').shape}",
            f"audio {tensor(table, 'audio_latents').shape}",
            f"log-prob {log_prob(manifest):.4f}",
            sep="  ",
        )

    # A request that cannot be sampled is a ValueError whose last line is JSON, so that no class of the project is needed.
    try:
        app.rollout.remote({"prompt": "a cat", "num_frames": 120}).result(timeout_s=60)
    except ValueError as error:
        start = str(error).rindex('{"code"')
        problem, _ = json.JSONDecoder().raw_decode(str(error), start)
        print("refused:", problem["field"], problem["rule"], "->", problem["remedy"])


if __name__ == "__main__":
    main()
