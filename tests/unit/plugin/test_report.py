"""What rank 0 prints about recomputation."""

import pytest
from torch import nn

from accelerate_plugin.report import describe_checkpointing


@pytest.mark.parametrize(
    ("own", "count", "line"),
    [
        (False, 0, "0 blocks run forward again in backward"),
        (False, 3, "3 blocks run forward again in backward"),
        (True, 0, "none by the engine; the model's own is switched on"),
    ],
)
def test_the_report_says_who_recomputes(own: bool, count: int, line: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].gradient_checkpointing = own  # where transformers keeps its switch
    assert describe_checkpointing(model, count) == line
