"""One flipped bit, anywhere in any file: verification names the file, and no reader hands out anything wrong."""

import random
from pathlib import Path

import pytest
import torch

from hsfmt import HiddenStateDataset
from hsfmt.errors import HsfmtError
from hsfmt.readers.verification import verify

# Every file of a dataset of one part matches exactly one of these.
KINDS = {
    "root": "zarr.json",
    "parts group": "parts/zarr.json",
    "part group": "parts/part-0/zarr.json",
    "arrays": "parts/part-0/*/zarr.json",
    "states": "parts/part-0/hidden_states/c/**/*",
    "ids": "parts/part-0/input_ids/c/*",
    "mask": "parts/part-0/loss_mask/c/*",
    "token extra": "parts/part-0/weight/c/*",
    "sample extra": "parts/part-0/score/c/*",
    "ragged extra": "parts/part-0/topk/c/**/*",
    "index": "hsfmt/index/part-0.safetensors",
    "manifest": "hsfmt/manifests/part-0.json",
    "snapshot index": "hsfmt/snapshots/*/index.safetensors",
    "snapshot ids": "hsfmt/snapshots/*/ids.safetensors",
    "pointer": "hsfmt/manifest.json",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory, build_dataset):
    """One part of two samples with extras of every kind, shards of two chunks and one that is not full."""
    return build_dataset(tmp_path_factory.mktemp("flips") / "dataset", n_parts=1, n_samples=2, first_seed=4)


def of_kind(root: Path, kind: str) -> list[Path]:
    return sorted(path for path in root.glob(KINDS[kind]) if path.is_file())


def test_the_kinds_cover_every_file_once(small, files):
    covered = [path.relative_to(small).as_posix() for kind in KINDS for path in of_kind(small, kind)]
    assert sorted(covered) == files(small)


def flips(path: Path, step: int):
    """Yield (position, bytes with a bit flipped there): for one byte of every `step`, the first and the last."""
    data = path.read_bytes()
    choose = random.Random(f"{path.name} {step}")
    positions = sorted({choose.randrange(at, min(at + step, len(data))) for at in range(0, len(data), step)})
    for position in sorted({0, len(data) - 1, *positions}):
        damaged = bytearray(data)
        damaged[position] ^= 1 << choose.randrange(8)
        yield position, bytes(damaged)


def verify_sweep(root: Path, kind: str, keep, step: int) -> int:
    n_flips = 0
    for path in of_kind(root, kind):
        name = path.relative_to(root).as_posix()
        with keep(path) as data:
            for position, damaged in flips(path, step):
                path.write_bytes(damaged)
                report = verify(root, level="full")
                named = [finding for finding in report.errors if finding.path == name]
                assert named, f"{name}, byte {position} of {len(data)}: {[str(f) for f in report.problems]}"
                others = [f for f in report.errors if f.path != name]
                assert not others, f"{name}, byte {position}: blames {[str(f) for f in others]}"
                if "/c/" in name:
                    assert all(finding.samples for finding in named)
                n_flips += 1
    assert verify(root, level="full").ok
    return n_flips


@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_the_file_of_a_flipped_bit(small, keep, kind):
    """One byte in 61, the first and the last."""
    assert verify_sweep(small, kind, keep, 61) >= 2


# Every byte of all shards and small documents; one in so many of the larger ones.
DENSE = {"arrays": 7, "index": 3, "manifest": 3, "snapshot index": 3}


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_the_file_of_a_flipped_bit_densely(small, keep, kind):
    step = DENSE.get(kind, 1)
    assert verify_sweep(small, kind, keep, step) >= sum(path.stat().st_size // step for path in of_kind(small, kind))


def read_all(root: Path) -> list[dict]:
    """Return all items, each with the dataset's header."""
    dataset = HiddenStateDataset(root, extras=["score", "topk", "weight"])
    try:
        assert list(dataset.sample_ids) == [item["sample_id"] for item in dataset]
        assert dataset.lengths.tolist() == [len(item["input_ids"]) for item in dataset]
        return [item | {"header": dataset.header} for item in dataset.__getitems__(range(len(dataset)))]
    finally:
        dataset.close()


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and left == right


def reader_sweep(root: Path, kind: str, keep, step: int) -> tuple[int, int]:
    """Return how many flips were refused and how many did not matter."""
    original = read_all(root)
    n_refused = n_unseen = 0
    for path in of_kind(root, kind):
        with keep(path):
            for position, damaged in flips(path, step):
                path.write_bytes(damaged)
                try:
                    items = read_all(root)
                except HsfmtError:
                    n_refused += 1
                    continue
                what = f"{path.relative_to(root)}, byte {position}"
                assert len(items) == len(original), what
                for item, wanted in zip(items, original, strict=True):
                    assert item.keys() == wanted.keys(), what
                    assert all(same(item[key], wanted[key]) for key in item), what
                n_unseen += 1
    assert len(read_all(root)) == len(original)
    return n_refused, n_unseen


# Zarr's metadata is not read by the reader: pointer, snapshot and manifests have it all, under digests. Of a shard it
# reads the chunks, not its own index and crc32c.
UNREAD = {"root", "parts group", "part group", "arrays"}
PARTLY_READ = {"states", "ids", "mask", "token extra", "sample extra", "ragged extra"}


def check_reader(root: Path, kind: str, keep, step: int) -> None:
    n_refused, n_unseen = reader_sweep(root, kind, keep, step)
    if kind in UNREAD:
        assert n_refused == 0
    else:
        assert n_refused > 0
        assert n_unseen == 0 or kind in PARTLY_READ


@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_gives_out_anything_wrong(small, keep, kind):
    check_reader(small, kind, keep, 61)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_gives_out_anything_wrong_densely(small, keep, kind):
    check_reader(small, kind, keep, DENSE.get(kind, 1))
