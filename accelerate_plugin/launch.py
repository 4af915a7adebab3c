"""``accelerate launch``: our flags, the YAML file's keys, their validation, and what the workers are told.

A flag beats the YAML file, which beats the environment. The launcher resolves all three into one set of values, checks
it, and exports it as ``FSDP_*`` variables, so that the workers (and a job started by ``torchrun`` with the same
variables) read settings from one place.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from accelerate_plugin import rules
from accelerate_plugin.compat import accelerator_available
from accelerate_plugin.keys import KEYS, Kind, SettingsError, nearest, parse_bool, parse_key, unknown_key
from accelerate_plugin.startup import ENABLED

__all__ = ["collect", "export", "wrap_environment", "wrap_parse_args", "wrap_parser", "wrap_validate"]

_SWITCH = "fsdp_ya_fsdp_enabled"
_OTHER_ENGINES = ("use_deepspeed", "use_megatron_lm", "tpu")

Parser = argparse.ArgumentParser


class LaunchError(SystemExit):
    """Ends the launcher with a message and a non-zero status, without a traceback."""

    def __init__(self, message: object) -> None:
        super().__init__(f"accelerate launch: ya-fsdp: {message}")


def wrap_parser(original: Callable[..., Parser]) -> Callable[..., Parser]:
    """Adds our flags to the launcher's parser, and a hint to its error for a misspelt one."""

    @functools.wraps(original)
    def launch_command_parser(*args: Any, **kwargs: Any) -> Parser:
        parser = original(*args, **kwargs)
        present = {option for action in parser._actions for option in action.option_strings}
        group = parser.add_argument_group("ya-fsdp Arguments", "Arguments of the ya-fsdp engine.")
        for key in KEYS.values():
            if f"--{key.name}" not in present:
                group.add_argument(f"--{key.name}", type=str, default=None, help=f"{key.effect} ({key.allowed})")
        _explain_unknown_flags(parser)
        parser.set_defaults(ya_fsdp_values=None)
        return parser

    return launch_command_parser


def wrap_parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hands ``python -m accelerate.commands.launch`` over to the launcher that was imported, and thus extended."""

    @functools.wraps(original)
    def parse_args(self: Parser, *args: Any, **kwargs: Any) -> Any:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        extended = "ya_fsdp_values" in self._defaults
        if spec is not None and spec.name == "accelerate.commands.launch" and not extended:
            from accelerate.commands import launch

            launch.main()
            raise SystemExit(0)
        return original(self, *args, **kwargs)

    return parse_args


def _explain_unknown_flags(parser: Parser) -> None:
    parse = parser.parse_known_args
    known = [option for action in parser._actions for option in action.option_strings]

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse(args, namespace)
        for argument in rest:
            flag = argument.split("=")[0]
            if flag.startswith("--fsdp") and flag not in known:
                close = nearest(flag, known)
                parser.error(f"unknown option {flag}" + (f"; did you mean {close}?" if close else ""))
        return parsed, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def collect(
    flags: Mapping[str, Any], config: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[bool, dict[str, Any]]:
    """Resolves flags, YAML keys and variables into the switch and the values given for the other keys.

    Args:
        flags: values given on the command line, by key.
        config: the ``fsdp_config`` section; the ``fsdp_`` prefix may be missing.
        environment: variables.

    Returns:
        Whether the engine is asked for, and every value that somebody gave. Values of other sources are checked only
        if it is: otherwise they belong to accelerate's own engine.

    Raises:
        SettingsError: naming the key (and the nearest known one), the value and what is allowed.
    """
    section = {name if name.startswith("fsdp") else f"fsdp_{name}": value for name, value in config.items()}
    for name in section:
        if "ya_fsdp" in name and name not in KEYS:
            raise unknown_key(name, "fsdp_config")
    enabled = False
    for source in (flags.get(_SWITCH), section.get(_SWITCH), environment.get(ENABLED)):
        if source is not None:
            enabled = parse_bool(_SWITCH, source)
            break
    if not enabled:
        return False, {}
    for name in section:
        if name not in KEYS:
            raise unknown_key(name, "fsdp_config")
    values = rules.from_environment(environment)
    for source in (section, flags):
        given = {name: parse_key(name, value) for name, value in source.items() if value is not None}
        values = rules.override(values, given)
    values.pop(_SWITCH, None)
    rules.check(values)
    return True, values


def export(values: Mapping[str, Any]) -> dict[str, str]:
    """The variables that carry ``values`` to the workers."""
    variables = {ENABLED: "true", "ACCELERATE_USE_FSDP": "true"}
    for name, value in values.items():
        key = KEYS[name]
        if value is None:
            continue
        if key.kind is Kind.NAMES:
            variables[key.env] = ",".join(value)
        else:
            variables[key.env] = str(value).lower() if isinstance(value, bool) else str(value)
    # transformers reads this one by itself while it loads weights.
    variables.setdefault("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    variables.setdefault("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    return variables


def _read_config(args: argparse.Namespace) -> Any:
    """The configuration that the stock launcher will read, or None where it will read none."""
    from accelerate.commands.config import default_config_file, load_config_from_file

    if args.config_file is None and not os.path.isfile(default_config_file):
        return None
    return load_config_from_file(args.config_file)


def wrap_validate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Resolves our settings before accelerate's own checks, and turns the launch into a sharded one."""

    @functools.wraps(original)
    def validate(args: argparse.Namespace) -> Any:
        flags = {name: getattr(args, name) for name in KEYS if name in getattr(args, "nondefault", ())}
        try:
            config = _read_config(args)
        except Exception as error:
            if flags.get(_SWITCH) is None:
                raise
            raise LaunchError(error) from None
        try:
            section = getattr(config, "fsdp_config", None) or {}
            enabled, values = collect(flags, section, os.environ)
            if not enabled:
                if ENABLED in os.environ:
                    os.environ[ENABLED] = "false"
                return original(args)
            _check_launch(args, config)
        except SettingsError as error:
            raise LaunchError(error) from None
        _turn_into_sharded_launch(args, config)
        result = original(args)
        _settle_devices(args)
        args.ya_fsdp_values = values
        return result

    return validate


