"""Flags, YAML keys and variables: which one wins, what is refused, and what reaches the workers."""

import argparse
from typing import Any

import pytest
from accelerate.commands import launch as stock
from hypothesis import given
from hypothesis import strategies as st

from accelerate_plugin import launch, rules
from accelerate_plugin.keys import KEYS, Kind, SettingsError, parse_key

SWITCH, VARIABLE = "fsdp_ya_fsdp_enabled", "FSDP_YA_FSDP_ENABLED"


def collect(flags: Any = None, config: Any = None, environment: Any = None) -> tuple[bool, dict[str, Any]]:
    return launch.collect(flags or {}, config or {}, environment or {})


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    original = getattr(stock.launch_command_parser, "__wrapped__", stock.launch_command_parser)
    return launch.wrap_parser(original)()


@pytest.mark.parametrize("on", ["True", "true", True, "1", 1, "yes", "on"])
@pytest.mark.parametrize("source", ["flag", "yaml", "environment"])
def test_any_source_and_spelling_switches_the_engine_on(source: str, on: Any) -> None:
    given_by = {
        "flag": {"flags": {SWITCH: on}},
        "yaml": {"config": {SWITCH: on}},
        "environment": {"environment": {VARIABLE: str(on)}},
    }
    assert collect(**given_by[source])[0] is True


def test_flag_beats_yaml_beats_environment() -> None:
    on, off = {SWITCH: "true"}, {SWITCH: "false"}
    assert collect(off, on, {VARIABLE: "true"})[0] is False
    assert collect(on, off, {VARIABLE: "false"})[0] is True
    assert collect({}, off, {VARIABLE: "true"})[0] is False
    assert collect({}, {}, {})[0] is False
    three = {"fsdp_auto_wrap_policy": "NO_WRAP"}, {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    environment = {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}
    assert collect(on | three[0], three[1], environment)[1]["fsdp_auto_wrap_policy"] == "NO_WRAP"
    assert collect(on, three[1], environment)[1]["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert collect(on, {}, environment)[1]["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP"


def test_yaml_keys_may_lack_the_prefix() -> None:
    assert collect({}, {"ya_fsdp_enabled": "yes", "version": 2})[1] == {"fsdp_version": "2"}


def test_a_misspelt_key_is_an_error_in_every_source() -> None:
    wrong = "fsdp_num_layer_to_checkpoint"
    with pytest.raises(SettingsError, match=rf"{wrong} in fsdp_config; did you mean fsdp_num_layers_to_checkpoint"):
        collect({SWITCH: "true"}, {wrong: 2})
    with pytest.raises(SettingsError, match=rf"{wrong.upper()} in the environment; did you mean FSDP_NUM_LAYERS_TO"):
        collect({SWITCH: "true"}, {}, {wrong.upper(): "2"})


def test_a_misspelt_switch_is_an_error_even_where_nothing_else_asks_for_the_engine() -> None:
    with pytest.raises(SettingsError, match="did you mean fsdp_ya_fsdp_enabled"):
        collect({}, {"fsdp_ya_fsdp_enabeld": True})


def test_without_the_switch_other_peoples_keys_are_left_alone() -> None:
    assert collect({}, {"fsdp_something_new": 1, "fsdp_sharding_strategy": "NO_SHARD"}) == (False, {})


@pytest.mark.parametrize(
    ("values", "both"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "false"}, 2),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_transformer_layer_cls_to_wrap": "A"}, 2),
        ({"fsdp_min_num_params": 100}, 1),
        ({"fsdp_activation_checkpointing": False, "fsdp_num_layers_to_checkpoint": 2}, 2),
        ({"fsdp_activation_checkpointing_offload": True}, 1),
        ({"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": True}, 2),
        ({"fsdp_ya_fsdp_hybrid_group_size": 2}, 1),
        ({"fsdp_ya_fsdp_pin_memory": True}, 1),
    ],
)
def test_contradictions_name_the_keys(values: dict[str, Any], both: int) -> None:
    with pytest.raises(SettingsError) as caught:
        collect({SWITCH: "true"}, values)
    assert sum(name in str(caught.value) for name in values) == both


def test_a_flag_overrides_the_yaml_key_that_says_the_opposite() -> None:
    section = {"fsdp_activation_checkpointing": False, "fsdp_sharding_strategy": "FULL_SHARD"}
    flags = {SWITCH: "true", "fsdp_num_layers_to_checkpoint": "2", "fsdp_reshard_after_forward": "false"}
    _, values = collect(flags, section)
    assert values == {"fsdp_num_layers_to_checkpoint": 2, "fsdp_reshard_after_forward": False}
    _, values = collect({SWITCH: "true", "fsdp_activation_checkpointing": "true"}, {"fsdp_num_layers_to_checkpoint": 0})
    assert values == {"fsdp_activation_checkpointing": True}
    _, values = collect(
        {SWITCH: "true", "fsdp_reshard_after_forward": "false"}, {"fsdp_sharding_strategy": "HYBRID_SHARD"}
    )
    assert values["fsdp_sharding_strategy"] == "HYBRID_SHARD_ZERO2"


REFERENCE_YAML = {
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_forward_prefetch": True,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": False,
    "fsdp_activation_checkpointing": False,
    "fsdp_num_layers_to_checkpoint": 0,
}


def test_a_usual_version_1_file_is_accepted_whole() -> None:
    enabled, values = collect({SWITCH: "true"}, REFERENCE_YAML)
    assert enabled
    assert set(values) == set(REFERENCE_YAML)


