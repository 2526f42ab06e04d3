"""What a request asks for: the value of `hsfmt` in its `sampling_params.custom_params`.

SGLang carries only flat values there, so that it is a JSON text. client.py makes it, this module reads it; both sides
are here to stay beside each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.errors import HsfmtError, Problem, SampleError
from hsfmt.writers.samples import check_id, check_source_index

KEY = "hsfmt"
_MEMBERS = ("id", "n_tokens", "loss_mask", "metadata", "source_index")


@dataclass(frozen=True, slots=True)
class Ask:
    """A sample that is asked for.

    Attributes
    ----------
    sample_id
        Its id in the dataset.
    n_tokens
        Length that the prompt must have, or None. The server may cut prompts; then the sample is refused.
    mask_runs
        The tokens whose mask is 1, as ascending [start, stop) runs; None where no mask was given.
    metadata
        JSON object about the sample.
    source_index
        Its place in the default order, or None.
    """

    sample_id: str
    n_tokens: int | None = None
    mask_runs: tuple[tuple[int, int], ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source_index: int | None = None

    def loss_mask(self, n_tokens: int) -> npt.NDArray[np.uint8] | None:
        """Return the mask, uint8 [token], or None where none was given.

        Raises
        ------
        SampleError
            It goes beyond the prompt.
        """
        if self.mask_runs is None:
            return None
        mask = np.zeros(n_tokens, np.uint8)
        for start, stop in self.mask_runs:
            if stop > n_tokens:
                where = f"sample {self.sample_id!r}: loss_mask"
                raise SampleError.at(where, expected=f"runs within {n_tokens} tokens", got=f"[{start}, {stop}]")
            mask[start:stop] = 1
        return mask


def parse_ask(value: Any) -> Ask:
    """Return what a request's `hsfmt` value asks for.

    Raises
    ------
    SampleError
        It is not what `ask_text` makes; all problems at once.
    """
    try:
        document = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise SampleError.at("hsfmt", expected="a JSON object", got=repr(value)[:100])
    problems = [Problem(f"hsfmt: {name}", f"one of {', '.join(_MEMBERS)}", "an unknown member")
                for name in sorted(set(document) - set(_MEMBERS))]  # fmt: skip
    n_tokens, metadata = document.get("n_tokens"), document.get("metadata") or {}
    try:
        check_id(document.get("id"))
        check_source_index(document.get("source_index"))
    except HsfmtError as error:
        problems += error.problems
    if n_tokens is not None and (not _is_count(n_tokens) or n_tokens < 1):
        problems.append(Problem("hsfmt: n_tokens", "an integer from 1 on", repr(n_tokens)[:60]))
    if not isinstance(metadata, dict):
        problems.append(Problem("hsfmt: metadata", "an object", type(metadata).__name__))
    runs = document.get("loss_mask")
    if runs is not None and not _are_runs(runs):
        problems.append(Problem("hsfmt: loss_mask", "ascending [start, stop] runs of ones", repr(runs)[:60]))
    if problems:
        raise SampleError(problems)
    pairs = None if runs is None else tuple((start, stop) for start, stop in runs)
    return Ask(document["id"], n_tokens, pairs, metadata, document.get("source_index"))


def ask_text(
    sample_id: str,
    *,
    n_tokens: int | None = None,
    loss_mask: Sequence[int] | npt.NDArray[Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    source_index: int | None = None,
) -> str:
    """Return the JSON text that asks for a sample.

    Parameters
    ----------
    sample_id
        Id in the dataset.
    n_tokens
        Length of the prompt, so that one that the server cuts is refused.
    loss_mask
        0 or 1 [token].
    metadata, source_index
        As for `DatasetWriter.write`.

    Raises
    ------
    SampleError
        A mask of other values or another length.
    """
    document: dict[str, Any] = {"id": sample_id}
    if loss_mask is not None:
        mask = np.asarray(loss_mask)
        if mask.ndim != 1 or not np.isin(mask, (0, 1)).all() or n_tokens not in (None, len(mask)):
            expected = "0 or 1 [token], one for each token of the prompt"
            raise SampleError.at(
                f"sample {sample_id!r}: loss_mask", expected=expected, got=f"{mask.dtype} {mask.shape}"
            )
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
        document["loss_mask"] = edges.reshape(-1, 2).tolist()
        n_tokens = len(mask)
    optional = {"n_tokens": n_tokens, "metadata": dict(metadata or {}) or None, "source_index": source_index}
    document.update((name, value) for name, value in optional.items() if value is not None)
    return json.dumps(document, separators=(",", ":"))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_runs(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    last = 0
    for run in value:
        if not isinstance(run, list) or len(run) != 2 or not all(map(_is_count, run)):
            return False
        if not last <= run[0] < run[1]:
            return False
        last = run[1]
    return True
