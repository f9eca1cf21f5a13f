"""Deployment of the one process that owns what ad-hoc callers get.

An ingress replica comes and goes, and every link must work whichever of them answers, so none of them owns a rollout:
they forward to this one replica, which is a RolloutClient. What it keeps is lost when it dies, and can be sampled again
from the request and the seed.
"""

from ray import serve
from ray.serve.handle import DeploymentHandle

from configs.settings import AppConfig
from deployments.client import RolloutClient
from deployments.handles import Handles
from deployments.kept.rollouts import KeptRollouts
from schemas.card import ModelCard
from schemas.errors import Problem, invalid


class RolloutArchive(KeptRollouts):
    """Keeps rollouts by request_id. One replica: it is the place where they are."""

    def __init__(
        self,
        config: AppConfig,
        card: ModelCard,
        text_encoder: DeploymentHandle,
        denoiser: DeploymentHandle,
        av_decoder: DeploymentHandle,
        lease_board: DeploymentHandle,
    ) -> None:
        context = serve.get_replica_context()
        if context.world_size != 1:
            raise _not_alone(context.world_size).exception()
        handles = Handles(
            app_name=context.app_name,
            text_encoder=text_encoder,
            denoiser=denoiser,
            av_decoder=av_decoder,
            lease_board=lease_board,
        )
        client = RolloutClient(handles, card, config.client, wait_when_full=False)
        super().__init__(client, card, config.http)


def _not_alone(num_replicas: int) -> Problem:
    return invalid(
        "num_replicas",
        num_replicas,
        "must be 1 for RolloutArchive, since links lead to what one process keeps",
        "scale the Ingress, which forwards to it",
    )
