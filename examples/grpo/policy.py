"""The policy as the trainer has it: the transformer with a LoRA, its optimizer, and a step of learning.

It knows trajectories and advantages, no rewards and no cluster.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning
from pipeline.noise import MODALITIES, Modality
from pipeline.profile import adopt
from pipeline.replay import StepLogProbs, micro_batches
from schemas.trajectory import TrajectoryView

from .checks import check_checkpoint, check_fresh
from .loss import clipped_loss, kl
from .settings import Settings

FORM = ("model", "rank", "alpha", "target_modules")
"""Settings that two runs must have in common to share an adapter."""

Row = dict[str, float]
"""One iteration in numbers."""


class Policy:
    """Weights that learn. `updates` counts what they have learned from."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.updates = 0
        self.weights = {"video": settings.video_weight, "audio": settings.audio_weight}
        self.lora = LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.target_modules
        )
        self.transformer = load(settings.model, "transformer", dtype=settings.dtype, device=settings.device)
        torch.manual_seed(settings.seed)
        self.transformer.add_adapter(self.lora)
        self.parameters = [p for p in self.transformer.parameters() if p.requires_grad]
        for parameter in self.parameters:  # in bfloat16, small updates would be rounded away
            parameter.data = parameter.data.float()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.learning_rate, weight_decay=0.0)

    def adapter(self) -> dict[str, Tensor]:
        """What is published."""
        return dict(get_peft_model_state_dict(self.transformer))

    def learn(
        self,
        trajectories: Sequence[TrajectoryView],
        conditionings: Sequence[Conditioning],
        advantages: Mapping[str, Sequence[float]],
        staleness: Sequence[int] | None = None,
    ) -> Row:
        """Optimizer steps on all samples and their stochastic steps. advantages: of each sample, per modality; staleness:
        updates since the weights that a sample was made with, where they are known.

        Raises ValueError where this process cannot compute as the rollouts were computed, and RuntimeError, before
        anything is learned, where the first ratio of a sample of these very weights is beyond the clip range.
        """
        settings = self.settings
        adopt(trajectories[0].manifest["execution_profile"], self.transformer)
        replayed: Any = (self.transformer, trajectories, conditionings)
        how: Any = {"log_prob_kind": settings.log_prob_kind, "max_rows": settings.max_rows}
        references = self._references(replayed, how) if settings.kl_weight else {}
        row: Row = {}
        for epoch in range(settings.epochs):
            found: dict[str, list[float]] = {}
            for moves in micro_batches(*replayed, **how):
                losses = []
                for move, m in product(moves, MODALITIES):
                    if getattr(move, m) is None:  # the modality moved by ode
                        continue
                    index, reference = move.trajectory, references.get((move.trajectory, move.step))
                    old = trajectories[index].manifest[f"log_probs_{m}"][move.step]
                    loss, figures = self._loss(move, m, old, advantages[m][index], reference)
                    if epoch == 0 and staleness and not staleness[index]:
                        check_fresh(figures[f"ratio_{m}"], settings.clip_range)
                    for name, value in figures.items():
                        found.setdefault(name, []).append(value)
                    if self.weights[m]:
                        losses.append(self.weights[m] * loss)
                if losses:
                    (torch.stack(losses).sum() / len(trajectories)).backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, settings.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            row = row or {**_summary(found, settings.clip_range), "grad_norm": float(norm)}
        self.updates += 1
        return row

    def save(self, path: Path) -> None:
        """Write a checkpoint in the place of the one before, whole or not at all."""
        state = {
            "form": {name: getattr(self.settings, name) for name in FORM},
            "adapter": self.adapter(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint, at this run's learning rate. Raises ValueError for one that does not fit."""
        state = torch.load(path, map_location=self.settings.device, weights_only=True)
        check_checkpoint(state, self.settings)
        set_peft_model_state_dict(self.transformer, state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate
        self.updates = state["updates"]

    def _loss(
        self,
        move: StepLogProbs,
        modality: Modality,
        old: float,
        advantage: float,
        reference: Mapping[Modality, Tensor] | None,
    ) -> tuple[Tensor, Row]:
        """Of one move of one modality, and its figures: the ratio, and the distance from the reference."""
        loss, ratio = clipped_loss(getattr(move, modality), old, advantage, self.settings.clip_range)
        if reference is None:
            return loss, {f"ratio_{modality}": ratio}
        distance = kl(move.means[modality], reference[modality], move.stds[modality])
        figures = {f"ratio_{modality}": ratio, f"kl_{modality}": float(distance.detach())}
        return loss + self.settings.kl_weight * distance, figures

    @torch.no_grad()
    def _references(self, replayed: Any, how: Any) -> dict[tuple[int, int], Mapping[Modality, Tensor]]:
        """Means of the moves under the weights without the adapter, by trajectory and step."""
        self.transformer.disable_adapters()
        means = {
            (move.trajectory, move.step): move.means
            for moves in micro_batches(*replayed, **how)
            for move in moves
        }
        self.transformer.enable_adapters()
        return means


def _summary(found: Mapping[str, Sequence[float]], clip_range: float) -> Row:
    """Of each modality that moved: the ratios' extremes and the share beyond the clip range; and its mean distance."""
    row: Row = {}
    for name, values in found.items():
        kind, modality = name.split("_")
        if kind == "kl":
            row[name] = sum(values) / len(values)
        else:
            row |= {f"{name}_min": min(values), f"{name}_max": max(values)}
            row[f"off_{modality}"] = max(abs(ratio - 1) for ratio in values)
            row[f"clipped_{modality}"] = sum(abs(r - 1) > clip_range for r in values) / len(values)
    return row
