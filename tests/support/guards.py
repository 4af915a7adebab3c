"""Guards against tests that pass because nothing was sharded, and comparisons that name what differs."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.engines import FSDP2, local
from tests.support.recorder import GATHER, REDUCE_SCATTER, CollectiveRecorder

#: Largest part of the model that one of two ranks may hold.
MAX_SHARE = 0.6


def assert_really_sharded(model: nn.Module, recorder: CollectiveRecorder | None, engine: str) -> None:
    """Check that a run was sharded and did communicate (collective).

    Args:
        model: The sharded model.
        recorder: What one training step sent, or None if only the model is to be looked at.
        engine: Name of the engine that should manage the model.

    Raises:
        AssertionError: With the rank and the parameter.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    where = f"rank {rank} of {world_size}"
    kind = _parameter_type(engine)
    counts, expected, names = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert isinstance(parameter, kind), f"{where}: {name} is a {type(parameter).__name__}, expected {kind.__name__}"
        counts.append(local(parameter).numel())
        expected.append(parameter.numel())
        names.append(name)
    assert counts, f"{where}: the model has no trainable parameter"
    total = torch.tensor(counts)
    dist.all_reduce(total)
    for name, found, want in zip(names, total.tolist(), expected, strict=True):
        assert found == want, f"{where}: the shards of {name} hold {found} elements together, the parameter has {want}"
    share = sum(counts) / sum(expected)
    if world_size > 1 and sum(expected) >= 100 * world_size:
        # A handful of elements may lie on one rank; more are split evenly, up to small tensors and padding.
        limit = MAX_SHARE * 2 / world_size
        assert share <= limit, f"{where}: holds {share:.0%} of the model, expected at most {limit:.0%}"
    if recorder is not None and world_size > 1:  # alone, an engine may copy instead
        assert recorder.count(GATHER) >= 1, f"{where}: no gather was seen"
        assert recorder.count(REDUCE_SCATTER) >= 1, f"{where}: no reduce-scatter was seen"


def _parameter_type(engine: str) -> type:
    if engine == FSDP2:
        return DTensor
    from ya_fsdp import RaggedShardDTensor

    return RaggedShardDTensor


def assert_same_values(
    actual: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    what: str,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> None:
    """Compare tensors by name; the default asks for equal bits. Differing keys, shapes and dtypes fail too."""
    assert list(actual) == list(expected), f"{what}: keys are {list(actual)}, expected {list(expected)}"
    for name, want in expected.items():
        found = actual[name]
        if want is None or found is None:
            assert want is None, f"{what}: {name} is None, expected a tensor"
            assert found is None, f"{what}: {name} is a tensor, expected None"
            continue
        torch.testing.assert_close(
            found, want, atol=atol, rtol=rtol, msg=lambda text, name=name: f"{what}: {name}: {text}"
        )


def assert_same_numbers(actual: list[float], expected: list[float], what: str, *, atol: float = 0.0) -> None:
    """Compare lists of numbers within an absolute tolerance; the default asks for equality."""
    assert len(actual) == len(expected), f"{what}: {len(actual)} values, expected {len(expected)}"
    for step, (found, want) in enumerate(zip(actual, expected, strict=True)):
        assert abs(found - want) <= atol, f"{what} at step {step}: {found!r}, expected {want!r} within {atol:g}"


def assert_same_on_all_ranks(value: float, what: str) -> None:
    """Check that every rank has the same bits (collective)."""
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert len(set(values)) == 1, f"{what} differs between ranks: {values}"
