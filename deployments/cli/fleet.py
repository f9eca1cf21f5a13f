"""`weights` and `status`: what runs at the address, and what it samples from."""

import json
from argparse import Namespace
from typing import Any

from deployments.cli.http import DONE, Api
from deployments.cli.table import lined_up

HEADER = ("replica", "version", "digest", "state", "")
DIGITS = 12
"""Of a digest that are shown; --json has them all."""


def weights(args: Namespace, api: Api) -> int:
    """The policy's version, and every replica's version, digest and state."""
    fleet = api.read("/v1/weights")
    control = fleet["control"]
    kept = ", ".join(map(str, fleet["kept_versions"])) or "none"
    lines = [f"policy version {control['version']}, {control['run']}; kept: {kept}"]
    if fleet["replicas"]:
        lines.append(lined_up([HEADER, *[_line(replica) for replica in fleet["replicas"]]]))
    lines += [
        f"not to be trusted: {len(found['sample_ids'])} samples of {found['replica_id']}"
        for found in fleet["distrusted"]
    ]
    # What cannot be shown is no answer of this app, in JSON either.
    print(json.dumps(fleet) if args.json else "\n".join(lines))
    return DONE


def status(args: Namespace, api: Api) -> int:
    """Whether an app takes requests, of which checkpoint, and how many replicas sample from which version."""
    health, fleet = api.read("/health"), api.read("/v1/weights")
    control, replicas = fleet["control"], fleet["replicas"]
    in_line = sum(replica["version"] == control["version"] for replica in replicas)
    told = {
        "url": api.url,
        "status": health["status"],
        "checkpoint": health["checkpoint"],
        "run": control["run"],
        "policy_version": control["version"],
        "num_denoisers": len(replicas),
        "num_at_version": in_line,
    }
    text = (
        f"{api.url}: {health['status']}, checkpoint {health['checkpoint']}, {control['run']}\n"
        f"policy version {control['version']}: {in_line} of {len(replicas)} denoisers"
    )
    print(json.dumps(told) if args.json else text)
    return DONE


def _line(replica: dict[str, Any]) -> tuple[str, ...]:
    problem = replica["problem"]
    return (
        replica["replica_id"],
        str(replica["version"]),
        replica["weights_digest"][:DIGITS],
        replica["run"],
        "" if problem is None else f"{problem['code']}: {problem['rule']}",
    )
