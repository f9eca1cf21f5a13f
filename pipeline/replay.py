"""Replay: the log-probs of stored trajectories under a transformer's current weights, differentiable.

Each modality is scored with the stored states of both, in forward passes of the size that the rollout used and at the
place where the sample stood there, so that under the rollout's weights and execution profile the log-probs come back
bit for bit and a trainer's first ratio is 1. Moves of different steps and trajectories share passes (packing.py).
It knows no optimizer and no loss.

``log_probs`` scores one trajectory and ``log_probs_of_many`` several, all in one graph; ``micro_batches`` yields them a
few at a time, for a backward pass in between. They run in the caller's gradient mode.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.conditioning import Conditioning
from pipeline.guidance import Velocities, guide, plan_of
from pipeline.noise import MODALITIES, Modality
from pipeline.packing import Seats, pack, seats
from pipeline.stored_moves import Steps, StoredMove, stored_moves
from pipeline.tensors import owned
from pipeline.transitions import LogProbKind, transition
from pipeline.velocity import Latents, Row, VelocityModel
from schemas.trajectory import TrajectoryView


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLogProbs:
    """Log-probs of one step, float32 scalars with a graph to the transformer; None where a modality moved by ode."""

    trajectory: int
    """Index of the trajectory among those that were given."""
    step: int
    video: Tensor | None
    audio: Tensor | None
    means: Mapping[Modality, Tensor]
    """Of the next state, float32 [L, C] with the same graph; of the stochastic modalities."""
    stds: Mapping[Modality, float]
    """Of each element of the next state; of the stochastic modalities."""


def log_probs(
    transformer: LTX2VideoTransformer3DModel,
    trajectory: TrajectoryView,
    conditioning: Conditioning,
    steps: Iterable[int] | None = None,
    *,
    log_prob_kind: LogProbKind | None = None,
    max_rows: int | None = None,
) -> list[StepLogProbs]:
    """Score the stored moves of ``steps`` (default: every stochastic step), in their order.

    ``log_prob_kind`` is the kind that the caller's clip range is made for; None takes whatever was sampled.
    ``max_rows`` bounds the rows of a forward pass, padding included, where the rollout's passes are more than there is
    memory for; log-probs from passes of another size than the rollout's differ by rounding and are no longer bit for bit.

    Raises ValueError for a step whose two states were not kept or that moved by ode, for another schema version, for
    a mode that has no log-probs, for an execution profile that this process does not run under (another architecture
    included), for a conditioning that is not the rollout's, and for another kind of log-prob. Trajectories of any
    policy version are taken: that the weights have moved on is what a ratio measures.
    """
    (scored,) = log_probs_of_many(
        transformer, [trajectory], [conditioning], steps, log_prob_kind=log_prob_kind, max_rows=max_rows
    )
    return scored


def log_probs_of_many(
    transformer: LTX2VideoTransformer3DModel,
    trajectories: Sequence[TrajectoryView],
    conditionings: Iterable[Conditioning],
    steps: Steps | None = None,
    *,
    log_prob_kind: LogProbKind | None = None,
    max_rows: int | None = None,
) -> list[list[StepLogProbs]]:
    """Score several trajectories: one list for each, in their order, as ``log_probs`` would give it.

    ``conditionings`` are those of the trajectories' groups, each once and in any order: digests tell whose they are.
    ``steps``: the same of every trajectory, or ``{index of the trajectory: steps}``, which leaves out the others.

    Raises ValueError as ``log_probs`` does, before anything is computed.
    """
    replay = _Replay(
        transformer, stored_moves(transformer, trajectories, conditionings, steps, log_prob_kind), max_rows
    )
    scored = {
        position: move
        for batch in replay.batches
        for position, move in zip(batch, replay.score(batch), strict=True)
    }
    by_trajectory: list[list[StepLogProbs]] = [[] for _ in trajectories]
    for _, move in sorted(scored.items()):
        by_trajectory[move.trajectory].append(move)
    return by_trajectory


def micro_batches(
    transformer: LTX2VideoTransformer3DModel,
    trajectories: Sequence[TrajectoryView],
    conditionings: Iterable[Conditioning],
    steps: Steps | None = None,
    *,
    log_prob_kind: LogProbKind | None = None,
    max_rows: int | None = None,
) -> Iterator[list[StepLogProbs]]:
    """The same moves, one forward pass at a time, so that memory holds the graph of one: call ``backward`` on what each
    micro-batch gives before the next is asked for.

        for batch in micro_batches(transformer, trajectories, conditionings):
            sum(loss(move) for move in batch).backward()
        optimizer.step()

    No two micro-batches share a graph, and a move is whole in one of them: its positive and negative row too, which take
    two passes in the rare micro-batch where they cannot share one. A step comes in no particular micro-batch; its
    ``trajectory`` and ``step`` say what it is. Nothing is computed before the first is asked for.

    Raises ValueError as ``log_probs`` does, at the call.
    """
    replay = _Replay(
        transformer, stored_moves(transformer, trajectories, conditionings, steps, log_prob_kind), max_rows
    )
    # An expression, so that no local of a waiting generator keeps the last micro-batch's graph.
    return (replay.score(batch) for batch in replay.batches)


class _Replay:
    """Moves on their seats, and the transformer to score them with."""

    def __init__(
        self, transformer: LTX2VideoTransformer3DModel, moves: Sequence[StoredMove], max_rows: int | None
    ) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}; None leaves passes as they were")
        self._model = VelocityModel(transformer)
        self._moves = moves
        self._seats = [seats(move.places, max_rows) for move in moves]
        kinds = [(move.geometry, move.conditioning.masked) for move in moves]
        self.batches = pack(list(zip(kinds, self._seats, strict=True)))
        """Positions of the moves of each micro-batch."""

    def score(self, batch: Sequence[int]) -> list[StepLogProbs]:
        """The log-probs of one micro-batch, in its order. Their graph alone keeps what a backward pass needs."""
        moves = [self._moves[position] for position in batch]
        own_seats = [self._seats[position] for position in batch]
        states = [_state(move.view, move.step, self._model.device) for move in moves]
        velocities = self._velocities(moves, own_seats, states)
        return [
            _log_probs(
                move,
                state,
                [{m: velocities[of][m][index : index + 1] for m in MODALITIES} for of, index in own.taken],
            )
            for move, own, state in zip(moves, own_seats, states, strict=True)
        ]

    def _velocities(
        self, moves: Sequence[StoredMove], own_seats: Sequence[Seats], states: Sequence[Latents]
    ) -> list[Latents]:
        """Velocities [num_rows, L, C] of the micro-batch's passes. An empty seat is filled by one of the rows."""
        sizes = own_seats[0].sizes
        passes: list[dict[int, Row]] = [{} for _ in sizes]
        for move, own, state in zip(moves, own_seats, states, strict=True):
            for (of, index), row in zip(own.taken, _rows(move, state), strict=True):
                passes[of][index] = row
        return [
            self._model(
                [rows.get(index, next(iter(rows.values()))) for index in range(size)], moves[0].geometry
            )
            for size, rows in zip(sizes, passes, strict=True)
        ]


