"""`PYTORCH_ALLOC_CONF`, as far as it changes what is reserved and is modelled."""

from dstune.errors import UsageError
from dstune.estimator.allocator import CachingAllocator
from dstune.estimator.expandable import ExpandableAllocator

NO_EFFECT = frozenset({"backend", "pinned_use_cuda_host_register", "pinned_num_register_threads"})
"""Keys that do not change reserved memory, the native backend being meant."""


def make_allocator(alloc_conf: str | None, capacity_bytes: int | None = None) -> CachingAllocator:
    """The allocator that a process with this setting has.

    Raises:
        UsageError: A key that changes reserved memory in a way that is not modelled, or is unknown.
    """
    expandable = False
    for item in (alloc_conf or "").split(","):
        key, _, value = (part.strip() for part in item.partition(":"))
        if key == "expandable_segments":
            expandable = value.lower() == "true"
        elif (key and key not in NO_EFFECT) or (key == "backend" and value != "native"):
            raise UsageError(
                f"`{item.strip()}` of PYTORCH_ALLOC_CONF is not modelled", hint="use expandable_segments:True"
            )
    return ExpandableAllocator(capacity_bytes) if expandable else CachingAllocator(capacity_bytes)