def _value_of(key: Any) -> st.SearchStrategy[Any]:
    match key.kind:
        case Kind.BOOL:
            return st.sampled_from([value for value in (True, False) if str(value).lower() not in key.refused])
        case Kind.INT:
            return st.integers(min_value=key.minimum, max_value=10**9)
        case Kind.CHOICE:
            return st.sampled_from([choice for choice in key.choices if choice not in key.refused])
        case Kind.NAMES:
            return st.lists(st.from_regex(r"[A-Z][A-Za-z0-9]{0,8}", fullmatch=True), max_size=3).map(tuple)
        case Kind.RESHARD:
            return st.booleans()
    return st.from_regex(r"[a-z.*]{1,10}", fullmatch=True)


OTHERS = [key for key in KEYS.values() if key.name != SWITCH]


@given(st.fixed_dictionaries({}, optional={key.name: _value_of(key) for key in OTHERS}))
def test_what_the_launcher_exports_the_worker_reads_back(values: dict[str, Any]) -> None:
    values = {name: value for name, value in values.items() if value != ()}
    read = rules.from_environment(launch.export(values))
    assert read.pop(SWITCH) is True
    assert {name: read[name] for name in values} == values
    assert set(read) - set(values) <= {"fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type"}


def test_the_parser_takes_every_key_as_a_flag_with_underscores_or_hyphens(parser: argparse.ArgumentParser) -> None:
    for name in KEYS:
        for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
            args = parser.parse_args([flag, "1", "train.py", "--lr", "3"])
            assert str(getattr(args, name)) == "1"
            assert args.training_script == "train.py"
            assert args.training_script_args == ["--lr", "3"]


def test_a_misspelt_flag_names_the_nearest(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--fsdp_num_layer_to_checkpoint", "2", "train.py"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "unknown option --fsdp_num_layer_to_checkpoint; did you mean --fsdp_num_layers_to_checkpoint?" in message


def test_flags_of_the_script_are_not_ours_to_judge(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(["train.py", "--fsdp_num_layer_to_checkpoint", "2"])
    assert args.training_script_args == ["--fsdp_num_layer_to_checkpoint", "2"]


def test_without_the_switch_the_launch_arguments_and_the_environment_stay_as_they_were(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import os

    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\nmixed_precision: 'no'\n"
    )
    monkeypatch.delenv(VARIABLE, raising=False)
    words = ["--config_file", str(file), "--main_process_port", "29511", "missing.py"]
    unwrapped = getattr(stock.launch_command_parser, "__wrapped__", stock.launch_command_parser)
    validate = getattr(stock._validate_launch_command, "__wrapped__", stock._validate_launch_command)
    environment = getattr(stock.prepare_multi_gpu_env, "__wrapped__", stock.prepare_multi_gpu_env)
    before = dict(os.environ)
    plain_args, *_ = validate(unwrapped().parse_args(words))
    plain_environment = environment(plain_args)
    args, *_ = launch.wrap_validate(validate)(parser.parse_args(words))
    assert dict(os.environ) == before
    assert launch.wrap_environment(environment)(args) == plain_environment
    ours = {"ya_fsdp_values", *(name for name in KEYS if not hasattr(plain_args, name))}
    assert {name: value for name, value in vars(args).items() if name not in ours} == vars(plain_args)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config_file", "nowhere.yaml"], "nowhere.yaml"),
        ([], "training script 'missing.py' does not exist"),
        (["--fsdp_sharding_strategy", "FULL"], "allowed: FULL_SHARD"),
        (["--use_deepspeed"], "two engines"),
        (["--num_processes", "0"], "num_processes: 0 is not a number of processes"),
        (["--fsdp_state_dict_type", "SHARD_STATE_DICT"], "fsdp_state_dict_type: got 'SHARD_STATE_DICT'; allowed: FULL"),
    ],
)
def test_a_launch_that_cannot_work_ends_with_one_message(
    parser: argparse.ArgumentParser, words: list[str], message: str
) -> None:
    validate = getattr(stock._validate_launch_command, "__wrapped__", stock._validate_launch_command)
    args = parser.parse_args([f"--{SWITCH}", "true", *words, "missing.py"])
    with pytest.raises(SystemExit) as caught:
        launch.wrap_validate(validate)(args)
    assert message in str(caught.value.code)
    assert "\n" not in str(caught.value.code)


def test_parse_key_of_an_absent_value_is_absent() -> None:
    assert all(parse_key(name, None) is None for name in KEYS)


def _workers(parser: argparse.ArgumentParser, words: list[str]) -> tuple[str, bool, list[str]]:
    args = parser.parse_args(words)
    launch._run_through_us_if_needed(args)
    return args.training_script, bool(args.module), args.training_script_args


def test_workers_start_through_the_package_only_where_start_up_files_are_missing(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate_plugin import startup

    monkeypatch.setattr(startup, "started_by_interpreter", True)
    assert _workers(parser, ["train.py", "--lr", "1"]) == ("train.py", False, ["--lr", "1"])
    monkeypatch.setattr(startup, "started_by_interpreter", False)
    assert _workers(parser, ["train.py", "--lr", "1"]) == ("accelerate_plugin", True, ["run", "train.py", "--lr", "1"])
    assert _workers(parser, ["-m", "pkg.train"]) == ("accelerate_plugin", True, ["run", "-m", "pkg.train"])
