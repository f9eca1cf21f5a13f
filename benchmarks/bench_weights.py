"""How long a change of weights takes, and how long nothing can be sampled meanwhile.

A trainer publishes to 1, 2 and 4 denoisers that are busy: a LoRA, the full weights of the preset, and a state dict of
1 GiB (the transformer with one large tensor more, which its forward pass does not read). A swap is the time in which a
denoiser's step thread writes; it is compared with one copy of the same bytes in the same process. Hashing, fetching and
comparing happen beside the step thread and are part of the whole time only. The pause is the longest time between two
forward passes around the swap.

    python -m benchmarks.bench_weights
"""

import argparse
import time
from itertools import pairwise
from typing import Any

import numpy as np
import ray
import torch
from peft import LoraConfig, get_peft_model_state_dict
from ray import serve

from benchmarks.harness import Spread, ratio, report, seconds
from benchmarks.on_ray import cluster, statuses
from configs.settings import AppConfig
from deployments.client import RolloutClient
from deployments.denoiser import Denoiser
from deployments.graph import bind
from pipeline.checkpoint import load
from pipeline.velocity import Latents, VelocityModel

GIB = 2**30
PIECE_BYTES = GIB // 4
"""Of a copy to compare with: far more than any cache holds."""
BALLAST = "ballast"
LORA = LoraConfig(
    r=16, lora_alpha=32, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False
)
WAIT_S = 600.0


def with_ballast(transformer: Any, num_bytes: int) -> Any:
    """The transformer with a parameter more, that many bytes large."""
    if num_bytes:
        ballast = torch.nn.Parameter(torch.zeros(num_bytes // 4), requires_grad=False)
        transformer.register_parameter(BALLAST, ballast)
    return transformer


class TimedModel:
    """A VelocityModel that remembers when its passes began and ended."""

    def __init__(self, model: VelocityModel) -> None:
        self._model, self.device = model, model.device
        self.passes: list[tuple[float, float]] = []

    def __call__(self, *args: Any) -> Latents:
        started = time.monotonic()
        result = self._model(*args)
        self.passes.append((started, time.monotonic()))
        return result


class TimedDenoiser(Denoiser):
    """Says when its passes were and how long a copy takes it."""

    ballast_bytes = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.timed = TimedModel(self.model)
        self.engine.model = self.timed  # type: ignore[assignment]

    def _load(self, config: AppConfig) -> Any:
        return with_ballast(super()._load(config), self.ballast_bytes)

    async def status(self) -> dict[str, Any]:
        return {**await super().status(), "passes": self.timed.passes[-4000:]}

    async def copy_s(self, num_bytes: int) -> float:
        """One copy of so many bytes into memory that was used before, the median of five. In pieces, since four
        replicas on one machine do so at once."""
        piece = min(num_bytes, PIECE_BYTES)
        source, target = np.ones(piece, np.uint8), np.zeros(piece, np.uint8)
        copies = [seconds(lambda: np.copyto(target, source)) for _ in range(5)]
        return Spread.of(copies).median * num_bytes / piece


class LadenDenoiser(TimedDenoiser):
    """With weights of a GiB in all."""

    ballast_bytes = GIB


def publications(transformer: Any) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Tensors and arguments of a full and of a LoRA update."""
    full = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    transformer.add_adapter(LORA)
    adapter = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(transformer).items()}
    return {"full": (full, {}), "lora": (adapter, {"update": "lora", "lora_config": LORA})}


def measure(
    preset: str, num_replicas: int, denoiser: type[TimedDenoiser], turns: int
) -> list[dict[str, Any]]:
    config = AppConfig.model_validate(
        {"preset": preset, "denoiser": {"row_buckets": [1]}, "weights": {"max_bytes": 4 * GIB}}
    )
    options = {
        "Denoiser": {
            "num_replicas": num_replicas,
            "max_ongoing_requests": 3,
            "ray_actor_options": {"num_cpus": 0},
        }
    }
    serve.run(bind(config, denoiser=denoiser, options=options), route_prefix=None)
    trainer = with_ballast(load(config.model, "transformer"), denoiser.ballast_bytes)
    kinds = publications(trainer)
    wanted = ["full"] if denoiser.ballast_bytes else ["lora", "full"]
    rows = []
    with RolloutClient.connect() as client:
        version = client.policy_version().control.version
        for kind in wanted:
            tensors, arguments = kinds[kind]
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            copies = (
                serve.get_deployment_handle("Denoiser", "default").broadcast("copy_s", num_bytes).results()
            )
            wholes, swaps, pauses, steps = [], [], [], []
            for turn in range(turns + 1):
                group = client.submit(
                    {
                        "prompt": "a red ball",
                        "num_samples": 4 * num_replicas,
                        "num_inference_steps": 8,
                        "media": False,
                        "allow_mixed_versions": True,
                    }
                )
                while not any(sample.steps_done for sample in group.samples):
                    time.sleep(0.05)
                busy_from = time.monotonic()
                before = {s["replica_id"]: s["stats"]["swap_s"] for s in statuses()}
                version += 1
                started = time.perf_counter()
                client.publish_weights(version=version, tensors=tensors, timeout_s=WAIT_S, **arguments)
                whole_s = time.perf_counter() - started
                client.gather([group], timeout_s=WAIT_S)
                group.raise_if_failed()
                if (
                    turn == 0
                ):  # the first adapter is wrapped around the layers; later ones are copied in place
                    continue
                after = statuses()
                wholes.append(whole_s)
                swaps.append(max(s["stats"]["swap_s"] - before[s["replica_id"]] for s in after))
                passes = [[p for p in s["passes"] if p[0] > busy_from] for s in after]
                pauses.append(max(_longest_gap(of_replica) for of_replica in passes))
                steps += [end - begin for of_replica in passes for begin, end in of_replica]
            copy_s = Spread.of(copies).median
            rows.append(
                {
                    "weights": "1 GiB" if denoiser.ballast_bytes else f"{preset}, {kind}",
                    "MiB": num_bytes / 2**20,
                    "replicas": num_replicas,
                    "publish to last acknowledgement, s": Spread.of(wholes),
                    "swap, slowest replica, s": Spread.of(swaps),
                    "swap over one memcpy": ratio(swaps, [copy_s] * len(swaps)),
                    "longest pause between passes, s": Spread.of(pauses),
                    "one pass, s": Spread.of(steps).median,
                }
            )
    serve.delete("default")
    ray.kill(ray.get_actor("weights of default", namespace="ltx_rollout"))
    return rows


def _longest_gap(passes: list[tuple[float, float]]) -> float:
    """Between the end of one pass and the beginning of the next, of passes while there was always something to do."""
    return max((after[0] - before[1] for before, after in pairwise(passes)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    rows = []
    with cluster(object_store_bytes=5 * GIB):
        for num_replicas in args.replicas:
            for denoiser in (TimedDenoiser, LadenDenoiser):
                rows += measure(args.preset, num_replicas, denoiser, args.turns)
    report(
        "weights",
        rows,
        notes=[
            "float32; the memcpy is of the same bytes, in a denoiser's process, into memory that was used before",
            "marks: full at most 4 memcpys per replica, LoRA at most 0.5 s for 4 replicas, pause at most a swap and a sample",
        ],
    )


if __name__ == "__main__":
    main()
