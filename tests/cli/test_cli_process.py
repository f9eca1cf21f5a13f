"""The command line as a process of its own: Ctrl-C, and what it does not load."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cli.serving import ROOT, Archive, app_of, as_from_a_terminal, files_in, served


def test_ctrl_c_hangs_up_and_says_so(tmp_path: Path) -> None:
    archive = Archive()
    with served(app_of(archive)) as address:
        command = [
            sys.executable,
            "-m",
            "deployments.cli",
            "rollout",
            "late",
            "--out",
            str(tmp_path),
            "--url",
            address,
        ]
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=as_from_a_terminal
        )
        while not getattr(archive, "asked", None):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    assert "stopped" in err
    assert files_in(tmp_path) == set()


def test_it_starts_without_torch_ray_and_pydantic() -> None:
    code = (
        "import sys, deployments.cli.__main__ as cli\n"
        "code = cli.main(['status', '--url', 'http://127.0.0.1:9'])\n"
        "loaded = {'torch', 'ray', 'pydantic', 'pyarrow', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL).returncode
        == 3
    )
