"""What runs when an interpreter starts: a guard that costs microseconds, and the registration behind it.

Only the standard library may be imported here before the guard has decided. The guard lets two kinds of process
through: ``accelerate`` itself, which needs our flags, and any process whose environment asks for the engine.
"""

import os
import sys

__all__ = [
    "ENABLED",
    "FALSE_WORDS",
    "KILL_SWITCH",
    "TRUE_WORDS",
    "is_launcher",
    "main",
    "register_hooks",
    "requested",
    "started_by_interpreter",
]

ENABLED = "FSDP_YA_FSDP_ENABLED"
KILL_SWITCH = "YA_FSDP_DISABLE"
TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0", "", "none", "null"})

_SCRIPTS = ("accelerate", "accelerate.exe", "accelerate-launch", "accelerate-launch.exe", "accelerate_cli.py")

# True where Python itself called `main`, which means that the start-up files are installed for this interpreter.
started_by_interpreter = False
_registered = False


def _is_false(value: str) -> bool:
    return value.strip().lower() in FALSE_WORDS


def requested() -> bool:
    """Whether this process's environment asks for the engine.

    A value that is neither true nor false counts as asking, so that it ends in an error that names it rather than in a
    run without the engine.
    """
    return not _is_false(os.environ.get(ENABLED, "")) and not _killed()


def _killed() -> bool:
    return not _is_false(os.environ.get(KILL_SWITCH, ""))


def is_launcher() -> bool:
    """Whether this process was started as ``accelerate``: the script, the module, or ours in its place."""
    words = [os.path.basename(word) for word in sys.orig_argv[1:8]]
    if "accelerate_plugin" in words:
        return "launch" in words
    return any(word in _SCRIPTS or word.startswith("accelerate.commands") for word in words)


def main() -> None:
    """Called at interpreter start. Never raises."""
    global started_by_interpreter
    started_by_interpreter = True
    try:
        if not _killed() and (requested() or is_launcher()):
            register_hooks()
    except Exception as error:
        # Silence would end in a run on another engine than the one asked for.
        if requested():
            sys.stderr.write(f"ya-fsdp: {ENABLED} is set, but the start-up hooks could not be installed: {error!r}\n")


def register_hooks() -> None:
    """Registers the post-import hooks on accelerate, transformers and torch, once per process."""
    global _registered
    if _registered:
        return
    import importlib

    from wrapt import register_post_import_hook

    # By name: this file lies below all others, which ask it whether the engine is wanted.
    compat = importlib.import_module("accelerate_plugin.compat")
    _registered = True
    if requested() and not is_launcher():
        # transformers reads these when it loads weights, long before an Accelerator exists.
        os.environ.setdefault("ACCELERATE_USE_FSDP", "true")
        os.environ.setdefault("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    for module in compat.hooked_modules():
        register_post_import_hook(compat.apply, module)
