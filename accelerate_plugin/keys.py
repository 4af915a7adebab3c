"""Every ``fsdp_*`` key in one table: its name, its values, its default and what it does here.

The table drives the flags of ``accelerate launch``, the validation of the YAML file and of the environment, the export
to the workers, and the documentation. Standard library only, so that the launcher can validate before torch is
imported.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from accelerate_plugin.startup import FALSE_WORDS, TRUE_WORDS

__all__ = ["KEYS", "Key", "Kind", "SettingsError", "documentation", "nearest", "parse_bool", "parse_key", "unknown_key"]


class SettingsError(ValueError):
    """A key or a value that cannot be used; the message names the key, the value and what is allowed."""


class Kind(Enum):
    """How a key's value is read."""

    BOOL = "true or false"
    INT = "a whole number"
    CHOICE = "one of a list"
    NAMES = "class names, separated by commas"
    RESHARD = "true, false, FULL_SHARD, SHARD_GRAD_OP or a number of processes"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Key:
    """One key of ``fsdp_config``.

    Attributes:
        name: with the ``fsdp_`` prefix; the flag is ``--name``, the variable ``NAME``.
        default: what holds where nobody sets the key; ``None`` where the engine or the model decides.
        effect: what the key does here, in one sentence.
        ours: accelerate has no such key of its own.
        choices: allowed values of a ``CHOICE``.
        refused: values that accelerate knows and this engine refuses, with the reason.
        minimum: smallest allowed number of an ``INT``.
        variable: the environment variable, where it is not the name in capitals.
    """

    name: str
    kind: Kind
    default: Any
    effect: str
    ours: bool = False
    choices: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    minimum: int = 0
    variable: str = ""

    @property
    def env(self) -> str:
        """The environment variable that carries the key to the workers."""
        return self.variable or self.name.upper()

    @property
    def allowed(self) -> str:
        """What a value may be, for messages."""
        if self.kind is Kind.CHOICE:
            return ", ".join(self.choices)
        if self.kind is Kind.INT:
            return f"a whole number of {self.minimum} or more"
        return str(self.kind.value)


_ONE_PREFETCH = "the engine always gathers the next unit while the backward pass of this one runs; use BACKWARD_PRE"
_NO_SHARD = "this engine exists to shard; leave out --fsdp_ya_fsdp_enabled to replicate the model on every process"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

