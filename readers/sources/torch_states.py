"""The tensors of a loaded `.pt` file, as arrays: ids and masks, and states in the shapes that programs give them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeGuard

import ml_dtypes
import numpy as np
import torch

from hsfmt.errors import SourceError
from hsfmt.readers.sources import columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATE_DTYPES: dict[torch.dtype, tuple[np.dtype[Any], torch.dtype]] = {
    torch.bfloat16: (np.dtype(ml_dtypes.bfloat16), torch.int16),
    torch.float16: (np.dtype(np.float16), torch.int16),
    torch.float32: (np.dtype(np.float32), torch.int32),
}
# Beyond its file's size a tensor may grow only this far by expanded (stride 0) axes.
_EXPANDED_NBYTES = 64 << 20


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor, for modules that do not import torch."""
    return isinstance(value, torch.Tensor)


def check_tensor(value: Any, where: str, file_nbytes: int) -> torch.Tensor:
    """Take a plain dense CPU tensor, views included, whose copy is not larger than its file allows.

    Raises
    ------
    SourceError
        Something else, or a view that repeats a few bytes into a giant.
    """
    if not isinstance(value, torch.Tensor):
        raise SourceError.at(where, expected="a tensor", got=type(value).__name__)
    tensor = value.detach()
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise SourceError.at(where, expected="a plain dense tensor", got=f"{tensor.layout} on {tensor.device}")
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    if nbytes > file_nbytes + _EXPANDED_NBYTES:
        raise SourceError.at(
            where,
            expected=f"a tensor that fits its file of {file_nbytes} bytes",
            got=f"an expanded view of {nbytes} bytes, shape {list(tensor.shape)}",
        )
    return tensor


def same_storage(first: object, second: object) -> bool:
    """Whether two values are tensors in the same storage."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if any(tensor.layout is not torch.strided or tensor.device.type != "cpu" for tensor in (first, second)):
        return False
    there, here = first.untyped_storage(), second.untyped_storage()
    return there.nbytes() > 0 and (there.data_ptr(), there.nbytes()) == (here.data_ptr(), here.nbytes())


def row_values(value: Any, where: str, file_nbytes: int) -> NDArray[Any]:
    """Token ids or a mask: a tensor or a list of numbers, as an array (not yet checked, see `columns`).

    Raises
    ------
    SourceError
        Neither of them.
    """
    if isinstance(value, list | tuple):
        if any(type(number) not in (int, bool, float) for number in value):
            raise SourceError.at(where, expected="a list of numbers", got="a list of other things")
        try:
            return np.array(value)
        except OverflowError as error:
            raise SourceError.at(where, expected="numbers below 2**63", got=str(error)) from error
    tensor = check_tensor(value, where, file_nbytes)
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    try:
        array: NDArray[Any] = tensor.numpy()
    except TypeError as error:
        raise SourceError.at(where, expected="integers", got=str(tensor.dtype)) from error
    return array


def batched(tensor: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Drop a batch axis of 1: [1, token, …], or [layer, 1, token, hidden] as stacked layers have it."""
    if tensor.ndim == 4 and 1 in tensor.shape[:2]:
        tensor = tensor.squeeze(0 if tensor.shape[0] == 1 else 1)
    # With one token, [1, 1, W] may be [token, layer, hidden] just as well: both read the same once W is split.
    is_batch = tensor.ndim == 3 and tensor.shape[0] == 1 and (n_tokens != 1 or tensor.shape[1] == 1)
    return tensor[0] if is_batch else tensor


