"""A group of 8 through the whole graph, against diffusers' pipeline and against our engine in one process.

Each contender encodes a prompt, samples 8 times 20 steps keeping every state, and decodes picture and sound. The
pipeline runs the 8 as one batch. On a CPU all of them have the same cores.

    python -m benchmarks.bench_graph
"""

import argparse
import itertools
import os
import time
from typing import Any

import ray
import torch
from diffusers import LTX2Pipeline
from ray import serve

from benchmarks.harness import Spread, ratio, report, take_turns
from benchmarks.in_process import InProcess, device
from benchmarks.on_ray import cluster
from deployments.client import RolloutClient
from deployments.graph import bind
from pipeline.checkpoint import folder, load
from pipeline.conditioning import read
from pipeline.decode import AVDecoder
from pipeline.profile import profile_of
from pipeline.record import to_table
from pipeline.sample import Job
from pipeline.text import PromptEncoder
from schemas.conditioning import pack_conditioning

GROUP, NUM_STEPS = 8, 20
PROMPTS = (f"a red ball, take {number}" for number in itertools.count())


def by_pipeline(pipe: LTX2Pipeline, here: InProcess) -> float:
    """diffusers, one call, a callback that keeps every video state on the host (it hands out no audio ones)."""
    kept: list[Any] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept.append({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})
        return tensors

    sizes, started = here.card.defaults, time.perf_counter()
    pipe(
        prompt=next(PROMPTS),
        num_videos_per_prompt=GROUP,
        num_inference_steps=NUM_STEPS,
        height=sizes.height,
        width=sizes.width,
        num_frames=sizes.num_frames,
        frame_rate=sizes.frame_rate,
        guidance_scale=1.0,
        audio_guidance_scale=1.0,
        stg_scale=0.0,
        audio_stg_scale=0.0,
        modality_scale=1.0,
        audio_modality_scale=1.0,
        output_type="np",
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents"],
    )
    assert len(kept) == NUM_STEPS
    return time.perf_counter() - started


class OneProcess:
    """The same stages without Ray, one after the other."""

    def __init__(self, here: InProcess) -> None:
        self.here = here
        model = here.config.model
        parts = {
            name: load(model, name, device=device()) for name in ("tokenizer", "text_encoder", "connectors")
        }
        self.encoder = PromptEncoder(**parts, max_prompt_tokens=here.card.max_prompt_tokens)
        decoders = {name: load(model, name, device=device()) for name in ("vae", "audio_vae", "vocoder")}
        self.decoder = AVDecoder(**decoders, patch_size=1, patch_size_t=1, tiling=False)
        self.engine = here.engine(here.config.denoiser.row_buckets)

    def run(self) -> float:
        here, prompt = self.here, next(PROMPTS)
        started = time.perf_counter()
        encoded = self.encoder.encode([prompt], num_rows=1)[0]
        table = pack_conditioning(
            video_context=encoded.video,
            audio_context=encoded.audio,
            text_mask=encoded.mask,
            torch_dtype=encoded.torch_dtype,
            manifest={"digest": encoded.digest},
        )
        conditioning = read(table, here.model.device)
        request = here.resolved(
            prompt=prompt, num_samples=GROUP, num_inference_steps=NUM_STEPS, return_steps="all"
        )
        jobs = [
            Job(sample_id=f"{prompt}/{k}", request=request, sample_index=k, conditioning=conditioning)
            for k in range(GROUP)
        ]
        profile = profile_of(here.model.transformer)
        for future in [self.engine.submit(job) for job in jobs]:
            finished = future.result()
            to_table(finished, card=here.card, profile=profile, policy_version=0, timings={})
            latents = finished.sample.latents
            self.decoder.decode(latents["video"], latents["audio"], finished.sample.geometry)
        return time.perf_counter() - started


def by_graph(client: RolloutClient) -> float:
    """A trainer's view: submit, and every table read."""
    started = time.perf_counter()
    request = {
        "prompt": next(PROMPTS),
        "num_samples": GROUP,
        "num_inference_steps": NUM_STEPS,
        "return_steps": "all",
    }
    for sample in client.as_completed([client.submit(request)]):
        sample.raise_if_failed()
        ray.get([sample.trajectory, sample.media])
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    here = InProcess(args.preset, device())
    pipe = LTX2Pipeline.from_pretrained(folder(here.config.model)).to(device())
    pipe.set_progress_bar_config(disable=True)
    alone = OneProcess(here)
    cores = os.cpu_count() or 1
    on_all_cores = {"ray_actor_options": {"num_cpus": cores}}
    with cluster(object_store_bytes=2 * 2**30):
        options = {name: on_all_cores for name in ("TextEncoder", "Denoiser", "AVDecoder")}
        options["Denoiser"] = {**on_all_cores, "max_ongoing_requests": 12}
        serve.run(bind(here.config, options=options), route_prefix=None)
        with RolloutClient.connect() as client:
            figures = take_turns(
                {
                    "the graph, through handles": lambda: by_graph(client),
                    "(a) diffusers' LTX2Pipeline": lambda: by_pipeline(pipe, here),
                    "(b) our engine in one process": alone.run,
                },
                turns=args.turns,
            )
    alone.engine.stop()
    ours = figures["the graph, through handles"]
    report(
        "graph",
        [
            {
                "contender": name,
                "seconds for the group": Spread.of(values),
                "the graph's speed over it": ratio(values, ours),
            }
            for name, values in figures.items()
        ],
        notes=[
            f"preset {args.preset}, group of {GROUP}, {NUM_STEPS} steps, every state kept, media decoded",
            "marks: 1.0 over (a), 0.95 over (b)",
        ],
    )


if __name__ == "__main__":
    main()
