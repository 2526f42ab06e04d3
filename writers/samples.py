"""From what a caller has (torch or NumPy) to checked arrays of little-endian bit patterns, copying where it must.

Spec: rules SMP-1 to SMP-7. torch is never imported here: a tensor brings its own methods.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from hsfmt import canonical
from hsfmt.digests import SampleHasher
from hsfmt.dtypes import DType, dtype
from hsfmt.errors import FormatError, SampleError
from hsfmt.header import Header
from hsfmt.index import MAX_ID_NBYTES, MAX_META_NBYTES

Array = npt.NDArray[Any]
# Small enough to stay in a core's cache between the finiteness check and the digest.
_BLOCK_NBYTES = 1 << 20
_MAX_REASON_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Sample:
    """A checked sample.

    Attributes
    ----------
    sample_id
        UTF-8 id.
    input_ids
        int64 [token].
    loss_mask
        uint8 [token], 0 or 1; ones where none was given.
    loss_mask_given
        Whether the caller gave a mask.
    layers
        One array of patterns [token, hidden] a layer, views of the caller's memory.
    dense
        The same as one C-contiguous [token, layer, hidden] array if the caller's memory is that.
    meta
        The metadata object's bytes.
    """

    sample_id: str
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.uint8]
    loss_mask_given: bool
    layers: Sequence[Array]
    dense: Array | None
    meta: bytes

    @property
    def n_tokens(self) -> int:
        """Tokens of the sample."""
        return len(self.input_ids)

    def blocks(self) -> Iterator[Array]:
        """Yield the states as C-contiguous [token, layer, hidden] blocks of about 1 MiB."""
        row = sum(layer[:1].nbytes for layer in self.layers)
        step = max(1, _BLOCK_NBYTES // row)
        for start in range(0, self.n_tokens, step):
            if self.dense is not None:
                yield self.dense[start : start + step]
            else:
                yield np.stack([layer[start : start + step] for layer in self.layers], axis=1)


def make_sample(
    header: Header,
    sample_id: str,
    input_ids: Any,
    hidden_states: Any,
    loss_mask: Any = None,
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """Check a caller's arrays against the header.

    Raises
    ------
    SampleError
        Another dtype, shape or length than header and ids imply; an empty sample; a mask that is not 0 or 1.
    """
    check_id(sample_id)
    where = f"sample {sample_id!r}"
    ids = _integers(input_ids, f"{where}: input_ids")
    if not len(ids):
        raise SampleError.at(where, expected="at least one token", got="an empty sample")
    layers, dense = _states(hidden_states, header, len(ids), where)
    return Sample(
        sample_id=sample_id,
        input_ids=ids,
        loss_mask=_mask(loss_mask, len(ids), f"{where}: loss_mask"),
        loss_mask_given=loss_mask is not None,
        layers=layers,
        dense=dense,
        meta=_metadata(metadata, where),
    )


def check_id(sample_id: object) -> str:
    """Return the id if it can be one (rule SMP-1).

    Raises
    ------
    SampleError
        Not text, empty, over 4096 bytes, or not encodable.
    """
    if not isinstance(sample_id, str):
        raise SampleError.at("sample id", expected="text", got=f"{type(sample_id).__name__} {sample_id!r}"[:100])
    try:
        nbytes = len(sample_id.encode("utf-8"))
    except UnicodeEncodeError:
        raise SampleError.at("sample id", expected="Unicode text", got=ascii(sample_id)[:100]) from None
    if not 0 < nbytes <= MAX_ID_NBYTES:
        raise SampleError.at("sample id", expected=f"1 to {MAX_ID_NBYTES} bytes of UTF-8", got=f"{nbytes} bytes")
    return sample_id


def check_reason(sample_id: str, reason: object) -> None:
    """Refuse a hole's reason that is no text.

    Raises
    ------
    SampleError
        It is not a string of Unicode text, empty, or over 64 KiB.
    """
    if not isinstance(reason, str) or not reason or not _is_unicode(reason):
        raise SampleError.at(f"hole {sample_id!r}", expected="a reason", got=ascii(reason)[:100])
    if len(reason.encode()) > _MAX_REASON_NBYTES:
        expected = f"a reason of at most {_MAX_REASON_NBYTES} bytes"
        raise SampleError.at(f"hole {sample_id!r}", expected=expected, got=f"{len(reason.encode())}")


def is_positive(value: object) -> bool:
    """Say whether `value` is an integer above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_source_index(value: object) -> int | None:
    """Return the place in the default order that a caller gave, None for none.

    Raises
    ------
    SampleError
        Not an integer from 0 to 2**62 - 1, so that those that follow fit too.
    """
    if value is None:
        return None
    good = not isinstance(value, bool) and isinstance(value, SupportsIndex)
    if not good or not 0 <= operator.index(value) < 2**62:  # type: ignore[arg-type]
        raise SampleError.at("source_index", expected="an integer from 0 to 2**62 - 1", got=repr(value)[:100])
    return operator.index(value)  # type: ignore[arg-type]


def scan(sample: Sample, header: Header, *, count_nonfinite: bool) -> tuple[bytes, int]:
    """Return (content digest, number of NaN and Inf values) in one pass; 0 when they are not counted."""
    element = dtype(header.dtype)
    hasher = SampleHasher(header.dtype, sample.n_tokens, header.n_layers, header.hidden_size)
    hasher.tokens(sample.input_ids, sample.loss_mask)
    bad = 0
    for block in sample.blocks():
        hasher.states(block)
        if count_nonfinite:
            bad += _n_nonfinite(block, element)
    return hasher.digest(), bad


