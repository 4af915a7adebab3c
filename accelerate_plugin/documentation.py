"""Writes ``docs/accelerate.md`` from the tables that the plug-in itself uses.

``python -m accelerate_plugin.documentation > docs/accelerate.md``; a test holds the page to it.
"""

from accelerate_plugin.compat import REPLACEMENTS, TESTED
from accelerate_plugin.keys import documentation

__all__ = ["render"]

_HEAD = """# Under accelerate

Written by `python -m accelerate_plugin.documentation > docs/accelerate.md`; do not edit by hand.

`accelerate launch --config_file configs/fsdp_config.yaml --fsdp_ya_fsdp_enabled true SCRIPT ...` trains SCRIPT on
ya-fsdp. Without the flag, or with `false`, nothing of accelerate's behaviour changes. Where the workers are started by
something else (torchrun, SLURM) the environment variable `FSDP_YA_FSDP_ENABLED=true` asks for the engine, and every key
below is an environment variable in capitals. `YA_FSDP_DISABLE=1` switches the start-up hook off altogether.

## Keys

Each is a key of `fsdp_config` in the YAML file and a flag of `accelerate launch`. A flag beats the file, the file beats
the environment. Booleans may be spelled true, yes, on, 1 and so on, in any case. An unknown key, or a value that a key
does not take, is an error that names it; so is a known value that the engine cannot do, with the reason.

"""

_NAMES = """
## What is replaced at run time

Nothing of accelerate, transformers, trl or peft is changed on disk. When the engine is asked for, these names are
replaced as their modules are imported; each replacement calls the original for anything that the engine does not
manage.

| module | name | why |
|---|---|---|
"""


def render() -> str:
    """The whole page."""
    rows = [f"| `{item.module}` | `{item.name}` | {item.why} |" for item in REPLACEMENTS]
    versions = [
        f"| {name} | {first} | {'any' if last is None else f'below {last}'} |" for name, (first, last) in TESTED.items()
    ]
    tested = [
        "",
        "## Versions",
        "",
        "Packages that are installed in other versions stop the start with a message;",
        "`YA_FSDP_ALLOW_UNTESTED_VERSIONS=1` goes on regardless.",
        "",
        "| package | from | to |",
        "|---|---|---|",
    ]
    return _HEAD + documentation() + _NAMES + "\n".join([*rows, *tested, *versions]) + "\n"


if __name__ == "__main__":
    print(render(), end="")
