"""Repeated buckets alternate between shared buffers; whatever is kept or rare has a buffer of its own."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ya_fsdp.runtime.buffer_plan import NUM_SHARED, BucketInfo, BufferPlan, plan_buffers

bucket_lists = st.lists(
    st.builds(BucketInfo, kind=st.sampled_from("abc"), nbytes=st.integers(0, 10**9), is_kept=st.booleans()),
    max_size=20,
)
numbers_shared = st.integers(NUM_SHARED, 4)


def users_of(plan: BufferPlan, buckets: list[BucketInfo]) -> list[list[BucketInfo]]:
    """Return the buckets of each shared buffer."""
    users: list[list[BucketInfo]] = [[] for _ in plan.shared_nbytes]
    for bucket, index in zip(buckets, plan.assignments, strict=True):
        if index is not None:
            users[index].append(bucket)
    return users


@given(bucket_lists, numbers_shared)
def test_as_many_neighbours_of_a_kind_as_there_are_buffers_never_meet(
    buckets: list[BucketInfo], num_shared: int
) -> None:
    plan = plan_buffers(buckets, num_shared)
    for kind in "abc":
        order = [
            index
            for bucket, index in zip(buckets, plan.assignments, strict=True)
            if bucket.kind == kind and index is not None
        ]
        for place in range(len(order) - num_shared + 1):
            assert len(set(order[place : place + num_shared])) == num_shared, order


@given(bucket_lists, numbers_shared)
def test_kept_and_rare_buckets_have_their_own_buffer_and_all_others_share(
    buckets: list[BucketInfo], num_shared: int
) -> None:
    counts = Counter(bucket.kind for bucket in buckets if not bucket.is_kept)
    for bucket, index in zip(buckets, plan_buffers(buckets, num_shared).assignments, strict=True):
        own = bucket.is_kept or counts[bucket.kind] <= num_shared
        assert (index is None) == own, f"{bucket} of {counts}"


@given(bucket_lists)
def test_a_shared_buffer_serves_one_kind_and_is_as_large_as_its_largest_user(buckets: list[BucketInfo]) -> None:
    plan = plan_buffers(buckets)
    for nbytes, users in zip(plan.shared_nbytes, users_of(plan, buckets), strict=True):
        assert users, "a buffer that nobody uses"
        assert len({bucket.kind for bucket in users}) == 1
        assert nbytes == max(bucket.nbytes for bucket in users)
    assert len(plan.shared_nbytes) == NUM_SHARED * len({b.kind for users in users_of(plan, buckets) for b in users})


@given(bucket_lists, st.integers(10**10, 10**12))
def test_a_bucket_that_is_not_repeated_never_sizes_the_shared_buffers(buckets: list[BucketInfo], nbytes: int) -> None:
    plan = plan_buffers(buckets)
    embedding, head = (BucketInfo(kind, nbytes, is_kept=False) for kind in ("embedding", "head"))
    larger = plan_buffers([embedding, *buckets, head])
    assert larger.shared_nbytes == plan.shared_nbytes
    assert larger.assignments == (None, *plan.assignments, None)


def test_an_embedding_and_a_kept_head_around_four_blocks() -> None:
    blocks = [BucketInfo("block", nbytes, is_kept=False) for nbytes in (100, 90, 80, 120)]
    plan = plan_buffers([BucketInfo("embedding", 999, is_kept=False), *blocks, BucketInfo("head", 999, is_kept=True)])
    assert plan == BufferPlan(shared_nbytes=(100, 120), assignments=(None, 0, 1, 0, 1, None))


def test_two_buckets_per_block_alternate_independently() -> None:
    """Blocks with a frozen and a trainable bucket need two buffers of each size, so that a block can look ahead."""
    buckets = [
        BucketInfo(("block", part), nbytes, is_kept=False)
        for _ in range(3)
        for part, nbytes in (("frozen", 100), ("trainable", 7))
    ]
    plan = plan_buffers(buckets)
    assert sorted(plan.shared_nbytes) == [7, 7, 100, 100]
    blocks = [set(plan.assignments[i : i + 2]) for i in range(0, 6, 2)]
    assert not blocks[0] & blocks[1]
    assert not blocks[1] & blocks[2]
