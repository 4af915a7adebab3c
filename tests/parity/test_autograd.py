"""Whatever autograd can be asked for gives the numbers of one process, in fp64 to nine digits.

Each case runs a backward from a model and rows of a batch. Losses are means over rows, so the average over ranks of
what each rank gets from its own rows is what one process gets from all.
"""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.autograd import Model, compare, mean_square, rows_of, sharded
from tests.support.engines import ENGINE, FSDP2, full, full_gradients
from tests.support.guards import assert_same_values
from tests.support.models import Mlp, float_batches
from tests.support.recorder import GATHER, REDUCE_SCATTER, CollectiveRecorder

beyond_fsdp2 = pytest.mark.skipif(ENGINE == FSDP2, reason="PyTorch's engine cannot do this")


# ---- outputs, graphs and inputs ------------------------------------------------------------------------------------


class InPlace(Model):
    def forward(self, x):
        x = torch.tanh_(self.first(x))
        for block in self.blocks:
            x = block(x)
            x.mul_(1.1)
            x += 0.1
            torch.tanh_(x)
        return self.head(x)


@dataclass(frozen=True)
class Boxed:
    """What no pytree knows."""

    value: torch.Tensor
    extra: object = None


class BoxedMlp(Mlp):
    def forward(self, box):
        y = super().forward(box.value)
        return replace(box, value=y, extra={"twice": [y * 2, (torch.tanh(y), "text")], "inner": Boxed(y + 1)})


class Boxes(Model):
    def __init__(self):
        super().__init__(BoxedMlp)

    def forward(self, x):
        box = Boxed(torch.tanh(self.first(x)))
        for block in self.blocks:
            box = block(box)
            twice = box.extra["twice"]
            box = Boxed(box.value + twice[0] + twice[1][0] + box.extra["inner"].value)
        return self.head(box.value)


class Nested(Model):
    def forward(self, x):
        return {"out": [super().forward(x), None], "input": (x, 3)}


class Stashing(Mlp):
    """Keeps what it computed on the way, and what a layer of its own makes of it."""

    def __init__(self, width, hidden):
        super().__init__(width, hidden)
        self.side = nn.Linear(hidden, 2)

    def forward(self, x):
        self.hidden = torch.tanh(self.up(x))
        self.logits = self.side(self.hidden)
        return x + self.down(self.hidden)


class Repeated(Model):
    """Runs its blocks several times over."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def plain_loss(model, rows):
    mean_square(model(rows)).backward()


def nested_loss(model, rows):
    mean_square(model(rows)["out"][0]).backward()


def stashed_loss(model, rows):
    loss = mean_square(model(rows))
    for block in model.blocks:
        loss = loss + mean_square(block.hidden) + mean_square(block.logits)
    loss.backward()
    for block in model.blocks:
        del block.hidden, block.logits


def hooked_loss(model, rows):
    """A loss on what hooks caught inside of units."""
    seen = []
    handles = [block.up.register_forward_hook(lambda _, args, out: seen.append(out)) for block in model.blocks]
    out = model(rows)
    for handle in handles:
        handle.remove()
    (mean_square(out) + sum(mean_square(each) for each in seen)).backward()


def two_backwards(model, rows):
    loss = mean_square(model(rows.clone().requires_grad_()))
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def partial_backwards(model, rows):
    """Two losses over one graph, one after the other."""
    out = model(rows.clone().requires_grad_())
    mean_square(out[:, 0]).backward(retain_graph=True)
    mean_square(out[:, 1]).backward()


def inputs_first(model, rows):
    """The input's gradient alone, then a step on the input that it gives, as adversarial training does."""
    rows = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mean_square(model(rows)), rows)
    mean_square(model((rows + 0.1 * slope.sign()).detach())).backward()


def inputs_and_parameters(model, rows):
    rows = rows.clone().requires_grad_()
    loss = mean_square(model(rows))
    torch.autograd.grad(loss, rows, retain_graph=True)
    loss.backward()


def three_forwards(model, rows):
    sum(mean_square(model(rows * factor)) * factor for factor in (1.0, 0.5, 2.0)).backward()


