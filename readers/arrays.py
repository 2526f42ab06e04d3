"""`open_zarr`: the parts' columns as zarr-python arrays, and a view of each column over all parts.

zarr-python fills in zeros for what is missing and believes whatever shard index it finds; so it reads through a store
that gives it nothing but checked bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from hsfmt import zarr_dtypes
from hsfmt.catalog import check_listed
from hsfmt.errors import CorruptionError, HsfmtError
from hsfmt.header import Header
from hsfmt.layout import column_folder
from hsfmt.readers.part_cache import OpenPart
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.readers.zarr_store import VerifyingStore

Array = npt.NDArray[Any]


def open_zarr(
    url: str | os.PathLike[str],
    snapshot: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ZarrDataset:
    """Open the columns of a dataset as arrays for NumPy, xarray or dask; every byte they give is checked.

    Parameters
    ----------
    url
        The dataset.
    snapshot
        None: the sealed one; "live": all that is committed now; or a fingerprint.
    storage_options
        For fsspec URLs.

    Returns
    -------
    ZarrDataset
        `parts`, and each column over all parts as an attribute (`.hidden_states`).

    Raises
    ------
    NotFoundError
        No dataset, or never sealed, or no such snapshot or part.
    CorruptionError
        Snapshot, manifests or indexes are not those that were written.
    """
    zarr_dtypes.register()
    return ZarrDataset(SampleReader(url, snapshot=snapshot, options=ReadOptions(), storage_options=storage_options))


class ZarrDataset:
    """The arrays of a snapshot's parts.

    A part's arrays hold all samples of the part, in the order they were written: also those that the snapshot does not
    serve (retracted, or a later copy of an id), and not in the snapshot's order. `sample_tokens` says which rows of
    `hidden_states`, `input_ids` and `loss_mask` are a sample of the snapshot.

    Attributes
    ----------
    header
        What the data means.
    fingerprint
        The snapshot.
    parts
        Part name to column name to `zarr.Array`, parts in the order of the snapshot's table.
    columns
        Column name to its view over all parts, where all parts have it in the same form.
    """

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self.header: Header = reader.header
        self.fingerprint = reader.fingerprint
        snapshot = reader.snapshot
        numbers = [number for number, ref in enumerate(snapshot.parts) if ref.index_digest is not None]
        reader.parts.load(numbers)
        opened = [reader.parts.get(number) for number in numbers]
        for part in opened:
            check_listed(snapshot, part.number, part.index.lengths)
        store = VerifyingStore(reader, opened)
        self.parts: dict[str, dict[str, zarr.Array[Any]]] = {
            part.name: {name: _open_array(store, part, name) for name in part.columns} for part in opened
        }
        self.columns: Mapping[str, ConcatenatedColumn] = MappingProxyType(_concatenated(self.parts))
        self._token_starts = _token_starts(reader, opened)

    def __getattr__(self, name: str) -> ConcatenatedColumn:
        columns = self.__dict__.get("columns", {})
        if name in columns:
            found: ConcatenatedColumn = columns[name]
            return found
        raise AttributeError(f"no column {name!r} that all parts have in the same form; there are {sorted(columns)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.columns]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{column.name} {column.dtype} {column.shape}" for column in self.columns.values())
        return f"<ZarrDataset of {len(self.parts)} parts: {shapes}>"

    @property
    def token_starts(self) -> npt.NDArray[np.int64]:
        """First row of each sample of the snapshot, in its order, on the token axis over all parts; int64 [sample]."""
        return self._token_starts

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample of the snapshot, int64 [sample]."""
        return self._reader.lengths

    def sample_tokens(self, index: int) -> slice:
        """Return the rows of a sample of the snapshot on the token axis over all parts.

        Raises
        ------
        IndexError
            There is no such sample.
        """
        start = int(self._token_starts[index])
        return slice(start, start + int(self.lengths[index]))


