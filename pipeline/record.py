"""From a finished sample to its trajectory table: the columns and the manifest that a trainer reads.

It runs off the step thread. The manifest holds all that is needed to reproduce the sample or to reject it.
"""

import time
from dataclasses import asdict

import pyarrow as pa

from pipeline.entry import Finished
from pipeline.noise import MODALITIES, Modality
from pipeline.profile import ExecutionProfile, library_versions
from pipeline.sample import Sample, host_floats
from pipeline.tensors import to_numpy
from schemas.arrow import Array
from schemas.card import ModelCard
from schemas.trajectory import pack_trajectory


def to_table(
    finished: Finished,
    *,
    card: ModelCard,
    profile: ExecutionProfile,
    replica_id: str,
    timings: dict[str, float],
) -> pa.Table:
    """The trajectory of a finished sample of the replica ``replica_id``. ``timings`` in seconds are added to the
    engine's own and the packing's."""
    started = time.perf_counter()
    sample = finished.sample
    video_latents, audio_latents = _states(sample, "video"), _states(sample, "audio")
    log_probs = {modality: host_floats(sample.log_probs[modality]) for modality in MODALITIES}
    steps = [state.step for state in sample.kept]
    sigmas = sample.sigmas
    return pack_trajectory(
        steps=steps,
        sigmas=[float(sigmas[step]) for step in steps],
        video_latents=video_latents,
        audio_latents=audio_latents,
        log_prob_video=[_at(log_probs["video"], step) for step in steps],
        log_prob_audio=[_at(log_probs["audio"], step) for step in steps],
        state_dtype=sample.job.request.state_dtype,
        manifest={
            "request": sample.job.request.model_dump(mode="json"),
            "sample_id": sample.job.sample_id,
            "sample_index": sample.job.sample_index,
            "seed": sample.job.request.seed,
            "attempt": sample.job.attempt,
            "policy_version": finished.stamp.version,
            "weights_digest": finished.stamp.digest,
            "policy_versions": sample.policy_versions,
            "replica_id": replica_id,
            **card.stamp,
            "conditioning_digest": sample.job.conditioning.digest,
            "num_steps": sample.num_steps,
            "sigmas": sigmas.tolist(),
            "geometry": asdict(sample.geometry),
            "n_video": sample.latents["video"].numel(),
            "n_audio": sample.latents["audio"].numel(),
            "log_probs_video": log_probs["video"],
            "log_probs_audio": log_probs["audio"],
            "execution_profile": profile.as_dict(),
            "places": [asdict(places) for places in sample.places],
            "libraries": library_versions(),
            "timings": {
                "wait_s": finished.wait_s,
                "denoise_s": finished.denoise_s,
                "pack_s": time.perf_counter() - started,
                **timings,
            },
        },
    )


def _states(sample: Sample, modality: Modality) -> Array:
    """Kept states [R, L, C] of one modality; the recorder wrote them side by side, so nothing is copied here."""
    for state in sample.kept:
        state.copies[modality].wait()
    return to_numpy(sample.stacked[modality])


def _at(log_probs: list[float | None], step: int) -> float | None:
    """The log-prob of the move away from a state; the last state has none."""
    return log_probs[step] if step < len(log_probs) else None
