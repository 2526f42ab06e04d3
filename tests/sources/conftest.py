"""What the tests of the sources share."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsfmt.errors import SourceError
from hsfmt.readers.sources import Source, SourceItem

_NAMES = {"int64": "I64", "int32": "I32", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


@pytest.fixture
def copy_of(data_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A folder of the test data that a test may change."""

    def copy(name: str) -> Path:
        target = tmp_path / name.replace("/", "_")
        shutil.copytree(data_dir / name, target, copy_function=shutil.copyfile)
        target.chmod(0o755)
        for folder in filter(Path.is_dir, target.rglob("*")):
            folder.chmod(0o755)
        return target

    return copy


@pytest.fixture
def save_safetensors() -> Callable[..., bytes]:
    """Write a safetensors file by hand, byte for byte; `tail` goes after the tensors, `entries` into the header."""

    def save(path: Path, tensors: dict[str, np.ndarray], *, tail: bytes = b"", entries: dict | None = None) -> bytes:
        header, blobs, at = {}, [], 0
        for name, array in tensors.items():
            blob = np.ascontiguousarray(array).tobytes()
            shape, dtype = list(array.shape), _NAMES[array.dtype.name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(blob)]}
            blobs.append(blob)
            at += len(blob)
        text = json.dumps(header | (entries or {})).encode()
        data = struct.pack("<Q", len(text)) + text + b"".join(blobs) + tail
        path.write_bytes(data)
        return data

    return save


@pytest.fixture
def item_of() -> Callable[[Source, str], SourceItem]:
    """The item of a key."""

    def find(source: Source, key: str) -> SourceItem:
        (item,) = [item for item in source.items if item.key == key]
        return item

    return find


@pytest.fixture
def refused(item_of) -> Callable[[Source, str], SourceError]:
    """The error with which a source refuses an item; it names the file."""

    def refuse(source: Source, key: str) -> SourceError:
        with pytest.raises(SourceError) as info:
            source.load(item_of(source, key))
        assert all(problem.where.startswith(key) for problem in info.value.problems)
        return info.value

    return refuse


@pytest.fixture
def accounted_for() -> Callable[[Source], None]:
    """Assert that every file is in exactly one item, or a support file, or a stray."""

    def check(source: Source) -> None:
        claimed = [path for item in source.items for path in item.paths]
        claimed += [support.path for support in source.support if not support.path.startswith("../")]
        claimed += [stray.path for stray in source.strays]
        there = [path.relative_to(source.root).as_posix() for path in source.root.rglob("*") if not path.is_dir()]
        assert sorted(claimed) == sorted(there)
        for item in source.items:
            there = [source.root / path for path in item.paths if (source.root / path).is_file()]
            assert item.nbytes == sum(path.stat().st_size for path in there)

    return check
