"""Dtypes follow from the parameter and the policy; anything but a floating-point dtype is refused."""

import dataclasses
import itertools

import pytest
import torch

from ya_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ya_fsdp.policy import ResolvedDtypes
from ya_fsdp.runtime.settings import UnitSettings

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize(
    ("master", "param", "reduce"), list(itertools.product(FLOATS, (None, *FLOATS), (None, *FLOATS))), ids=str
)
def test_defaults_follow_the_parameter_then_the_compute_dtype(
    master: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    found = ResolvedDtypes.resolve(master, MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
    compute = master if param is None else param
    sent = compute if reduce is None else reduce
    assert found == ResolvedDtypes(master, compute, sent, sent)


@pytest.mark.parametrize("master", [torch.int64, torch.uint8, torch.bool, torch.int8])
def test_integer_parameters_are_never_cast(master: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert ResolvedDtypes.resolve(master, policy) == ResolvedDtypes(master, master, master, master)


@pytest.mark.parametrize(("reduce", "sum_in"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_16_bit_gradients_are_added_up_in_32_bits_on_request(reduce: torch.dtype, sum_in: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce, bit32_acc_for_bit16_reduce_scatter=True)
    assert ResolvedDtypes.resolve(torch.float32, policy).accumulate == sum_in


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("value", [torch.int32, torch.bool, torch.complex64, "bfloat16", float, 16])
def test_a_policy_refuses_what_is_no_floating_point_dtype(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a floating-point torch.dtype, got") as caught:
        MixedPrecisionPolicy(**{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def test_policies_are_values() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16) != MixedPrecisionPolicy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = torch.float16  # type: ignore[misc]
    assert isinstance(CPUOffloadPolicy(), OffloadPolicy)
    assert CPUOffloadPolicy() != OffloadPolicy()


@pytest.mark.parametrize(("after_forward", "after_backward"), list(itertools.product([True, False], repeat=2)))
def test_a_unit_is_kept_if_it_stays_gathered_anywhere(after_forward: bool, after_backward: bool) -> None:
    settings = UnitSettings(reshard_after_forward=after_forward, reshard_after_backward=after_backward)
    assert settings.is_kept == (not after_forward or not after_backward)
