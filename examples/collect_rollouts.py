"""A trainer actor that collects groups of rollouts from the running app and reads them where they lie.

    serve run serve_config.yaml                  # in a shell of its own
    python examples/collect_rollouts.py --prompt "a cat plays the piano" --num-samples 4 --out out

The actor makes the calls, so it owns the trajectories: they live as long as it does, whatever happens to the replicas.
Copy `Trainer` and put your update where the numbers are printed.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parents[1]


@ray.remote(num_cpus=0)
class Trainer:
    """Submits groups, and reads each sample as soon as it is done."""

    def __init__(self, app_name: str) -> None:
        from deployments.client import RolloutClient

        self.client = RolloutClient.connect(app_name)

    def collect(self, requests: list[dict[str, Any]], out: str | None) -> Iterator[dict[str, Any]]:
        """Yields a line of numbers per sample, in the order in which samples are done."""
        from schemas.trajectory import read_trajectory

        groups = [self.client.submit(request) for request in requests]
        numbers = {group.group_id: number for number, group in enumerate(groups)}
        for sample in self.client.as_completed(groups):
            sample.raise_if_failed()
            table = ray.get(sample.trajectory)
            trajectory = read_trajectory(table)  # read-only views; pipeline.tensors.owned copies to a device
            if out is not None:
                save(table, ray.get(sample.media), f"{out}/{sample.request.request_id}-{sample.sample_index}")
            yield {
                "group": numbers[sample.group_id],
                "sample": sample.sample_index,
                "video_latents": trajectory.video_latents.shape,
                "audio_latents": trajectory.audio_latents.shape,
                "log_prob_video": mean(trajectory.log_prob_video),
                "log_prob_audio": mean(trajectory.log_prob_audio),
                "KiB": table.nbytes // 1024,
                "read in": "object store" if lies_in_object_store(trajectory.video_latents) else "own memory",
            }


def mean(log_probs: tuple[float | None, ...]) -> float | None:
    """Over the steps that moved stochastically; None where none did."""
    known = [value for value in log_probs if value is not None]
    return round(sum(known) / len(known), 4) if known else None


def lies_in_object_store(array: np.ndarray) -> bool:
    """Whether the array's memory is Ray's shared memory, mapped into this process, and so nobody's copy.

    Ray keeps results of up to about 100 KiB in the caller's own memory instead.
    """
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return "plasma" in line
    return False


def save(trajectory: Any, media: Any, stem: str) -> None:
    """The trajectory as an Arrow file, which can be read back without copies too, and the media as an MP4."""
    from pyarrow import feather

    from pipeline.export import save_mp4

    feather.write_feather(trajectory, f"{stem}.arrow", compression="uncompressed")
    save_mp4(media, f"{stem}.mp4")


def print_table(lines: list[dict[str, Any]]) -> None:
    """Columns under the names of the first line's keys."""
    rows = [[*lines[0]], *([str(value) for value in line.values()] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--address", default="auto", help="of the Ray cluster, host:port (default: RAY_ADDRESS)"
    )
    parser.add_argument("--app", default="default", help="name of the Serve application")
    parser.add_argument("--prompt", action="append", help="one group of samples each; may be given again")
    parser.add_argument("--num-samples", type=int, default=4, help="samples in a group")
    parser.add_argument("--request", type=json.loads, default={}, help="more fields of the request, as JSON")
    parser.add_argument("--out", type=Path, help="folder for trajectories (Arrow) and media (MP4)")
    args = parser.parse_args()

    out = None
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        out = str(args.out.resolve())
    # The repository travels to the actor, so that it finds RolloutClient on any node.
    ray.init(
        args.address,
        runtime_env={"working_dir": str(REPOSITORY)},
        log_to_driver=False,
        logging_level="ERROR",
    )
    requests = [
        {"prompt": prompt, "num_samples": args.num_samples, "media": out is not None, **args.request}
        for prompt in args.prompt or ["a cat plays the piano", "rain on a tin roof"]
    ]
    trainer = Trainer.remote(args.app)
    results = trainer.collect.options(num_returns="streaming").remote(requests, out)
    lines = []
    for line in tqdm(results, total=sum(request["num_samples"] for request in requests), unit="sample"):
        lines.append(ray.get(line))
    print_table(lines)


if __name__ == "__main__":
    main()
