"""The execution profile: everything besides weights and inputs that a forward pass's bits depend on.

Log-probs of a replay equal a rollout's bit for bit under an equal profile. It is stamped into every manifest, so that
a trainer can set the same (``adopt``) or refuse.
"""

import hashlib
import inspect
import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version

import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from peft.tuners.tuners_utils import BaseTunerLayer

from pipeline.tensors import name_of

logger = logging.getLogger(__name__)

LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "pyarrow")

ADOPTABLE = ("num_threads", "tf32", "attention_backend")
"""Fields of a profile that ``adopt`` can set in a running process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionProfile:
    """What a replica computes with."""

    transformer: str
    """Short digest of the transformer's architecture: its class and the config entries that are not the defaults."""
    device: str
    """The processor's model, such as "NVIDIA H200" or "x86_64"."""
    dtype: str
    """The transformer's dtype."""
    attention_backend: str
    """diffusers' attention backend; "native" is torch's scaled_dot_product_attention."""
    text_mask: str
    """Form in which text masks reach the attention."""
    num_threads: int | None
    """torch's threads on the CPU, whose reductions split by them; None on other devices."""
    tf32: bool
    """Whether CUDA matmuls may round float32 inputs to TF32."""
    compiled: bool
    lora: str
    """How adapters are applied: "none", "live" (also while it is disabled, as for a reference policy) or "merged"."""
    torch: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def differences(self, other: Mapping[str, object]) -> dict[str, tuple[object, object]]:
        """Fields whose values differ, with (this one's, the other's)."""
        own = self.as_dict()
        return {key: (own.get(key), other.get(key)) for key in own if own.get(key) != other.get(key)}


def profile_of(transformer: LTX2VideoTransformer3DModel) -> ExecutionProfile:
    """The profile under which ``transformer`` runs in this process."""
    device = torch.device(transformer.device)
    on_cpu = device.type == "cpu"
    return ExecutionProfile(
        transformer=_architecture(transformer),
        device=platform.machine() if on_cpu else torch.cuda.get_device_name(device),
        dtype=name_of(transformer.dtype),
        attention_backend=_attention_backend(transformer),
        text_mask="none where all tokens are valid",
        num_threads=torch.get_num_threads() if on_cpu else None,
        tf32=not on_cpu and torch.backends.cuda.matmul.allow_tf32,
        compiled=any(getattr(block, "_compiled_call_impl", None) for block in transformer.transformer_blocks),
        lora=_lora(transformer),
        torch=torch.__version__,
    )


def adopt(
    recorded: Mapping[str, object], transformer: LTX2VideoTransformer3DModel
) -> dict[str, tuple[object, object]]:
    """Run ``transformer`` under a manifest's ``execution_profile``, as far as this process can be set to.

    Sets torch's threads and whether CUDA rounds to TF32, both for the whole process, and the attention backend, which
    diffusers sets for the model and for models of this process that have none of their own.

    Returns the fields that differ still, with (the value here, the recorded one): empty when a replay is exact.
    """
    different = profile_of(transformer).differences(recorded)
    num_threads, tf32, backend = (recorded.get(key) for key in ADOPTABLE)
    if "num_threads" in different and isinstance(num_threads, int) and transformer.device.type == "cpu":
        torch.set_num_threads(num_threads)
    if "tf32" in different and isinstance(tf32, bool) and transformer.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = tf32
    if "attention_backend" in different and isinstance(backend, str):
        try:
            transformer.set_attention_backend(backend)
        except (
            ValueError,
            RuntimeError,
            ImportError,
        ) as error:  # unknown here, or its package is not installed
            logger.warning("attention_backend %r cannot be set here: %s", backend, error)
    return profile_of(transformer).differences(recorded)


@cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries that a sample's numbers went through."""
    return {name: version(name) for name in LIBRARIES}


def _architecture(transformer: LTX2VideoTransformer3DModel) -> str:
    """Entries whose names begin with "_" say where a config came from; those at their defaults are left out, so that an
    entry that a later diffusers brings changes nothing."""
    parameters = inspect.signature(type(transformer).__init__).parameters
    defaults = {name: _json(parameter.default) for name, parameter in parameters.items()}
    entries = {
        name: value
        for name, value in transformer.config.items()
        if not name.startswith("_") and _json(value) != defaults.get(name)
    }
    return hashlib.sha256(_json([type(transformer).__name__, entries]).encode()).hexdigest()[:16]


def _json(value: object) -> str:
    """Lists and tuples, which a config file does not tell apart, give the same text."""
    return json.dumps(value, sort_keys=True, default=str)


def _lora(transformer: LTX2VideoTransformer3DModel) -> str:
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    if not layers:
        return "none"
    return "merged" if any(layer.merged for layer in layers) else "live"


def _attention_backend(transformer: LTX2VideoTransformer3DModel) -> str:
    """The backend that the attention processors were set to, else the one that diffusers takes in this process."""
    processor = next(iter(transformer.attn_processors.values()), None)
    backend = getattr(processor, "_attention_backend", None)
    if backend is None:
        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))