@pytest.mark.parametrize(
    ("build", "backward"),
    [
        (InPlace, plain_loss),
        (Boxes, plain_loss),
        (Nested, nested_loss),
        (partial(Repeated, 2), plain_loss),
        (partial(Model, Stashing), stashed_loss),
        (Model, hooked_loss),
        (Model, two_backwards),
        (Model, partial_backwards),
        (Model, inputs_first),
        (Model, inputs_and_parameters),
        (Model, three_forwards),
    ],
)
def test_gradients_equal_one_process(on_ranks, build, backward):
    on_ranks(2, compare, build, backward)


def check_inputs_only():
    model = sharded(Model, reshard_after_forward=True)
    rows = rows_of(float_batches(1)[0].double()).requires_grad_()
    with CollectiveRecorder() as recorder:
        (found,) = torch.autograd.grad(mean_square(model(rows)), rows)
    plain = Model().double()
    (expected,) = torch.autograd.grad(mean_square(plain(rows)), rows)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert recorder.count(REDUCE_SCATTER) == 0, "nothing was to be reduced"
    assert recorder.count(GATHER) > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_gradient_of_the_input_alone_reduces_nothing(on_ranks):
    on_ranks(2, check_inputs_only)


# ---- what cannot be right is refused -------------------------------------------------------------------------------


class Hidden:
    """Not a container, not a dataclass."""

    def __init__(self, value):
        self.value = value


class HidingMlp(Mlp):
    def forward(self, x):
        return Hidden(super().forward(x.value if isinstance(x, Hidden) else x))


class Hides(Model):
    def __init__(self):
        super().__init__(HidingMlp)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.value)


def stash_alone(index, model, rows):
    model(rows)
    mean_square(model.blocks[index].hidden).backward()


def check_refusal(build, backward, name):
    """The error names the parameters, and training goes on behind it as if nothing had happened."""
    model = sharded(build)
    batch = float_batches(1)[0].double()

    def twice():  # what reaches no hook of the engine is found out at the next forward
        backward(model, rows_of(batch))
        backward(model, rows_of(batch))

    with pytest.raises(RuntimeError, match=f"{name}.*past the outputs of the unit.*a unit of its own with fully_shard"):
        twice()
    if build is Hides:
        return
    model.zero_grad()
    plain = build().double()
    plain_loss(plain, batch)
    plain_loss(model, rows_of(batch))
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same_values(full_gradients(model), expected, "gradients afterwards", atol=1e-9)


@beyond_fsdp2
@pytest.mark.parametrize(
    ("build", "backward", "name"),
    [
        (partial(Model, Stashing), partial(stash_alone, 2), "blocks.2"),
        (partial(Model, Stashing), partial(stash_alone, 0), "blocks.0"),
        (Hides, plain_loss, "blocks.[012]"),
    ],
)
def test_a_loss_on_what_a_unit_did_not_return_is_refused(on_ranks, build, backward, name):
    on_ranks(2, check_refusal, build, backward, name)


# ---- parameters frozen and unfrozen --------------------------------------------------------------------------------


def check_flips():
    """Parts, whole units and the whole model change between frozen and trainable in the middle of a run."""
    plain, model = Model().double(), sharded(Model)
    batch = float_batches(1)[0].double()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    flips = [
        {},
        {"blocks.0.up.weight": False},
        {"blocks.0": False, "first": False},
        {"": False, "blocks.1": True},
        {"": True, "head": False},
        {"": True},
    ]
    for step, flip in enumerate(flips):
        for each, rows in ((plain, batch), (model, rows_of(batch))):
            for prefix, is_trainable in flip.items():
                for name, parameter in each.named_parameters():
                    if name.startswith(prefix):
                        parameter.requires_grad_(is_trainable)
            plain_loss(each, rows)
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_same_values(full_gradients(model), expected, f"gradients of step {step}", atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = {name: full(parameter) for name, parameter in model.named_parameters()}
        expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
        assert_same_values(found, expected, f"weights of step {step}", atol=1e-9)


def test_parameters_may_be_frozen_and_unfrozen_between_steps(on_ranks):
    on_ranks(2, check_flips)
