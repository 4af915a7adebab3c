"""Which buffer each bucket is gathered into: pure arithmetic over buckets in model order.

Autograd saves views of gathered parameters, so a bucket's address must not change between its forward and its backward.
Repeated blocks therefore take turns in :data:`NUM_SHARED` buffers sized by the largest of them, and every other
bucket (embedding, head, kept ones) has a buffer of its own that takes memory only while it is gathered. The largest
tensor of a model is usually the embedding or the head; since those never share, they never size the shared buffers.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["NUM_SHARED", "BucketInfo", "BufferPlan", "plan_buffers"]

NUM_SHARED = 2
"""One buffer computes while the next bucket is gathered into the other."""


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """What the plan must know of a bucket.

    Attributes:
        kind: Buckets of equal kind are repetitions of one another (same module class, dtype and trainability).
        nbytes: Bytes of the gathered bucket, padding included.
        is_kept: The bucket stays gathered between forward and backward.
    """

    kind: Hashable
    nbytes: int
    is_kept: bool


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Buffers of a root's buckets.

    Attributes:
        shared_nbytes: Size of each shared buffer.
        assignments: Per bucket: index of its shared buffer, or None for a buffer of its own.
    """

    shared_nbytes: tuple[int, ...]
    assignments: tuple[int | None, ...]


def plan_buffers(buckets: Sequence[BucketInfo], num_shared: int = NUM_SHARED) -> BufferPlan:
    """Assigns buffers; buckets of a kind take turns in model order.

    Kinds that occur no more often than there would be shared buffers gain nothing from sharing and get their own.

    Args:
        buckets: The root's buckets in model order.
        num_shared: Shared buffers per kind.
    """
    counts = Counter(bucket.kind for bucket in buckets if not bucket.is_kept)
    first_of_kind: dict[Hashable, int] = {}
    seen: Counter[Hashable] = Counter()
    sizes: list[int] = []
    assignments: list[int | None] = []
    for bucket in buckets:
        if bucket.is_kept or counts[bucket.kind] <= num_shared:
            assignments.append(None)
            continue
        if bucket.kind not in first_of_kind:
            first_of_kind[bucket.kind] = len(sizes)
            sizes.extend([0] * num_shared)
        index = first_of_kind[bucket.kind] + seen[bucket.kind] % num_shared
        seen[bucket.kind] += 1
        sizes[index] = max(sizes[index], bucket.nbytes)
        assignments.append(index)
    return BufferPlan(tuple(sizes), tuple(assignments))
