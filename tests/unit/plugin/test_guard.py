"""A run that asked for the engine and does not use it stops at its first optimizer step."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STEP = """
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1)
optimizer.step()
print('stepped')
"""


def run(before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    code = f"import accelerate_plugin\n{before}\nimport torch\n{STEP}"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "PATH": "", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("order", ["accelerate_plugin.install()", "import torch; accelerate_plugin.install()"])
def test_a_plain_optimizer_step_is_stopped_with_the_reason_and_the_way_out(order: str) -> None:
    result = run(order, FSDP_YA_FSDP_ENABLED="true")
    assert result.returncode != 0
    assert "stepped" not in result.stdout
    assert (
        "ya-fsdp was asked for (FSDP_YA_FSDP_ENABLED is set) but is not active: SGD is about to step" in result.stderr
    )
    assert "--fsdp_ya_fsdp_enabled" in result.stderr


@pytest.mark.parametrize(
    "variables", [{}, {"FSDP_YA_FSDP_ENABLED": "false"}, {"FSDP_YA_FSDP_ENABLED": "1", "YA_FSDP_DISABLE": "1"}]
)
def test_a_run_that_did_not_ask_is_left_alone(variables: dict[str, str]) -> None:
    result = run("accelerate_plugin.install()", **variables)
    assert (result.returncode, result.stdout) == (0, "stepped\n")
