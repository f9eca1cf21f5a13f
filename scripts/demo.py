"""`make demo`: start the app as a user would, collect a group from a trainer's actor, save what came back, stop.

    serve run serve_config.yaml --address local
    python examples/collect_rollouts.py --num-samples 4 --out out ...

The Ray cluster is the demo's own: its own folder, ports and token, and on the loopback interface where Ray lets one choose
(the ports on which Serve's replicas talk to each other are open on all). Another cluster on the machine is neither joined
nor touched. Whatever was started is stopped again, also on Ctrl-C and on a failure.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "serve_config.yaml"

LOG_NAME = "serve.log"

READY_DEADLINE_S = 300.0
"""Long, since a cold machine reads a gigabyte of libraries into five processes first."""
COLLECT_DEADLINE_S = 300.0
STOP_GRACE_S = 20.0
POLL_S = 0.5
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PROMPT = "a cat plays the piano in the rain"
REQUEST = {
    "request_id": "demo",
    "seed": 7,
    "height": 128,
    "width": 192,
    "num_frames": 49,
    "num_inference_steps": 16,
}
"""Two seconds of video: more than the preset's default, so that there is something to see and hear."""


class Failed(Exception):
    """The demo cannot go on; says why."""


def main() -> int:
    catch_interrupts()
    sys.path.insert(0, str(ROOT))  # for this project's modules, which are not installed
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for what came back (default: out)"
    )
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("demo-*"):
        old.unlink()
    # Ray's sockets lie in its folder, and the path of a socket is short (107 bytes on Linux): not below TMPDIR.
    home = Path(tempfile.mkdtemp(prefix="ltx-demo-", dir="/tmp"))
    try:
        run(home, out)
    except KeyboardInterrupt:
        print("\nstopped")
        return 130
    except Failed as failure:
        log = out / LOG_NAME
        print(f"\n{failure}\nThe end of {log}:", *_tail(log), sep="\n", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return 0


def run(home: Path, out: Path) -> None:
    """The demo itself, with all temporary files in ``home``."""
    with served(home, out) as (address, environment):
        command = [
            "examples/collect_rollouts.py",
            *("--address", address, "--prompt", PROMPT, "--num-samples", "4"),
            *("--out", str(out), "--request", json.dumps(REQUEST)),
        ]
        print(f"\n$ python {command[0]} --num-samples 4 --out out ...", flush=True)
        with running([sys.executable, *command], environment) as trainer:
            wait_until_done(trainer)
    draw(out)
    report(out)


@contextmanager
def served(home: Path, out: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The app on a cluster of its own until the block ends: the cluster's address, and the environment to reach it from.

    Its temporary files are in ``home``, its log is in ``out``.
    """
    gcs_port = free_port()
    environment = cluster_environment(home, gcs_port)
    config, http = config_for(home)
    address = f"127.0.0.1:{gcs_port}"
    print("$ serve run serve_config.yaml --address local", flush=True)
    serve_command = [str(Path(sys.executable).with_name("serve")), "run", str(config), "--address", "local"]
    with (
        (out / LOG_NAME).open("w") as log,
        running(serve_command, environment, stdout=log, stderr=log) as serve,
    ):
        wait_until_ready(serve, http, address, environment)
        yield address, environment


def cluster_environment(home: Path, gcs_port: int) -> dict[str, str]:
    """For all that is started here: nothing of another cluster, and what keeps this one to itself."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return inherited | {
        "RAY_TMPDIR": str(home),
        "RAY_GCS_SERVER_PORT": str(gcs_port),
        # By this name Ray keeps to the loopback interface, on Linux too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def config_for(home: Path) -> tuple[Path, str]:
    """serve_config.yaml and its HTTP address; a copy with another port where that one is taken."""
    config = yaml.safe_load(CONFIG.read_text())
    options = config["http_options"]
    path = CONFIG
    if not _is_free(options["host"], options["port"]):
        print(f"port {options['port']} is taken, so the app gets another one")
        options["port"] = free_port()
        path = home / CONFIG.name
        path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path, f"http://{options['host']}:{options['port']}"


def wait_until_ready(
    serve: subprocess.Popen[bytes], http: str, address: str, environment: dict[str, str]
) -> None:
    """Until every deployment is healthy. Raises Failed when the app cannot be deployed, or not in time."""
    deadline = time.monotonic() + READY_DEADLINE_S
    with tqdm(total=1, unit="deployment", desc="starting Ray", bar_format=BAR) as bar:
        while not _listens(http):
            bar.refresh()
            _check(serve, deadline)
        with connected(address, environment) as status:
            while True:
                app = status()
                states = app.deployments.values() if app else ()
                bar.total = max(len(states), 1)
                bar.n = sum(state.status == "HEALTHY" for state in states)
                bar.set_description_str("starting the app")
                if app and app.status == "RUNNING":
                    return
                if app and app.status == "DEPLOY_FAILED":
                    raise Failed(f"the app could not be deployed: {app.message}")
                _check(serve, deadline)


BAR = "{desc}: {n}/{total} deployments |{bar:30}| {elapsed}"


def wait_until_done(trainer: subprocess.Popen[bytes]) -> None:
    try:
        code = trainer.wait(COLLECT_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"the rollouts were not there after {COLLECT_DEADLINE_S:.0f} s") from None
    if code:
        raise Failed(f"the trainer ended with exit code {code}")


def draw(out: Path) -> None:
    """Log-probs and sigmas of the group."""
    from pyarrow import feather

    from pipeline.plot import save_log_probs_png

    trajectories = [feather.read_table(path) for path in sorted(out.glob("demo-*.arrow"))]
    save_log_probs_png(trajectories, out / "demo-log-probs.png")


def report(out: Path) -> None:
    print()
    for path in sorted(out.glob("demo-*")):
        print(f"{path.stat().st_size / 1024:8.0f} KiB  {os.path.relpath(path)}")
    print("\nThe tiny checkpoint has random weights: what it shows and plays is noise, in the right shapes.")


@contextmanager
def running(
    command: list[str], environment: dict[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, out of the terminal's reach; stopped with its children at the block's end."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
    try:
        yield process
    finally:
        for signum in INTERRUPTS:  # stopping is not to be stopped halfway
            signal.signal(signum, signal.SIG_IGN)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of the session; as a rule nothing
        process.wait(STOP_GRACE_S)
        catch_interrupts()


@contextmanager
def connected(address: str, environment: dict[str, str]) -> Iterator[Any]:
    """A look at the app's state from this process: a callable that gives it, or None while there is no app."""
    os.environ.update(environment)
    import ray
    from ray import serve

    try:
        with interrupts_held():
            ray.init(address, namespace="serve", log_to_driver=False, logging_level="ERROR")
        yield lambda: serve.status().applications.get("default")
    finally:
        with interrupts_held():
            ray.shutdown()


def catch_interrupts() -> None:
    """From now on an interrupt is raised in the main thread, as KeyboardInterrupt, so that what runs is stopped."""
    for signum in INTERRUPTS:
        signal.signal(signum, _interrupt)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Around what changes the handling of signals, as Ray does when it starts and when it ends, there without Python's
    knowledge: an interrupt that comes meanwhile is raised after it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        catch_interrupts()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _listens(url: str) -> bool:
    where = urlsplit(url)
    with suppress(OSError), socket.create_connection((where.hostname or "", where.port or 80), timeout=2):
        return True
    return False


def _check(serve: subprocess.Popen[bytes], deadline: float) -> None:
    """Pause; raise Failed when there is nothing more to wait for."""
    if serve.poll() is not None:
        raise Failed(f"serve run ended with exit code {serve.returncode}")
    if time.monotonic() > deadline:
        raise Failed(f"the app was not ready after {READY_DEADLINE_S:.0f} s")
    time.sleep(POLL_S)


def _tail(log: Path, num_lines: int = 30) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-num_lines:] if log.exists() else []


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
