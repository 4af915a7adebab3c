"""``python -m accelerate_plugin launch ...``: ``accelerate launch`` with the hooks, start-up files or not.

``python -m accelerate_plugin run SCRIPT ...`` (or ``run -m MODULE ...``) runs a script in this process with the hooks.
``python -m accelerate_plugin merge CHECKPOINT OUT`` writes a sharded checkpoint as an ordinary model.
"""

import os
import runpy
import sys

from accelerate_plugin import install

_USAGE = """usage: python -m accelerate_plugin launch [arguments of accelerate launch]
       python -m accelerate_plugin run SCRIPT [arguments]
       python -m accelerate_plugin merge CHECKPOINT OUT [--max-shard-size SIZE]"""


def _launch(arguments: list[str]) -> None:
    from accelerate.commands import launch

    parser = launch.launch_command_parser()
    launch.launch_command(parser.parse_args(arguments))


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["-m"]:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    # As Python does for a script; our own place, which may have been the working directory, must stay reachable.
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    if here not in sys.path:
        sys.path.append(here)
    runpy.run_path(arguments[0], run_name="__main__")


def _merge(arguments: list[str]) -> None:
    from accelerate_plugin import merge

    merge.main(arguments)


def main() -> None:
    """Entry point of the module."""
    commands = {"launch": _launch, "run": _run, "merge": _merge}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(_USAGE)
    install()
    commands[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
