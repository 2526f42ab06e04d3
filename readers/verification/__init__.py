"""Verification: what is wrong with a dataset, all of it at once, in three tiers.

The judge is independent of the judged: chunks and sample digests are decoded and computed here anew, by no code of the
writer or of the reader.
"""

from __future__ import annotations

from hsfmt.readers.verification.report import Finding, Report
from hsfmt.readers.verification.tiers import LEVELS, verify

__all__ = ["LEVELS", "Finding", "Report", "verify"]
