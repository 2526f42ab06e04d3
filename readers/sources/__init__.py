"""Sources: folders that other programs wrote, read strictly, for `hsfmt convert`. Importing this imports no torch."""

from __future__ import annotations

from hsfmt.readers.sources.base import (
    AbsentSampleError,
    Source,
    SourceItem,
    SourceSample,
    Stray,
    SupportFile,
    hole_reason,
)
from hsfmt.readers.sources.detection import SOURCE_NAMES, find_source
from hsfmt.readers.sources.meaning import SourceMeaning, check_against, settle_final_norm, settle_layers
from hsfmt.readers.sources.options import KeyMap, SourceOptions, parse_key_map

__all__ = [
    "SOURCE_NAMES",
    "AbsentSampleError",
    "KeyMap",
    "Source",
    "SourceItem",
    "SourceMeaning",
    "SourceOptions",
    "SourceSample",
    "Stray",
    "SupportFile",
    "check_against",
    "find_source",
    "hole_reason",
    "parse_key_map",
    "settle_final_norm",
    "settle_layers",
]
