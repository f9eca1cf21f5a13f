"""The command line over a running app's HTTP: `python -m deployments.cli generate "a cat plays the piano" -o cat.mp4`.

It loads neither torch nor Ray, save for the picture of `inspect`. Answers go to stdout, all else to stderr.

Exit codes: 0 done; 1 failed; 2 asked in a way that cannot be answered; 3 no app at the address; 130 stopped by Ctrl-C.
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import httpx

from deployments.cli.http import DONE, STOPPED, TOKEN_VARIABLE, USAGE, Api, Failure

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None, transport: "httpx.BaseTransport | None" = None) -> int:
    """Run a command; returns the exit code. ``transport``: another way than the network, for tests."""
    argv = sys.argv[1:] if argv is None else argv
    in_json = "--json" in argv
    try:
        return _run(_parser().parse_args(argv), transport)
    except Failure as failure:
        return _told(failure, in_json)
    except KeyboardInterrupt:
        text = "stopped; nobody waits for it any more, so the app stops too"
        return _told(Failure(text, STOPPED), in_json)
    except BrokenPipeError:
        # Who read our answer has seen enough; the interpreter must not try to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        return _told(Failure(f"a file cannot be written: {error}"), in_json)
    except Exception as error:
        text = f"the answer was not understood ({error!r}); is the app of another release?"
        return _told(Failure(text), in_json)


def _run(args: Namespace, transport: "httpx.BaseTransport | None") -> int:
    # Each command loads what it needs itself.
    if args.command == "inspect":
        from deployments.cli.inspect import inspect

        return inspect(args)
    with Api(args.url, transport) as api:
        if args.command in ("weights", "status"):
            from deployments.cli import fleet

            return (fleet.weights if args.command == "weights" else fleet.status)(args, api)
        from deployments.cli import rollout

        return (rollout.generate if args.command == "generate" else rollout.rollout)(args, api)


def _told(failure: Failure, in_json: bool) -> int:
    if in_json:
        error = {"message": failure.message, **(failure.problem or {})}
        print(json.dumps({**failure.done, "error": error}))
    else:
        print(f"error: {failure.message}", file=sys.stderr)
    return failure.code


class _Parser(ArgumentParser):
    """Tells what is wrong with a command line as every other failure is told, after the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise Failure(message, USAGE)


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="python -m deployments.cli",
        description="Rollouts of LTX-2.3 from a running app.",
        epilog=f"Exit codes: 0 done, 1 failed, 2 asked in a way that cannot be answered, 3 no app at the address. "
        f"A bearer token is taken from the environment variable {TOKEN_VARIABLE}.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help_: str, *, has_app: bool = True) -> ArgumentParser:
        added = commands.add_parser(name, help=help_, description=help_)
        added.add_argument(
            "--json", action="store_true", help="one JSON object on stdout, and no progress bar"
        )
        if has_app:
            added.add_argument("--url", default=DEFAULT_URL, help="address of the app (default: %(default)s)")
        return added

    generate = command("generate", "Sample what a user would watch, as an MP4.")
    generate.add_argument("-o", "--output", required=True, metavar="FILE", help="where to put it")
    _add_request(generate)

    rollout = command("rollout", "Sample a group: an Arrow file per sample, the conditioning, a manifest.")
    rollout.add_argument("--group", type=int, default=1, metavar="N", help="samples (default: %(default)s)")
    rollout.add_argument("--out", required=True, metavar="FOLDER", help="where to put them")
    rollout.add_argument("--media", action="store_true", help="an MP4 of each sample, too")
    _add_request(rollout)

    inspect = command(
        "inspect", "Show what `rollout` wrote: a table, and a picture of the log-probs.", has_app=False
    )
    inspect.add_argument("folder", help="the folder of `rollout --out`")
    inspect.add_argument("--no-png", action="store_true", help="no picture, which takes seconds to load")

    command("weights", "Show the policy's version, and every replica's.")
    command("status", "Show whether an app answers, and what it serves.")
    return parser


def _add_request(parser: ArgumentParser) -> None:
    parser.add_argument("prompt", help="what is to be seen and heard")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    for name, kind, help_ in (
        ("negative-prompt", str, "what guidance leads away from"),
        ("seed", int, "of all noise (default: drawn, and told)"),
        ("height", int, "pixels"),
        ("width", int, "pixels"),
        ("num-frames", int, "frames of video, 8k + 1"),
        ("frame-rate", float, "frames per second"),
        ("num-inference-steps", int, "denoising steps"),
        ("deadline-s", float, "seconds until it is given up"),
    ):
        options: dict[str, Any] = {"type": kind, "help": help_, "metavar": kind.__name__.upper()}
        parser.add_argument(f"--{name}", **options)
    parser.add_argument(
        "--request",
        metavar="JSON",
        help='further fields of a request, as {"state_dtype": "bfloat16"} or @file.json',
    )


if __name__ == "__main__":
    # Names of files need not be text.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main())
