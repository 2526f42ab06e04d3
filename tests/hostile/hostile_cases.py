"""All cases, by name."""

import cases_attachments
import cases_frames
import cases_header
import cases_index
import cases_json
import cases_manifest
import cases_places
import cases_safetensors
import cases_snapshot
from cases import CASES, PART, Case

__all__ = ["CASES", "PART", "Case"]
# Importing a table adds its cases.
_TABLES = (
    cases_json, cases_manifest, cases_header, cases_index, cases_frames, cases_safetensors, cases_snapshot,
    cases_attachments, cases_places,
)  # fmt: skip
