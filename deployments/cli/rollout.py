"""`generate` and `rollout`: a request is sent, its steps are shown as they are done, and its files are fetched.

What is there already stays as it is until all that takes its place has come.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deployments.cli.files import is_there, stage_in, whole_file
from deployments.cli.http import DONE, FAILED, USAGE, Api, Failure, failure_of
from deployments.cli.run_folder import CONDITIONING, MANIFEST, SUFFIXES, move_in, refuse_taken, sample_file

ROLLOUTS = "/v1/rollouts"
OPTIONS = (
    "negative_prompt",
    "seed",
    "height",
    "width",
    "num_frames",
    "frame_rate",
    "num_inference_steps",
    "deadline_s",
)
"""Of the command line that are fields of a request."""


def generate(args: Namespace, api: Api) -> int:
    """What a user would watch, as an MP4."""
    output = Path(args.output)
    if is_there(output):
        if output.is_dir():
            raise Failure(f"{output} is a folder; name a file", USAGE)
        if not args.force:
            raise Failure(f"{output} is there already; choose another place, or add --force", USAGE)
    request = _request(args, {"mode": "generate", "num_samples": 1, "trajectory": False, "media": True})
    with whole_file(output) as part:
        summary = _sampled(api, request, quiet=args.json)
        (sample,) = summary["samples"]
        if sample["problem"] is not None:
            raise failure_of(sample["problem"])
        num_bytes = api.download(sample["links"]["mp4"], part)
    told = {
        "request_id": summary["request_id"],
        "seed": sample["seed"],
        "policy_version": sample["policy_version"],
        "file": str(output),
        "num_bytes": num_bytes,
    }
    text = f"{output}: {num_bytes} bytes, seed {sample['seed']}, policy version {sample['policy_version']}"
    print(json.dumps(told) if args.json else text)
    return DONE


def rollout(args: Namespace, api: Api) -> int:
    """A group: an Arrow file per sample, the conditioning, a manifest; with --media an MP4 per sample."""
    folder = Path(args.out)
    refuse_taken(folder, force=args.force)
    request = _request(args, {"num_samples": args.group, "media": args.media})
    with stage_in(folder) as stage:
        summary = _sampled(api, request, quiet=args.json)
        files = _fetch(api, summary, stage, quiet=args.json)
        (stage / MANIFEST).write_text(json.dumps({**summary, "files": files}, indent=2) + "\n")
        move_in(stage, folder)
    failed = [sample for sample in summary["samples"] if sample["problem"] is not None]
    told = {"request_id": summary["request_id"], "folder": str(folder), "num_failed": len(failed), **files}
    text = f"{folder}: {len(files['samples'])} of {len(summary['samples'])} samples, seed {summary['request']['seed']}"
    if failed:
        if not args.json:
            print(text)
        problem = failed[0]["problem"]
        first = failure_of(problem).message
        raise Failure(f"{len(failed)} samples failed, the first: {first}", FAILED, problem, done=told)
    print(json.dumps(told) if args.json else text)
    return DONE


def _request(args: Namespace, fixed: dict[str, Any]) -> dict[str, Any]:
    """``fixed`` is what the command is about, and not to be changed."""
    further = _further(args.request)
    for name, value in {**fixed, "prompt": args.prompt}.items():
        if further.get(name, value) != value:
            raise Failure(f"--request cannot set {name}: the command line does", USAGE)
    given = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    return {**further, **given, **fixed, "prompt": args.prompt}


def _further(text: str | None) -> dict[str, Any]:
    """The fields of --request: JSON, or @ and the name of a file of it."""
    if text is None:
        return {}
    try:
        fields = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise Failure(f"--request cannot be read: {error}", USAGE) from None
    if not isinstance(fields, dict):
        raise Failure(f"--request must be a JSON object, got {text}", USAGE)
    return fields


def _sampled(api: Api, request: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """The summary of the rollout, once it is done."""
    with _bar("step", quiet) as bar:
        done: dict[int, int] = {}
        for event, told in api.events(ROLLOUTS, request):
            match event:
                case "started":
                    asked = told["request"]
                    bar.reset(asked["num_samples"] * asked["num_inference_steps"])
                    bar.set_description(f"{asked['num_samples']} samples, seed {asked['seed']}")
                case "progress":
                    done[told["sample_index"]] = told["steps_done"]
                    bar.update(sum(done.values()) - bar.n)
                case "problem":
                    raise failure_of(told)
                case "summary":
                    summary: dict[str, Any] = told
                    return summary
    raise Failure("the app ended the answer before the rollout was done; see its log")


def _fetch(api: Api, summary: dict[str, Any], folder: Path, *, quiet: bool) -> dict[str, Any]:
    """Download the parts; returns their names in the folder."""
    samples: list[dict[str, Any]] = []
    # By their place in the group: no word of the server's becomes a file's name.
    wanted = [(index, sample) for index, sample in enumerate(summary["samples"]) if sample["problem"] is None]
    conditioning = summary["links"]["conditioning"]
    with _bar("file", quiet, total=len(wanted) + 1) as bar:
        if conditioning is not None:
            api.download(conditioning, folder / CONDITIONING)
        bar.update()
        for index, sample in wanted:
            names: dict[str, Any] = {"sample_index": index}
            for kind in SUFFIXES:
                if sample["links"][kind] is not None:
                    names[kind] = sample_file(index, kind)
                    api.download(sample["links"][kind], folder / names[kind])
            samples.append(names)
            bar.update()
    return {"conditioning": CONDITIONING if conditioning is not None else None, "samples": samples}


@contextmanager
def _bar(unit: str, quiet: bool, total: int | None = None) -> Iterator[Any]:
    """On stderr; only where somebody can see it."""
    with tqdm(total=total, unit=unit, disable=True if quiet else None, leave=False) as bar:
        yield bar
