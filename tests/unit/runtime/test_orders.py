"""What is gathered ahead follows from the order in which units ran."""

import gc
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from ya_fsdp.runtime.schedule import ForwardOrder, PostForwardOrder


class Unit:
    """Something that can be referred to weakly."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def make_units(count: int) -> list[Unit]:
    return [Unit(f"unit {i}") for i in range(count)]


def run(order: ForwardOrder[Unit], units: Iterable[Unit]) -> None:
    for unit in units:
        order.record(unit)
    order.end()


def test_the_first_forward_has_no_forecast() -> None:
    order: ForwardOrder[Unit] = ForwardOrder()
    units = make_units(2)
    order.record(units[0])
    assert order.next_after(units[0]) is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_a_unit_is_followed_by_what_followed_its_last_run(indices: list[int]) -> None:
    order: ForwardOrder[Unit] = ForwardOrder()
    units = make_units(6)
    run(order, [units[i] for i in indices])
    for index, unit in enumerate(units):
        places = [place for place, i in enumerate(indices[:-1]) if i == index]
        expected = units[indices[places[-1] + 1]] if places else None
        assert order.next_after(unit) is expected


def test_the_forecast_is_that_of_the_last_whole_forward() -> None:
    order: ForwardOrder[Unit] = ForwardOrder()
    a, b, c = make_units(3)
    run(order, [a, b, c])
    order.record(a)
    assert order.next_after(a) is b, "the forward under way does not count yet"
    order.record(c)
    order.end()
    assert order.next_after(a) is c
    assert order.next_after(b) is None, "b did not run"


def test_a_forward_that_broke_off_leaves_the_forecast_alone() -> None:
    order: ForwardOrder[Unit] = ForwardOrder()
    a, b, c = make_units(3)
    run(order, [a, b, c])
    order.record(a)
    order.abandon()
    run(order, [a, b, c])
    assert [order.next_after(unit) for unit in (a, b, c)] == [b, c, None]


def test_orders_keep_no_unit_alive() -> None:
    forward: ForwardOrder[Unit] = ForwardOrder()
    post: PostForwardOrder[Unit] = PostForwardOrder()
    units = make_units(3)
    for unit in units:
        post.record(unit)
    run(forward, units)
    first, _, last = units
    del units, unit, _
    gc.collect()
    assert forward.next_after(first) is None
    assert post.previous(last, lambda _: True) is first, "a unit that is gone is passed over"


@given(st.permutations(range(6)))
def test_the_backward_walks_through_the_forwards_from_the_end(permutation: list[int]) -> None:
    order: PostForwardOrder[Unit] = PostForwardOrder()
    units = make_units(6)
    ran = [units[i] for i in permutation]
    for unit in ran:
        order.record(unit)
    found = [order.previous(unit, lambda _: True) for unit in reversed(ran)]
    assert found == [*reversed(ran[:-1]), None]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.sets(st.integers(0, 3)))
def test_units_that_want_nothing_are_passed_over(indices: list[int], wanted: set[int]) -> None:
    order: PostForwardOrder[Unit] = PostForwardOrder()
    units = make_units(4)
    for index in indices:
        order.record(units[index])
    for place in range(len(indices) - 1, -1, -1):
        before = [i for i in indices[:place] if i in wanted]
        expected = units[before[-1]] if before else None
        assert order.previous(units[indices[place]], lambda unit: units.index(unit) in wanted) is expected


def test_a_unit_without_a_forward_left_has_nothing_before_it() -> None:
    order: PostForwardOrder[Unit] = PostForwardOrder()
    a, b = make_units(2)
    order.record(a)
    order.record(b)
    assert order.previous(b, lambda _: True) is a
    assert order.previous(b, lambda _: True) is None
    order.clear()
    assert order.previous(a, lambda _: True) is None


def test_forwards_whose_backward_has_passed_are_not_offered_again() -> None:
    order: PostForwardOrder[Unit] = PostForwardOrder()
    a, b = make_units(2)
    for _ in range(2):  # the backward of the first micro-batch comes before the forward of the second
        order.record(a)
        order.record(b)
        assert order.previous(b, lambda _: True) is a
        assert order.previous(a, lambda _: True) is None