_TABLE = (
    Key(
        "fsdp_ya_fsdp_enabled",
        Kind.BOOL,
        False,
        "Train with ya-fsdp. Without it nothing of accelerate's behaviour changes.",
        ours=True,
    ),
    Key(
        "fsdp_ya_fsdp_reduce_dtype",
        Kind.CHOICE,
        None,
        "Dtype in which gradients are averaged; fp32 under bf16 or fp16 mixed precision, else the gradients' own.",
        ours=True,
        choices=("fp32", "bf16", "fp16"),
    ),
    Key(
        "fsdp_ya_fsdp_reshard_after_forward",
        Kind.RESHARD,
        None,
        "Like fsdp_reshard_after_forward, whose place it takes where both are given.",
        ours=True,
    ),
    Key(
        "fsdp_ya_fsdp_hybrid_group_size",
        Kind.INT,
        None,
        "Processes that share one copy of the model under a HYBRID strategy; the processes of one host by default.",
        ours=True,
        minimum=1,
    ),
    Key(
        "fsdp_ya_fsdp_pin_memory",
        Kind.BOOL,
        True,
        "Keep offloaded parameters in page-locked host memory (with fsdp_offload_params).",
        ours=True,
    ),
    Key(
        "fsdp_ya_fsdp_shard_alignment",
        Kind.INT,
        8,
        "Elements to which parameter starts and shard ends are aligned in the flat buffers.",
        ours=True,
        minimum=1,
    ),
    Key(
        "fsdp_num_layers_to_checkpoint",
        Kind.INT,
        None,
        "Recompute the activations of the first so many blocks in the backward pass; 0 checkpoints none.",
        ours=True,
    ),
    Key(
        "fsdp_version",
        Kind.CHOICE,
        "2",
        "Accepted in both values; both mean this engine, and the keys of both versions are understood.",
        choices=("1", "2"),
    ),
    Key(
        "fsdp_sharding_strategy",
        Kind.CHOICE,
        None,
        "FULL_SHARD reshards after forward, SHARD_GRAD_OP keeps parameters until backward, HYBRID_* replicate it.",
        choices=_STRATEGIES,
        refused={"NO_SHARD": _NO_SHARD},
    ),
    Key(
        "fsdp_reshard_after_forward",
        Kind.RESHARD,
        None,
        "Free a unit's parameters after its forward pass (true, FULL_SHARD), keep them (false, SHARD_GRAD_OP), or let "
        "so many neighbours keep them together.",
    ),
    Key(
        "fsdp_offload_params",
        Kind.BOOL,
        False,
        "Keep sharded parameters, gradients and optimizer state in host memory; each gather copies from there.",
    ),
    Key(
        "fsdp_auto_wrap_policy",
        Kind.CHOICE,
        None,
        "How units are chosen; by default from the model: embedding, each repeated block, final norm with head.",
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    ),
    Key(
        "fsdp_transformer_layer_cls_to_wrap",
        Kind.NAMES,
        None,
        "Classes whose instances become units, instead of those found in the model.",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
    ),
    Key(
        "fsdp_min_num_params",
        Kind.INT,
        None,
        "With SIZE_BASED_WRAP: a module with at least so many parameters becomes a unit.",
    ),
    Key(
        "fsdp_backward_prefetch",
        Kind.CHOICE,
        None,
        "The next unit is gathered while the backward pass of this one runs: BACKWARD_PRE is what always happens.",
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        refused={"BACKWARD_POST": _ONE_PREFETCH, "NO_PREFETCH": _ONE_PREFETCH},
    ),
    Key(
        "fsdp_forward_prefetch",
        Kind.BOOL,
        False,
        "Name the next unit explicitly for prefetching in forward (for models that run their blocks in order).",
    ),
    Key(
        "fsdp_state_dict_type",
        Kind.CHOICE,
        "FULL_STATE_DICT",
        "Form of checkpoints: whole files from rank 0, or slices for any number, or for this number of processes.",
        choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"),
    ),
    Key(
        "fsdp_use_orig_params",
        Kind.BOOL,
        True,
        "Accepted in both values: parameters always keep their names, shapes and settings.",
    ),
    Key(
        "fsdp_cpu_ram_efficient_loading",
        Kind.BOOL,
        True,
        "Only rank 0 reads the weights of a pretrained model; the others receive their shards from it.",
    ),
    Key(
        "fsdp_sync_module_states",
        Kind.BOOL,
        True,
        "All processes start from rank 0's weights and buffers.",
    ),
    Key(
        "fsdp_activation_checkpointing",
        Kind.BOOL,
        None,
        "Recompute the activations of every block in backward (of the first fsdp_num_layers_to_checkpoint, if set).",
    ),
    Key(
        "fsdp_activation_checkpointing_offload",
        Kind.BOOL,
        False,
        "Keep the inputs of recomputed blocks in host memory.",
    ),
    Key(
        "fsdp_ignored_modules",
        Kind.TEXT,
        None,
        "A regular expression; modules whose full name matches it are left alone.",
    ),
    Key(
        "fsdp_limit_all_gathers",
        Kind.CHOICE,
        "true",
        "At most two blocks are gathered at a time: true is what always happens.",
        choices=("true", "false"),
        refused={"false": "the number of gathered blocks is fixed by the engine's two shared buffers; use true"},
    ),
)

KEYS: Mapping[str, Key] = {key.name: key for key in _TABLE}


def parse_bool(name: str, value: Any) -> bool:
    """Reads a truth value in any usual spelling.

    Raises:
        SettingsError: for anything else.
    """
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise SettingsError(f"{name}: got {value!r}; allowed: true, false (also yes/no, on/off, 1/0)")


