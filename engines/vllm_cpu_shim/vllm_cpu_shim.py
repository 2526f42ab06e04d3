"""Two gaps of vLLM 0.32 that its unmodified hidden-states connector falls into without an accelerator.

It pins host memory, which a CPU build of torch refuses, and asks the placeholder that stands for a CUDA event whether
it has passed.
"""

import functools


def register() -> None:
    """Fill both; vLLM calls this in each of its processes."""
    import torch
    from vllm.v1.worker.cpu import shm

    if hasattr(shm._EventPlaceholder, "query"):  # noqa: SLF001  the gap
        return
    shm._EventPlaceholder.query = lambda _: True  # noqa: SLF001
    original = torch.empty_like

    @functools.wraps(original)
    def empty_like(*args: object, pin_memory: bool = False, **options: object) -> object:  # noqa: ARG001
        return original(*args, **options)

    torch.empty_like = empty_like
