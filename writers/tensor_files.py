"""The bytes of files that hold named tensors: .safetensors, .npz and .pt. The same tensors make the same bytes.

* `.safetensors` and `.pt` hold real bfloat16 and float8_e4m3fn tensors. What else is known is in the safetensors
  metadata under `hsfmt`, as JSON, and in the dict of the `.pt` file under `hsfmt`, as plain values.
* NumPy has neither type: `.npz` holds their bit patterns as uint16 and uint8, says the real type in `NAME.dtype`, and
  what else is known as JSON in `hsfmt`. `ml_dtypes` reads them: `patterns.view(ml_dtypes.bfloat16)`.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

_SAFETENSORS = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bool": "BOOL",
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor to write: the name of its element type, and its values as little-endian bit patterns, any strides."""

    dtype: str
    patterns: npt.NDArray[Any]


def write_safetensors(file: IO[bytes], tensors: Mapping[str, FileTensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, each tensor aligned to its element type, `metadata` as its `__metadata__`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    # The widest types first, so that each tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].patterns.itemsize, name))
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.patterns.nbytes
        header[name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": list(tensor.patterns.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()  # as the safetensors library writes it
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        file.write(np.ascontiguousarray(tensors[name].patterns).reshape(-1).view(np.uint8).data)


def _safetensors(file: IO[bytes], tensors: Mapping[str, FileTensor], attributes: Mapping[str, Any]) -> None:
    write_safetensors(file, tensors, {"hsfmt": json.dumps(attributes, sort_keys=True)})


def _npz(file: IO[bytes], tensors: Mapping[str, FileTensor], attributes: Mapping[str, Any]) -> None:
    arrays: dict[str, Any] = {"hsfmt": np.array(json.dumps(attributes, sort_keys=True))}
    for name, tensor in tensors.items():
        arrays[name] = tensor.patterns.view(np.bool_) if tensor.dtype == "bool" else tensor.patterns
        if tensor.dtype in ("bfloat16", "float8_e4m3fn"):
            arrays[f"{name}.dtype"] = np.array(tensor.dtype)
    # Not np.savez, whose own parameters would clash with columns of the same names.
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            # An entry by name alone would hold the time of day.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


class _Outcome:
    """A file for torch.save that keeps what went wrong: torch's zip writer says RuntimeError of whatever it was."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except BaseException as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def save_torch(value: Any, file: IO[bytes]) -> None:
    """Write a torch.save file; the file's name, if it has one, is not in it.

    Raises
    ------
    OSError
        The storage fails.
    """
    import torch

    outcome = _Outcome(file)
    try:
        torch.save(value, cast("IO[bytes]", outcome))
    except RuntimeError as error:
        if outcome.error is not None:
            raise outcome.error from error
        raise


def _pt(file: IO[bytes], tensors: Mapping[str, FileTensor], attributes: Mapping[str, Any]) -> None:
    import torch

    values: dict[str, Any] = {"hsfmt": dict(attributes)}
    for name, tensor in tensors.items():
        patterns = np.ascontiguousarray(tensor.patterns)
        # torch takes no array of a type it has no words for: it gets signed integers of that width, or bytes.
        plain = patterns.view(np.int16 if tensor.dtype == "bfloat16" else patterns.dtype)
        values[name] = torch.from_numpy(plain).view(getattr(torch, tensor.dtype))
    save_torch(values, file)


FORMATS: dict[str, Callable[[IO[bytes], Mapping[str, FileTensor], Mapping[str, Any]], None]] = {
    ".pt": _pt,
    ".safetensors": _safetensors,
    ".npz": _npz,
}
