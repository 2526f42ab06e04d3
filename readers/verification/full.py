"""Tier full, a part's samples: every value decoded, every sample digest computed anew.

Spec: rules VFY-7 to VFY-11, DIG-3, DIG-4. The digests are built here from the bytes, not by the functions that wrote
them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt import canonical
from hsfmt.columns import IDS, MASK, STATES, Column
from hsfmt.dtypes import DType
from hsfmt.errors import FormatError
from hsfmt.index import PartIndex
from hsfmt.layout import column_folder
from hsfmt.readers.verification.part_context import PartContext
from hsfmt.readers.verification.report import Counts, Findings
from hsfmt.readers.verification.shards import Block, ColumnReader

_SAMPLE_TAG = b"hsfmt:sample:1\0"
_EXTRA_TAG = b"hsfmt:extras:1\0"


@dataclass(slots=True)
class SampleFaults:
    """Faults of samples of a part, gathered into one finding a kind and place.

    Attributes
    ----------
    kinds
        (severity, code, where) to (row, sample id, expected, got) of each sample.
    """

    kinds: dict[tuple[str, str, str], list[tuple[int, str, str, str]]] = field(default_factory=dict)

    def extend(self, later: SampleFaults) -> None:
        """Add those of later rows."""
        for kind, faults in later.kinds.items():
            self.kinds.setdefault(kind, []).extend(faults)

    def report(self, findings: Findings) -> None:
        """Make findings of them."""
        for (severity, code, where), faults in self.kinds.items():
            row, sample_id, expected, got = faults[0]
            more = f"; {len(faults) - 1} more samples likewise" if len(faults) > 1 else ""
            got = f"{got} in sample {sample_id!r} (row {row}){more}"
            ids = [sample_id for _, sample_id, *_ in faults]
            findings.add(severity, code, where, expected=expected, got=got, samples=ids)


def owned_shards(column: Column, number: int, n_slices: int) -> range:
    """Return the shards of a column that slice `number` of a part checks whole; each is in just one slice."""
    first, end = (-(-edge * column.n_shards // n_slices) for edge in (number, number + 1))
    return range(first, end)


class PartDecoder:
    """Decodes a part, or a slice of it, front to back, sample by sample, holding one chunk row a column.

    A slice is a shard of the states, the share of the other columns' shards that falls to it, and the samples that
    begin in that shard. What these need of other shards is read too.

    Parameters
    ----------
    context
        The part; its index has been parsed.
    number, n_slices
        Which slice: all of them together check the part.

    Attributes
    ----------
    faults
        Of samples, by `check_samples`.
    elsewhere
        Where findings about files of other slices go.
    """

    def __init__(self, context: PartContext, number: int = 0, n_slices: int = 1) -> None:
        assert context.index is not None
        self._context = context
        self._index: PartIndex = context.index
        self._columns = context.manifest.columns
        self.elsewhere = replace(
            context, findings=Findings(), counts=Counts(), advance=lambda _: None, unusable=set(context.unusable)
        )
        self._readers = {
            name: ColumnReader(context, column, owned_shards(column, number, n_slices), self.elsewhere)
            for name, column in self._columns.items()
        }
        self._extras = sorted(name for name in self._columns if name not in (STATES, IDS, MASK))
        self.faults = SampleFaults()
        step = self._columns[STATES].shard_rows
        starts = self._index.token_offsets[:-1]
        first, end = (int(np.searchsorted(starts, edge * step)) for edge in (number, number + 1))
        self._samples = range(first, self._index.n_samples if number == n_slices - 1 else end)

    def check(self) -> None:
        """Decode and check everything; findings are in the context afterwards."""
        self.check_samples()
        self.faults.report(self._context.findings)

    def check_samples(self) -> None:
        """Decode and check everything; what is wrong with samples stays in `faults`."""
        for row in self._samples:
            self._check_content(row)
            self._check_extras(row)
        for reader in self._readers.values():
            reader.finish()

    def _note(self, row: int, code: str, where: str, expected: str, got: str, severity: str = "error") -> None:
        (sample_id,) = self._context.sample_ids([row])
        self.faults.kinds.setdefault((severity, code, where), []).append((row, sample_id, expected, got))

    def _where(self, column: str) -> str:
        return column_folder(self._context.manifest.part, column)

    def _index_where(self, table: str) -> str:
        return f"{self._context.manifest.index_file.path}: {table}"

    def _check_content(self, row: int) -> None:
        start, stop = (int(n) for n in self._index.token_offsets[row : row + 2])
        states = self._columns[STATES]
        state = xxhash.xxh3_128(_SAMPLE_TAG + states.dtype_name.encode() + b"\0")
        state.update(struct.pack("<3Q", stop - start, *states.shape[1:]))
        # All three are read to the sample's end even if one is damaged: what is wrong in the others is reported too.
        whole = self._add_ids(state, row, start, stop)
        whole &= self._add_mask(state, row, start, stop)
        whole &= self._add_states(state, row, start, stop)
        stored = self._index.content_digest[row].tobytes()
        if whole and state.digest() != stored:
            self._note(row, "content_digest", self._index_where("content_digest"), state.hexdigest(), stored.hex())

    def _add_ids(self, state: xxhash.xxh3_128, row: int, start: int, stop: int) -> bool:
        whole, negative = True, 0
        signed = np.dtype(f"<i{self._columns[IDS].dtype.itemsize}")
        for block in self._readers[IDS].blocks(start, stop):
            if block is None:
                whole = False
                continue
            ids = block.reshape(-1).view(signed).astype("<i8")
            negative += int(np.count_nonzero(ids < 0))
            state.update(ids.data)
        if negative:
            got = f"{negative} negative ids"
            self._note(row, "negative_ids", self._where(IDS), "token ids from 0 on", got, "warning")
        return whole

    def _add_mask(self, state: xxhash.xxh3_128, row: int, start: int, stop: int) -> bool:
        whole, supervised, other = True, 0, 0
        for block in self._readers[MASK].blocks(start, stop):
            if block is None:
                whole = False
                continue
            mask = block.reshape(-1)
            supervised += int(np.count_nonzero(mask == 1))
            other += int(np.count_nonzero(mask > 1))
            state.update(mask.data)
        if other:
            self._note(row, "loss_mask", self._where(MASK), "0 or 1", f"{other} other values")
        stored = int(self._index.n_supervised[row])
        if whole and supervised != stored:
            where = self._index_where("n_supervised")
            self._note(row, "n_supervised", where, f"{supervised}, as the mask has", str(stored))
        if whole and not self._index.loss_mask_given[row] and supervised != stop - start:
            where, got = self._index_where("loss_mask_given"), f"a mask with {supervised} ones of {stop - start}"
            self._note(row, "loss_mask", where, "all ones where no mask was given", got)
        return whole

    def _add_states(self, state: xxhash.xxh3_128, row: int, start: int, stop: int) -> bool:
        whole, nonfinite, zero = True, 0, 0
        element = self._columns[STATES].dtype
        for block in self._readers[STATES].blocks(start, stop):
            if block is None:
                whole = False
                continue
            nonfinite += _n_nonfinite(block, element)
            zero += _n_zero_rows(block)
            state.update(block.data)
        if nonfinite:
            got = f"{nonfinite} NaN or Inf values"
            self._note(row, "nonfinite", self._where(STATES), "finite states", got, "warning")
        if zero:
            n_rows = (stop - start) * self._columns[STATES].n_planes
            got = f"{zero} of {n_rows} states [token, layer] zero throughout"
            self._note(row, "all_zero", self._where(STATES), "states that are not all zero", got, "warning")
        return whole

    def _check_extras(self, row: int) -> None:
        meta = self._index.meta_bytes(row)
        self._check_metadata(row, meta)
        state = xxhash.xxh3_128(_EXTRA_TAG + struct.pack("<Q", len(meta)) + meta)
        whole = True
        for name in self._extras:
            whole &= self._add_extra(state, row, self._columns[name])
        stored = self._index.extra_digest[row].tobytes()
        if whole and state.digest() != stored:
            self._note(row, "extra_digest", self._index_where("extra_digest"), state.hexdigest(), stored.hex())

    def _add_extra(self, state: xxhash.xxh3_128, row: int, column: Column) -> bool:
        valid = bool(self._index.valid[column.name][row])
        start, stop = self._extra_rows(column, row)
        state.update(f"{column.name}\0{column.dtype_name}\0".encode())
        if valid:
            shape = (stop - start, *column.shape[1:])
            state.update(b"\1" + struct.pack(f"<{len(shape) + 1}Q", len(shape), *shape))
        else:
            state.update(b"\0")
        whole, other, nulls = True, 0, not valid and column.kind == "ragged" and stop > start
        for block in self._readers[column.name].blocks(start, stop):
            if block is None:
                whole = False
                continue
            if column.dtype_name == "bool":
                other += int(np.count_nonzero(block > 1))
            if valid:
                state.update(block.data)
            else:
                nulls |= bool(block.any())
        if nulls:
            expected = "no rows of a null value" if column.kind == "ragged" else "zeros in the rows of a null value"
            self._note(row, "values", self._where(column.name), expected, "other ones")
        if other:
            self._note(row, "values", self._where(column.name), "0 or 1 in bool", f"{other} other values")
        return whole or not valid

    def _extra_rows(self, column: Column, row: int) -> tuple[int, int]:
        if column.kind == "sample":
            return row, row + 1
        offsets = self._index.token_offsets if column.kind == "token" else self._index.offsets[column.name]
        return int(offsets[row]), int(offsets[row + 1])

    def _check_metadata(self, row: int, meta: bytes) -> None:
        where = self._index_where("meta")
        try:
            document = canonical.loads(meta, where, metadata=True)
        except FormatError as error:
            self._note(row, "metadata", where, "a JSON object", error.problems[0].got)
            return
        if not isinstance(document, dict):
            self._note(row, "metadata", where, "a JSON object", type(document).__name__)


def _n_nonfinite(block: Block, element: DType) -> int:
    """Count patterns whose exponent bits are all set (float8_e4m3fn: whose magnitude bits are)."""
    exponent = element.exponent_mask
    magnitude = block & block.dtype.type((1 << (8 * element.itemsize - 1)) - 1)
    # One maximum is cheaper than a comparison array, and almost always enough.
    if int(magnitude.max()) < exponent:
        return 0
    return int(np.count_nonzero(magnitude >= block.dtype.type(exponent)))


def _n_zero_rows(block: Block) -> int:
    """Count states [row, plane] without a bit set."""
    wide: npt.NDArray[np.generic] = block
    if block.shape[2] * block.itemsize % 8 == 0:
        wide = block.view("<u8")
    return int(np.count_nonzero(~wide.any(axis=2)))
