"""Deployment of the decoding stage: a trajectory in, its media tables out. Called only when media was asked for."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from configs.settings import AppConfig
from pipeline.checkpoint import load
from pipeline.decode import AVDecoder as Decoder
from pipeline.tensors import frozen
from schemas.card import ModelCard
from schemas.geometry import Geometry
from schemas.media import pack_media
from schemas.trajectory import read_trajectory


class AVDecoder:
    """Video VAE, audio VAE and vocoder on one device."""

    def __init__(self, config: AppConfig, card: ModelCard) -> None:
        settings = config.decoder
        self.card = card
        dtypes = {"vae": settings.dtype, "audio_vae": settings.audio_dtype, "vocoder": settings.audio_dtype}
        parts = {
            component: load(
                config.model, component, dtype=dtype, device=settings.device, low_memory=settings.low_memory
            )
            for component, dtype in dtypes.items()
        }
        self._decoder = Decoder(
            **parts,
            patch_size=self.card.patch_size,
            patch_size_t=self.card.patch_size_t,
            tiling=settings.tiling,
        )
        # One sample at a time: a decode fills the device by itself.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")

    async def __call__(self, trajectory: pa.Table) -> dict[str, pa.Table]:
        """Frames and waveform of the trajectory's last state. Raises RuntimeError (a Problem) for another checkpoint's."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._media, trajectory)

    def _media(self, table: pa.Table) -> dict[str, pa.Table]:
        started = time.perf_counter()
        trajectory = read_trajectory(table)
        manifest = trajectory.manifest
        self.card.refuse_others(manifest)
        geometry = Geometry(**manifest["geometry"])
        media = self._decoder.decode(
            frozen(trajectory.video_latents[-1], trajectory.state_dtype),
            frozen(trajectory.audio_latents[-1], trajectory.state_dtype),
            geometry,
        )
        return pack_media(
            frames=media.frames,
            frame_rate=geometry.frame_rate,
            waveform=media.waveform,
            sample_rate=self.card.waveform_sample_rate,
            manifest={
                **manifest,
                "timings": {**manifest["timings"], "decode_s": time.perf_counter() - started},
            },
        )
