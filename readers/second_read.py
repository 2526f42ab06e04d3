"""Documents of remote datasets are read once more before they are called damaged: a byte may flip on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hsfmt.errors import CorruptionError, FormatError, HeaderMismatchError
from hsfmt.naming import about_dataset
from hsfmt.storage import Store

_T = TypeVar("_T")
# What a document with a wrong byte may look like: damage, none of ours, of a later version, or of another dataset.
_ALTERED = (CorruptionError, FormatError, HeaderMismatchError)


def read_twice(store: Store, read: Callable[[], _T]) -> _T:
    """Return what `read` reads and checks, by a second call if what came over a network may be damaged.

    Raises
    ------
    HsfmtError
        Whatever it raises, the second time if that may be damage; it names the dataset.
    """
    with about_dataset(store.url):
        try:
            return read()
        except _ALTERED:
            if store.is_local:
                raise
        return read()
