"""`generate` and `rollout`: a request is sent, its steps are shown as they are done, and its files are fetched.

A folder of a rollout is whole when its manifest.json is there: it is written last.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deployments.cli.http import DONE, FAILED, USAGE, Api, Failure, failure_of, whole_file

ROLLOUTS = "/v1/rollouts"
MANIFEST = "manifest.json"
CONDITIONING = "conditioning.arrows"
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
    _refuse(output, output, args.force)
    request = _request(args, {"mode": "generate", "num_samples": 1, "trajectory": False, "media": True})
    summary = _sampled(api, request, quiet=args.json)
    (sample,) = summary["samples"]
    if sample["problem"] is not None:
        raise failure_of(sample["problem"])
    num_bytes = api.download(sample["links"]["mp4"], output)
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
    _refuse(folder, folder / MANIFEST, args.force)
    request = _request(args, {"num_samples": args.group, "media": args.media})
    summary = _sampled(api, request, quiet=args.json)
    _clear(folder)
    files = _fetch(api, summary, folder, quiet=args.json)
    manifest = {**summary, "files": files}
    with whole_file(folder / MANIFEST) as part:
        part.write_text(json.dumps(manifest, indent=2) + "\n")
    failed = [sample for sample in summary["samples"] if sample["problem"] is not None]
    told = {"request_id": summary["request_id"], "folder": str(folder), "num_failed": len(failed), **files}
    text = f"{folder}: {len(files['samples'])} of {len(summary['samples'])} samples, seed {summary['request']['seed']}"
    print(json.dumps(told) if args.json else text)
    if failed:
        failure = failure_of(failed[0]["problem"])
        raise Failure(f"{len(failed)} samples failed, the first: {failure.message}", FAILED, failure.problem)
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
    except (OSError, ValueError) as error:
        raise Failure(f"--request cannot be read: {error}", USAGE) from None
    if not isinstance(fields, dict):
        raise Failure(f"--request must be a JSON object, got {text}", USAGE)
    return fields


def _refuse(place: Path, file: Path, force: bool) -> None:
    """Raise Failure where something would be overwritten, or cannot be written at all."""
    if file.exists() and not force:
        raise Failure(f"{file} is there already; choose another place, or add --force", USAGE)
    if place != file and place.exists() and not place.is_dir():
        raise Failure(f"{place} is not a folder; choose another place", USAGE)
    if place == file and file.is_dir():
        raise Failure(f"{file} is a folder; name a file", USAGE)


def _clear(folder: Path) -> None:
    """Take away what an earlier rollout left there, its manifest first."""
    for pattern in (MANIFEST, CONDITIONING, "sample-*.arrows", "sample-*.mp4"):
        for file in folder.glob(pattern):
            file.unlink()


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
    wanted = [sample for sample in summary["samples"] if sample["problem"] is None]
    conditioning = summary["links"]["conditioning"]
    with _bar("file", quiet, total=len(wanted) + 1) as bar:
        if conditioning is not None:
            api.download(conditioning, folder / CONDITIONING)
        bar.update()
        for sample in wanted:
            index, links = sample["sample_index"], sample["links"]
            names: dict[str, Any] = {"sample_index": index}
            for kind, suffix in (("trajectory", "arrows"), ("mp4", "mp4")):
                if links[kind] is not None:
                    names[kind] = f"sample-{index}.{suffix}"
                    api.download(links[kind], folder / names[kind])
            samples.append(names)
            bar.update()
    return {"conditioning": CONDITIONING if conditioning is not None else None, "samples": samples}


@contextmanager
def _bar(unit: str, quiet: bool, total: int | None = None) -> Iterator[Any]:
    """On stderr; only where somebody can see it."""
    with tqdm(total=total, unit=unit, disable=True if quiet else None, leave=False) as bar:
        yield bar
