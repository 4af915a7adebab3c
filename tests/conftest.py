"""Fixtures shared by all tests: pools of rank processes, kept alive across tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.pool import RankPools

# How long one example takes says nothing on a busy machine.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """Pools of rank processes, one per world size."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def on_ranks(rank_pools: RankPools) -> Callable[..., list[Any]]:
    """``on_ranks(world_size, job, *args, limit=60.0)`` runs an importable function on every rank of a gloo group."""
    return rank_pools.run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that need large pools last: pools of 1 and 2 ranks fit side by side, a larger one pushes others out."""

    def pool_size(item: pytest.Item) -> int:
        if "rank_pools" not in getattr(item, "fixturenames", ()):
            return 0
        callspec = getattr(item, "callspec", None)
        world = callspec.params.get("world") if callspec is not None else None
        return max(2, world) if isinstance(world, int) else 2

    items.sort(key=pool_size)
