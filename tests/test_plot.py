"""The picture of a group: it is drawn without touching matplotlib's global state, and refuses what is no group."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from pipeline.plot import save_log_probs_png
from schemas.arrow import table_of

ROOT = Path(__file__).parents[1]


def trajectory(sample_index: int = 0, **changes: Any) -> pa.Table:
    """A table with as much of a manifest as the picture reads."""
    manifest = {
        "sample_index": sample_index,
        "sigmas": [1.0, 0.7, 0.4, 0.0],
        "log_probs_video": [-1.0 + sample_index / 100, None, 0.5],
        "log_probs_audio": [None, None, None],
        "n_video": 100,
        "n_audio": 10,
        "request": {
            "prompt": "two $ and a half_$ " * 9,
            "seed": 5,
            "transition": {
                "video": {"kind": "sde", "noise_level": 0.7},
                "audio": {"kind": "ode", "noise_level": 0.0},
            },
        },
        **changes,
    }
    return table_of([(pa.field("step", pa.int32()), pa.array([0], pa.int32()))], manifest)


@pytest.mark.parametrize("num_samples", [1, 4, 12])
def test_a_group_of_any_size_is_drawn(tmp_path: Path, num_samples: int) -> None:
    save_log_probs_png([trajectory(index) for index in range(num_samples)], tmp_path / "group.png")
    with Image.open(tmp_path / "group.png") as picture:
        assert picture.format == "PNG" and picture.width > picture.height > 500
        assert len(picture.convert("RGB").getcolors(2**24)) > 20  # more than an empty sheet


def test_tables_that_are_no_group_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one table"):
        save_log_probs_png([], tmp_path / "group.png")
    with pytest.raises(ValueError, match="draw each group by itself"):
        save_log_probs_png([trajectory(), trajectory(sigmas=[1.0, 0.5, 0.25, 0.0])], tmp_path / "group.png")


def test_drawing_needs_no_global_state_of_matplotlib() -> None:
    code = "import sys, pipeline.plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
