"""What the property tests of the layout draw from: shapes, buckets, world sizes, alignments."""

from hypothesis import strategies as st

from ya_fsdp.layout import FlatLayout, ParamSpec, plan_contiguous

#: Scalars, empty tensors, vectors, matrices and cubes of a few elements.
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
non_empty_shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
world_sizes = st.one_of(st.sampled_from([1, 2, 3, 5, 6, 7, 8]), st.integers(1, 70))
alignments = st.sampled_from([1, 2, 3, 4, 8, 16, 24])


@st.composite
def buckets(draw: st.DrawFn) -> list[ParamSpec]:
    """Return the parameters of one bucket; a bucket may have none."""
    return [ParamSpec(f"p{i}", shape) for i, shape in enumerate(draw(st.lists(shapes, max_size=8)))]


@st.composite
def layouts(draw: st.DrawFn) -> FlatLayout:
    """Return the planned layout of a bucket."""
    return plan_contiguous(draw(buckets()), draw(world_sizes), draw(alignments))
