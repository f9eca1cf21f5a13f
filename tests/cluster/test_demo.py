"""`make demo` beside somebody else's Ray cluster: what it saves, and that it leaves nothing running."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import av
import pytest
import ray
from apps import until

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"
DEADLINE_S = 500
"""Two minutes on an idle laptop's two cores at most; others may work on the machine."""

pytestmark = [
    pytest.mark.timeout(DEADLINE_S + 100),
    pytest.mark.usefixtures("port"),  # the other cluster
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc"),
]


class Demo:
    """A running demo, and whatever it started: all of that inherits its environment."""

    def __init__(self, out: Path) -> None:
        self.mark = uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # A cluster that the surroundings point to must not matter.
        environment |= {"RAY_ADDRESS": "127.0.0.1:1", "LTX_ROLLOUT_DEMO": self.mark}
        self.printed = out / "printed"
        with self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), "--out", str(out)],
                env=environment,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def started(self) -> list[str]:
        """Names of the demo's processes."""
        names = []
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and self.mark in (process / "environ").read_text(errors="replace"):
                    names.append((process / "comm").read_text().strip())
            except OSError:  # it has ended meanwhile, or is another user's
                continue
        return names


INTERRUPTED = """
import os, signal, sys, time

sys.path.insert(0, sys.argv[1])
import demo


def is_told_to_end():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # the signal ends it


demo.catch_interrupts()
try:
    with demo.connected(sys.argv[2], dict(os.environ)):
        if sys.argv[3] == "while":
            is_told_to_end()
    is_told_to_end()
except KeyboardInterrupt:
    print("stopped")
"""


HELD = """
import os, signal, sys

sys.path.insert(0, sys.argv[1])
import demo

try:
    with demo.interrupts_held():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        print("went on")
except KeyboardInterrupt:
    print("stopped")
"""


@contextmanager
def running(out: Path) -> Iterator[Demo]:
    demo = Demo(out)
    try:
        yield demo
    finally:
        if demo.process.poll() is None:
            demo.process.terminate()
            demo.process.wait(60)


def test_the_demo_saves_media_and_a_picture_and_stops_what_it_started(tmp_path: Path) -> None:
    with running(tmp_path) as demo:
        assert demo.process.wait(DEADLINE_S) == 0, demo.printed.read_text()
    assert until(lambda: not demo.started(), timeout_s=20)
    assert (tmp_path / "demo-log-probs.png").read_bytes().startswith(b"\x89PNG")
    for index in range(4):
        with av.open(str(tmp_path / f"demo-{index}.mp4")) as container:
            video, audio = container.streams.video[0], container.streams.audio[0]
            assert float(video.duration * video.time_base) == pytest.approx(49 / 24, abs=1e-3)
            assert float(audio.duration * audio.time_base) == pytest.approx(49 / 24, abs=0.1)
    printed = demo.printed.read_text()
    assert printed.count("object store") == 4 and "100%" in printed


def test_an_interrupted_demo_stops_what_it_started(tmp_path: Path) -> None:
    with running(tmp_path) as demo:
        assert until(lambda: "raylet" in demo.started() or demo.process.poll() is not None)
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(60) == 130, demo.printed.read_text()
    assert until(lambda: not demo.started(), timeout_s=20)


@pytest.mark.parametrize("moment", ["while", "after"])
def test_the_demo_hears_that_it_is_to_end_while_it_is_connected_to_ray_and_after(moment: str) -> None:
    address = ray.get_runtime_context().gcs_address
    script = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(SCRIPT.parent), address, moment],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (script.returncode, script.stdout) == (0, "stopped\n"), script.stderr[-2000:]


def test_an_interrupt_that_comes_while_ray_changes_handlers_is_heard_after_that() -> None:
    script = subprocess.run(
        [sys.executable, "-c", HELD, str(SCRIPT.parent)], capture_output=True, text=True, timeout=60
    )
    assert (script.returncode, script.stdout) == (0, "went on\nstopped\n"), script.stderr[-2000:]
