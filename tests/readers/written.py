"""What the readers' tests compare with: samples of known content, and stores that record what is read."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import places

from hsfmt.dtypes import dtype
from hsfmt.storage.local import LocalStore


@dataclass
class Content:
    """One sample as it was written; states as bit patterns."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    states: np.ndarray
    extras: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def make_content(seed: int, sample_id: str, n_tokens: int, *, layers: int, hidden: int, name: str = "bfloat16"):
    """A sample of random finite values."""
    rng = np.random.default_rng([seed, int(hashlib.sha256(sample_id.encode()).hexdigest()[:8], 16)])
    shape = (n_tokens, layers, hidden)
    if name == "bfloat16":
        states = (rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif name == "float8_e4m3fn":
        states = rng.integers(0, 0x7F, shape).astype(np.uint8)
    else:
        states = rng.normal(size=shape).astype(dtype(name).storage)
    return Content(
        sample_id,
        rng.integers(0, 1 << 17, n_tokens),
        rng.integers(0, 2, n_tokens).astype(bool),
        states,
        metadata={"row": seed, "weight": 0.5},
    )


def as_written(states: np.ndarray, name: str) -> np.ndarray:
    """Bit patterns as the writer takes them."""
    import ml_dtypes

    native = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
    return states.view(native[name]) if name in native else states


@dataclass
class Written:
    """A dataset and what is in it, by id and in the order of its snapshot."""

    path: Path
    content: dict[str, Content]
    layers: list[int]
    dtype: str

    @property
    def url(self) -> str:
        """Where the test finds it: the folder, or with `--store` a copy in a bucket or below a web server."""
        return places.CURRENT[-1].url(self.path)

    @property
    def ids(self) -> list[str]:
        return list(self.content)

    def shards(self, column: str = "hidden_states") -> list[Path]:
        found = (path for path in self.path.glob(f"parts/*/{column}/c/**/*") if path.is_file())
        return sorted(found, key=lambda path: [int(p) if p.isdecimal() else -1 for p in path.parts])


def write_dataset(
    path: Path,
    lengths=(1, 7, 8, 9, 16, 33, 3, 64, 5, 31),
    *,
    layers=(1, 3, 5),
    hidden=8,
    dtype="bfloat16",
    codec="zstd",
    parts=2,
    chunk_tokens=8,
    shard_tokens=32,
    final_norm="pre",
    values=None,
    **options,
) -> Written:
    """Write a dataset of several parts with a small grid, so that every border occurs."""
    from hsfmt import DatasetWriter

    content = {}
    per_part = -(-len(lengths) // parts)
    for part in range(parts):
        with DatasetWriter(
            path, layers=list(layers), hidden_size=hidden, final_norm=final_norm, dtype=dtype, codec=codec,
            chunk_tokens=chunk_tokens, shard_tokens=shard_tokens, **options,
        ) as writer:  # fmt: skip
            for number in range(part * per_part, min((part + 1) * per_part, len(lengths))):
                sample = make_content(
                    number, f"id-{number:03}", lengths[number], layers=len(layers), hidden=hidden, name=dtype
                )
                if dtype == "float8_e4m3fn":
                    scales = np.random.default_rng(number).uniform(0.01, 3, lengths[number]).astype(np.float32)
                    sample.extras["hidden_states_scale"] = scales
                if values is not None:
                    sample.extras |= values(number, lengths[number])
                content[sample.sample_id] = sample
                writer.write(
                    sample.sample_id, sample.input_ids, as_written(sample.states, dtype), sample.loss_mask,
                    sample.metadata, source_index=number, **sample.extras,
                )  # fmt: skip
    return Written(path, content, list(layers), dtype)


class CountingStore(LocalStore):
    """A local store that records the reads of whole objects and ranges."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.reads: list[str] = []
        self.batches: list[list[tuple[str, int, int]]] = []

    def read(self, path, max_nbytes):
        self.reads.append(path)
        return super().read(path, max_nbytes)

    def read_each(self, ranges):
        self.batches.append(list(ranges))
        return super().read_each(ranges)


class RemoteLikeStore(CountingStore):
    """The same, read as remote stores are: by batches of ranges."""

    is_local = False


def flip_bit(path: Path, position: int, bit: int = 3) -> None:
    """Change one bit of a file in place; negative positions count from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
    places.CURRENT[-1].changed(path)


def assert_same(read, wanted: Content, start: int = 0, stop: int | None = None, planes=slice(None)) -> None:
    """Compare a SampleArrays with what was written."""
    assert read.sample_id == wanted.sample_id
    assert read.input_ids.dtype == np.int64
    assert read.loss_mask.dtype == np.bool_
    np.testing.assert_array_equal(read.input_ids, wanted.input_ids[start:stop])
    np.testing.assert_array_equal(read.loss_mask, wanted.loss_mask[start:stop])
    expected = wanted.states[start:stop][:, planes]
    assert read.hidden_states.dtype == expected.dtype
    assert read.hidden_states.shape == expected.shape
    assert read.hidden_states.tobytes() == expected.tobytes()
