"""What the parts of a run say about it: engine, host, command, times.

Spec: rule MAN-9.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import hsfmt
from hsfmt import canonical
from hsfmt.errors import UsageError

_MAX_PRODUCER_NBYTES = 1 << 20


def full_producer(given: Mapping[str, Any] | None, codec: str) -> dict[str, Any]:
    """Return the caller's members and ours, as a copy that no one can change before the commit.

    Raises
    ------
    FormatError
        Something that canonical JSON does not have.
    UsageError
        It is too large to be repeated in each part.
    """
    producer = {
        "codec": codec,
        "host": platform.node(),
        "library": f"hsfmt {hsfmt.__version__}",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **(given or {}),
    }
    data = canonical.dumps(producer)
    if len(data) > _MAX_PRODUCER_NBYTES:
        raise UsageError.at("producer", expected=f"at most {_MAX_PRODUCER_NBYTES} bytes of JSON", got=f"{len(data)}")
    result: dict[str, Any] = canonical.loads(data, "producer")
    return result
