"""The migration guide: every snippet runs, what it moves over trains alike, and no argument is left out."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import ya_fsdp

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "migration_guide.md").read_text(encoding="utf-8")
SETUP = "The model of the examples"


@dataclass(frozen=True)
class Snippet:
    """A block of Python, the section it stands in, and whether it is a ``Before``, an ``After`` or neither."""

    section: str
    label: str
    line: int
    code: str


def snippets() -> list[Snippet]:
    found, section, label = [], "", ""
    lines = GUIDE.splitlines()
    start = None
    for number, line in enumerate(lines):
        if start is not None:
            if line == "```":
                found.append(Snippet(section, label, start + 1, "\n".join(lines[start:number]) + "\n"))
                start, label = None, ""
        elif line.startswith("## "):
            section, label = line.removeprefix("## "), ""
        elif match := re.match(r"(Before|After):", line):
            label = match.group(1)
        elif line == "```python":
            start = number + 1
    assert start is None, "a block is not closed"
    return found


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", GUIDE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def train(model: Any, tokens: torch.Tensor, loss_of: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = loss_of(model, tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(found: list[Snippet]) -> dict[tuple[str, str], list[float]]:
    """Run each snippet behind the set-up; return the losses of those that stand before or after a move."""
    setup = next(snippet for snippet in found if snippet.section == SETUP)
    losses = {}
    for snippet in found:
        namespace: dict[str, Any] = {}
        for part in (setup, snippet):
            # Line numbers are those of the guide, so that a traceback points into it.
            exec(compile("\n" * (part.line - 1) + part.code, "docs/migration_guide.md", "exec"), namespace)
        if snippet.label:
            model, tokens, loss_of = (namespace[name] for name in ("model", "tokens", "loss_of"))
            losses[snippet.section, snippet.label] = train(model, tokens, loss_of)
    return losses


def test_every_snippet_runs_and_what_is_moved_over_trains_alike(on_ranks: Any) -> None:
    found = snippets()
    assert len(found) == GUIDE.count("```python") >= 10
    for losses in on_ranks(2, run, found, limit=120.0):
        assert {section for section, _ in losses} == {"From FSDP1", "From FSDP2", "From YaFSDP"}
        for section in {section for section, _ in losses}:
            before, after = losses[section, "Before"], losses[section, "After"]
            assert before == pytest.approx(after, abs=1e-3), f"{section}: {before} and {after}"
            assert after[-1] < after[0]


def rows(section: str) -> str:
    """Return the first column of the tables of a section."""
    return "\n".join(line.split(" | ")[0] for line in sections()[section].splitlines() if line.startswith("| "))


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("From FSDP1", list(inspect.signature(FullyShardedDataParallel).parameters)),
        ("From FSDP2", list(inspect.signature(fsdp2_fully_shard).parameters)),
        ("From FSDP2", [name for name in vars(FSDPModule) if not name.startswith("_")]),
        ("From YaFSDP", list(inspect.signature(ya_fsdp.YaFSDP).parameters)),
    ],
    ids=["FSDP1", "FSDP2", "methods", "YaFSDP"],
)
def test_no_argument_and_no_method_is_left_out(section: str, names: list[str]) -> None:
    assert [name for name in names if f"`{name}`" not in rows(section)] == []


def test_arguments_of_this_engine_that_others_have_not_are_named() -> None:
    own = set(inspect.signature(ya_fsdp.fully_shard).parameters) - set(inspect.signature(fsdp2_fully_shard).parameters)
    assert own == {"shard_alignment", "backend"}
    assert [name for name in own if f"`{name}`" not in sections()["From FSDP2"]] == []


def test_switches_called_refused_are_refused() -> None:
    refused = {
        name
        for line in sections()["From FSDP2"].splitlines()
        if "| refused" in line
        for name in re.findall(r"`(set_\w+)`", line.split(" | ")[0])
    }
    assert len(refused) == 7
    for name in refused:
        with pytest.raises(NotImplementedError, match=name):
            getattr(ya_fsdp.YaFSDPModule, name)(torch.nn.Linear(1, 1))
