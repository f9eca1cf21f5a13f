"""The engine around a transformer of LTX-2.3's real width and fewer layers, with random weights, in bfloat16.

What a GPU day must answer: how busy the device is kept, samples per GPU-hour, peak memory, and whether a row's bits
depend on its place in the batch, on the batch's size, or on other rows there too.

    python -m benchmarks.bench_gpu            # needs a GPU of 80 GB or more
    python -m benchmarks.bench_gpu --smallest # the same code on a CPU
"""

import argparse
import threading
import time
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel

from benchmarks.harness import report
from configs.settings import AppConfig
from pipeline.checkpoint import load, read_card
from pipeline.conditioning import Conditioning, Context
from pipeline.engine import Engine
from pipeline.noise import draw
from pipeline.sample import Job
from pipeline.velocity import Row, VelocityModel
from pipeline.warm_up import warm_up
from schemas.card import ModelCard
from schemas.geometry import geometry
from schemas.resolve import resolve

REAL_LAYERS = 48
WIDE = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
    "rope_type": "split",
}
"""LTX-2.3's flags; every width is the class's default, which is the real one."""


def wide_card() -> ModelCard:
    """The card of a checkpoint of LTX-2.3's sizes, from the generated one's and the real ones' numbers."""
    config = AppConfig.model_validate({"preset": "ltx23_h200", "model": "tiny"})
    card = read_card("tiny", config.limits, config.defaults)
    return card.model_copy(
        update={
            "video_channels": 128,
            "audio_latent_channels": 8,
            "audio_mel_bins": 64,
            "video_context_dim": 4096,
            "audio_context_dim": 2048,
        }
    )


def smallest_card() -> ModelCard:
    config = AppConfig.model_validate({"preset": "tiny"})
    return read_card("tiny", config.limits, config.defaults)


def smallest_model() -> LTX2VideoTransformer3DModel:
    model: LTX2VideoTransformer3DModel = load("tiny", "transformer")
    return model


def wide_model(num_layers: int) -> LTX2VideoTransformer3DModel:
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LTX2VideoTransformer3DModel(num_layers=num_layers, **WIDE)
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def busy_share(device: torch.device, work: threading.Event, shares: list[float]) -> None:
    """Samples the driver's utilisation figure until the work is done."""
    while not work.wait(0.1):
        if device.type == "cuda":
            shares.append(torch.cuda.utilization(device) / 100)


def throughput(model: VelocityModel, card: ModelCard, num_rows: int, num_steps: int) -> dict[str, Any]:
    engine = Engine(model, card, row_buckets=(num_rows,))
    warm_up(model, card, engine.buckets)
    threading.Thread(target=engine.run, daemon=True).start()
    conditioning = Conditioning(positive=_context(card, model.device, 1), negative=None, digest="noise")
    fields = {"prompt": "x", "seed": 1, "num_samples": 2 * num_rows, "num_inference_steps": num_steps}
    request = resolve({**fields, "stochastic_steps": [0, 1, 2], "media": False}, card)
    done, shares = threading.Event(), list[float]()
    watch = threading.Thread(target=busy_share, args=(model.device, done, shares), daemon=True)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    watch.start()
    started = time.perf_counter()
    futures = [
        engine.submit(Job(sample_id=str(k), request=request, sample_index=k, conditioning=conditioning))
        for k in range(2 * num_rows)
    ]
    for future in futures:
        future.result()
    seconds = time.perf_counter() - started
    done.set()
    engine.stop()
    steps = 2 * num_rows * num_steps
    layers = len(model.transformer.transformer_blocks)
    of_real_depth = seconds / steps * REAL_LAYERS / layers
    return {
        "rows": num_rows,
        "ms per row and step": seconds / steps * 1000,
        "device busy, mean": sum(shares) / len(shares) if shares else "not measured",
        "samples per GPU-hour, scaled to 48 layers and 30 steps": 3600 / (of_real_depth * 30),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30
        if model.device.type == "cuda"
        else "not measured",
    }


@torch.inference_mode()
def bits(model: VelocityModel, card: ModelCard) -> dict[str, bool]:
    """What a row's bits depend on."""
    defaults = card.defaults
    of = geometry(
        card,
        height=defaults.height,
        width=defaults.width,
        num_frames=defaults.num_frames,
        frame_rate=defaults.frame_rate,
    )

    def row(seed: int) -> Row:
        return Row(
            latents={
                "video": draw(seed, (of.num_video_tokens, of.video_channels)).to(model.device),
                "audio": draw(seed + 1, (of.audio_frames, of.audio_channels)).to(model.device),
            },
            sigma=torch.tensor(0.9),
            context=_context(card, model.device, seed + 2),
        )

    own, others = row(100), [row(200), row(300), row(400)]
    alone = model([own], of)
    first, second, last = (
        model(batch, of) for batch in ([own, *others], [own, *others[::-1]], [*others, own])
    )
    return {
        "on the batch's size": not torch.equal(alone["video"][0], first["video"][0]),
        "on the other rows": not torch.equal(first["video"][0], second["video"][0]),
        "on the index in the batch": not torch.equal(first["video"][0], last["video"][3]),
    }


def _context(card: ModelCard, device: torch.device, key: int) -> Context:
    return Context(
        video=draw(key, (card.max_prompt_tokens, card.video_context_dim)).to(device),
        audio=draw(key + 1, (card.max_prompt_tokens, card.audio_context_dim)).to(device),
        mask=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smallest", action="store_true", help="tiny on the CPU, to try the script")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    if args.smallest:
        card, model = smallest_card(), VelocityModel(smallest_model())
    else:
        card, model = wide_card(), VelocityModel(wide_model(args.layers))
    rows = [throughput(model, card, num_rows, args.steps) for num_rows in args.rows]
    name = "gpu_smallest" if args.smallest else "gpu"
    report(name, rows, notes=[f"row bits depend {what}: {so}" for what, so in bits(model, card).items()])


if __name__ == "__main__":
    main()
