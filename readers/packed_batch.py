"""The memory of a packed batch, and how samples get into it: states by one plan of reads, the rest beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hsfmt.errors import UsageError
from hsfmt.readers.packed_views import PackedLayout
from hsfmt.readers.sample_arrays import SampleArrays
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.sample_requests import Piece, SampleRequest
from hsfmt.readers.views import as_array

Array = npt.NDArray[Any]
Tensors = Mapping[str, torch.Tensor]


class Document(NamedTuple):
    """Sample `number` in a batch: `n_tokens` from row `at` on, read from the sample's token `start` on."""

    number: int
    start: int
    n_tokens: int
    at: int


def fill(
    reader: SampleReader, layout: PackedLayout, documents: Sequence[Document], tensors: Tensors
) -> list[SampleArrays]:
    """Fill a batch; what no document takes becomes padding.

    Parameters
    ----------
    reader
        Where the samples are.
    layout
        What goes where.
    documents
        One behind the other, from row 0 on.
    tensors
        The batch, as `layout.specs` says.

    Returns
    -------
    list
        The samples without their states.

    Raises
    ------
    UsageError
        Scales that the states need are null.
    IndexError, CorruptionError, NotFoundError, StorageError
        As `SampleReader.read_requests`.
    """
    n_filled = sum(document.n_tokens for document in documents)
    stored = _stored_states(layout, tensors, n_filled)
    scale = () if layout.scale is None else (layout.scale,)
    requests = _requests(layout, documents, {key: as_array(value, layout.stored) for key, value in stored.items()})
    samples = reader.read_requests(requests, extras=scale)
    if layout.converts:
        for states in layout.states:
            scales = _scales(layout, documents, samples, states.shift) if layout.dequantizes else None
            _convert(stored[states.key].flatten(1), scales, tensors[states.key][0, :n_filled].flatten(1))
    if layout.scale in layout.keys:
        tensors[layout.scale or ""][0, :n_filled] = _scales(layout, documents, samples, 0)
    _fill_narrow(layout.shift, documents, samples, tensors)
    for key, tensor in tensors.items():
        padding = tensor[:, n_filled:]
        if key == "document_ids":
            padding.fill_(-1)
        else:
            padding.zero_()
    return samples


def _stored_states(layout: PackedLayout, tensors: Tensors, n_filled: int) -> dict[str, torch.Tensor]:
    """Return the memory [token, layer, hidden] that takes the states as stored: the batch's own where that will do."""
    stored = {}
    for states in layout.states:
        shape = n_filled, len(states.planes), layout.hidden_size
        if layout.converts:
            stored[states.key] = torch.empty(shape, dtype=getattr(torch, layout.stored))
        else:
            stored[states.key] = tensors[states.key][0, :n_filled].view(shape)
    return stored


def _requests(layout: PackedLayout, documents: Sequence[Document], rows: Mapping[str, Array]) -> list[SampleRequest]:
    requests = []
    for number, start, n_tokens, at in documents:
        pieces = []
        for states in layout.states if n_tokens else ():
            first = start + states.shift
            pieces.append(Piece(first, first + n_tokens, states.planes, rows[states.key][at : at + n_tokens]))
        stop = start + n_tokens + layout.shift if n_tokens else start
        requests.append(SampleRequest(number, start, stop, pieces=pieces))
    return requests


def _fill_narrow(shift: int, documents: Sequence[Document], samples: Sequence[SampleArrays], tensors: Tensors) -> None:
    keys = ("input_ids", "loss_mask", "position_ids", "document_ids")
    ids, mask, positions, numbers = (tensors[key][0].numpy() for key in keys)
    for number, (document, sample) in enumerate(zip(documents, samples, strict=True)):
        here = slice(document.at, document.at + document.n_tokens)
        first = document.start + shift
        ids[here] = sample.input_ids[shift:]
        mask[here] = sample.loss_mask[shift:]
        positions[here] = np.arange(first, first + document.n_tokens)
        numbers[here] = number


def _scales(
    layout: PackedLayout, documents: Sequence[Document], samples: Sequence[SampleArrays], shift: int
) -> torch.Tensor:
    """Return float32 [token]: the scales of the states that are `shift` tokens ahead of the batch's rows."""
    column = layout.scale or ""
    scales = [np.empty(0, np.float32)]
    for document, sample in zip(documents, samples, strict=True):
        values = sample.extras[column]
        if values is None:
            where = f"{column} of {sample.sample_id}"
            raise UsageError.at(where, expected="the scales of its states", got="null")
        scales.append(values[shift : shift + document.n_tokens])
    return torch.from_numpy(np.concatenate(scales))


def _convert(stored: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
    """Fill `out` [token, ...] with the states, multiplied with their scales [token] if there are any."""
    if scales is None:
        out.copy_(stored)
        return
    # The product in bfloat16, as hs_connectors forms it; another dtype is that of the trainer, which comes after.
    product = out if out.dtype == torch.bfloat16 else torch.empty_like(out, dtype=torch.bfloat16)
    product.copy_(stored).mul_(scales.to(torch.bfloat16)[:, None])
    if product is not out:
        out.copy_(product)
