"""Activation checkpointing around units and inside them, reentrant and not."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.support.engines import full_gradients, shard
from tests.support.guards import assert_same_values
from tests.support.models import Mlp, MlpStack, build_model, float_batches, my_rows, token_batches
from tests.support.recorder import GATHER, REDUCE_SCATTER, CollectiveRecorder
from tests.support.training import causal_loss


class CheckpointAround(MlpStack):
    """The model recomputes whole units."""

    reentrant = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedMlp(Mlp):
    """The unit recomputes its own inside."""

    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def inside_model():
    model = MlpStack()
    for block in model.blocks:
        block.__class__ = CheckpointedMlp
    return model


BUILDERS = {"around": CheckpointAround, "inside": inside_model}


def mean_gradients(batch):
    plain = MlpStack()
    plain(batch).square().mean().backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def check_small(where, reentrant):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    CheckpointAround.reentrant = CheckpointedMlp.reentrant = reentrant
    batch = float_batches(1)[0]
    expected = mean_gradients(batch)
    for reshard_after_forward in (True, False):
        model = BUILDERS[where]()
        shard(model, units=list(model.blocks), reshard_after_forward=reshard_after_forward)
        for step in range(2):
            # A reentrant checkpoint needs an input that requires gradients.
            rows = my_rows(batch, rank, world_size).clone().requires_grad_(reentrant)
            with CollectiveRecorder() as recorder:
                model(rows).square().mean().backward()
            what = f"{where}, reentrant={reentrant}, reshard_after_forward={reshard_after_forward}, step {step}"
            assert_same_values(full_gradients(model), expected, what, atol=1e-6)
            assert recorder.count(REDUCE_SCATTER) == 3, f"{what}: {recorder.count(REDUCE_SCATTER)} reduce-scatters"
            expected_gathers = 6 if reshard_after_forward else 3
            assert recorder.count(GATHER) == expected_gathers, f"{what}: {recorder.count(GATHER)} gathers"
            model.zero_grad()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_gradients_and_collectives_are_those_without_checkpointing(on_ranks, where, reentrant):
    on_ranks(2, check_small, where, reentrant)


def check_llama(reentrant):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = token_batches(1)[0]
    plain = build_model("llama")
    causal_loss(plain, tokens).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    model = build_model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    shard(model)
    causal_loss(model, my_rows(tokens, rank, world_size)).backward()
    assert_same_values(full_gradients(model), expected, f"reentrant={reentrant}", atol=1e-6)


def test_transformers_gradient_checkpointing_gives_the_same_gradients(on_ranks):
    for reentrant in (False, True):
        on_ranks(2, check_llama, reentrant)


def check_wrapper():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = float_batches(1)[0]
    for implementation in CheckpointImpl:
        model = MlpStack()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=implementation)
        shard(model, units=list(model.blocks), mp={"param_dtype": torch.float32})
        rows = my_rows(batch, rank, world_size).clone().requires_grad_(True)
        model(rows).square().mean().backward()
        found = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in full_gradients(model).items()}
        assert_same_values(found, mean_gradients(batch), str(implementation), atol=1e-6)


def test_checkpoint_wrapper_modules_can_be_units(on_ranks):
    on_ranks(2, check_wrapper)
