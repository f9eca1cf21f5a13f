"""The examples, run as a user runs them: as scripts in processes of their own, against a running app."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import av
import ray
from apps import App
from pyarrow import feather

from schemas.trajectory import read_trajectory

EXAMPLES = Path(__file__).parents[3] / "examples"
DEADLINE_S = 200


def run(script: Path, app: App, *arguments: str, cwd: Path) -> str:
    """What the script printed. It knows the cluster's address, and finds nothing of this project by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, str(script), "--address", address, "--app", app.name, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trainer_collects_groups_and_reads_them_where_they_lie(plain: App, tmp_path: Path) -> None:
    request = (
        '{"request_id": "mine", "height": 128, "width": 192, "num_frames": 49, "num_inference_steps": 9}'
    )
    printed = run(
        EXAMPLES / "collect_rollouts.py",
        plain,
        *("--prompt", "a red ball", "--num-samples", "2", "--out", "saved", "--request", request),
        cwd=tmp_path,
    )
    assert printed.count("object store") == 2 and "own memory" not in printed
    for index in range(2):
        trajectory = read_trajectory(feather.read_table(tmp_path / f"saved/mine-{index}.arrow"))
        assert trajectory.manifest["sample_index"] == index
        assert trajectory.video_latents.shape[0] == 10
        with av.open(str(tmp_path / f"saved/mine-{index}.mp4")) as container:
            assert sum(1 for _ in container.decode(video=0)) == 49
            assert container.streams.audio[0].duration > 0


def test_a_small_trajectory_is_kept_by_its_owner(plain: App, tmp_path: Path) -> None:
    printed = run(EXAMPLES / "collect_rollouts.py", plain, "--num-samples", "1", cwd=tmp_path)
    assert printed.count("own memory") == 2 and not any(tmp_path.iterdir())


def test_a_trainer_without_this_project_needs_a_handle_alone(plain: App, tmp_path: Path) -> None:
    script = shutil.copy(EXAMPLES / "foreign_trainer.py", tmp_path)
    printed = run(Path(script), plain, cwd=tmp_path)
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("sample")] == list("0123")
    assert "refused: num_frames must be 8k + 1 -> use 113 or 121" in printed


def test_a_trainer_with_packages_of_the_same_names_keeps_them(plain: App, tmp_path: Path) -> None:
    printed = run(EXAMPLES / "own_configs" / "trainer.py", plain, cwd=tmp_path)
    trainer, collector = printed.split("the collector has")
    for package in ("configs", "schemas"):
        assert str(EXAMPLES / "own_configs" / package / "__init__.py") in trainer
        assert f"/{package}/__init__.py" in collector
    # Ray unpacks a working_dir below its own folder.
    assert collector.count("/working_dir_files/") == 2 and str(EXAMPLES) not in collector
    assert collector.count("num_samples=4") == 2
