"""Forward passes without a backward: evaluation, repeated evaluation, training afterwards."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.engines import full, shard
from tests.support.guards import assert_same_values
from tests.support.models import MlpStack, OddModel, float_batches, my_rows
from tests.support.recorder import GATHER, CollectiveRecorder


def gathered_names(model):
    return [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


def evaluate_twice():
    features = float_batches(1, width=5)[0]
    expected = OddModel()(features).detach()
    for reshard_after_forward in (True, False, None):
        model = OddModel()
        shard(model, units=list(model.blocks), reshard_after_forward=reshard_after_forward)
        model.eval()
        for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            for _ in range(2):
                with context():
                    output = model(features)
                torch.testing.assert_close(output.detach().clone(), expected, atol=1e-6, rtol=0)
                if reshard_after_forward:
                    assert gathered_names(model) == [], f"{context.__name__}: still gathered after forward"


def test_root_with_parameters_evaluates_twice_in_a_row(on_ranks):
    on_ranks(2, evaluate_twice)


def root_follows_the_option():
    features = float_batches(1, width=5)[0]
    for option, names in ((True, []), (None, ["scale", "shift"]), (False, ["scale", "shift"])):
        model = OddModel()
        for block in model.blocks:
            shard(block, units=[])
        shard(model, units=[], reshard_after_forward=option)
        model(features)
        assert gathered_names(model) == names, f"reshard_after_forward={option} on the root"


def test_root_keeps_its_parameters_only_if_not_told_otherwise(on_ranks):
    on_ranks(2, root_follows_the_option)


def train_after_evaluation():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = float_batches(3)
    plain = MlpStack()
    plain(batches[0]).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for reshard_after_forward in (True, False):
        model = MlpStack()
        shard(model, units=list(model.blocks), reshard_after_forward=reshard_after_forward)
        parameters = dict(model.named_parameters())  # what an optimizer holds
        for _ in range(2):
            with torch.no_grad():
                model(batches[1])
            model(batches[2])  # with a graph that is dropped
            model(my_rows(batches[0], rank, world_size)).square().mean().backward()
            with torch.no_grad():
                model(batches[1])
            found = {name: full(parameter.grad) for name, parameter in parameters.items()}
            assert_same_values(found, expected, f"reshard_after_forward={reshard_after_forward}", atol=1e-6)
            for parameter in parameters.values():
                parameter.grad = None


def test_evaluation_between_training_steps_changes_nothing(on_ranks):
    on_ranks(2, train_after_evaluation)


def count_gathers():
    model = MlpStack()
    shard(model, units=list(model.blocks), reshard_after_forward=True)
    for _ in range(2):
        with torch.no_grad(), CollectiveRecorder() as recorder:
            model(float_batches(1)[0])
        assert [event.kind for event in recorder.events] == [GATHER] * 3


def test_evaluation_gathers_each_unit_once_and_reduces_nothing(on_ranks):
    on_ranks(2, count_gathers)
