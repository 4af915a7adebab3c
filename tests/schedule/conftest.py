"""One helper process for all tests of the schedule: starting it costs seconds, a job milliseconds."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils import backend_registration

from tests.schedule.helper import Helper


@pytest.fixture(scope="session")
def schedule_helper() -> Iterator[Helper]:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot have an accelerator written in Python")
    helper = Helper()
    yield helper
    helper.close()


@pytest.fixture
def in_helper(schedule_helper: Helper) -> Callable[..., Any]:
    """``in_helper(job, *args)`` runs an importable function where the fake accelerator is."""
    return schedule_helper.run