def _parse_int(key: Key, value: Any) -> int:
    word = str(value).strip()
    try:
        number = int(word)
    except ValueError:
        # YAML users write 1e8; 8.5 must not be cut to 8 without a word.
        try:
            number = int(word) if not float(word).is_integer() else int(float(word))
        except (ValueError, OverflowError):
            number = key.minimum - 1
    if isinstance(value, bool) or number < key.minimum:
        raise SettingsError(f"{key.name}: got {value!r}; allowed: {key.allowed}")
    return number


def _parse_choice(key: Key, value: Any) -> str:
    if isinstance(value, bool):
        value = str(value).lower()
    word = str(getattr(value, "name", value)).strip()
    match = next((choice for choice in key.choices if choice.lower() == word.lower()), None)
    if match is None and key.name == "fsdp_sharding_strategy" and word.isdigit() and 1 <= int(word) <= len(key.choices):
        match = key.choices[int(word) - 1]
    if match is None:
        usable = ", ".join(choice for choice in key.choices if choice not in key.refused)
        raise SettingsError(f"{key.name}: got {value!r}; allowed: {usable}")
    if match in key.refused:
        raise SettingsError(f"{key.name}: {match} is not supported by ya-fsdp: {key.refused[match]}")
    return match


def _parse_names(value: Any) -> tuple[str, ...]:
    # transformers makes a list of one text out of a text with commas.
    parts = [value] if isinstance(value, str) else list(value)
    return tuple(name for part in parts for name in (word.strip() for word in str(part).split(",")) if name)


def _parse_reshard(key: Key, value: Any) -> bool | int:
    word = str(getattr(value, "name", value)).strip()
    if word.upper() in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return word.upper() == "FULL_SHARD"
    if word.upper() == "NO_SHARD":
        raise SettingsError(f"{key.name}: NO_SHARD is not supported by ya-fsdp: {_NO_SHARD}")
    if not isinstance(value, bool) and word.isdigit() and int(word) > 1:
        return int(word)
    try:
        return parse_bool(key.name, value)
    except SettingsError:
        raise SettingsError(f"{key.name}: got {value!r}; allowed: {key.allowed}") from None


def parse_key(name: str, value: Any) -> Any:
    """Reads the value of a known key.

    Raises:
        SettingsError: for an unknown key, or a value that the key cannot take.
    """
    if name not in KEYS:
        raise unknown_key(name)
    key = KEYS[name]
    if value is None:
        return None
    match key.kind:
        case Kind.BOOL:
            truth = parse_bool(name, value)
            if str(truth).lower() in key.refused:
                raise SettingsError(f"{name}: {value!r} is not supported by ya-fsdp: {key.refused[str(truth).lower()]}")
            return truth
        case Kind.INT:
            return _parse_int(key, value)
        case Kind.CHOICE:
            return _parse_choice(key, value)
        case Kind.NAMES:
            return _parse_names(value)
        case Kind.RESHARD:
            return _parse_reshard(key, value)
    return str(value)


def nearest(name: str, known: Iterable[str] = KEYS) -> str | None:
    """The known name most like this one, if any is."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_key(name: str, where: str = "", known: Iterable[str] = KEYS) -> SettingsError:
    """The error for a key that nobody knows."""
    known = list(known)
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else f"known keys: {', '.join(sorted(known))}"
    return SettingsError(f"unknown key {name}{f' in {where}' if where else ''}; {hint}")


def documentation() -> str:
    """The table as Markdown, for the documentation."""
    rows = ["| key | values | default | effect |", "|---|---|---|---|"]
    for key in _TABLE:
        values = ", ".join(choice for choice in key.choices if choice not in key.refused) or key.allowed
        default = "" if key.default is None else str(key.default).lower() if key.kind is Kind.BOOL else key.default
        refused = "".join(f" {value} is refused: {reason}." for value, reason in key.refused.items())
        rows.append(f"| `{key.name}` | {values} | {default} | {key.effect}{refused} |")
    return "\n".join(rows) + "\n"
