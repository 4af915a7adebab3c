"""A wheel, an editable wheel and a wheel made from the source distribution all carry the start-up files."""

import base64
import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", "77")
ROOT = Path(__file__).parents[3]
STARTUP = ("ya_fsdp_startup.pth", "ya_fsdp_startup.start")


def build(kind: str, source: Path, target: Path) -> Path:
    code = f"import backend; print(backend.build_{kind}({str(target)!r}))"
    environment = {**os.environ, "PYTHONPATH": str(source / "build_support")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return target / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked: building in the checkout itself would leave files in it."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "copy"
    copy.mkdir()
    for name in (
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "build_support",
        "accelerate_plugin",
        "ya_fsdp",
    ):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True)
    archive = build("sdist", copy, folder)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.name.startswith("ya_fsdp-") and path.is_dir())


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_start_up_files_lie_at_the_top_of_the_wheel_and_in_its_record(kind: str, sources: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(kind, sources, tmp_path)) as wheel:
        names = wheel.namelist()
        assert len(names) == len(set(names))
        record = wheel.read(next(name for name in names if name.endswith("RECORD"))).decode()
        for name in STARTUP:
            content = (ROOT / "build_support" / name).read_bytes()
            assert wheel.read(name) == content
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert f"{name},sha256={digest},{len(content)}\n" in record
            assert record.count(name) == 1
        if kind == "wheel":
            assert {"ya_fsdp/__init__.py", "accelerate_plugin/startup.py", "ya_fsdp/py.typed"} <= set(names)
            assert not [name for name in names if name.startswith(("tests", "build_support", "docs"))]
        else:
            paths = [name for name in names if name.startswith("__editable__")]
            assert [Path(name).suffix for name in paths] == [".pth"], "an import finder would slow every start"
