"""A picture of a group: the log-probs of its samples, step by step, above the sigmas that they were sampled at.

The level of a log-prob is set by the noise of the step and is nearly alike in a whole group; what an update weighs is
how its samples differ. So both are shown, each modality by itself. It reads manifests alone, no latents.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from pipeline.noise import MODALITIES, Modality
from schemas.arrow import manifest_of

SIZE_INCHES, DPI = (11.0, 7.4), 130
COLORS = ("#3b6fb6", "#d1495b", "#2a9d8f", "#e9a23b", "#7b5ea7", "#8c6d46", "#4c9f4a", "#c76ba0")
"""Told apart on screen and in print; a group of more samples takes them again."""
INK, FAINT = "#30343b", "#d9dce1"
MAX_PROMPT_CHARS = 90
MAX_NAMED_SAMPLES = 8
"""Beyond these a legend would cover the picture."""

ROWS = ("level", "apart", "sigma")

Steps = NDArray[np.float64]


def save_log_probs_png(trajectories: Sequence[pa.Table], path: str | Path) -> None:
    """Draw the trajectory tables of one group to ``path``. A step that moved by ode has no log-prob, and shows as a gap.

    Raises ValueError for no tables, and for tables that were not sampled at the same sigmas.
    """
    manifests = [manifest_of(table) for table in trajectories]
    _check(manifests)
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic(
        [[f"{modality} {row}" for modality in MODALITIES] for row in ROWS],
        height_ratios=[3, 3, 1.5],
        sharex=True,
    )
    for modality in MODALITIES:
        level, apart, sigma = (axes[f"{modality} {row}"] for row in ROWS)
        _draw_modality(level, apart, modality, manifests)
        _draw_sigmas(sigma, manifests[0]["sigmas"])
    _label(figure, axes, manifests)
    figure.savefig(path, format="png")


def _check(manifests: Sequence[dict[str, Any]]) -> None:
    if not manifests:
        raise ValueError("trajectories must hold at least one table, got none")
    for manifest in manifests:
        if manifest["sigmas"] != manifests[0]["sigmas"]:
            raise ValueError(
                "trajectories must be of one group, but their sigmas differ; draw each group by itself"
            )


def _draw_modality(level: Axes, apart: Axes, modality: Modality, manifests: Sequence[dict[str, Any]]) -> None:
    log_probs = np.array([manifest[f"log_probs_{modality}"] for manifest in manifests], dtype=np.float64)
    difference = log_probs - log_probs.mean(axis=0)
    for axes, values in ((level, log_probs), (apart, difference)):
        _draw_samples(axes, values, [manifest["sample_index"] for manifest in manifests])
        if np.isnan(values).all():
            axes.text(
                0.5, 0.5, "moved by ode: no log-probs", transform=axes.transAxes, ha="center", color=INK
            )
            axes.set_yticks([])
    level.set_title(f"{modality}, {manifests[0][f'n_{modality}']:,} elements", fontsize=10, color=INK)


def _draw_samples(axes: Axes, values: Steps, sample_indices: Sequence[int]) -> None:
    for row, sample_index in zip(values, sample_indices, strict=True):
        axes.plot(
            row,
            color=COLORS[sample_index % len(COLORS)],
            linewidth=1.4,
            marker="o",
            markersize=3.6,
            alpha=0.9,
            label=f"sample {sample_index}",
        )


def _draw_sigmas(axes: Axes, sigmas: Sequence[float]) -> None:
    axes.fill_between(range(len(sigmas)), sigmas, color=FAINT, alpha=0.6, linewidth=0)
    axes.plot(sigmas, color=INK, linewidth=1.4, marker="o", markersize=3.6)
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("step", color=INK)


def _label(figure: Figure, axes: dict[str, Axes], manifests: Sequence[dict[str, Any]]) -> None:
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(FAINT)
        each.tick_params(colors=INK, labelsize=8, length=3)
        each.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.7)
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
    first = MODALITIES[0]
    for row, name in zip(
        ROWS, ("log-prob, mean per element", "apart from the group's mean", "sigma"), strict=True
    ):
        axes[f"{first} {row}"].set_ylabel(name, color=INK, fontsize=9)
    request = manifests[0]["request"]
    prompt = request["prompt"].replace("$", r"\$")  # not a formula
    shown = prompt if len(prompt) <= MAX_PROMPT_CHARS else f"{prompt[:MAX_PROMPT_CHARS]}..."
    how = ", ".join(f"{modality} {_move(request['transition'][modality])}" for modality in MODALITIES)
    figure.suptitle(f"{shown}\nseed {request['seed']}   {how}", fontsize=11, color=INK)
    if len(manifests) <= MAX_NAMED_SAMPLES:
        handles, labels = axes[f"{first} level"].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
        )


def _move(transition: dict[str, Any]) -> str:
    return (
        transition["kind"]
        if transition["kind"] == "ode"
        else f"{transition['kind']} {transition['noise_level']:g}"
    )