def _n_nonfinite(block: Array, element: DType) -> int:
    unsigned = np.dtype(f"<u{element.itemsize}")
    magnitude = block.view(unsigned) & unsigned.type((1 << (8 * element.itemsize - 1)) - 1)
    # All exponent bits set means that the magnitude is not below the mask; one max is cheaper than a comparison array.
    if int(magnitude.max()) < element.exponent_mask:
        return 0
    return int(np.count_nonzero(magnitude >= unsigned.type(element.exponent_mask)))


def patterns(value: Any, element: DType, where: str) -> Array:
    """Return the little-endian bit patterns of a torch tensor or NumPy array, as a view where that is possible.

    Raises
    ------
    SampleError
        Its dtype is not `element`. NumPy has no bfloat16 and float8 of its own: ml_dtypes arrays are taken, and
        unsigned integers of that width as patterns.
    """
    if _is_tensor(value):
        return _tensor_patterns(value, element, where)
    array = _unmasked(value, where)
    name = array.dtype.name
    if name == element.name:
        if name in ("bfloat16", "float8_e4m3fn"):
            return array.astype(array.dtype.newbyteorder("<"), copy=False).view(element.storage)
        return array.astype(element.storage, copy=False)
    if element.name in ("bfloat16", "float8_e4m3fn") and array.dtype == np.dtype(f"u{element.itemsize}"):
        return array.astype(element.storage, copy=False)
    raise SampleError.at(where, expected=f"dtype {element.name}", got=name, remedy=_cast_remedy(element))


def _cast_remedy(element: DType) -> str:
    return f"cast it yourself if that is meant, e.g. .to(torch.{element.name}): the writer never changes values"


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor_patterns(tensor: Any, element: DType, where: str) -> Array:
    torch = sys.modules["torch"]
    name = str(tensor.dtype).removeprefix("torch.")
    if name != element.name:
        raise SampleError.at(where, expected=f"dtype {element.name}", got=name, remedy=_cast_remedy(element))
    tensor = tensor.detach().cpu()
    if name == "bfloat16":
        tensor = tensor.view(torch.int16)
    elif name == "float8_e4m3fn":
        tensor = tensor.view(torch.uint8)
    array: Array = tensor.numpy()
    return array.view(element.storage)


def _states(value: Any, header: Header, n_tokens: int, where: str) -> tuple[Sequence[Array], Array | None]:
    element = dtype(header.dtype)
    layer_shape = (n_tokens, header.hidden_size)
    if isinstance(value, list | tuple):
        layers = [patterns(layer, element, f"{where}: hidden_states[{i}]") for i, layer in enumerate(value)]
        shapes = {layer.shape for layer in layers}
        if len(layers) != header.n_layers or shapes != {layer_shape}:
            expected = f"{header.n_layers} arrays of [{n_tokens} tokens, {header.hidden_size}]"
            raise SampleError.at(where, expected=expected, got=f"{len(layers)} of {sorted(shapes)}")
        return layers, None
    array = patterns(value, element, f"{where}: hidden_states")
    shape = (n_tokens, header.n_layers, header.hidden_size)
    if array.shape != shape:
        expected = f"hidden_states {shape} [token, layer, hidden] for {n_tokens} input_ids"
        raise SampleError.at(where, expected=expected, got=str(array.shape))
    dense = array if array.flags.c_contiguous else None
    return [array[:, i] for i in range(header.n_layers)], dense


def _unmasked(value: Any, where: str) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        remedy = "fill it (.filled(...)): what lies below the mask would be stored"
        raise SampleError.at(where, expected="a plain array", got="a masked array", remedy=remedy)
    return np.asarray(value)


def _to_numpy(value: Any, where: str) -> Array:
    if not _is_tensor(value):
        return _unmasked(value, where)
    tensor = value.detach().cpu()
    try:
        return np.asarray(tensor.numpy())
    except TypeError:  # NumPy has no bfloat16; float32 holds each of its values
        return np.asarray(tensor.float().numpy())


def _integers(value: Any, where: str) -> npt.NDArray[np.int64]:
    array = _to_numpy(value, where)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise SampleError.at(where, expected="integers [token]", got=f"{array.dtype} {array.shape}")
    limit = 2**31
    if array.size and not -limit <= int(array.min()) <= int(array.max()) < limit:
        raise SampleError.at(where, expected="token ids of 32 bits", got=f"{array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.int64)


def _mask(value: Any, n_tokens: int, where: str) -> npt.NDArray[np.uint8]:
    if value is None:
        return np.ones(n_tokens, np.uint8)
    array = _to_numpy(value, where)
    if array.shape != (n_tokens,):
        raise SampleError.at(where, expected=f"[{n_tokens}], one for each input id", got=str(array.shape))
    if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        got = f"{array.dtype} with values such as {array[~np.isin(array, (0, 1))][:1]}"
        raise SampleError.at(where, expected="0 or 1", got=got, remedy="keep weights in an extra column of kind token")
    return np.ascontiguousarray(array, np.uint8)


def _metadata(value: Mapping[str, Any] | None, where: str) -> bytes:
    if value is not None and not isinstance(value, Mapping):
        raise SampleError.at(f"{where}: metadata", expected="a mapping", got=type(value).__name__)
    try:
        data = canonical.dumps_metadata(dict(value or {}))
    except FormatError as error:
        raise SampleError(replace(problem, where=f"{where}: metadata") for problem in error.problems) from None
    if len(data) > MAX_META_NBYTES:
        raise SampleError.at(f"{where}: metadata", expected=f"at most {MAX_META_NBYTES} bytes", got=f"{len(data)}")
    return data
