"""Parameters with gather hooks of their own: what travels, when the hooks run, and that training equals one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.eight_bits import OneScale, RoundedLinear, ScalePerRank, Wrapped
from tests.support.guards import assert_same_numbers, assert_same_values
from tests.support.models import my_rows
from tests.support.recorder import GATHER, CollectiveRecorder
from tests.support.training import adamw, mean_over_ranks
from ya_fsdp import MixedPrecisionPolicy, RaggedShardDTensor, fully_shard, get_full_state_dict, load_full_state_dict

SIZES = [(12, 20), (20, 13), (13, 12)]  # 13 rows do not divide evenly


class Mlp(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(linear(*size) for size in SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batches(count: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, SIZES[0][0], generator=generator) for _ in range(count)]


def sharded(kind: type[Wrapped], **options: object) -> Mlp:
    model = Mlp(nn.Linear)
    for layer in model.layers:
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(kind: type[Wrapped], mapped: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    RoundedLinear.num_scales = 1 if kind is OneScale else world_size
    plain = Mlp(RoundedLinear)
    policy = MixedPrecisionPolicy(all_gather_dtype_to_param_cls={torch.int8: kind} if mapped else {})
    model = sharded(kind, mp_policy=policy)
    expected, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    weight = model.layers[0].weight
    assert isinstance(weight, RaggedShardDTensor)
    assert isinstance(weight._local_tensor, kind)
    assert weight.shape == (20, 12)
    losses: tuple[list[float], list[float]] = ([], [])
    norms: tuple[list[float], list[float]] = ([], [])
    for batch in batches():
        loss = plain(batch).square().mean()
        loss.backward()
        losses[0].append(loss.item())
        norms[0].append(nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item())
        expected.step()
        expected.zero_grad()
        loss = model(my_rows(batch, rank, world_size)).square().mean()
        loss.backward()
        losses[1].append(mean_over_ranks(loss.detach()))
        norms[1].append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    assert_same_numbers(losses[1], losses[0], "loss", atol=1e-5)
    assert_same_numbers(norms[1], norms[0], "gradient norm", atol=1e-5)
    full = get_full_state_dict(model, rank0_only=False)
    assert_same_values(full, dict(plain.state_dict()), "weights", atol=1e-4)
    load_full_state_dict(model, {name: value * 2 for name, value in full.items()})
    again = get_full_state_dict(model, rank0_only=False)
    assert_same_values(again, {name: value * 2 for name, value in full.items()}, "loaded weights", atol=0)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", [OneScale, ScalePerRank])
def test_weights_that_travel_in_8_bits_train_like_one_process(on_ranks, kind, mapped):
    on_ranks(2, train, kind, mapped)


def test_four_ranks_of_which_one_has_fewer_rows(on_ranks):
    on_ranks(4, train, ScalePerRank, False)


def watch() -> None:
    model = sharded(OneScale, reshard_after_forward=True)
    x = batches(1)[0]
    for _ in range(2):
        OneScale.calls.clear()
        with CollectiveRecorder() as recorder:
            model(x).square().mean().backward()
        assert OneScale.calls.count("pre") == 2 * len(SIZES)
        assert OneScale.calls.count("post") == 2 * len(SIZES)
        bytes_sent = [event.num_bytes for event in recorder.of(GATHER) if event.dtype == torch.uint8]
        rows = {fan_out + fan_out % 2 for _, fan_out in SIZES}
        assert sorted(set(bytes_sent)) == sorted({(out + out % 2) * fan_in for fan_in, out in SIZES}), (
            bytes_sent,
            rows,
        )
        assert len(bytes_sent) == 2 * len(SIZES)
        for layer in model.layers:
            (group,) = [g for g in layer._get_fsdp_state().groups if g.params[0].name.endswith("weight")]
            assert group.params[0].extensions.all_gather_metadata is None
            held = [buffer.live_nbytes for buffer in group.buffers]
            assert held == [0] * len(held)
            full = group.params[0].unsharded_param
            assert full.untyped_storage().nbytes() == 0, "what the hook made is given back too"


def test_both_hooks_run_at_every_gather_bytes_travel_and_memory_returns(on_ranks):
    on_ranks(2, watch)


class OneHook(Wrapped):
    def fsdp_pre_all_gather(self, mesh):
        raise AssertionError("never called")


class WrongDtype(ScalePerRank):
    def fsdp_pre_all_gather(self, mesh):
        return (self.inner.half(),), None


def refuse() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(OneHook(layer.weight.detach()))
    with pytest.raises(ValueError, match="weight is a OneHook, which has no fsdp_post_all_gather"):
        fully_shard(layer)
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(Wrapped(layer.weight.detach()))
    with pytest.raises(ValueError, match="weight is a Wrapped, a tensor subclass that does not say"):
        fully_shard(layer)
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"wants to be gathered as torch\.int8"):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(all_gather_dtype_to_param_cls={torch.int8: nn.Parameter}))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(WrongDtype(layer.weight.detach()))
    policy = MixedPrecisionPolicy(all_gather_dtype_to_param_cls={torch.int8: WrongDtype})
    fully_shard(layer, mp_policy=policy)
    with pytest.raises(RuntimeError, match=r"weight: all_gather_dtype_to_param_cls .* returned \[torch.float16\]"):
        layer(torch.ones(2, 4))


def test_half_a_pair_of_hooks_and_wrong_dtypes_are_refused_by_name(on_ranks):
    on_ranks(2, refuse)
