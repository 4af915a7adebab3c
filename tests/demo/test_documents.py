"""What the documents say is true: files they link to exist, keys and targets they name exist, their code runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_plugin.keys import KEYS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")],
    key=lambda document: document.as_posix(),
)


def test_the_documents_that_a_reader_starts_from_are_there() -> None:
    names = {document.relative_to(ROOT).as_posix() for document in DOCUMENTS}
    assert {"README.md", "CHANGELOG.md", "examples/clm.md", "examples/sft.md", "docs/index.md"} <= names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_to_files_of_the_repository(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    missing = [link for link in local if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_keys_and_make_targets_named_in_it_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    keys = {
        key
        for key in re.findall(r"(?<![.\w])fsdp_[a-z_]+[a-z]\b", text)
        if not (ROOT / "configs" / f"{key}.yaml").exists()
    }
    torch_hooks = {"fsdp_pre_all_gather", "fsdp_post_all_gather", "fsdp_plugin", "fsdp_config"}
    assert keys - torch_hooks <= set(KEYS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets


@pytest.mark.slow
def test_the_python_code_of_the_readme_trains_on_two_processes(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    script = tmp_path / "your_file.py"
    script.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < 0.7 * losses[0]
