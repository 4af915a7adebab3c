"""Units of one mesh share what they communicate through."""

import gc

from torch.distributed.device_mesh import init_device_mesh

from tests.schedule.fake_accelerator import fake_ranks
from tests.schedule.scenarios import sharded
from ya_fsdp import HierarchicalBackend
from ya_fsdp.runtime.mesh import ShardMesh, _meshes


def check_shared():
    gc.collect()
    before = len(_meshes)
    with fake_ranks(8):
        first = ShardMesh.of(init_device_mesh("cpu", (8,)))
        assert ShardMesh.of(first.mesh) is ShardMesh.of(init_device_mesh("cpu", (8,))) is first
        backend = HierarchicalBackend((0, 1))
        other = ShardMesh.of(first.mesh, backend)
        assert other is not first
        assert ShardMesh.of(first.mesh, backend) is other
    with fake_ranks(8):  # an equal mesh over process groups that were made anew
        again = ShardMesh.of(init_device_mesh("cpu", (8,)))
        assert again is not first
        assert again.shard_group is not first.shard_group
    del first, again, other
    gc.collect()
    assert len(_meshes) <= before, "a mesh outlives what was sharded over it"


def test_one_object_per_mesh_and_backend_while_the_process_group_lives(in_helper):
    in_helper(check_shared)


def check_units():
    with sharded("cpu") as run:
        groups = [group for unit in run.model.units().values() for group in unit._get_fsdp_state().groups]
        assert len(groups) > 2
        assert len({id(group.mesh) for group in groups}) == len({id(group.dtypes) for group in groups}) == 1


def test_units_of_a_model_share_the_mesh_and_the_dtypes(in_helper):
    in_helper(check_units)
