"""The policy as the trainer has it: the transformer with a LoRA, its optimizer, and a step of learning.

It knows trajectories and advantages, no rewards and no cluster.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from examples.grpo.loss import clipped_loss, kl
from examples.grpo.settings import Settings
from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning
from pipeline.noise import MODALITIES
from pipeline.profile import adopt
from pipeline.replay import StepLogProbs, log_probs_of_many, micro_batches
from schemas.trajectory import TrajectoryView

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
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.learning_rate, weight_decay=0.0)

    def adapter(self) -> dict[str, Tensor]:
        """What is published."""
        return dict(get_peft_model_state_dict(self.transformer))

    def learn(
        self,
        trajectories: Sequence[TrajectoryView],
        conditionings: Sequence[Conditioning],
        advantages: Mapping[str, Sequence[float]],
    ) -> Row:
        """Optimizer steps on all samples and their stochastic steps. advantages: of each sample, per modality.

        Raises ValueError where this process cannot compute as the rollouts were computed.
        """
        adopt(trajectories[0].manifest["execution_profile"], self.transformer)
        replayed: Any = (self.transformer, trajectories, conditionings)
        how: Any = {"log_prob_kind": self.settings.log_prob_kind, "max_rows": self.settings.max_rows}
        references = self._references(replayed, how) if self.settings.kl_weight else None
        row: Row = {}
        for _ in range(self.settings.epochs):
            ratios: dict[str, list[float]] = {modality: [] for modality in MODALITIES}
            for moves in micro_batches(*replayed, **how):
                losses = [
                    self._loss(move, modality, trajectories, advantages, references, ratios)
                    for move in moves
                    for modality in MODALITIES
                    if getattr(move, modality) is not None  # it is where the modality moved by ode
                ]
                (torch.stack(losses).sum() / len(trajectories)).backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            row = row or {**_summary(ratios, self.settings.clip_range), "grad_norm": float(norm)}
        self.updates += 1
        return row

    def save(self, path: Path) -> None:
        """Write a checkpoint in the place of the one before, whole or not at all."""
        state = {"adapter": self.adapter(), "optimizer": self.optimizer.state_dict(), "updates": self.updates}
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self.settings.device, weights_only=True)
        set_peft_model_state_dict(self.transformer, state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]

    def _loss(
        self,
        move: StepLogProbs,
        modality: str,
        trajectories: Sequence[TrajectoryView],
        advantages: Mapping[str, Sequence[float]],
        references: list[dict[int, StepLogProbs]] | None,
        ratios: dict[str, list[float]],
    ) -> Tensor:
        """Of one move of one modality; its ratio is added to `ratios`."""
        log_prob = getattr(move, modality)
        old = trajectories[move.trajectory].manifest[f"log_probs_{modality}"][move.step]
        advantage = advantages[modality][move.trajectory]
        loss, ratio = clipped_loss(log_prob, old, advantage, self.settings.clip_range)
        ratios[modality].append(ratio)
        if references is not None:
            reference = getattr(references[move.trajectory][move.step], modality)
            loss = loss + self.settings.kl_weight * kl(log_prob, reference)
        return self.weights[modality] * loss

    @torch.no_grad()
    def _references(self, replayed: Any, how: Any) -> list[dict[int, StepLogProbs]]:
        """Log-probs under the weights without the adapter, by trajectory and step."""
        self.transformer.disable_adapters()
        scored = log_probs_of_many(*replayed, **how)
        self.transformer.enable_adapters()
        return [{move.step: move for move in moves} for moves in scored]


def _summary(ratios: Mapping[str, list[float]], clip_range: float) -> Row:
    """Extremes of the ratios, and the share beyond the clip range; NaN for a modality that has none."""
    row: Row = {}
    for modality, values in ratios.items():
        found = torch.tensor(values or [float("nan")])
        row[f"ratio_{modality}_min"], row[f"ratio_{modality}_max"] = float(found.min()), float(found.max())
        row[f"clipped_{modality}"] = float(((found - 1).abs() > clip_range).float().mean())
    return row
