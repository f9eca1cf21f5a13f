"""Whether an update's tensors fit the transformer: names compared both ways, shapes and dtypes, before any is
touched.

Knows no bytes: what is compared is what `TensorSpec`s say.

Invariant: `check_names` returns only where each name on one side has its equal on the other.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from schemas.errors import Problem
from schemas.lora import LoraSpec, adapter_name, modules_of
from schemas.weights import TensorSpec, Update

ADAPTER_DTYPES = ("float32", "bfloat16", "float16")
MAX_LISTED = 5
"""Names of one kind that an error lists; it counts all."""
STILL_SERVED = "the policy before it is still served"

_COMPONENTS = ("audio_vae", "connectors", "scheduler", "text_encoder", "tokenizer", "vae", "vocoder")
_WRAPPERS = ("transformer.", "model.", "module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.")
"""What a trainer's own wrapping may put before the names of a state dict."""


def check_names(
    update: Update,
    tensors: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    lora_config: LoraSpec | None = None,
    *,
    complete: bool = True,
) -> None:
    """Raises ValueError (a Problem, `weights_refused`) where `tensors` do not fit the transformer `target`.

    full: the same names both ways, each of the same shape and dtype. partial: some of them, at least one. lora:
    a pair of matrices for every layer that lora_config names, of its rank, the layer's sizes and one dtype, and
    no others. The error counts and lists what is missing, unexpected, or of another shape or dtype.

    complete: whether these are all tensors of the update; if not, none is said to be missing.
    """
    foreign = [name for name in tensors if name.removeprefix("base_model.model.").startswith(_FOREIGN)]
    if foreign:
        rule = f"cannot be those of other components, which do not follow policy versions: {listed(foreign)}"
        raise refused(rule, "publish the transformer's alone").exception()
    if update == "lora":
        if lora_config is None:
            raise refused("need a lora_config with update lora", "send PEFT's LoraConfig").exception()
        given = own_names(tensors)
        expected = _adapter_of(given, target, lora_config)
        if complete and not given.keys() & expected.keys():
            rule = f"must fit a layer that target_modules names, got not one that does: {listed(given)}"
            raise refused(
                rule, f'wanted are {listed(sorted(expected))}, or "lora_B" in its place'
            ).exception()
        _compare(given, expected, expected if complete else (), "publish the pair of every layer")
        return
    if complete and not tensors:
        raise refused("must hold at least one of the transformer's, got none", "name some").exception()
    wanted = target if update == "full" and complete else ()
    _compare(tensors, target, wanted, _remedy(tensors, target))


def own_names(tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """An adapter's tensors by their own names, whatever form they were published in; a name that is no LoRA
    weight's stays as it is. Raises ValueError where two forms name one weight."""
    own = {name: adapter_name(name) or name for name in tensors}
    count = Counter(own.values())
    twice = [name for name in tensors if count[own[name]] > 1]
    if twice:
        raise refused(f"must name each weight once, got {listed(twice)}", "publish one form").exception()
    return {own[name]: spec for name, spec in tensors.items()}


def refused(rule: str, remedy: str) -> Problem:
    """The `weights_refused` problem of an update's tensors."""
    return Problem(code="weights_refused", field="tensors", rule=rule, remedy=f"{remedy}; {STILL_SERVED}")


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return ", ".join(every[:MAX_LISTED]) + more


def _adapter_of(
    given: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec], config: LoraSpec
) -> dict[str, TensorSpec]:
    """What an adapter of that configuration consists of, in the dtype that it was given in."""
    dtypes = sorted({spec.dtype for spec in given.values()})
    if len(dtypes) > 1 or not set(dtypes) <= set(ADAPTER_DTYPES):
        rule = f"must be of one dtype in an adapter, {' or '.join(ADAPTER_DTYPES)}, got {', '.join(dtypes)}"
        raise refused(rule, "cast them to the one that the trainer computes in").exception()
    layers = sorted(module for module in modules_of(target) if config.targets(module))
    if not layers:
        rule = f"cannot be bound: no layer of the transformer fits target_modules {config.target_modules!r}"
        raise refused(rule, "name layers as the checkpoint does").exception()
    expected: dict[str, TensorSpec] = {}
    for layer in layers:
        weight = target.get(f"{layer}.weight")
        if weight is None or len(weight.shape) != 2:
            rule = f"cannot be bound: target_modules names {layer}, which is no linear layer"
            raise refused(rule, "name linear layers only").exception()
        (rows, columns), rank = weight.shape, config.rank(layer)
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            expected[f"{layer}.lora_{side}.weight"] = TensorSpec(
                dtype=dtypes[0] if dtypes else "float32", shape=shape
            )
    return expected


def _compare(
    tensors: Mapping[str, TensorSpec],
    target: Mapping[str, TensorSpec],
    wanted: Iterable[str],
    remedy: str,
) -> None:
    """Raises where a wanted name is missing, or a given one is not in the target or differs from it."""
    both = [(name, spec, target[name]) for name, spec in tensors.items() if name in target]
    differences = {
        "missing": sorted(set(wanted) - tensors.keys()),
        "unexpected": [name for name in tensors if name not in target],
        "of another shape": [
            f"{name} {list(spec.shape)} instead of {list(other.shape)}"
            for name, spec, other in both
            if spec.shape != other.shape
        ],
        "of another dtype": [
            f"{name} {spec.dtype} instead of {other.dtype}"
            for name, spec, other in both
            if spec.dtype != other.dtype
        ],
    }
    found = [f"{len(names)} {kind} ({listed(names)})" for kind, names in differences.items() if names]
    if found:
        raise refused(f"must be the transformer's: {', '.join(found)}", remedy).exception()


def _remedy(tensors: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> str:
    """How to mend the names or dtypes of a state dict, where that can be guessed."""
    for name in tensors:
        if name in target:
            continue
        for wrapper in _WRAPPERS:
            if name.removeprefix(wrapper) in target:
                return f'leave out "{wrapper}" before the names'
        if ".lora_" in name or ".base_layer." in name:
            return "publish the adapter with update lora, or the state dict of the model without it"
    if any(spec.dtype != target[name].dtype for name, spec in tensors.items() if name in target):
        return "cast them to the served dtype, and do so in the trainer's forward pass too"
    return "publish the state dict of the served transformer"


_FOREIGN = tuple(f"{component}." for component in _COMPONENTS)
