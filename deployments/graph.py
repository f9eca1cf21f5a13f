"""The architecture on one page: which deployments there are and who calls whom.

            request                     conditioning ref               trajectory ref
client / HTTP ───► TextEncoder ──────────────────────► Denoiser ────────────────────► AVDecoder ──► media ref
                   Gemma + connectors                  transformer, step engine        VAEs, vocoder
                   cached, batched                     n replicas, one device each     only when media is asked for
                                        LeaseBoard ◄───┘ progress, leases

The process that makes a call owns its result, so the graph is run by whoever needs the trajectories: a trainer through
`deployments.client.RolloutClient`, or the ingress, which is such a client behind HTTP. How many replicas, on what and
with which limits is said in `serve_config.yaml`; what the model does, in `configs/`.
"""

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from configs.settings import AppConfig
from deployments.av_decoder import AVDecoder
from deployments.denoiser import Denoiser
from deployments.ingress import Ingress, http
from deployments.lease_board import LeaseBoard
from deployments.router import FewestRowsRouter
from deployments.text_encoder import TextEncoder


def build_app(args: AppConfig) -> Application:
    """The graph of `args`; the entry point that `serve_config.yaml` names."""
    spread = RequestRouterConfig(
        request_router_class=FewestRowsRouter,
        initial_backoff_s=0.005,
        backoff_multiplier=1.5,
        max_backoff_s=0.05,
    )
    # Every client and denoiser calls the board twice a second: not a line of log each.
    board = serve.deployment(logging_config={"enable_access_log": False})(LeaseBoard).bind(
        args.client.lease_s
    )
    encoder = serve.deployment(TextEncoder).bind(args)
    denoiser = serve.deployment(request_router_config=spread)(Denoiser).bind(args, board)
    decoder = serve.deployment(AVDecoder).bind(args)
    return serve.deployment(serve.ingress(http)(Ingress)).bind(args, encoder, denoiser, decoder, board)
