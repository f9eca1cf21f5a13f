"""What the weight store wants of every denoiser, and what each says of itself: the fleet's state.

The control record is the one thing that replicas follow. Its revision grows with every change, and a replica tells up
to which revision it is in line.

This module knows no weights, and not how the two sides reach each other.
"""

from typing import Any, Literal

from schemas.fields import Bool, Bytes, Contract, Index

RunState = Literal["running", "paused", "asleep"]
"""paused: no sample moves. asleep: nor are the weights on the device."""

When = Literal["between_samples", "immediate"]
"""between_samples: samples that have started end first, and no other starts. immediate: at the next step."""


class Staged(Contract):
    """A version that is not in place yet."""

    version: Index
    identity: str
    """Of the publication that makes it: a version may be tried again with other weights."""


class RunOrder(Contract):
    """Whether samples move, and when a replica follows that."""

    run: RunState
    when: When


class Control(Contract):
    """The control record."""

    revision: Index = 0
    """Grows with every change, also when the store starts anew."""
    base_digest: str = ""
    """Digest of the checkpoint's own weights, of which the versions are; empty until a replica has told it."""
    version: Index = 0
    """Of the policy to sample from."""
    identity: str = ""
    """Of the publication that made it (`Publication.identity`); empty for the checkpoint."""
    staged: Staged | None = None
    """A version to fetch and check, and not yet to sample from."""
    swap_when: When = "between_samples"
    """When a replica takes the version on."""
    run: RunState = "running"
    run_when: When = "between_samples"
    """When a replica halts."""
    wants_spec: Bool = False
    """Whether the store does not know which tensors the transformer has, and replicas should register."""


class ReplicaState(Contract):
    """What one denoiser replica says of itself."""

    replica_id: str
    base_digest: str = ""
    """Digest of its checkpoint's own weights."""
    word: Index = 0
    """Rises with each of the replica's words, which may overtake one another."""
    version: Index
    """Of the policy that it samples from."""
    weights_digest: str
    """Of all its weights (`schemas.weights.weights_digest`)."""
    run: RunState
    revision: Index = 0
    """Of the last control record that it is in line with, or has tried to follow: `problem` then says why it could
    not."""
    staged: tuple[str, ...] = ()
    """Identities of the publications that it has fetched and found to fit, and does not sample from."""
    problem: dict[str, Any] | None = None
    """Why it could not follow the record, as `Problem.payload()`; None where all is well."""


class Distrust(Contract):
    """Samples whose weights turned out not to be what was published: to be thrown away."""

    replica_id: str
    version: Index
    tensors: tuple[str, ...]
    """Names of the weights whose bytes differed; the first few."""
    sample_ids: tuple[str, ...]
    """Samples that the replica had finished since its last change of weights, as their manifests name them."""


class Fleet(Contract):
    """The control record, every replica's state, and what went wrong."""

    control: Control
    replicas: tuple[ReplicaState, ...]
    """Those that were heard of lately."""
    distrusted: tuple[Distrust, ...] = ()
    """The latest, at most a hundred."""
    kept_versions: tuple[Index, ...] = ()
    """Published versions whose weights the store still has."""
    kept_bytes: Bytes = 0
    """Of their weights."""
