"""The deployments that a client calls."""

from dataclasses import dataclass

from ray import serve
from ray.serve.handle import DeploymentHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class Handles:
    """Handles to the deployments of one app."""

    app_name: str
    text_encoder: DeploymentHandle
    denoiser: DeploymentHandle
    av_decoder: DeploymentHandle
    lease_board: DeploymentHandle

    @classmethod
    def of_app(cls, app_name: str) -> "Handles":
        """The handles of a running app."""
        return cls(
            app_name=app_name,
            text_encoder=serve.get_deployment_handle("TextEncoder", app_name),
            denoiser=serve.get_deployment_handle("Denoiser", app_name),
            av_decoder=serve.get_deployment_handle("AVDecoder", app_name),
            lease_board=serve.get_deployment_handle("LeaseBoard", app_name),
        )
