"""Draws the runs of `make grpo`: rewards with their spread over seeds, log-prob ratios, clip shares and staleness.

python -m examples.grpo.plot out/grpo        # reads <name>-<seed>/history.jsonl, writes learning.png and prints a table
"""

import json
import sys
from pathlib import Path

import av
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT = "#30343b", "#d9dce1"
STYLES = {
    "seed": ("#d1495b", "GRPO, one step off policy"),
    "on-policy": ("#e9a23b", "GRPO, on policy"),
    "audio-weight-0": ("#3b6fb6", "audio weight 0"),
    "video-weight-0": ("#2a9d8f", "video weight 0"),
    "shuffled": ("#8a8f98", "advantages shuffled"),
}
UNITS = {"video": "redness of the picture", "audio": "level near 440 Hz, dB"}
WINDOW = 5
"""Iterations that a figure in the table is the mean of."""

Curves = np.ndarray
"""[seeds, iterations]"""


def draw(folder: Path) -> None:
    """learning.png, and the rewards at the start and the end on screen."""
    runs = read(folder)
    figure = Figure(figsize=(11, 6.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic(
        [["video", "video", "audio", "audio"], ["ratio", "staleness", "before", "after"]],
        height_ratios=[3, 2],
        width_ratios=[3, 3, 2, 2],
    )
    for modality, unit in UNITS.items():
        for name, histories in runs.items():
            color, label = STYLES[name]
            _band(
                axes[modality],
                curves(histories, f"reward_{modality}"),
                color,
                f"{label}, {len(histories)} seeds",
            )
        axes[modality].set_title(f"{modality} reward: {unit}", fontsize=10, color=INK)
    main = runs["seed"]
    for modality, color in (("video", "#3b6fb6"), ("audio", "#d1495b")):
        low, high = (curves(main, f"ratio_{modality}_{end}") for end in ("min", "max"))
        axes["ratio"].fill_between(
            iterations(main),
            low.min(axis=0),
            high.max(axis=0),
            color=color,
            alpha=0.3,
            label=modality,
            linewidth=0,
        )
        _band(axes["staleness"], curves(main, f"clipped_{modality}"), color, f"clipped, {modality}")
    _band(axes["staleness"], curves(main, "staleness"), INK, "staleness, updates")
    axes["ratio"].set_title("ratios of new to old probability", fontsize=10, color=INK)
    axes["staleness"].set_title("staleness, share of clipped ratios", fontsize=10, color=INK)
    for name in ("video", "audio", "ratio", "staleness"):
        _tidy(axes[name])
    for name in ("before", "after"):
        axes[name].imshow(first_frame(next(folder.glob(f"seed-*/{name}-0.mp4"))))
        axes[name].set_title(name, fontsize=10, color=INK)
        axes[name].axis("off")
    figure.savefig(folder / "learning.png")
    _print(runs)


def read(folder: Path) -> dict[str, list[list[dict[str, float]]]]:
    """Histories by the run's name, in the order of STYLES; one of each seed."""
    runs = {
        name: [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(folder.glob(f"{name}-[0-9]*/history.jsonl"))
        ]
        for name in STYLES
    }
    return {name: histories for name, histories in runs.items() if histories}


def curves(histories: list[list[dict[str, float]]], key: str) -> Curves:
    shortest = min(map(len, histories))
    return np.array([[row[key] for row in history[:shortest]] for history in histories])


def iterations(histories: list[list[dict[str, float]]]) -> np.ndarray:
    return np.asarray(curves(histories, "iteration")[0])


def first_frame(clip: Path) -> np.ndarray:
    """uint8 [H, W, 3]"""
    with av.open(str(clip)) as container:
        return np.asarray(next(container.decode(video=0)).to_ndarray(format="rgb24"))


def _band(axes: Axes, values: Curves, color: str, label: str) -> None:
    mean, spread = values.mean(axis=0), values.std(axis=0)
    steps = np.arange(1, values.shape[1] + 1)
    axes.plot(steps, mean, color=color, linewidth=1.6, label=label)
    axes.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.7)
    axes.set_xlabel("iteration", color=INK, fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _print(runs: dict[str, list[list[dict[str, float]]]]) -> None:
    print(f"\nrewards, mean ± spread over seeds, of the first and the last {WINDOW} iterations")
    for name, histories in runs.items():
        for modality in UNITS:
            values = curves(histories, f"reward_{modality}")
            ends = [part.mean(axis=1) for part in (values[:, :WINDOW], values[:, -WINDOW:])]
            shown = " -> ".join(f"{end.mean():8.3f} ± {end.std():.3f}" for end in ends)
            each = ", ".join(f"{a:.3f} -> {b:.3f}" for a, b in zip(*ends, strict=True))
            print(f"{STYLES[name][1]:28} {modality}  {shown}   ({each})")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