def _check_launch(args: argparse.Namespace, config: Any) -> None:
    for name in _OTHER_ENGINES:
        if getattr(args, name, False):
            raise SettingsError(f"--{name} and --{_SWITCH} ask for two engines; leave one out")
    kind = str(getattr(getattr(config, "distributed_type", None), "value", "NO"))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA", "TPU"):
        raise SettingsError(f"distributed_type: {kind} and {_SWITCH} ask for two engines; set distributed_type: FSDP")
    if args.use_parallelism_config or getattr(config, "parallelism_config", None):
        raise SettingsError("parallelism_config is not supported together with ya-fsdp; remove it")
    count = args.num_processes if args.num_processes is not None else getattr(config, "num_processes", None)
    if count is not None and int(count) < 1:
        raise SettingsError(f"num_processes: {count} is not a number of processes; give hosts times devices per host")
    script = args.training_script
    if not args.module and not args.no_python and not os.path.isfile(script):
        raise SettingsError(f"the training script {script!r} does not exist (looked in {os.getcwd()})")


def _turn_into_sharded_launch(args: argparse.Namespace, config: Any) -> None:
    """Sets what stock accelerate looks at, so that it starts workers the way it does for its own FSDP."""
    if args.cpu or getattr(config, "use_cpu", False):
        os.environ["ACCELERATE_USE_CPU"] = "true"
    args.cpu = args.multi_gpu = False
    args.use_fsdp = True
    # Strings are truthy in the stock consistency check, "false" too; ours has been done.
    args.fsdp_cpu_ram_efficient_loading = False
    if args.num_processes is None and config is None:
        import torch

        args.num_processes = torch.cuda.device_count() or 1
    if config is not None and args.config_file is None:
        sys.stderr.write("ya-fsdp: no --config_file given, using the default one of `accelerate config`\n")


def _settle_devices(args: argparse.Namespace) -> None:
    on_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true" or not accelerator_available()
    local = max(1, int(args.num_processes or 1) // max(1, int(args.num_machines or 1)))
    if on_cpu:
        if "OMP_NUM_THREADS" not in os.environ and "num_cpu_threads_per_process" not in getattr(args, "nondefault", ()):
            args.num_cpu_threads_per_process = max(1, (os.cpu_count() or 1) // local)
        return
    import torch

    devices = torch.cuda.device_count()
    if torch.cuda.is_available() and local > devices and getattr(args, "gpu_ids", "all") in (None, "all"):
        raise LaunchError(f"num_processes: {local} processes per host were asked for, and this host has {devices} GPUs")


def wrap_environment(original: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
    """Replaces accelerate's fixed list of exported keys by our resolved values."""

    @functools.wraps(original)
    def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
        values = getattr(args, "ya_fsdp_values", None)
        if values is None:
            return original(args)
        args.fsdp_cpu_ram_efficient_loading = False
        environment = original(args)
        for name in [name for name in environment if name.startswith("FSDP_")]:
            del environment[name]
        environment.update(export(values))
        _run_through_us_if_needed(args)
        return environment

    return prepare_multi_gpu_env


def _run_through_us_if_needed(args: argparse.Namespace) -> None:
    """Without installed start-up files, workers start through ``python -m accelerate_plugin run``."""
    from accelerate_plugin import startup

    if startup.started_by_interpreter or args.no_python:
        return
    how = ["-m", args.training_script] if args.module else [args.training_script]
    args.training_script_args = ["run", *how, *args.training_script_args]
    args.training_script, args.module = "accelerate_plugin", True
