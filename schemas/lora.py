"""LoRA as it is published: what of PEFT's configuration is served, which layers it names, what its tensors are
called.

Served is plain LoRA on linear layers: `y + lora_B(lora_A(x)) * scaling`. Whatever else PEFT can do is refused
by name, since an adapter of which half is served samples a policy that nobody trained.

Knows neither torch nor PEFT: layers are names, and which of them exist is the caller's to say.

Invariant: a layer's target, rank and scaling are those that PEFT takes from the same configuration.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from schemas.errors import invalid
from schemas.fields import Bool, Contract, Count, Positive

T = TypeVar("T")

WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "peft_type",  # looked at apart
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",  # only while training
        "init_lora_weights",  # looked at apart
        "eva_config",
        "loftq_config",
        "megatron_core",
        "qalora_group_size",
        "ensure_weight_tying",
        "runtime_config",
    }
)
"""Entries of a PEFT configuration that change nothing in a sampler's forward pass."""

INITS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal", None)
"""The others (pissa, olora, corda, loftq, lora_ga, ...) change the trainer's base weights as they start."""

_ADAPTER_NAME = re.compile(
    r"(?:base_model\.model\.)?(?:transformer\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight"
)


def _names(value: object) -> object:
    """Names in one order, whichever collection they came in; a regular expression as it is."""
    if isinstance(value, list | tuple | set | frozenset) and all(isinstance(name, str) for name in value):
        return tuple(sorted(value))
    return value


ModuleNames = Annotated[str | tuple[str, ...], BeforeValidator(_names)]
"""Layers: a regular expression of whole names, or names and endings of names after a dot."""


class LoraSpec(Contract):
    """A PEFT `LoraConfig`, reduced to what decides the forward pass. Made from the config, its `to_dict()`
    or an adapter_config.json."""

    r: Count
    """Rank of the layers that rank_pattern does not name."""
    lora_alpha: Positive
    """Numerator of the scaling, of the layers that alpha_pattern does not name. No default: a state dict does
    not have it."""
    target_modules: ModuleNames
    """Layers that have an adapter."""
    exclude_modules: ModuleNames | None = None
    """Layers that have none, though target_modules names them."""
    rank_pattern: dict[str, Count] = Field(default_factory=dict)
    """Ranks of single layers by the ending of their name, a regular expression; the first that fits counts."""
    alpha_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Numerators of single layers, likewise."""
    use_rslora: Bool = False
    """Whether the scaling's denominator is the root of the rank instead of the rank."""

    @model_validator(mode="before")
    @classmethod
    def _plain_lora_only(cls, given: Any) -> Any:
        if hasattr(given, "to_dict"):
            given = given.to_dict()
        if not isinstance(given, Mapping):
            return given
        for name, value in given.items():
            if name not in cls.model_fields and name not in WITHOUT_EFFECT and not _is_off(value):
                remedy = "train a plain LoRA on linear layers, or publish the full weights"
                raise invalid(name, value, "is not served", remedy).refusal()
        kind = str(getattr(given.get("peft_type"), "value", given.get("peft_type", "LORA")))
        if kind != "LORA":
            raise invalid("peft_type", kind, "must be LORA", "publish the full weights").refusal()
        init = given.get("init_lora_weights")
        if init not in INITS_THAT_KEEP_THE_BASE:
            rule = (
                "must leave the base weights as they are, which this replica has and the trainer has changed"
            )
            raise invalid("init_lora_weights", init, rule, "convert it to a plain LoRA with PEFT").refusal()
        return {
            name: value for name, value in given.items() if name in cls.model_fields and value is not None
        }

    @model_validator(mode="after")
    def _names_are_usable(self) -> Self:
        if self.target_modules == "all-linear":
            rule = "must name the layers"
            raise invalid("target_modules", "all-linear", rule, r'use ".*\.to_(q|k|v)" or a list').refusal()
        patterns: dict[str, Iterable[object]] = {
            "target_modules": [self.target_modules],
            "exclude_modules": [self.exclude_modules],
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        }
        for field, expressions in patterns.items():
            for expression in expressions:
                if isinstance(expression, str) and not _compiles(expression):
                    raise invalid(field, expression, "must be a regular expression", "mend it").refusal()
        return self

    def targets(self, module: str) -> bool:
        """Whether the layer of that name has an adapter, as PEFT decides it."""
        return _fits(self.target_modules, module) and not _fits(self.exclude_modules, module)

    def rank(self, module: str) -> int:
        """Rank of that layer's adapter."""
        return _of_pattern(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """What that layer's `lora_B(lora_A(x))` is multiplied by."""
        rank = self.rank(module)
        return _of_pattern(self.alpha_pattern, module, self.lora_alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )


def adapter_name(name: str) -> str | None:
    """The adapter tensor's own name, "<layer>.lora_A.weight", of whatever stands around it in `name`: PEFT's
    "base_model.model.", diffusers' "transformer.", the adapter's name. None where it is no LoRA weight."""
    match = _ADAPTER_NAME.fullmatch(name)
    return f"{match['module']}.lora_{match['side']}.weight" if match else None


def layer_of(name: str) -> str:
    """The layer that an adapter tensor belongs to, by the tensor's own name."""
    return name.rsplit(".lora_", 1)[0]


def modules_of(names: Iterable[str]) -> set[str]:
    """Every module that a state dict's names imply: their proper prefixes."""
    modules: set[str] = set()
    for name in names:
        while "." in name:
            name = name.rsplit(".", 1)[0]
            if name in modules:
                break
            modules.add(name)
    return modules


def _is_off(value: object) -> bool:
    return (
        value is None or value is False or value == "none" or (hasattr(value, "__len__") and not len(value))
    )


def _compiles(expression: str) -> bool:
    try:
        re.compile(expression)
    except re.error:
        return False
    return True


def _fits(wanted: str | tuple[str, ...] | None, module: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted or ())


def _of_pattern(pattern: Mapping[str, T], module: str, otherwise: T) -> T:
    for expression, value in pattern.items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return otherwise
