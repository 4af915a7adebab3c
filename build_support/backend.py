"""Build backend: setuptools, and the interpreter start-up files at the top level of every wheel.

accelerate has no plug-in point, so the package must be able to run a little code when an interpreter starts. Python
looks for that only in ``*.pth`` (and, from 3.15 on, ``*.start``) files that lie directly in ``site-packages``.
setuptools has no option for such files that also works for editable installs, and a wheel is a zip file with a list of
its contents, so the files are added to the finished wheel. One function serves ``pip install .``, ``pip install -e .``
and wheels made from the source distribution.

Both files carry the same base name on purpose: where Python knows ``.start`` files it ignores the ``import`` line of
the ``.pth`` file of that name, so the start-up code runs once, never twice.
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

STARTUP_FILES = ("ya_fsdp_startup.pth", "ya_fsdp_startup.start")


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Builds an ordinary wheel with the start-up files in it."""
    name = _setuptools.build_wheel(wheel_directory, config_settings, metadata_directory)
    _add_startup_files(Path(wheel_directory, name))
    return name


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Builds an editable wheel with the start-up files in it."""
    name = _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)
    _add_startup_files(Path(wheel_directory, name))
    return name


def _record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def _add_startup_files(wheel: Path) -> None:
    """Rewrites the wheel with the start-up files added and listed in its RECORD."""
    added = {name: Path(__file__).with_name(name).read_bytes() for name in STARTUP_FILES}
    rewritten = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(rewritten, "w", zipfile.ZIP_DEFLATED) as target:
        record = next(info for info in source.infolist() if info.filename.endswith(".dist-info/RECORD"))
        for info in source.infolist():
            if info.filename != record.filename:
                target.writestr(info, source.read(info))
        lines = source.read(record).decode()
        for name, content in added.items():
            # The record's timestamp keeps builds reproducible where SOURCE_DATE_EPOCH is set.
            entry = zipfile.ZipInfo(name, date_time=record.date_time)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(entry, content)
            lines += _record_line(name, content)
        target.writestr(record, lines)
    os.replace(rewritten, wheel)
