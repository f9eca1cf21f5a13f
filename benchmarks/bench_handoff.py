"""From the last step to arrays in the trainer's process: an Arrow table through the object store, against other ways.

A replica's process holds the states of one sample as the recorder leaves them, a buffer per modality whose last row is
yet to come. Each contender copies that row, packs, hands over and ends with one readable array per modality in this
process; the receiver then adds up all elements, which is not timed.

    python -m benchmarks.bench_handoff
"""

import argparse
import base64
import json
import os
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgpack
import numpy as np
import ray
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from benchmarks.harness import Spread, ratio, report, seconds, take_turns
from pipeline.tensors import to_numpy
from schemas.trajectory import pack_trajectory, read_trajectory

MIB = 2**20
NUM_STATES, CHANNELS, AUDIO_TOKENS = 16, 128, 126


class Kept:
    """Kept states of one sample, of about ``num_bytes`` in all."""

    def __init__(self, num_bytes: int) -> None:
        tokens = num_bytes // (NUM_STATES * CHANNELS * 4) - AUDIO_TOKENS
        self.states = {
            modality: torch.randn(NUM_STATES, length, CHANNELS)
            for modality, length in (("video", tokens), ("audio", AUDIO_TOKENS))
        }
        self.last = {modality: states[-1].clone() for modality, states in self.states.items()}

    def complete(self) -> dict[str, torch.Tensor]:
        """The states [R, L, C] per modality, the last one just written."""
        for modality, states in self.states.items():
            states[-1].copy_(self.last[modality])
        return self.states


def packed(kept: Kept) -> Any:
    states = kept.complete()
    video, audio = (to_numpy(states[modality]) for modality in ("video", "audio"))
    none = [None] * NUM_STATES
    return pack_trajectory(
        steps=list(range(NUM_STATES)),
        sigmas=[1.0] * NUM_STATES,
        video_latents=video,
        audio_latents=audio,
        log_prob_video=none,
        log_prob_audio=none,
        state_dtype="float32",
        manifest={},
    )


class Replica:
    """Holds the states and hands them over in every form."""

    def __init__(self, num_bytes: int) -> None:
        self.kept = Kept(num_bytes)
        handler = type("Handler", (_Forms,), {"kept": self.kept})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def port(self) -> int:
        return self.server.server_address[1]

    def arrow(self) -> Any:
        return packed(self.kept)

    def torch_tensors(self) -> dict[str, torch.Tensor]:
        return self.kept.complete()

    def timed_put(self) -> tuple[float, float]:
        """Seconds to pack and put the Arrow table, and of one copy of its bytes into memory that was used before."""
        source = self.kept.states["video"].numpy()
        target = np.zeros_like(source)
        copy_s = seconds(lambda: np.copyto(target, source))
        return seconds(lambda: ray.put(packed(self.kept))), copy_s


class _Forms(BaseHTTPRequestHandler):
    """The HTTP contenders' server: safetensors in msgpack, as SGLang answers, and base64 in JSON."""

    kept: Kept

    def do_GET(self) -> None:
        raw = {name: save_tensors({"t": states}) for name, states in self.kept.complete().items()}
        if self.path == "/msgpack":
            body = msgpack.packb({name: {"__tensor__": True, "data": data} for name, data in raw.items()})
        else:
            body = json.dumps({name: base64.b64encode(data).decode() for name, data in raw.items()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not a line per request."""


def from_arrow(replica: Any) -> tuple[float, np.ndarray[Any, Any]]:
    ref = replica.arrow.remote()
    ray.wait([ref], fetch_local=False)
    started = time.perf_counter()
    array = read_trajectory(ray.get(ref)).video_latents
    return time.perf_counter() - started, array


def from_msgpack(port: int) -> np.ndarray[Any, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/msgpack", timeout=120) as answer:
        unpacked = msgpack.unpackb(answer.read())
    return load_tensors(unpacked["video"]["data"])["t"].numpy()


def from_json(port: int) -> np.ndarray[Any, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=300) as answer:
        unpacked = json.loads(answer.read())
    return load_tensors(base64.b64decode(unpacked["video"]))["t"].numpy()


def measure(num_mib: int, turns: int) -> list[dict[str, Any]]:
    replica = ray.remote(Replica).options(num_cpus=0).remote(num_mib * MIB)
    port = ray.get(replica.port.remote())
    first_put_s, _ = ray.get(replica.timed_put.remote())
    gets: list[float] = []
    puts: list[float] = []
    copies: list[float] = []

    def whole(get: Callable[[], np.ndarray[Any, Any]]) -> Callable[[], float]:
        def run() -> float:
            started = time.perf_counter()
            array = get()
            took = time.perf_counter() - started
            assert np.isfinite(array.sum())
            return took

        return run

    def arrow() -> np.ndarray[Any, Any]:
        get_s, array = from_arrow(replica)
        gets.append(get_s)
        return array

    def put() -> float:
        put_s: float
        put_s, copy_s = ray.get(replica.timed_put.remote())
        puts.append(put_s)
        copies.append(copy_s)
        return put_s

    figures = take_turns(
        {
            "Arrow table, object store": whole(arrow),
            "of this, pack and put": put,
            "torch tensors, object store": whole(
                lambda: ray.get(replica.torch_tensors.remote())["video"].numpy()
            ),
            "safetensors in msgpack, HTTP": whole(lambda: from_msgpack(port)),
            "base64 in JSON, HTTP": whole(lambda: from_json(port)),
        },
        turns=turns,
    )
    ours = figures["Arrow table, object store"]
    ray.kill(replica)
    return [
        {"MiB": num_mib, "way": "one memcpy", "ms": Spread.of([1000 * c for c in copies[1:]])},
        *(
            {
                "MiB": num_mib,
                "way": name,
                "ms": Spread.of([1000 * value for value in values]),
                "over one memcpy": ratio(values, copies[1:]),
                "over Arrow": ratio(values, ours),
            }
            for name, values in figures.items()
        ),
        {"MiB": num_mib, "way": "of Arrow, get", "ms": Spread.of([1000 * value for value in gets[1:]])},
        {"MiB": num_mib, "way": "the first pack and put", "ms": 1000 * first_put_s},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    folder = tempfile.mkdtemp(prefix="ltx", dir="/tmp")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ray.init(
        object_store_memory=3 * 1024 * MIB,
        include_dashboard=False,
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
        log_to_driver=False,
    )
    try:
        rows = [row for mib in args.mib for row in measure(mib, args.turns)]
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    report(
        "handoff",
        rows,
        notes=[
            "float32; both processes on one machine; Ray's store as it comes",
            "the first put into a store pays for memory that was never touched; the others reuse memory",
            "marks: pack and put at most 2 memcpys, get under 5 ms, msgpack at least 10 times Arrow",
        ],
    )


if __name__ == "__main__":
    main()
