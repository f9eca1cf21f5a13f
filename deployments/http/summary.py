"""Reads a settled rollout's tables for the numbers in them. In the ingress's process; trainers do not pass here."""

import asyncio
from typing import Any

import pyarrow as pa

from deployments.kept.api import Settled, SettledSample
from schemas.arrow import manifest_of
from schemas.summary import RolloutLinks, RolloutSummary, SampleLinks, SampleSummary

NUMBERS = ("policy_version", "log_probs_video", "log_probs_audio", "n_video", "n_audio", "timings")


async def summarize(settled: Settled, root: str) -> RolloutSummary:
    """The numbers of a settled rollout, and links that begin with ``root``, the path of the app."""
    path = f"{root}/v1/rollouts/{settled['id']}"
    seed = settled["request"]["seed"]
    read = await asyncio.gather(*(_read(sample, seed, path) for sample in settled["samples"]))
    manifests = [manifest for _, manifest in read if manifest is not None]
    first: dict[str, Any] = manifests[0] if manifests else {}
    has_conditioning = settled["conditioning"] is not None
    return RolloutSummary(
        request_id=settled["id"],
        request=settled["request"],
        sigmas=first.get("sigmas"),
        conditioning_digest=first.get("conditioning_digest"),
        samples=[summary for summary, _ in read],
        links=RolloutLinks(self=path, conditioning=f"{path}/conditioning" if has_conditioning else None),
    )


async def _read(
    sample: SettledSample, seed: int, rollout_path: str
) -> tuple[SampleSummary, dict[str, Any] | None]:
    known: dict[str, Any] = {
        "sample_index": sample["sample_index"],
        "seed": seed,
        "attempt": sample["attempt"],
    }
    if sample["problem"] is not None:
        return SampleSummary(**known, problem=sample["problem"]), None
    trajectory: pa.Table | None = None if sample["trajectory"] is None else await sample["trajectory"]
    media: dict[str, pa.Table] | None = None if sample["media"] is None else await sample["media"]
    table = trajectory if media is None else media["video"]
    assert table is not None, "a request asks for one of the two"
    # That of the media says how long they took, too.
    manifest = manifest_of(table)
    path = f"{rollout_path}/samples/{sample['sample_index']}"
    links = SampleLinks(
        trajectory=None if trajectory is None else f"{path}/trajectory",
        mp4=None if media is None else f"{path}/media.mp4",
        wav=None if media is None else f"{path}/audio.wav",
        frames=None if media is None else f"{path}/frames/{{frame}}.png",
    )
    summary = SampleSummary(
        **known,
        **{key: manifest[key] for key in NUMBERS},
        trajectory_bytes=None if trajectory is None else trajectory.nbytes,
        media_bytes=None if media is None else sum(table.nbytes for table in media.values()),
        num_frames=None if media is None else media["video"].num_rows,
        links=links,
    )
    return summary, manifest
