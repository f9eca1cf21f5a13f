"""A shared prefix on its way between replicas: read from the table in which the sample that made it was packed."""

import pyarrow as pa

from pipeline.sample import Places, Prefix, State
from pipeline.side_work import OnHost
from pipeline.tensors import frozen
from pipeline.velocity import Place
from schemas.arrow import Array
from schemas.trajectory import read_trajectory


def read_prefix(table: pa.Table) -> Prefix:
    """The prefix in a trajectory table whose sample ended before its first stochastic step. Copies nothing."""
    trajectory = read_trajectory(table)

    def on_host(latents: Array) -> OnHost:
        return OnHost(buffer=frozen(latents, trajectory.state_dtype))

    return Prefix(
        states=tuple(
            State(step=int(step), copies={"video": on_host(video), "audio": on_host(audio)})
            for step, video, audio in zip(
                trajectory.steps, trajectory.video_latents, trajectory.audio_latents, strict=True
            )
        ),
        places=tuple(_places(places) for places in trajectory.manifest["places"]),
        policy_versions=tuple(trajectory.manifest["policy_versions"]),
    )


def _places(stored: dict[str, dict[str, int] | None]) -> Places:
    positive, negative = stored["positive"], stored["negative"]
    assert positive is not None
    return Places(positive=Place(**positive), negative=None if negative is None else Place(**negative))
