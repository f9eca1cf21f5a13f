"""What the model does: one frozen tree of settings, read from a preset and changed by the keys given beside
it.

`preset` names a YAML in this folder, or is a path to one; keys given beside it go over the YAML's, subtree by
subtree. Each part of the app gets its own subtree. How many replicas, on what and with which limits is said
in `serve_config.yaml`, not here.

This module knows no torch and no ray: dtypes and devices are names here, and the parts that use them find out
whether they exist.

Invariants: an unknown key is an error wherever it stands; the tree is never changed after it was made; the
defaults lie within the limits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from schemas.card import Defaults, Limits, StateDtype
from schemas.fields import Bool, Bytes, Contract, Count, Float, Indices, Positive

PRESETS = Path(__file__).parent

MIB = 2**20


class TextEncoderSettings(Contract):
    """Gemma and the connectors."""

    dtype: StateDtype = "float32"
    """Of the weights and the contexts."""
    device: str = "cpu"
    """torch device, such as cpu, cuda or cuda:0."""
    low_memory: Bool = False
    """Load the weights file by file straight to the device, so that host memory never holds them whole."""
    max_rows: Count = 8
    """Prompts in one forward pass at most; with batch_invariant, exactly."""
    batch_wait_s: Annotated[Float, Field(ge=0)] = 0.005
    """Seconds to wait for more prompts to share a forward pass with."""
    cache_bytes: Bytes = 64 * MIB
    """Contexts kept for prompts that come again, in bytes."""


class DenoiserSettings(Contract):
    """The transformer and its step engine."""

    dtype: StateDtype = "float32"
    """Of the weights; the state has its own dtype, and all else is float32."""
    device: str = "cpu"
    """torch device, such as cpu, cuda or cuda:0."""
    low_memory: Bool = False
    """Load the weights file by file straight to the device, so that host memory never holds them whole."""
    row_buckets: Annotated[Indices, Field(min_length=1)] = (1, 2, 4, 8)
    """Sizes that a batch of rows is padded to, rising. The last is the replica's capacity."""
    max_tokens: Count | None = None
    """Bound on rows times tokens (video and audio) of a batch: buckets that go beyond it for a geometry are not used
    for it. The smallest bucket always is. None: no bound."""
    compile: Bool = False
    """Compile the transformer's repeated blocks, once per bucket and geometry. Not worth it on a CPU."""
    attention_backend: str | None = None
    """diffusers' name of an attention backend; None: its default."""
    num_threads: Count | None = None
    """CPU threads of torch; None: torch's default."""
    stall_timeout_s: Positive = 300.0
    """Seconds without a finished step after which the replica is taken for stuck, and replaced."""
    when_halted: Literal["wait", "refuse"] = "wait"
    """What happens to samples that come while sampling is paused or asleep: they wait, or are told so (HTTP: 503)."""
    parity_every: Count | None = None
    """Replay one sample in so many on the replica and export how far its log-probs are off. None: none."""
    parity_alarm: Positive = 1e-5
    """Difference of a log-prob from which on the probe writes an error into the log."""

    @field_validator("row_buckets")
    @classmethod
    def _rising(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        right = tuple(sorted({size for size in sizes if size > 0}))
        if sizes != right:
            raise ValueError(f"must be at least 1 and rise strictly, got {list(sizes)}; use {list(right)}")
        return sizes


class DecoderSettings(Contract):
    """Video VAE, audio VAE and vocoder."""

    dtype: StateDtype = "float32"
    """Of the video VAE."""
    audio_dtype: StateDtype = "float32"
    """Of the audio VAE and the vocoder, whose errors are heard sooner."""
    device: str = "cpu"
    """torch device, such as cpu, cuda or cuda:0."""
    low_memory: Bool = False
    """Load the weights file by file straight to the device, so that host memory never holds them whole."""
    tiling: Bool = False
    """Decode the video in tiles: less memory, and slightly different pixels at the seams."""


class ClientSettings(Contract):
    """The client's side: what may be in flight, and how it stays alive to the replicas."""

    max_bytes_in_flight: Bytes = 512 * MIB
    """Bytes of trajectories and media that are being made or not yet collected."""
    lease_s: Positive = 10.0
    """Seconds after which the samples of a client that fell silent are dropped."""
    pulse_s: Positive = 0.5
    """Seconds between renewals of a lease."""
    max_attempts: Count = 3
    """Times a sample is started, when replicas die under it."""

    @model_validator(mode="after")
    def _a_lost_pulse_is_survived(self) -> Self:
        if self.pulse_s * 2 > self.lease_s:
            raise ValueError(
                "pulse_s must be at most half of lease_s, so that one lost pulse ends no lease, "
                f"got {self.pulse_s:g} of {self.lease_s:g}; use {self.lease_s / 2:g} or less"
            )
        return self


class WeightSettings(Contract):
    """Published policies, and how replicas follow them."""

    folder: str | None = None
    """Where published weights are written, so that a cluster's restart does not lose them: a path that the node of the
    weight store can write to, and every node that it may be restarted on. None: the object store alone has them."""
    max_bytes: Bytes = 256 * MIB
    """Of published weights in the object store: what is sampled from, the update that is on its way, and earlier
    versions while they fit."""
    keep_versions: Count = 2
    """Versions kept, the newest among them."""
    poll_s: Positive = 2.0
    """Longest time between two words of a replica."""
    silence_s: Positive = 10.0
    """Time after which a replica that is not heard of is taken for dead."""
    fetch_timeout_s: Positive = 600.0
    """Longest time for a replica to fetch weights."""

    @model_validator(mode="after")
    def _a_lost_word_is_survived(self) -> Self:
        if self.poll_s * 2 > self.silence_s:
            raise ValueError(
                "poll_s must be at most half of silence_s, so that one lost word makes no replica dead, "
                f"got {self.poll_s:g} of {self.silence_s:g}; use {self.silence_s / 2:g} or less"
            )
        return self


class HttpSettings(Contract):
    """Ad-hoc requests: the ingress, and the archive of their rollouts."""

    max_rollouts: Count = 16
    """Rollouts sampled at a time; one more is told to try again."""
    max_num_samples: Count = 8
    """Samples of one rollout."""
    max_body_bytes: Bytes = MIB
    """Bytes of a request's body."""
    body_timeout_s: Positive = 30.0
    """Seconds within which a request's body must be there."""
    keep_s: Positive = 900.0
    """Seconds for which a rollout is kept once it is settled, for its links and its request_id."""
    keep_bytes: Bytes = 256 * MIB
    """Of kept rollouts in the object store; the oldest make way. One that is larger is answered and not kept."""
    encoded_bytes: Bytes = 64 * MIB
    """Of encoded media that each ingress replica keeps in its memory, for players that seek."""
    token_env: str | None = None
    """Name of the environment variable that holds the token which callers must send as "Authorization: Bearer ...". Read
    where the ingress runs, at its start. None: no token from there."""
    token_file: str | None = None
    """Path of a file that holds it, likewise. None for both: no token is asked for."""
    weights_root: str | None = None
    """Folder under which weights may be named by path over HTTP. None: none can be."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests and read answers in a browser, such as "https://lab.example". None by default:
    then only pages of the app's own host may."""

    @model_validator(mode="after")
    def _one_place_for_the_token(self) -> Self:
        if self.token_env is not None and self.token_file is not None:
            raise ValueError("token_env and token_file cannot both be given; leave one of the two out")
        return self


class AppConfig(Contract):
    """The whole tree; the argument of `deployments.graph.build_app`."""

    preset: str = "tiny"
    """Name of a preset in this folder, or path to a YAML file."""
    model: str
    """tiny, small, a hub id, or a path to a folder in diffusers' layout."""
    batch_invariant: Bool = False
    """Whether a sample's bits are the same whoever shares its forward passes. Every batch then has one size, and a denoiser
    proves at its start that a row's bits do not depend on its place in it; where they do (on CPUs), the size is 1."""
    text_encoder: TextEncoderSettings = TextEncoderSettings()
    """The text stage."""
    denoiser: DenoiserSettings = DenoiserSettings()
    """The denoising stage."""
    decoder: DecoderSettings = DecoderSettings()
    """The decoding stage."""
    limits: Limits
    """What one request may ask for."""
    defaults: Defaults
    """What it gets without asking."""
    client: ClientSettings = ClientSettings()
    """Handed to every client of the app."""
    weights: WeightSettings = WeightSettings()
    """Published policies."""
    http: HttpSettings = HttpSettings()
    """The HTTP side."""

    @model_validator(mode="before")
    @classmethod
    def _over_the_preset(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", cls.model_fields["preset"].default)
        return _merged(load_preset(preset), given) if isinstance(preset, str) else given

    @model_validator(mode="after")
    def _one_size_where_invariant(self) -> Self:
        sizes = self.denoiser.row_buckets
        if self.batch_invariant and len(sizes) != 1:
            raise ValueError(
                f"denoiser.row_buckets must have exactly one size with batch_invariant, got {list(sizes)}; "
                "use [1] on a CPU, or the size that fills the device"
            )
        return self

    @model_validator(mode="after")
    def _defaults_within_limits(self) -> Self:
        for default, limit in (
            ("num_inference_steps", "max_inference_steps"),
            ("deadline_s", "max_deadline_s"),
        ):
            value, most = getattr(self.defaults, default), getattr(self.limits, limit)
            if value > most:
                raise ValueError(
                    f"defaults.{default} must be at most limits.{limit}, {most:g}, got {value:g}"
                )
        return self


def load_preset(preset: str) -> dict[str, Any]:
    """The tree of a preset's YAML. Raises ValueError for a preset that is not there or is no mapping."""
    path = Path(preset) if preset.endswith((".yaml", ".yml")) else PRESETS / f"{preset}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PRESETS.glob("*.yaml")))
        raise ValueError(f"preset must be one of {known} or a path to a YAML file, got {preset!r}")
    tree = yaml.safe_load(path.read_text())
    if not isinstance(tree, dict):
        raise ValueError(f"preset {path} must hold keys and values, got {type(tree).__name__}")
    return tree


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, subtree by subtree; lists and all else are replaced whole."""
    merged = dict(below)
    for key, value in above.items():
        under = below.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            value = _merged(under, value)
        merged[key] = value
    return merged
