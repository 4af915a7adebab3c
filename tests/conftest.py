"""Fixtures shared by all tests: pools of rank processes, kept alive across tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.pool import RankPools


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
    """Run tests of the same world size together, since not all pools may be alive at once."""

    def world_size(item: pytest.Item) -> int:
        if "on_ranks" not in getattr(item, "fixturenames", ()):
            return 0
        callspec = getattr(item, "callspec", None)
        return callspec.params.get("world", 2) if callspec is not None else 2

    items.sort(key=world_size)
