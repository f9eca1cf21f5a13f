"""The architecture on one page: which deployments there are and who calls whom.

            request                     conditioning ref               trajectory ref
client / HTTP ───► TextEncoder ──────────────────────► Denoiser ────────────────────► AVDecoder ──► media ref
                   Gemma + connectors                  transformer, step engine        VAEs, vocoder
                   cached, batched                     n replicas, one device each     only when media is asked for
                                        LeaseBoard ◄───┤ progress, leases
                                       WeightStore ────┘ policy versions, halts: an actor beside the app

The process that makes a call owns its result, so the graph is run by whoever needs the trajectories: a trainer through
`deployments.client.RolloutClient`, or, for HTTP, one `RolloutArchive`, which is such a client and keeps rollouts for a
while. Any number of ingress replicas forward to it: HTTP ───► Ingress ───► RolloutArchive ───► the stages. How many replicas, on what and
with which limits is said in `serve_config.yaml`; what the model does, in `configs/`.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from configs.settings import AppConfig
from deployments.archive import RolloutArchive
from deployments.av_decoder import AVDecoder
from deployments.denoiser import Denoiser
from deployments.ingress import Ingress
from deployments.lease_board import LeaseBoard
from deployments.router import FewestRowsRouter
from deployments.text_encoder import TextEncoder
from pipeline.checkpoint import read_card

ARCHIVE_ROOM = 4096


def build_app(args: AppConfig) -> Application:
    """The graph of ``args``; the entry point that ``serve_config.yaml`` names."""
    return bind(args)


def bind(
    args: AppConfig,
    *,
    text_encoder: type = TextEncoder,
    denoiser: type = Denoiser,
    av_decoder: type = AVDecoder,
    lease_board: type = LeaseBoard,
    archive: type = RolloutArchive,
    ingress: type = Ingress,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Application:
    """The graph with other classes in a stage's place, and ``serve.deployment`` options by deployment name."""
    card = read_card(args.model, args.limits, args.defaults)
    spread = RequestRouterConfig(
        request_router_class=FewestRowsRouter,
        initial_backoff_s=0.005,
        backoff_multiplier=1.5,
        max_backoff_s=0.05,
    )

    def deployment(cls: type, name: str, **own: Any) -> Any:
        return serve.deployment(name=name, **{**own, **(options or {}).get(name, {})})(cls)

    # Every client and denoiser calls the board twice a second, and who follows a rollout the archive: not a line of log each.
    quiet = {"logging_config": {"enable_access_log": False}}
    board = deployment(lease_board, "LeaseBoard", **quiet).bind(args.client.lease_s)
    encoder = deployment(text_encoder, "TextEncoder").bind(args, card)
    sampler = deployment(denoiser, "Denoiser", request_router_config=spread).bind(args, card, board)
    decoder = deployment(av_decoder, "AVDecoder").bind(args, card)
    # One replica, since links lead to what it keeps; and room for all who wait, and for those who end the wait.
    keeper = deployment(
        archive, "RolloutArchive", num_replicas=1, max_ongoing_requests=ARCHIVE_ROOM, **quiet
    ).bind(args, card, encoder, sampler, decoder, board)
    front = deployment(serve.ingress()(ingress), "Ingress")
    return front.bind(args, card, keeper)
