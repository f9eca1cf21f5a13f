"""The stored moves of trajectories that can be scored again: what each of them needs, and why one is refused.

It reads manifests and asks which states were kept; it computes nothing. All refusals come before any forward pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diffusers import LTX2VideoTransformer3DModel

from pipeline.conditioning import Conditioning
from pipeline.noise import MODALITIES, Modality
from pipeline.profile import ADOPTABLE, ExecutionProfile, profile_of
from pipeline.transitions import LogProbKind
from pipeline.velocity import Place
from schemas.geometry import Geometry
from schemas.resolved import ResolvedRequest
from schemas.trajectory import SCHEMA_VERSION, TrajectoryView

Steps = Iterable[int] | Mapping[int, Iterable[int]]
"""Which steps to score: the same of every trajectory, or by a trajectory's index (the others are then left out)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMove:
    """One step of one trajectory."""

    trajectory: int
    """Index of the trajectory among those that were given."""
    step: int
    view: TrajectoryView
    request: ResolvedRequest
    conditioning: Conditioning
    geometry: Geometry

    @property
    def places(self) -> tuple[Place, ...]:
        """Where its rows stood: the positive one, and the negative one if there is guidance."""
        stored = self.view.manifest["places"][self.step]
        return tuple(Place(**stored[name]) for name in ("positive", "negative") if stored[name] is not None)

    def is_stochastic(self, modality: Modality) -> bool:
        """Whether the modality moved with noise, so that the move has a log-prob."""
        return self.step in getattr(self.request.stochastic_steps, modality)


def scorable_steps(trajectory: TrajectoryView) -> list[int]:
    """The stochastic steps whose two states were kept, rising; none in mode generate."""
    kept = set(trajectory.steps.tolist())
    request = ResolvedRequest.model_validate(trajectory.manifest["request"])
    return [step for step in _stochastic(request) if {step, step + 1} <= kept]


def stored_moves(
    transformer: LTX2VideoTransformer3DModel,
    trajectories: Sequence[TrajectoryView],
    conditionings: Iterable[Conditioning],
    steps: Steps | None,
    log_prob_kind: LogProbKind | None,
) -> list[StoredMove]:
    """The moves of ``steps`` (None: every stochastic one), by trajectory, then in the order of the steps.

    Raises ValueError, as ``pipeline.replay.log_probs`` says.
    """
    asked = _by_trajectory(steps, len(trajectories))
    profile = profile_of(transformer)
    by_digest = {one.digest: one for one in conditionings}
    moves = []
    for index, own_steps in asked.items():
        view = trajectories[index]
        name = "the trajectory" if len(trajectories) == 1 else f"trajectory {index}"
        request = _checked_request(view, profile, name, log_prob_kind)
        conditioning = _conditioning(view, by_digest, name)
        stochastic = _stochastic(request)
        geometry = Geometry(**view.manifest["geometry"])
        kept = view.steps.tolist()
        for step in stochastic if own_steps is None else own_steps:
            if step not in stochastic:
                raise ValueError(
                    f"step {step} of {name} has no log-prob, it moved by ode; the stochastic steps are {stochastic}"
                )
            missing = [state for state in (step, step + 1) if state not in kept]
            if missing:
                raise ValueError(
                    f"state {missing[0]} of {name} was not kept, only {kept} were; name it in return_steps"
                )
            moves.append(
                StoredMove(
                    trajectory=index,
                    step=step,
                    view=view,
                    request=request,
                    conditioning=conditioning,
                    geometry=geometry,
                )
            )
    return moves


def _by_trajectory(steps: Steps | None, num_trajectories: int) -> dict[int, list[int] | None]:
    if steps is None:
        return dict.fromkeys(range(num_trajectories))
    if not isinstance(steps, Mapping):
        common = list(steps)
        return {index: common for index in range(num_trajectories)}
    for index in steps:
        if not 0 <= index < num_trajectories:
            raise ValueError(
                f"steps must be given by the index of a trajectory, 0 to {num_trajectories - 1}, got {index}; "
                "count from 0 in the order of the trajectories"
            )
    return {index: list(own) for index, own in steps.items()}


def _checked_request(
    view: TrajectoryView, profile: ExecutionProfile, name: str, log_prob_kind: LogProbKind | None
) -> ResolvedRequest:
    manifest = view.manifest
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version of {name} must be {SCHEMA_VERSION}, got {manifest['schema_version']}; "
            "replay it with the release that sampled it"
        )
    _check_profile(profile, manifest["execution_profile"], name)
    request = ResolvedRequest.model_validate(manifest["request"])
    if request.mode != "rollout":
        raise ValueError(
            f"mode of {name} must be 'rollout', got {request.mode!r}, which moves by ode and has no log-probs; "
            "sample it again in mode rollout"
        )
    for modality in MODALITIES:
        kind = getattr(request.transition, modality).log_prob_kind
        if log_prob_kind not in (None, kind) and getattr(request.stochastic_steps, modality):
            raise ValueError(
                f"transition.{modality}.log_prob_kind of {name} must be {log_prob_kind!r}, as was asked for, got {kind!r}; "
                f"sample it again with that kind, or ask for {kind!r} with a clip range to match"
            )
    return request


def _check_profile(profile: ExecutionProfile, recorded: dict[str, object], name: str) -> None:
    different = profile.differences(recorded)
    if not different:
        return
    lines = "; ".join(f"{key}: here {here!r}, rollout {there!r}" for key, (here, there) in different.items())
    adoptable = ", ".join(key for key in different if key in ADOPTABLE)
    fixed = ", ".join(key for key in different if key not in ADOPTABLE)
    remedies = []
    if adoptable:
        remedies.append(
            f"call pipeline.profile.adopt(manifest['execution_profile'], transformer) to set {adoptable}"
        )
    if fixed:
        remedies.append(
            f"load the checkpoint, dtype and adapter of the rollout, on its device, for the same {fixed}"
        )
    raise ValueError(
        f"the execution profile differs from that of {name}, so log-probs would not be comparable ({lines}); "
        + "; ".join(remedies)
    )


def _conditioning(view: TrajectoryView, by_digest: Mapping[str, Conditioning], name: str) -> Conditioning:
    digest = view.manifest["conditioning_digest"]
    if digest not in by_digest:
        raise ValueError(
            f"conditioning must be the one that {name} was sampled with, digest {digest}, got "
            f"{', '.join(by_digest) or 'none'}; fetch the group's conditioning table"
        )
    return by_digest[digest]


def _stochastic(request: ResolvedRequest) -> list[int]:
    return sorted({*request.stochastic_steps.video, *request.stochastic_steps.audio})
