"""What the command line shows: a fleet, an app's status, and a folder of rollouts."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from deployments.cli.__main__ import main
from schemas.control import Fleet
from tests.cli.serving import FLEET


def test_the_fleet_is_shown(url: str, capsys: Any) -> None:
    assert main(["weights", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "policy version 3, running; kept: 2, 3" in out
    assert "denoiser-1  2        cdcdcdcdcdcd  running" in out
    assert main(["weights", "--url", url, "--json"]) == 0
    assert Fleet.model_validate_json(capsys.readouterr().out) == FLEET


def test_the_status_is_shown(url: str, capsys: Any) -> None:
    assert main(["status", "--url", f"{url}/"]) == 0
    assert "ok, checkpoint tiny, running\npolicy version 3: 1 of 2 denoisers" in capsys.readouterr().out
    assert main(["status", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_at_version"] == 1


def test_a_folder_is_shown_as_a_table_and_a_picture(url: str, tmp_path: Path, capsys: Any) -> None:
    main(["rollout", "a red ball", "--group", "2", "--out", str(tmp_path), "--url", url, "--seed", "7"])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "'a red ball', seed 7, 6 steps"
    assert out[1].split()[:3] == ["sample", "version", "states"] and out[-1] == str(
        tmp_path / "log-probs.png"
    )
    assert out[2].split()[:5] == ["0", "3", "7", "-3.5000", "-3.5000"] and out[3].split()[3] == "-4.5000"
    with Image.open(tmp_path / "log-probs.png") as picture:
        assert picture.format == "PNG"
    assert main(["inspect", str(tmp_path), "--json", "--no-png"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [sample["num_states"] for sample in told["samples"]] == [7, 7] and told["picture"] is None


def test_what_is_no_folder_of_a_rollout_is_told(tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", str(tmp_path)]) == 2 and "manifest.json is not there" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text("{")
    assert main(["inspect", str(tmp_path)]) == 2 and "cannot be read" in capsys.readouterr().err


def test_a_file_that_was_cut_short_is_told(url: str, tmp_path: Path, capsys: Any) -> None:
    main(["rollout", "a red ball", "--out", str(tmp_path), "--url", url])
    path = tmp_path / "sample-0.arrows"
    path.write_bytes(path.read_bytes()[:-500])
    assert main(["inspect", str(tmp_path), "--no-png"]) == 2
    assert "sample-0.arrows cannot be read" in capsys.readouterr().err
