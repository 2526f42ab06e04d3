"""Target `zarr`: one flat Zarr v3 group that any Zarr library reads, all samples one after the other.

The group holds `hidden_states` [token, layer, hidden], `input_ids` int64 [token], `loss_mask` uint8 [token],
`token_offsets` int64 [sample + 1], and the ids as UTF-8: `ids` uint8 with `id_offsets` int64 [sample + 1]; for float8
the scales too. Arrays are sharded (`sharding_indexed`, crc32c). The attribute `hsfmt_export` of the group says what the
states mean.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hsfmt.codecs import CODECS
from hsfmt.columns import (
    IDS,
    MASK,
    MAX_CHUNK_NBYTES,
    MAX_SHARD_CHUNK_ROWS,
    STATES,
    Column,
    column_chunk_rows,
    state_chunk_rows,
)
from hsfmt.cores import n_cores
from hsfmt.dtypes import STATE_DTYPES, dtype
from hsfmt.errors import Problem, SampleError
from hsfmt.writers.pipeline import encode_chunk
from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.targets.base import ExportJob, ExportSample, Target, Unit
from hsfmt.zarr_metadata import array_document, group_document, shard_index

Array = npt.NDArray[Any]

ATTRIBUTE = "hsfmt_export"
_SHARD_NBYTES = 1 << 30
_METADATA = "zarr.json"


@dataclass(frozen=True, slots=True)
class _Grid:
    """Tokens of a chunk and of a shard of every array along the tokens; a shard of each makes a unit."""

    n_tokens: int
    chunk: int
    shard: int

    @property
    def n_shards(self) -> int:
        return -(-self.n_tokens // self.shard)

    def span(self, shard: int) -> tuple[int, int]:
        """Return the tokens [first, stop) of a shard."""
        return shard * self.shard, min((shard + 1) * self.shard, self.n_tokens)


class ZarrTarget(Target):
    """One flat Zarr v3 group. A unit is a shard of all arrays along the tokens; samples may lie across two."""

    name: ClassVar[str] = "zarr"
    summary: ClassVar[str] = "one flat Zarr v3 group: tokens of all samples one after the other"
    dtypes: ClassVar[tuple[str, ...]] = STATE_DTYPES
    option_help: ClassVar[Mapping[str, str]] = {
        "codec": f"{' or '.join(CODECS)}; zstd (in a Blosc frame) is the default",
        "patterns": "yes stores bfloat16 and float8 as unsigned integers, for a zarr-python without hsfmt",
        "chunk_tokens": "tokens of a chunk",
        "shard_tokens": "tokens of a shard, a multiple of chunk_tokens",
    }

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job)
        self._offsets = np.concatenate([[0], np.cumsum(job.n_tokens)]).astype(np.int64)
        self._codec = job.options.get("codec", "zstd")

    def problems(self) -> list[Problem]:
        """Say what is wrong with the options."""
        found = []
        options = self.job.options
        if self._codec not in CODECS:
            found.append(Problem("--option codec", f"one of {', '.join(CODECS)}", repr(self._codec)))
        if options.get("patterns", "no") not in ("yes", "no"):
            found.append(Problem("--option patterns", "yes or no", repr(options["patterns"])))
        found += [
            Problem(f"--option {name}", "a number of tokens from 1 on", repr(options[name]))
            for name in ("chunk_tokens", "shard_tokens")
            if name in options and not (options[name].isascii() and options[name].isdigit() and int(options[name]))
        ]
        if found:
            return found
        grid, header = self._grid(), self.job.header
        if grid.chunk * header.hidden_size * dtype(header.dtype).itemsize > MAX_CHUNK_NBYTES:
            expected = f"chunks of at most {MAX_CHUNK_NBYTES} bytes"
            found.append(Problem("--option chunk_tokens", expected, f"{grid.chunk} tokens"))
        if grid.shard % grid.chunk:
            expected = f"a multiple of the chunk's {grid.chunk} tokens"
            found.append(Problem("--option shard_tokens", expected, f"{grid.shard}"))
        return found

    def dropped(self) -> list[str]:
        """Metadata, extra columns other than the scales, and attachments."""
        others = [f"extra column {name}" for name in self.job.extras if name != self._scale]
        others += [f"attachment {name}" for name in self.job.attachments]
        return (["metadata"] if self.job.has_metadata else []) + others

    def units(self) -> Sequence[Unit]:
        """A shard of all arrays along the tokens each."""
        grid, starts = self._grid(), self._offsets[:-1].tolist()
        columns = self._token_columns()
        found = []
        for shard in range(grid.n_shards):
            first, stop = grid.span(shard)
            numbers = range(bisect_right(starts, first) - 1, bisect_left(starts, stop))
            paths = tuple(f"{column.name}/{column.shard_key(shard)}" for column in columns)
            found.append(Unit(f"shard {shard}", numbers, paths))
        return found

    def write(self, unit: Unit, samples: Iterator[ExportSample]) -> None:
        """Write a shard of each array."""
        grid, columns = self._grid(), self._token_columns()
        shard = int(unit.paths[0].split("/")[2])
        first, stop = grid.span(shard)
        n = stop - first
        narrow = {column.name: np.zeros(n, column.dtype.storage) for column in columns if column.name != STATES}
        with (
            ThreadPoolExecutor(min(8, n_cores(), self.job.header.n_layers), "hsfmt-encode") as pool,
            writing(self.job.folder / unit.paths[0]) as file,
        ):
            states = _ShardWriter(columns[0], shard, file, pool)
            for sample in samples:
                start = int(self._offsets[sample.number])
                taken = slice(max(first - start, 0), min(stop - start, len(sample.input_ids)))
                at = slice(start + taken.start - first, start + taken.stop - first)
                states.append(_patterns(sample.hidden_states[taken], columns[0]))
                for name, rows in narrow.items():
                    rows[at] = _patterns(self._rows(sample, name), None)[taken]
            states.finish(n)
        for column, path in zip(columns[1:], unit.paths[1:], strict=True):
            self._write_shard(column, shard, path, narrow[column.name])

    def final_paths(self) -> tuple[str, ...]:
        """The arrays along the samples, and the metadata; the group's last."""
        small = self._sample_columns()
        paths = [f"{column.name}/{column.shard_key(i)}" for column in small.values() for i in range(column.n_shards)]
        arrays = [column.name for column in (*self._token_columns(), *small.values())]
        return (*paths, *(f"{name}/{_METADATA}" for name in arrays), _METADATA)

    def finish(self) -> tuple[str, ...]:
        """Write the arrays along the samples, and the metadata."""
        ids, offsets = self._ids()
        values = {"token_offsets": self._offsets, "ids": ids, "id_offsets": offsets}
        small = self._sample_columns()
        for name, column in small.items():
            for shard in range(column.n_shards):
                rows = values[name][shard * column.shard_rows : (shard + 1) * column.shard_rows]
                self._write_shard(column, shard, f"{name}/{column.shard_key(shard)}", rows)
        for column in (*self._token_columns(), *small.values()):
            with writing(self.job.folder / column.name / _METADATA) as file:
                file.write(array_document(column))
        with writing(self.job.folder / _METADATA) as file:
            file.write(group_document({ATTRIBUTE: self._attributes()}))
        return self.final_paths()

    @property
    def _scale(self) -> str | None:
        scaling = self.job.header.scaling
        return scaling["column"] if scaling else None

    def _rows(self, sample: ExportSample, name: str) -> Array:
        if name == IDS:
            return sample.input_ids
        if name == MASK:
            return sample.loss_mask
        scale = sample.extras[name]
        if scale is None:
            where = f"{name} of sample {sample.sample_id!r}"
            raise SampleError.at(where, expected="the scales of its float8 states", got="null")
        return scale.reshape(-1)

    def _grid(self) -> _Grid:
        header, options, n = self.job.header, self.job.options, int(self._offsets[-1])
        itemsize = dtype(header.dtype).itemsize
        row = header.n_layers * header.hidden_size * itemsize
        chunk = int(options.get("chunk_tokens", 0)) or min(n, state_chunk_rows(header.hidden_size, itemsize))
        per_shard = max(1, min(_SHARD_NBYTES // (chunk * row), MAX_SHARD_CHUNK_ROWS, -(-n // chunk)))
        return _Grid(n, chunk, int(options.get("shard_tokens", 0)) or chunk * per_shard)

    def _token_columns(self) -> list[Column]:
        header, grid = self.job.header, self._grid()
        name = header.dtype
        if self.job.options.get("patterns") == "yes" and name in ("bfloat16", "float8_e4m3fn"):
            name = f"uint{8 * dtype(name).itemsize}"
        shape = (grid.n_tokens, header.n_layers, header.hidden_size)
        columns = [Column(STATES, "token", name, shape, grid.chunk, grid.shard, self._codec)]
        narrow = {IDS: "int64", MASK: "uint8", **({self._scale: "float32"} if self._scale else {})}
        for key, of in narrow.items():
            # One chunk a shard, where that is no large one.
            rows = grid.shard if grid.shard * dtype(of).itemsize <= MAX_CHUNK_NBYTES else grid.chunk
            columns.append(Column(key, "token", of, (grid.n_tokens,), rows, grid.shard, self._codec))
        return columns

    def _sample_columns(self) -> dict[str, Column]:
        n, n_bytes = len(self.job.sample_ids), sum(len(key.encode()) for key in self.job.sample_ids)
        sizes = {"token_offsets": ("int64", n + 1), "ids": ("uint8", n_bytes), "id_offsets": ("int64", n + 1)}
        columns = {}
        for name, (of, rows) in sizes.items():
            chunk = min(rows, column_chunk_rows(dtype(of).itemsize))
            shard = chunk * min(-(-rows // chunk), MAX_SHARD_CHUNK_ROWS)
            columns[name] = Column(name, "ragged", of, (rows,), chunk, shard, self._codec)
        return columns

    def _ids(self) -> tuple[Array, Array]:
        encoded = [key.encode() for key in self.job.sample_ids]
        offsets = np.concatenate([[0], np.cumsum([len(key) for key in encoded])]).astype(np.int64)
        return np.frombuffer(b"".join(encoded), np.uint8), offsets

    def _write_shard(self, column: Column, shard: int, path: str, rows: Array) -> None:
        with ThreadPoolExecutor(1, "hsfmt-encode") as pool, writing(self.job.folder / path) as file:
            writer = _ShardWriter(column, shard, file, pool)
            writer.append(rows)
            writer.finish(len(rows))

    def _attributes(self) -> dict[str, Any]:
        header = self.job.header
        return {
            "dtype": header.dtype,
            "final_norm": header.final_norm,
            "layers": list(header.layers),
            "model": dict(header.model) if header.model else None,
            "scaling": dict(header.scaling) if header.scaling else None,
            "snapshot": self.job.fingerprint,
            "tokenizer": dict(header.tokenizer) if header.tokenizer else None,
        }


def _patterns(rows: Array, column: Column | None) -> Array:
    """Return rows as little-endian bit patterns."""
    storage = column.dtype.storage if column else dtype(rows.dtype.name).storage
    return rows.view(storage) if rows.dtype.itemsize == storage.itemsize else rows


class _ShardWriter:
    """Streams rows into the file of a shard; a row of chunks is in memory at a time.

    The chunks are encoded by threads of `pool`: Blosc called from a main thread would put blocks in any order.
    """

    def __init__(self, column: Column, shard: int, file: IO[bytes], pool: ThreadPoolExecutor) -> None:
        self._column = column
        self._shard = shard
        self._file = file
        self._pool = pool
        trailing = column.shape[2:] if column.name == STATES else column.shape[1:]
        # Plane-major, so that each chunk is contiguous for the encoder.
        self._buffer = np.zeros((column.n_planes, column.chunk_rows, *trailing), column.dtype.storage)
        self._filled = self._n_rows = self._at = 0
        self._table = np.zeros((column.n_chunks, 3), np.uint64)
        self._next = column.shard_chunks(shard)[0]

    def append(self, rows: Array) -> None:
        done = 0
        while done < len(rows):
            n = min(len(rows) - done, self._column.chunk_rows - self._filled)
            block = rows[done : done + n]
            if self._column.name == STATES:
                self._buffer[:, self._filled : self._filled + n] = block.swapaxes(0, 1)
            else:
                self._buffer[0, self._filled : self._filled + n] = block
            self._filled += n
            done += n
            if self._filled == self._column.chunk_rows:
                self._flush()
        self._n_rows += len(rows)

    def finish(self, n_rows: int) -> None:
        """Write the last chunks, padded with zeros, and the index."""
        assert self._n_rows == n_rows, (self._n_rows, n_rows)
        if self._filled:
            self._buffer[:, self._filled :] = 0
            self._flush()
        self._file.write(shard_index(self._column, self._shard, self._table))

    def _flush(self) -> None:
        for encoded in self._pool.map(lambda plane: encode_chunk(self._column.codec, plane), self._buffer):
            payload, _, crc = encoded
            self._table[self._next] = self._at, len(payload), 0
            self._file.write(payload)
            self._file.write(crc)
            self._at += len(payload) + len(crc)
            self._next += 1
        self._filled = 0
