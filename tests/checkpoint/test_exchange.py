"""Checkpoints are exchanged with accelerate's own functions over PyTorch FSDP2, in both directions."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.runs import FULL, SHARDED, assert_equal, launched
from tests.huggingface.session import two_groups
from tests.support.engines import FSDP2, full, shard
from tests.support.models import build_model, my_rows, token_batches
from tests.support.training import causal_loss

OnRanks = Callable[..., list[Any]]


def _of_accelerate(name: str, engine: str) -> Any:
    """Accelerate's function: its own for its own engine, though it may have been replaced in this process."""
    from accelerate.utils import fsdp_utils

    function = getattr(fsdp_utils, name)
    return getattr(function, "__wrapped__", function) if engine == FSDP2 else function


def _surroundings(form: str) -> tuple[Any, Any]:
    """What accelerate's functions ask its plugin and its Accelerator, of which it builds neither without a GPU."""
    from accelerate import PartialState
    from torch.distributed.fsdp import StateDictType

    PartialState()  # its logger insists on it
    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType[form],
        state_dict_config=SimpleNamespace(offload_to_cpu=form == FULL, rank0_only=form == FULL),
        optim_state_dict_config=SimpleNamespace(offload_to_cpu=form == FULL, rank0_only=form == FULL),
    )
    accelerator = SimpleNamespace(
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        is_main_process=dist.get_rank() == 0,
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )
    return plugin, accelerator


def _build(name: str, seed: int, engine: str) -> tuple[Any, Any]:
    model = shard(build_model(name, seed=seed), engine)
    return model, torch.optim.AdamW(two_groups(model), lr=1e-2)


def _train(model: Any, optimizer: Any) -> None:
    for batch in token_batches(2):
        causal_loss(model, my_rows(batch, dist.get_rank(), dist.get_world_size())).backward()
        optimizer.step()
        optimizer.zero_grad()


def _values(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        values |= {f"{names[id(parameter)]}/{key}": full(torch.as_tensor(value)) for key, value in state.items()}
    return values


def _save(engine: str, name: str, form: str, folder: str) -> Any:
    model, optimizer = _build(name, 1, engine)
    _train(model, optimizer)
    with launched(form, FSDP_YA_FSDP_ENABLED=str(engine != FSDP2).lower()):
        plugin, accelerator = _surroundings(form)
        _of_accelerate("save_fsdp_model", engine)(plugin, accelerator, model, folder)
        _of_accelerate("save_fsdp_optimizer", engine)(plugin, accelerator, optimizer, model, folder)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return _values(model, optimizer), groups


def _load(engine: str, name: str, form: str, folder: str, values: Any, groups: Any) -> None:
    model, optimizer = _build(name, 2, engine)
    for group in optimizer.param_groups:
        group.update(lr=0.5, weight_decay=0.5)
    with launched(form, FSDP_YA_FSDP_ENABLED=str(engine != FSDP2).lower()):
        plugin, accelerator = _surroundings(form)
        _of_accelerate("load_fsdp_model", engine)(plugin, accelerator, model, folder)
        _of_accelerate("load_fsdp_optimizer", engine)(plugin, accelerator, optimizer, model, folder)
    assert_equal(_values(model, optimizer), values, f"{name} in {form} read by {engine} on {dist.get_world_size()}")
    for group, expected in zip(optimizer.param_groups, groups, strict=True):
        # torch's own loading of full state turns tuples into lists.
        found = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        different = {key: (found.get(key), value) for key, value in expected.items() if found.get(key) != value}
        assert not different, f"{name} in {form} read by {engine}: settings (found, saved) {different}"


@pytest.fixture(scope="session")
def saved(rank_pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Checkpoints of two processes, by engine, model and form."""
    made: dict[tuple[str, ...], Any] = {}

    def get(*which: str) -> Any:
        if which not in made:
            folder = str(tmp_path_factory.mktemp("-".join(which)))
            made[which] = (folder, *rank_pools.run(2, _save, *which, folder)[0])
        return made[which]

    return get


@pytest.mark.parametrize("world", [2, 1, 3, 4])
def test_what_one_of_the_two_engines_saved_the_other_loads_exactly(
    on_ranks: OnRanks, saved: Callable[..., Any], world: int
) -> None:
    cases = [("llama", SHARDED), ("llama", FULL), *([("qwen2", SHARDED)] if world == 2 else [])]
    files = [(*pair, saved(*pair)) for pair in ((e, *c) for c in cases for e in (FSDP2, "ya_fsdp"))]
    for engine, name, form, (folder, values, groups) in files:
        reader = "ya_fsdp" if engine == FSDP2 else FSDP2
        on_ranks(world, _load, reader, name, form, folder, values, groups)


def test_the_names_of_files_are_those_of_accelerate(saved: Callable[..., Any]) -> None:
    for form in (SHARDED, FULL):
        ours, theirs = (Path(saved(engine, "llama", form)[0]) for engine in ("ya_fsdp", FSDP2))
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
