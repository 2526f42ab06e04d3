"""A limit of address space: what asks for more gets a MemoryError, whatever the machine has."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def address_space_limited(headroom: int) -> Iterator[None]:
    """Let this process have no more than `headroom` bytes beyond what it has mapped now."""
    gc.collect()
    with Path("/proc/self/statm").open("rb") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + headroom, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
