"""The warnings that the core logs, for the report of a command."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Return a list to which the package's warnings are added while this lasts."""
    texts: list[str] = []
    handler, logger = _Collector(texts), logging.getLogger("hsfmt")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
