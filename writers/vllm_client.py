"""What a client sends to a vLLM server with hsfmt's connector, and how it learns that its samples are durable."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from hsfmt.catalog import read_header
from hsfmt.errors import NotFoundError
from hsfmt.idset import CommittedIds
from hsfmt.storage import open_store
from hsfmt.writers.capturing.ask import KEY, ask_text

_POLL_SECONDS = 0.2


def capture_request(
    token_ids: Sequence[int],
    sample_id: str,
    *,
    loss_mask: Sequence[int] | npt.NDArray[Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    source_index: int | None = None,
    flush: bool = False,
) -> dict[str, Any]:
    """Return the body of a request to /v1/completions that stores the states of a prompt.

    Parameters
    ----------
    token_ids
        The prompt.
    sample_id
        Its id in the dataset. A request that is sent again under an id that is there is not stored twice.
    loss_mask
        0 or 1 [token]; None: none is given.
    metadata, source_index
        As for `DatasetWriter.write`.
    flush
        Also make durable all that came before.

    Raises
    ------
    SampleError
        A mask of other values or another length.
    """
    prompt = [int(token) for token in token_ids]
    ask = json.loads(
        ask_text(sample_id, n_tokens=len(prompt), loss_mask=loss_mask, metadata=metadata, source_index=source_index)
    )
    return _body(prompt, ask | ({"flush": True} if flush else {}))


def flush_request() -> dict[str, Any]:
    """Return the body of a request that makes durable all samples whose responses came before; stores none itself.

    The response says that it was asked for; `wait_durable` when it is done.
    """
    return _body([0], {"flush": True})


def wait_durable(
    url: str | os.PathLike[str],
    sample_ids: Iterable[str],
    seconds: float,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Wait until samples are in committed parts; return those that are not after `seconds`, in the order given.

    Raises
    ------
    NotFoundError
        There is no dataset.
    """
    store = open_store(url, storage_options)
    header = read_header(store)
    if header is None:
        raise NotFoundError.at(store.url, expected="a dataset", got="none")
    committed = CommittedIds(store, header)
    missing = list(sample_ids)
    deadline = time.monotonic() + seconds
    while True:
        committed.refresh()
        missing = [sample_id for sample_id in missing if sample_id not in committed]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(_POLL_SECONDS)


def _body(prompt: list[int], ask: Mapping[str, Any]) -> dict[str, Any]:
    # One token is the least that vLLM generates.
    return {"prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": {KEY: ask}}
