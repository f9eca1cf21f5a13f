"""Reads a group's tables for the numbers in them. In the ingress's process, for ad-hoc callers; trainers do not pass here."""

import asyncio
from typing import Any

import pyarrow as pa

from deployments.group import RolloutGroup, RolloutSample
from schemas.arrow import manifest_of
from schemas.summary import RolloutSummary, SampleSummary


async def summarize(group: RolloutGroup) -> RolloutSummary:
    """The numbers of a settled group."""
    read = await asyncio.gather(*(_read(sample) for sample in group.samples))
    manifests = [manifest for _, manifest in read if manifest is not None]
    first: dict[str, Any] = manifests[0] if manifests else {}
    return RolloutSummary(
        request_id=group.request_id,
        request=group.request.model_dump(mode="json"),
        sigmas=first.get("sigmas"),
        conditioning_digest=first.get("conditioning_digest"),
        samples=[summary for summary, _ in read],
    )


async def _read(sample: RolloutSample) -> tuple[SampleSummary, dict[str, Any] | None]:
    known: dict[str, Any] = {
        "sample_index": sample.sample_index,
        "seed": sample.group.request.seed,
        "attempt": sample.attempt,
    }
    if sample.problem is not None:
        return SampleSummary(**known, problem=sample.problem.payload()), None
    trajectory: pa.Table | None = None if sample.trajectory is None else await sample.trajectory
    media: dict[str, pa.Table] = {} if sample.media is None else await sample.media
    manifest = manifest_of(trajectory if trajectory is not None else media["video"])
    numbers = ("policy_version", "log_probs_video", "log_probs_audio", "n_video", "n_audio", "timings")
    return (
        SampleSummary(
            **known,
            **{key: manifest[key] for key in numbers},
            trajectory_bytes=None if trajectory is None else trajectory.nbytes,
            media_bytes=sum(table.nbytes for table in media.values()) or None,
        ),
        manifest,
    )
