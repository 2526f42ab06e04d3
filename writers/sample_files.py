"""One sample as a file of its own: .pt, .safetensors or .npz, for people who want to look at it elsewhere.

* `.safetensors` and `.pt` hold real bfloat16 and float8_e4m3fn tensors. What else is known of the sample is in the
  safetensors metadata under `hsfmt`, as JSON, and in the dict of the `.pt` file under `hsfmt`, as plain values.
* NumPy has neither type: `.npz` holds their bit patterns as uint16 and uint8, says the real type in `NAME.dtype`, and
  what else is known as JSON in `hsfmt`. `ml_dtypes` reads them: `patterns.view(ml_dtypes.bfloat16)`.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt.errors import NotFoundError, StorageError, UsageError

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
_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor to write: the name of its element type, and its values as little-endian bit patterns, any strides."""

    dtype: str
    patterns: npt.NDArray[Any]


def write_sample_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, FileTensor],
    attributes: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> int:
    """Write a file whose suffix says its format; it appears whole under its name or not at all.

    Parameters
    ----------
    path
        The file; its folder must exist.
    tensors
        By name.
    attributes
        What else is known: JSON values.
    overwrite
        Replace a file that is there.

    Returns
    -------
    int
        Its size in bytes.

    Raises
    ------
    UsageError
        Another suffix, or a file that is there and may not be replaced.
    NotFoundError, StorageError
        No such folder; the storage fails.
    """
    target = Path(path)
    write = _FORMATS.get(target.suffix)
    if write is None:
        raise UsageError.at(str(target), expected=f"a name that ends in {', '.join(_FORMATS)}", got=repr(target.suffix))
    if target.is_dir() or (target.exists() and not overwrite):
        got = "a folder" if target.is_dir() else "a file that is there already"
        raise UsageError.at(
            str(target), expected="a new file", got=got, remedy="choose another name, or say that it may be replaced"
        )
    if "hsfmt" in tensors and target.suffix != ".safetensors":
        got = "a column of that name, which is where the file says what else is known"
        raise UsageError.at("hsfmt", expected="no such column", got=got, remedy="write a .safetensors file")
    if not target.parent.is_dir():
        raise NotFoundError.at(str(target.parent), expected="a folder to write into", got="nothing")
    try:
        return _write_atomically(target, lambda file: write(file, tensors, attributes))
    except OSError as error:
        raise StorageError.at(str(target), expected="the storage to work", got=error.strerror or str(error)) from error


def file_name(sample_id: str, suffix: str) -> str:
    """Return a file name for a sample that is safe in any folder: no path, nothing hidden, no more than 200 characters.

    >>> file_name("../etc/passwd", ".pt"), file_name("chat 7/é", ".npz")
    ('%2E.%2Fetc%2Fpasswd.pt', 'chat%207%2F%C3%A9.npz')
    """
    name = quote(sample_id, safe="", errors="surrogatepass")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _MAX_NAME:
        # Two long ids that begin alike keep apart.
        name = f"{name[: _MAX_NAME - 33]}-{xxhash.xxh3_128_hexdigest(sample_id.encode('utf-8', 'surrogatepass'))}"
    return name + suffix


def _write_atomically(target: Path, write: Callable[[IO[bytes]], None]) -> int:
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.seek(0, os.SEEK_END)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems know no fsync of folders
            os.fsync(folder)
    finally:
        os.close(folder)
    return nbytes


def _write_safetensors(file: IO[bytes], tensors: Mapping[str, FileTensor], attributes: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"hsfmt": json.dumps(attributes, sort_keys=True)}}
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
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        file.write(np.ascontiguousarray(tensors[name].patterns).reshape(-1).view(np.uint8).data)


def _write_npz(file: IO[bytes], tensors: Mapping[str, FileTensor], attributes: Mapping[str, Any]) -> None:
    arrays: dict[str, Any] = {"hsfmt": np.array(json.dumps(attributes, sort_keys=True))}
    for name, tensor in tensors.items():
        arrays[name] = tensor.patterns.view(np.bool_) if tensor.dtype == "bool" else tensor.patterns
        if tensor.dtype in ("bfloat16", "float8_e4m3fn"):
            arrays[f"{name}.dtype"] = np.array(tensor.dtype)
    # Not np.savez, whose own parameters would clash with columns of the same names.
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def _write_pt(file: IO[bytes], tensors: Mapping[str, FileTensor], attributes: Mapping[str, Any]) -> None:
    import torch

    values: dict[str, Any] = {"hsfmt": dict(attributes)}
    for name, tensor in tensors.items():
        patterns = np.ascontiguousarray(tensor.patterns)
        # torch takes no array of a type it has no words for: it gets signed integers of that width, or bytes.
        plain = patterns.view(np.int16 if tensor.dtype == "bfloat16" else patterns.dtype)
        values[name] = torch.from_numpy(plain).view(getattr(torch, tensor.dtype))
    torch.save(values, file)


_FORMATS: dict[str, Callable[[IO[bytes], Mapping[str, FileTensor], Mapping[str, Any]], None]] = {
    ".pt": _write_pt,
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
}
SUFFIXES = tuple(_FORMATS)