def split_layers(
    value: Any, n_tokens: int, hidden_size: int | None, where: str, file_nbytes: int, *, layer_first: bool = False
) -> list[torch.Tensor]:
    """Views [token, layers, hidden] of an entry: a list of [T, H], or [T, L, H], or [T, L*H], batched or not.

    With `layer_first`, tensors of three axes are [L, T, H] instead.

    Raises
    ------
    SourceError
        Another shape, another length than the token ids, a width that is no multiple of `hidden_size`.
    """
    pieces = list(value) if isinstance(value, list | tuple) else [value]
    if not pieces:
        raise SourceError.at(where, expected="at least one layer", got="an empty list")
    blocks = []
    for i, piece in enumerate(pieces):
        name = f"{where}[{i}]" if isinstance(value, list | tuple) else where
        tensor = batched(_check_states(piece, name, file_nbytes), n_tokens)
        if layer_first and tensor.ndim == 3:
            tensor = tensor.transpose(0, 1)
        if tensor.ndim not in (2, 3) or 0 in tensor.shape[1:]:
            raise SourceError.at(
                name, expected="shape [token, hidden] or [token, layer, hidden]", got=f"shape {list(piece.shape)}"
            )
        if tensor.shape[0] != n_tokens:
            raise SourceError.at(
                name,
                expected=f"a state for each of the {n_tokens} token ids",
                got=f"{tensor.shape[0]} tokens, shape {list(piece.shape)}",
                remedy=_length_remedy(tensor, len(pieces), n_tokens),
            )
        if tensor.ndim == 2:
            width = tensor.shape[1]
            unit = hidden_size or width
            if width % unit:
                raise SourceError.at(name, expected=f"a multiple of hidden size {unit}", got=f"width {width}")
            tensor = tensor.view(n_tokens, width // unit, unit)
        blocks.append(tensor)
    return blocks


def check_total(blocks: list[torch.Tensor], where: str, file_nbytes: int) -> None:
    """Refuse views that are together larger than their file allows: a list of them may name the same bytes many times.

    Raises
    ------
    SourceError
        They are.
    """
    nbytes = sum(block.numel() * block.element_size() for block in blocks)
    if nbytes > file_nbytes + _EXPANDED_NBYTES:
        got = f"{len(blocks)} views of {nbytes} bytes together, which share them"
        raise SourceError.at(where, expected=f"states that fit their file of {file_nbytes} bytes", got=got)


def _check_states(value: Any, where: str, file_nbytes: int) -> torch.Tensor:
    if isinstance(value, dict):
        raise SourceError.at(
            where,
            expected="a tensor, or a list of tensors, one a layer",
            got=f"dict with the keys {', '.join(map(str, list(value)[:8]))}",
            remedy="save the layers as a list of [token, hidden], in the order of --layer-ids",
        )
    tensor = check_tensor(value, where, file_nbytes)
    if tensor.dtype not in STATE_DTYPES:
        raise SourceError.at(where, expected="bfloat16, float16 or float32 states", got=str(tensor.dtype))
    return tensor


def _length_remedy(tensor: torch.Tensor, n_pieces: int, n_tokens: int) -> str:
    if tensor.ndim == 3 and tensor.shape[1] == n_tokens:
        return "layers and tokens are on other axes than in this source: save the states as [token, layer, hidden]"
    if n_pieces == n_tokens:
        return "this looks like a list with one entry a token: save a list with one [token, hidden] a layer"
    return columns.CACHED_TOKENS


def stack_layers(blocks: list[torch.Tensor], where: str) -> NDArray[Any]:
    """Copy views [token, layers, hidden] side by side into one array [token, layer, hidden] of its own memory.

    Raises
    ------
    SourceError
        They differ in hidden size or dtype.
    """
    dtypes = {str(block.dtype).removeprefix("torch.") for block in blocks}
    widths = {block.shape[2] for block in blocks}
    if len(dtypes) > 1 or len(widths) > 1:
        got = f"{', '.join(sorted(dtypes))}, hidden size {', '.join(map(str, sorted(widths)))}"
        raise SourceError.at(where, expected="layers of one dtype and hidden size", got=got)
    dtype, bits = STATE_DTYPES[blocks[0].dtype]
    n_layers = sum(block.shape[1] for block in blocks)
    states = torch.empty((blocks[0].shape[0], n_layers, widths.pop()), dtype=blocks[0].dtype)
    at = 0
    for block in blocks:
        states[:, at : at + block.shape[1]].copy_(block)
        at += block.shape[1]
    array: NDArray[Any] = states.view(bits).numpy().view(dtype)
    return array
