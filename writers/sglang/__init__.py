"""The SGLang plugin: hidden states of prompts, straight from a serving engine into a dataset.

SGLang loads it through the entry point group `sglang.srt.plugins` in each of its processes. It does nothing unless
`HSFMT_SGLANG_OUT` (or `HSFMT_SGLANG_CONFIG`) is set. docs/sglang.md is the manual.
"""

from __future__ import annotations

import os

SWITCHES = ("HSFMT_SGLANG_OUT", "HSFMT_SGLANG_CONFIG")


def register() -> None:
    """Install the hooks; called by SGLang.

    Raises
    ------
    SystemExit
        Capture was asked for and can't be had. SGLang logs any other exception of a plugin and serves on without it,
        which would be noticed hours later.
    """
    if not any(os.environ.get(name) for name in SWITCHES):
        return
    try:
        from hsfmt.writers.sglang.hooks import install

        install(os.environ)
    except Exception as error:
        raise SystemExit(f"hsfmt: hidden states can't be captured: {error}") from error
