"""Shards of an activation cache: `shard_{k}.memmap`, rows [token, hidden] without a header, and its `.meta`.

bfloat16 is stored as its bit patterns; `.meta` is `{"shape": [rows, hidden], "dtype": "torch.bfloat16"}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.json_document import parse_object, read_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from hsfmt.readers.sources.folder import Folder

CONFIG = "config.json"
MEMMAP = ".memmap"
META = ".meta"
_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
_META_NBYTES, _CONFIG_NBYTES = 64 << 10, 1 << 20
_MOST_SHARDS = 1 << 20
_MOST_HIDDEN = 1 << 20
_COPY = "copy the whole folder again, or finish collecting the activations"


@dataclass(frozen=True, slots=True)
class Submodule:
    """The activations of one submodule: `name` is its folder, the shards are in order with the rows of each.

    `problems` says which shards are missing, or of another size than their rows take.
    """

    name: str
    shards: tuple[str, ...]
    starts: tuple[int, ...]
    hidden_size: int
    dtype: np.dtype[Any]
    config: dict[str, Any]
    problems: dict[str, Problem]

    @property
    def n_rows(self) -> int:
        """Rows, one a token, of all shards."""
        return self.starts[-1]

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.hidden_size * self.dtype.itemsize

    def shards_of(self, start: int, stop: int) -> tuple[str, ...]:
        """Paths of the shards that hold these rows."""
        return tuple(
            path
            for path, first, last in zip(self.shards, self.starts, self.starts[1:], strict=False)
            if first < stop and last > start
        )


def read_submodule(folder: Folder, path: str) -> Submodule:
    """Read what the documents of a submodule's folder say, and hold the shards' sizes to it.

    A shard that is missing or of another size is a problem of its own rows alone.

    Parameters
    ----------
    path
        The submodule's folder, relative to the source's.

    Raises
    ------
    SourceError
        A document is missing, malformed or contradicts another one.
    OSError
        The storage failed.
    """
    where = f"{path}/{CONFIG}"
    config = parse_object(read_file(folder, where, _CONFIG_NBYTES, _COPY), where)
    n_shards, hidden_size = config.integer("shard_count", 1, _MOST_SHARDS), config.integer("d_model", 1, _MOST_HIDDEN)
    total = config.integer("total_size", 1)
    sizes = {file.path: file.nbytes for file in folder.files}
    problems = {file.path: file.problem for file in folder.broken if file.problem is not None}
    shards, starts, dtypes = [], [0], set()
    for k in range(n_shards):
        shard = f"{path}/shard_{k}{MEMMAP}"
        n_rows, dtype = _read_meta(folder, shard.removesuffix(MEMMAP) + META, hidden_size)
        nbytes = n_rows * hidden_size * dtype.itemsize
        if sizes.get(shard) != nbytes:
            got = f"{sizes[shard]} bytes" if shard in sizes else "no such file"
            expected = f"{nbytes} bytes, {n_rows} rows of {hidden_size} {dtype.name} as its {META} says"
            problems.setdefault(shard, Problem(shard, expected, got, _COPY))
        shards.append(shard)
        starts.append(starts[-1] + n_rows)
        dtypes.add(dtype)
    if len(dtypes) > 1:
        raise SourceError.at(path, expected="shards of one dtype", got=", ".join(sorted(d.name for d in dtypes)))
    if starts[-1] != total:
        raise SourceError.at(f"{where}[total_size]", expected=f"{starts[-1]}, the rows of its shards", got=str(total))
    kept = {shard: problems[shard] for shard in shards if shard in problems}
    return Submodule(path, tuple(shards), tuple(starts), hidden_size, dtypes.pop(), config.members, kept)


def _read_meta(folder: Folder, path: str, hidden_size: int) -> tuple[int, np.dtype[Any]]:
    meta = parse_object(read_file(folder, path, _META_NBYTES, _COPY), path)
    shape, name = meta.get("shape"), meta.get("dtype")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int or n < 0 for n in shape):
        raise meta.refuse("shape", "[rows, hidden]")
    if shape[1] != hidden_size:
        raise meta.refuse("shape", f"rows of {hidden_size}, the d_model of {CONFIG}")
    # Old versions wrote no dtype, and float32.
    dtype = _DTYPES.get(str(name).removeprefix("torch.")) if name is not None else _DTYPES["float32"]
    if dtype is None:
        raise meta.refuse("dtype", ", ".join(_DTYPES))
    return shape[0], dtype


def read_rows(root: Path, submodule: Submodule, start: int, target: NDArray[Any]) -> None:
    """Read rows into `target`, [token, hidden] of the submodule's dtype, C-contiguous, from row `start` on.

    Raises
    ------
    SourceError
        A shard is of another size than when it was listed, or was written meanwhile.
    OSError
        The storage failed.
    """
    stop = start + len(target)
    width = submodule.row_nbytes
    buffer = target.view(np.uint8).reshape(-1).data
    done = 0
    for path, first, last in zip(submodule.shards, submodule.starts, submodule.starts[1:], strict=False):
        begin, end = max(start, first), min(stop, last)
        if begin >= end:
            continue
        with (root / path).open("rb", buffering=0) as file:
            stamp = FileStamp.take(root / path, path, file.fileno())
            if stamp.nbytes != (last - first) * width:
                expected = f"{(last - first) * width} bytes, as when the folder was listed"
                raise SourceError.at(path, expected=expected, got=f"{stamp.nbytes} bytes", remedy=_COPY)
            file.seek((begin - first) * width)
            until = done + (end - begin) * width
            while done < until:
                count = file.readinto(buffer[done:until])
                if not count:
                    raise SourceError.at(path, expected=f"rows up to {end - first}", got=f"{stamp.nbytes} bytes")
                done += count
            stamp.check_unchanged()
