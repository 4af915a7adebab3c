"""Every key is read in any usual spelling, or refused with its name, the value and what is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate_plugin.keys import KEYS, Kind, SettingsError, documentation, nearest, parse_bool, parse_key, unknown_key
from accelerate_plugin.startup import TRUE_WORDS

TRUE = ["true", "True", "TRUE", "yes", "y", "on", "1", "t", " true ", True, 1]
FALSE = ["false", "False", "no", "n", "off", "0", "f", False, 0]
BOOLEANS = [key.name for key in KEYS.values() if key.kind is Kind.BOOL and not key.refused]


@pytest.mark.parametrize("name", BOOLEANS)
def test_all_spellings_of_a_truth_value_mean_the_same(name: str) -> None:
    assert {parse_key(name, value) for value in TRUE} == {True}
    assert {parse_key(name, value) for value in FALSE} == {False}


@given(st.text(max_size=12))
def test_any_text_is_a_truth_value_or_an_error_that_names_key_and_value(text: str) -> None:
    try:
        value = parse_bool("fsdp_forward_prefetch", text)
    except SettingsError as error:
        value, message = None, str(error)
    if value is None:
        assert "fsdp_forward_prefetch" in message
        assert repr(text) in message
        assert "true, false" in message
    else:
        assert value == (text.strip().lower() in TRUE_WORDS)


@given(st.integers(min_value=0, max_value=10**12))
def test_whole_numbers_are_read_from_numbers_and_text(number: int) -> None:
    for spelling in (number, str(number), f" {number} "):
        assert parse_key("fsdp_min_num_params", spelling) == number


@pytest.mark.parametrize("value", [8.5, "8.5", "many", True, -1, "-3", "nan", "inf"])
def test_what_is_not_a_whole_number_is_refused(value: object) -> None:
    with pytest.raises(SettingsError, match=r"fsdp_num_layers_to_checkpoint.*whole number of 0 or more"):
        parse_key("fsdp_num_layers_to_checkpoint", value)


def test_large_numbers_in_scientific_notation_are_whole() -> None:
    assert parse_key("fsdp_min_num_params", "1e8") == 10**8


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("LlamaDecoderLayer", ("LlamaDecoderLayer",)),
        ("A,B", ("A", "B")),
        (" A , B ,", ("A", "B")),
        (["A", " B"], ("A", "B")),
        (["A,B", "C"], ("A", "B", "C")),
        ("", ()),
    ],
)
def test_class_names_are_read_with_and_without_spaces(value: object, names: tuple[str, ...]) -> None:
    assert parse_key("fsdp_transformer_layer_cls_to_wrap", value) == names


def test_choices_ignore_case_and_take_enum_members() -> None:
    from torch.distributed.fsdp import ShardingStrategy

    assert parse_key("fsdp_sharding_strategy", "full_shard") == "FULL_SHARD"
    assert parse_key("fsdp_sharding_strategy", ShardingStrategy.SHARD_GRAD_OP) == "SHARD_GRAD_OP"
    assert parse_key("fsdp_sharding_strategy", 1) == "FULL_SHARD"  # accelerate's old numbers


def test_an_impossible_choice_names_what_is_allowed_and_leaves_out_what_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"fsdp_sharding_strategy: got 'FULL'; allowed: FULL_SHARD, ") as caught:
        parse_key("fsdp_sharding_strategy", "FULL")
    assert "NO_SHARD" not in str(caught.value)


REFUSED = [(key.name, value, reason) for key in KEYS.values() for value, reason in key.refused.items()]


@pytest.mark.parametrize(("name", "value", "reason"), REFUSED)
def test_a_known_but_unsupported_value_is_refused_with_the_reason(name: str, value: str, reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_key(name, value)
    assert name in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["fsdp_reshard_after_forward", "fsdp_ya_fsdp_reshard_after_forward"])
def test_reshard_takes_the_values_of_both_fsdp_versions(name: str) -> None:
    assert parse_key(name, "FULL_SHARD") is True
    assert parse_key(name, "SHARD_GRAD_OP") is False
    assert parse_key(name, "true") is True
    assert parse_key(name, "4") == parse_key(name, 4) == 4
    for value in ("NO_SHARD", "sometimes", "2.5", -2):
        with pytest.raises(SettingsError, match=name):
            parse_key(name, value)


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("fsdp_num_layer_to_checkpoint", "fsdp_num_layers_to_checkpoint"),
        ("fsdp_ya_fsdp_enable", "fsdp_ya_fsdp_enabled"),
        ("fsdp_sharding_stategy", "fsdp_sharding_strategy"),
        ("fsdp_offload_parameters", "fsdp_offload_params"),
    ],
)
def test_a_misspelt_key_names_the_nearest(misspelt: str, right: str) -> None:
    assert nearest(misspelt) == right
    with pytest.raises(SettingsError, match=f"unknown key {misspelt}; did you mean {right}"):
        parse_key(misspelt, "1")


@given(st.sampled_from(sorted(KEYS)), st.data())
def test_one_dropped_letter_still_finds_the_key(name: str, data: st.DataObject) -> None:
    position = data.draw(st.integers(min_value=5, max_value=len(name) - 1))
    misspelt = name[:position] + name[position + 1 :]
    if misspelt not in KEYS:
        assert nearest(misspelt) in KEYS


def test_an_unknown_key_unlike_any_other_lists_the_known_ones() -> None:
    message = str(unknown_key("fsdp_zzzzzzzzzzzzzzz", "fsdp_config"))
    assert "in fsdp_config" in message
    assert all(name in message for name in KEYS)


def test_every_key_stands_in_the_documentation_table() -> None:
    table = documentation()
    assert all(f"`{name}`" in table for name in KEYS)
    assert all(reason in table for _, _, reason in REFUSED)


def test_every_key_of_accelerates_own_launcher_is_known() -> None:
    from accelerate.commands.launch import launch_command_parser

    flags = {
        option.removeprefix("--") for action in launch_command_parser()._actions for option in action.option_strings
    }
    stock = {flag for flag in flags if flag.startswith("fsdp_")}
    assert len(stock) >= 14
    assert stock <= set(KEYS)
