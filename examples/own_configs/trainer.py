"""A trainer whose own `configs` and `schemas` would hide this project's, and the other way round.

    serve run serve_config.yaml                  # in a shell of its own, from this repository
    python examples/own_configs/trainer.py       # from anywhere

The client runs in an actor whose working_dir is this repository, and the trainer stays where it is. Three things make
that hold:

* the trainer's job has a working_dir of its own. Without one, Ray puts the folder of the driver's script in front of
  every worker's path, and the actor would import the trainer's `configs`;
* Ray takes folders for a job only; an actor's working_dir is the URI of a zip. On several nodes that is a file they
  share, or an https, s3 or gs address, made by: git archive --prefix=ltx-rollout/ -o ltx-rollout.zip HEAD
* the actor's class is made inside a function, and imports RolloutClient in a method. Ray then ships the class by value,
  also when this file is not the main script, and no worker has to find this module.

Only dicts, numbers and Arrow tables go between the two. The actor owns the trajectories: they live as long as it does.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ray

import configs
import schemas

HERE = Path(__file__).resolve().parent
ROLLOUT_REPOSITORY = HERE.parents[1]


PACKAGES = ("deployments", "pipeline", "configs", "schemas")


def zipped_repository(folder: str) -> str:
    """The URI of a zip of what RolloutClient needs, all under one top folder, as Ray wants it."""
    path = Path(folder) / "ltx-rollout.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for package in PACKAGES:
            for file in sorted((ROLLOUT_REPOSITORY / package).rglob("*.[py]*")):
                archive.write(file, Path("ltx-rollout", file.relative_to(ROLLOUT_REPOSITORY)))
    return f"file://{path}"


def make_collector(app_name: str, rollout_uri: str) -> Any:
    """An actor that sees this repository as its own."""

    @ray.remote(num_cpus=0, runtime_env={"working_dir": rollout_uri})
    class Collector:
        def __init__(self) -> None:
            from deployments.client import RolloutClient

            self.client = RolloutClient.connect(app_name)

        def collect(self, requests: list[dict[str, Any]]) -> list[Any]:
            """Trajectory tables as refs: nothing is read or copied here."""
            groups = self.client.gather([self.client.submit(request) for request in requests])
            for group in groups:
                group.raise_if_failed()
            return [sample.trajectory for group in groups for sample in group.samples]

        def origins(self) -> list[str]:
            """Where this process found the packages of either name."""
            import configs
            import schemas

            return [configs.__file__, schemas.__file__]

    return Collector.remote()


def mean_log_prob(table: Any) -> float:
    """Of a trajectory's stochastic steps, over both modalities."""
    columns = (table.column(f"log_prob_{modality}").to_pylist() for modality in ("video", "audio"))
    known = [value for column in columns for value in column if value is not None]
    return sum(known) / len(known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--address", default="auto", help="of the Ray cluster, host:port (default: RAY_ADDRESS)"
    )
    parser.add_argument("--app", default="default", help="name of the Serve application")
    args = parser.parse_args()

    settings = configs.TrainerConfig()
    ray.init(args.address, runtime_env={"working_dir": str(HERE)}, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        collector = make_collector(args.app, zipped_repository(folder))
        origins = ray.get(collector.origins.remote())
    print("the trainer has", configs.__file__, schemas.__file__, sep="\n  ")
    print("the collector has", *origins, sep="\n  ")
    for step in range(settings.num_updates):
        request = {
            "prompt": "a cat plays the piano",
            "num_samples": settings.samples_per_prompt,
            "media": False,
        }
        tables = ray.get(ray.get(collector.collect.remote([request])))
        values = [mean_log_prob(table) for table in tables]
        print(schemas.Update(step=step, mean_log_prob=sum(values) / len(values), num_samples=len(values)))


if __name__ == "__main__":
    main()