def _rows(move: StoredMove, state: Latents) -> list[Row]:
    """The move's rows, positive and negative as ``StoredMove.places`` has them."""
    contexts = [move.conditioning.positive]
    if plan_of(move.request).negative:
        assert move.conditioning.negative is not None, "its digest says that it is the rollout's"
        contexts.append(move.conditioning.negative)
    sigma = _sigmas(move)[move.step]
    return [Row(latents=state, sigma=sigma, context=context) for context in contexts]


def _log_probs(move: StoredMove, state: Latents, velocities: Sequence[Latents]) -> StepLogProbs:
    """Guide and score one move; ``velocities`` are those of its rows, [1, L, C] per modality."""
    positive, *negative = velocities
    sigmas, plan = _sigmas(move), plan_of(move.request)
    moved = _state(move.view, move.step + 1, state["video"].device)
    scored: dict[Modality, Tensor | None] = dict.fromkeys(MODALITIES)
    means: dict[Modality, Tensor] = {}
    stds: dict[Modality, float] = {}
    for modality in MODALITIES:
        if not move.is_stochastic(modality):
            continue
        how = getattr(move.request.transition, modality)
        sample = state[modality].float().unsqueeze(0)
        own = Velocities(
            positive=positive[modality], negative=negative[0][modality] if negative else None, perturbed=()
        )
        scored_move = transition(
            how.kind,
            sample,
            guide(move.request, plan, modality, own, sample, sigmas[move.step]),
            sigma=sigmas[move.step],
            sigma_next=sigmas[move.step + 1],
            sigma_1=sigmas[1],
            noise_level=how.noise_level,
            next_sample=moved[modality].unsqueeze(0),
            log_prob_kind=how.log_prob_kind,
        )
        assert scored_move.log_prob is not None
        scored[modality] = scored_move.log_prob[0]
        means[modality], stds[modality] = scored_move.mean[0], float(scored_move.std[0])
    return StepLogProbs(
        trajectory=move.trajectory,
        step=move.step,
        video=scored["video"],
        audio=scored["audio"],
        means=means,
        stds=stds,
    )


def _sigmas(move: StoredMove) -> Tensor:
    return torch.tensor(move.view.manifest["sigmas"], dtype=torch.float32)


def _state(trajectory: TrajectoryView, step: int, device: torch.device) -> Latents:
    """Both modalities' stored state at ``step``, copied to the device, [L, C]."""
    index, dtype = trajectory.row_of(step), trajectory.state_dtype
    return {
        "video": owned(trajectory.video_latents[index], device, dtype),
        "audio": owned(trajectory.audio_latents[index], device, dtype),
    }
