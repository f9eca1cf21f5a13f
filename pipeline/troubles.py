"""What can go wrong with a sample in the engine, in words that its caller can act on."""

import logging

import torch

from pipeline.noise import MODALITIES
from pipeline.sample import Job, Sample
from schemas.errors import Problem

logger = logging.getLogger(__name__)


def stopped() -> Problem:
    return Problem(
        code="replica_died",
        rule="the replica was stopped before the sample was done",
        remedy="submit it again; a RolloutClient does so by itself",
    )


def expired(sample: Sample) -> Problem:
    return Problem(
        code="deadline_exceeded",
        field="deadline_s",
        value=sample.job.request.deadline_s,
        rule=f"the sample was not done in time, at step {sample.step} of {sample.num_steps}",
        remedy="allow more time, ask for fewer steps or samples, or add denoiser replicas",
    )


def lease_ran_out(job: Job) -> Problem:
    return Problem(
        code="lease_expired",
        field="lease_id",
        value=job.lease_id,
        rule="the caller stopped renewing its lease, so its samples were dropped",
        remedy="keep the RolloutClient that submitted them alive",
    )


def version_gone(job: Job, version: int) -> Problem:
    return Problem(
        code="policy_version_gone",
        field="policy_version",
        value=version,
        rule=f"the replica has moved on from version {job.policy_version}, to which the sample's group is bound",
        remedy="sample the group again on the newer version, as a RolloutClient does, or allow_mixed_versions",
    )


def failure(sample: Sample, error: Exception) -> Problem:
    step = f"step {sample.step} of {sample.num_steps}"
    if isinstance(error, torch.OutOfMemoryError):
        return Problem(
            code="out_of_memory",
            rule=f"the forward pass of this geometry does not fit in the device's memory ({step})",
            value=f"{sample.geometry.num_video_tokens} video tokens",
            remedy="ask for fewer frames or a smaller picture, or lower denoiser.row_buckets",
        )
    logger.error("sample %s failed at %s", sample.job.sample_id, step, exc_info=error)
    return Problem(
        code="internal",
        rule=f"the sample failed at {step}: {type(error).__name__}: {error}",
        remedy="see the replica's log",
    )


def non_finite(sample: Sample) -> Problem | None:
    """NaN and infinity stay in a state once they are there, so the last state tells of every step."""
    for modality in MODALITIES:
        if not bool(torch.isfinite(sample.latents[modality].float()).all()):
            return Problem(
                code="non_finite",
                field=f"{modality}_latents",
                rule="the state holds NaN or infinity",
                remedy="check the weights, lower noise_level, or use a wider state_dtype or model dtype",
            )
    return None
