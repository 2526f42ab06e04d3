"""Worker processes of a pool: how they end when their parent was killed."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import parent_process


def end_with_parent(grace_seconds: float = 0.0) -> None:
    """Make this worker process end after its parent; the initializer of a pool calls it.

    A pool's workers wait for work on a queue that they hold open themselves, so that they would wait for ever after
    their parent was killed.

    Parameters
    ----------
    grace_seconds
        How long a worker has to clean up.
    """
    threading.Thread(target=_wait_and_end, args=[grace_seconds], daemon=True).start()


def _wait_and_end(grace_seconds: float) -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        time.sleep(grace_seconds)
        os._exit(1)
