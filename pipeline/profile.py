"""The execution profile: everything besides weights and inputs that a forward pass's bits depend on.

Log-probs of a replay equal a rollout's bit for bit under an equal profile. It is stamped into every manifest, so that
a trainer can set the same or refuse.
"""

import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version

import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from pipeline.tensors import name_of

LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "pyarrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionProfile:
    """What a replica computes with."""

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
    """How adapters are applied: "none", "live" or "merged"."""
    torch: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def differences(self, other: dict[str, object]) -> dict[str, tuple[object, object]]:
        """Fields whose values differ, with (this one's, the other's)."""
        own = self.as_dict()
        return {key: (own.get(key), other.get(key)) for key in own if own.get(key) != other.get(key)}


def profile_of(transformer: LTX2VideoTransformer3DModel) -> ExecutionProfile:
    """The profile under which ``transformer`` runs in this process."""
    device = torch.device(transformer.device)
    on_cpu = device.type == "cpu"
    return ExecutionProfile(
        device=platform.machine() if on_cpu else torch.cuda.get_device_name(device),
        dtype=name_of(transformer.dtype),
        attention_backend=_attention_backend(transformer),
        text_mask="none where all tokens are valid",
        num_threads=torch.get_num_threads() if on_cpu else None,
        tf32=not on_cpu and torch.backends.cuda.matmul.allow_tf32,
        compiled=any(getattr(block, "_compiled_call_impl", None) for block in transformer.transformer_blocks),
        lora="live" if getattr(transformer, "peft_config", None) else "none",
        torch=torch.__version__,
    )


@cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries that a sample's numbers went through."""
    return {name: version(name) for name in LIBRARIES}


def _attention_backend(transformer: LTX2VideoTransformer3DModel) -> str:
    """The backend that the attention processors were set to, else the one that diffusers takes in this process."""
    processor = next(iter(transformer.attn_processors.values()), None)
    backend = getattr(processor, "_attention_backend", None)
    if backend is None:
        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))