@dataclass(frozen=True)
class ConcatenatedColumn:
    """A column over all parts, one after the other along the first axis; nothing is read before it is indexed.

    What NumPy, dask (`dask.array.from_array`) and through it xarray ask of an array: `shape`, `dtype`, `ndim`,
    indexing by integers, slices and `...`, and conversion by `numpy.asarray`.

    Attributes
    ----------
    name
        The column.
    arrays
        The parts' arrays.
    offsets
        First row of each part, and the number of rows; int64 [part + 1].
    """

    name: str
    arrays: tuple[zarr.Array[Any], ...]
    offsets: npt.NDArray[np.int64] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return (int(self.offsets[-1]), *self.arrays[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type; bfloat16 and float8_e4m3fn are those of ml_dtypes."""
        return self.arrays[0].dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of the chunks of the first part: a good block size is a multiple of it."""
        found: tuple[int, ...] = self.arrays[0].chunks
        return found

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(  # the signature is NumPy's
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001
    ) -> Array:
        if copy is False:
            raise ValueError(f"{self.name} is read from storage: there is nothing to give without a copy")
        return self[...].astype(self.dtype if dtype is None else dtype, copy=False)

    def __getitem__(self, key: Any) -> Array:
        """Return the rows and elements that NumPy's basic indexing selects.

        Raises
        ------
        IndexError
            Out of bounds, too many indices, or anything but integers, slices and one `...`.
        CorruptionError, NotFoundError, StorageError
            They can't be read as they were committed.
        """
        rows, *rest = _expanded(key, self.ndim)
        if isinstance(rows, int):
            row = rows + len(self) if rows < 0 else rows
            if not 0 <= row < len(self):
                raise IndexError(f"row {rows} of {len(self)}")
            return self._rows(row, row + 1)[(0, *rest)]
        start, stop, step = rows.indices(len(self))
        if step < 0:
            count = len(range(start, stop, step))
            low, high = (start + (count - 1) * step, start + 1) if count else (0, 0)
            return self._rows(low, high)[(slice(None, None, step), *rest)]
        if self.ndim > 1 and isinstance(rest[0], slice) and rest[0].step in (None, 1):
            # Planes that nobody wants (layers) are not read.
            found = self._rows(start, max(start, stop), rest[0])
            return found[(slice(None, None, step), slice(None), *rest[1:])]
        return self._rows(start, max(start, stop))[(slice(None, None, step), *rest)]

    def _rows(self, start: int, stop: int, planes: slice = slice(None)) -> Array:
        selection = () if self.ndim == 1 else (planes,)
        pieces = [
            np.asarray(array[(slice(max(start - first, 0), min(stop, end) - first), *selection)])
            for array, first, end in self._spans()
            if max(start, first) < min(stop, end)
        ]
        if len(pieces) == 1:
            return pieces[0]
        empty = np.empty((0, *self.shape[1:]), self.dtype)[(slice(None), *selection)]
        return np.concatenate([empty, *pieces])

    def _spans(self) -> Iterator[tuple[zarr.Array[Any], int, int]]:
        bounds = self.offsets.tolist()
        return zip(self.arrays, bounds[:-1], bounds[1:], strict=True)


class CheckedArray(zarr.Array[Any]):
    """A part's column: zarr-python's array, but that what it raises of damage are errors of this package.

    All other ways to index it (`[]`, `oindex`, `vindex`, `blocks`, `numpy.asarray`) end in one of these.
    """

    def get_basic_selection(self, *selection: Any, **settings: Any) -> Any:
        """Return a selection by integers and slices; see zarr-python."""
        with _typed(self.path):
            return super().get_basic_selection(*selection, **settings)

    def get_orthogonal_selection(self, *selection: Any, **settings: Any) -> Any:
        """Return a selection made for each axis; see zarr-python."""
        with _typed(self.path):
            return super().get_orthogonal_selection(*selection, **settings)

    def get_mask_selection(self, *selection: Any, **settings: Any) -> Any:
        """Return what a Boolean array selects; see zarr-python."""
        with _typed(self.path):
            return super().get_mask_selection(*selection, **settings)

    def get_coordinate_selection(self, *selection: Any, **settings: Any) -> Any:
        """Return single items by their indices; see zarr-python."""
        with _typed(self.path):
            return super().get_coordinate_selection(*selection, **settings)

    def get_block_selection(self, *selection: Any, **settings: Any) -> Any:
        """Return whole chunks by their indices; see zarr-python."""
        with _typed(self.path):
            return super().get_block_selection(*selection, **settings)


@contextmanager
def _typed(path: str) -> Iterator[None]:
    """Turn what the decoder raises of a frame that has its digest and is none into an error of this package."""
    try:
        yield
    except ExceptionGroup as group:
        # zarr-python 3.4 reads chunks in a task group, which wraps what the store raises.
        ours = _first(group, HsfmtError)
        if ours is not None:
            raise ours from group
        if _of_decoder(_first(group, RuntimeError)):
            raise _undecodable(path, _first(group, RuntimeError)) from group
        raise
    except RuntimeError as error:
        if not _of_decoder(error):
            raise
        raise _undecodable(path, error) from error


def _first(group: ExceptionGroup[Exception], kind: type[Exception]) -> Exception | None:
    found: Exception | None = group.subgroup(kind)
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found


def _of_decoder(error: Exception | None) -> bool:
    return error is not None and "blosc" in str(error)


def _undecodable(path: str, error: Exception | None) -> CorruptionError:
    remedy = "run `hsfmt verify --level full` to see all that is damaged"
    return CorruptionError.at(path, expected="chunks of valid Blosc frames", got=str(error)[:200], remedy=remedy)


def _open_array(store: VerifyingStore, part: OpenPart, name: str) -> CheckedArray:
    found = zarr.open_array(store=store, path=column_folder(part.name, name), mode="r", zarr_format=3)
    return CheckedArray(found.async_array)


def _concatenated(parts: Mapping[str, Mapping[str, zarr.Array[Any]]]) -> dict[str, ConcatenatedColumn]:
    result = {}
    for name in dict.fromkeys(name for arrays in parts.values() for name in arrays):
        arrays = tuple(arrays[name] for arrays in parts.values() if name in arrays)
        forms = {(array.dtype, array.shape[1:]) for array in arrays}
        if len(arrays) == len(parts) and len(forms) == 1:
            offsets = np.cumsum([0, *(array.shape[0] for array in arrays)], dtype=np.int64)
            result[name] = ConcatenatedColumn(name, arrays, offsets)
    return result


def _token_starts(reader: SampleReader, parts: list[OpenPart]) -> npt.NDArray[np.int64]:
    snapshot = reader.snapshot
    starts = np.empty(snapshot.n_samples, np.int64)
    first = 0
    for part in parts:
        of_part = snapshot.part == part.number
        starts[of_part] = first + part.index.token_offsets[snapshot.row[of_part]]
        first += int(part.index.token_offsets[-1])
    return starts


def _expanded(key: Any, ndim: int) -> list[int | slice]:
    """Return one index an axis.

    Raises
    ------
    IndexError
        Anything else than integers, slices and one `...`.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    if not any(item is Ellipsis for item in keys):
        keys.append(Ellipsis)
    at = next(place for place, item in enumerate(keys) if item is Ellipsis)
    keys[at : at + 1] = [slice(None)] * (ndim - len(keys) + 1)
    expanded: list[int | slice] = []
    for item in keys:
        if not isinstance(item, slice) and (isinstance(item, bool) or not hasattr(item, "__index__")):
            raise IndexError(f"{key!r}: only integers, slices and one ... select from this column")
        expanded.append(item if isinstance(item, slice) else item.__index__())
    if len(expanded) != ndim:
        raise IndexError(f"{len(expanded)} indices for {ndim} axes")
    return expanded
