"""The forward passes that one step of a batch takes: rows in, each sample's velocities and places out.

It moves no sample, and decides only how rows are split over passes of the buckets' sizes.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from pipeline.batching import Buckets
from pipeline.guidance import Velocities
from pipeline.noise import MODALITIES, Modality
from pipeline.sample import Places, Sample
from pipeline.stats import EngineStats
from pipeline.velocity import PLAIN, Perturbation, Place, Row, VelocityModel
from schemas.geometry import Geometry


def velocities_of(
    samples: Sequence[Sample], model: VelocityModel, buckets: Buckets, stats: EngineStats
) -> list[tuple[dict[Modality, Velocities], Places]]:
    """All passes of the samples' common plan: each sample's velocities, and where its rows stood."""
    plan, of = samples[0].plan, samples[0].geometry
    positive = [sample.positive_row() for sample in samples]
    negative = [sample.negative_row() for sample in samples] if plan.negative else []
    passes = _Passes(model, buckets, stats, of)
    # Negative rows first, as diffusers stacks them.
    main, places = passes.run([*negative, *positive])
    perturbed = [passes.run(positive, perturbation)[0] for perturbation in plan.perturbations]
    first = len(negative)
    return [
        (
            {
                modality: Velocities(
                    positive=main[modality][first + i],
                    negative=main[modality][i] if negative else None,
                    perturbed=tuple(velocities[modality][i] for velocities in perturbed),
                )
                for modality in MODALITIES
            },
            Places(positive=places[first + i], negative=places[i] if negative else None),
        )
        for i in range(len(samples))
    ]


class _Passes:
    """Runs rows of one geometry, and counts."""

    def __init__(self, model: VelocityModel, buckets: Buckets, stats: EngineStats, of: Geometry) -> None:
        self._model, self._buckets, self._stats, self._of = model, buckets, stats, of

    def run(
        self, rows: Sequence[Row], perturbation: Perturbation = PLAIN
    ) -> tuple[dict[Modality, list[Tensor]], list[Place]]:
        """Velocities [1, L, C] of every row, in batches of the buckets' sizes, padded by repeating a row."""
        velocities: dict[Modality, list[Tensor]] = {modality: [] for modality in MODALITIES}
        places: list[Place] = []
        stats, rest = self._stats, list(rows)
        num_tokens = self._of.num_video_tokens + self._of.audio_frames
        for num_rows in self._buckets.split(len(rows), num_tokens):
            own, rest = rest[:num_rows], rest[num_rows:]
            started = time.monotonic()
            result = self._model([*own, *[own[0]] * (num_rows - len(own))], self._of, perturbation)
            stats.forward_s += time.monotonic() - started
            stats.rows += len(own)
            stats.padded_rows += num_rows - len(own)
            stats.tokens += len(own) * num_tokens
            for index in range(len(own)):
                places.append(Place(num_rows=num_rows, index=index))
                for modality in MODALITIES:
                    velocities[modality].append(result[modality][index : index + 1])
        return velocities, places
