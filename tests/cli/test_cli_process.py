"""The command line as a process of its own: Ctrl-C, and what it does not load."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cli.serving import ROOT, Archive, app_of, files_in, interrupted, nobody, served
from tests.patience import PATIENCE_S, until


def test_ctrl_c_hangs_up_and_says_so(tmp_path: Path) -> None:
    archive = Archive()
    with served(app_of(archive)) as address:
        process = interrupted(archive, "rollout", "late", "--out", str(tmp_path), "--url", address)
        assert (process.returncode, "Traceback" in process.stderr) == (130, False), process.stderr
        until(lambda: not archive.shelf.running)
    assert "stopped" in process.stderr
    assert files_in(tmp_path) == set()


def test_it_starts_without_torch_ray_and_pydantic() -> None:
    code = (
        "import sys, deployments.cli.__main__ as cli\n"
        "code = cli.main(['status', '--url', sys.argv[1]])\n"
        "loaded = {'torch', 'ray', 'pydantic', 'pyarrow', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with nobody() as address:
        process = subprocess.run(
            [sys.executable, "-c", code, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert process.returncode == 3, process.stderr
