"""A group of 8 through the whole graph, against diffusers' pipeline and against our engine in one process.

Each contender encodes a prompt, samples 8 times 20 steps keeping every state, and decodes picture and sound. The
pipeline runs the 8 as one batch. On a CPU all of them have the same cores. One more turn of each, which is not counted,
says where the time goes.

    python -m benchmarks.bench_graph
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from diffusers import LTX2Pipeline
from ray import serve

from benchmarks.harness import Spread, ratio, report, take_turns
from benchmarks.in_process import InProcess, device
from benchmarks.on_ray import cluster
from benchmarks.where_time_goes import module_seconds, process_seconds
from deployments.client import RolloutClient
from deployments.graph import bind
from pipeline.checkpoint import folder, load
from pipeline.conditioning import read
from pipeline.decode import AVDecoder
from pipeline.profile import profile_of
from pipeline.record import to_table
from pipeline.sample import Job
from pipeline.text import PromptEncoder
from schemas.arrow import manifest_of
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


def modules_of(
    *, text_encoder: Any, connectors: Any, transformer: Any, vae: Any, audio_vae: Any, vocoder: Any, **_: Any
) -> dict[str, torch.nn.Module]:
    """What computes, by the stage it belongs to."""
    return {
        "text encoder": text_encoder.base_model,
        "connectors": connectors,
        "transformer": transformer,
        "video VAE": vae.decoder,
        "audio VAE": audio_vae.decoder,
        "vocoder": vocoder,
    }


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
        self.modules = modules_of(transformer=here.model.transformer, **parts, **decoders)
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
            to_table(finished, card=here.card, profile=profile, replica_id="here", timings={})
            latents = finished.sample.latents
            self.decoder.decode(latents["video"], latents["audio"], finished.sample.geometry)
        return time.perf_counter() - started


def by_graph(client: RolloutClient, timings: list[dict[str, float]] | None = None) -> float:
    """A trainer's view: submit, and every table read. ``timings`` gets those of each sample's manifest."""
    started = time.perf_counter()
    request = {
        "prompt": next(PROMPTS),
        "num_samples": GROUP,
        "num_inference_steps": NUM_STEPS,
        "return_steps": "all",
    }
    for sample in client.as_completed([client.submit(request)]):
        sample.raise_if_failed()
        _, media = ray.get([sample.trajectory, sample.media])
        if timings is not None:
            timings.append(manifest_of(media["video"])["timings"])
    return time.perf_counter() - started


def stages(contender: str, modules: dict[str, torch.nn.Module], run: Callable[[], float]) -> dict[str, Any]:
    """Seconds in each module, and outside of all, of one run."""
    with module_seconds(modules) as taken:
        whole = run()
    return {"contender": contender, **taken, "all else": whole - sum(taken.values()), "whole": whole}


def of_the_graph(client: RolloutClient) -> list[str]:
    """Of one run: seconds of its stages, and what each of its processes spent."""
    timings: list[dict[str, float]] = []
    with process_seconds() as spent:
        whole = by_graph(client, timings)
    encode = max(of["encode_s"] for of in timings)
    denoise = max(of["wait_s"] + of["denoise_s"] + of["pack_s"] for of in timings)
    decode = sum(of["decode_s"] for of in timings)
    most = sorted(((seconds, title) for title, seconds in spent.items() if seconds >= 0.05), reverse=True)
    figures = ", ".join(f"{_short(title)} {seconds:.2f}" for seconds, title in most)
    return [
        f"the graph, s: encode {encode:.2f}, denoise all {denoise:.2f}, decode one by one {decode:.2f}, "
        f"the rest {whole - encode - denoise - decode:.2f}, whole {whole:.2f}",
        f"the same run's CPU seconds by process: {figures}; {sum(spent.values()):.2f} in all, "
        f"of {whole * (os.cpu_count() or 1):.2f} that the cores have",
    ]


def _short(title: str) -> str:
    return Path(title).name.rpartition(":")[2]


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
    on_all_cores: dict[str, Any] = {"ray_actor_options": {"num_cpus": cores}}
    with cluster(object_store_bytes=2 * 2**30):
        options: dict[str, dict[str, Any]] = {
            name: on_all_cores for name in ("TextEncoder", "Denoiser", "AVDecoder")
        }
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
            notes = of_the_graph(client)
    profile = [
        stages("(a) diffusers' LTX2Pipeline", modules_of(**pipe.components), lambda: by_pipeline(pipe, here)),
        stages("(b) our engine in one process", alone.modules, alone.run),
    ]
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
        profile=profile,
        notes=[
            *notes,
            f"preset {args.preset}, group of {GROUP}, {NUM_STEPS} steps, every state kept, media decoded",
            "marks: 1.0 over (a), 0.95 over (b)",
        ],
    )


if __name__ == "__main__":
    main()
