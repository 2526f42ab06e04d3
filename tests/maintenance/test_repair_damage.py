"""Every file of a dataset damaged in every way: exactly the samples that are whole come out, bit for bit."""

import shutil

import numpy as np
import pytest
from repair_cases import DAMAGES, build, contents, files_of, flip, tree, without_fsync

from hsfmt import repair
from hsfmt.catalog import load_index, load_manifest, read_header
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store


@pytest.fixture(scope="module", params=["zstd", "none"])
def pristine(request, tmp_path_factory):
    """(root, codec, contents) of a dataset that is only read."""
    with without_fsync():
        root = build(tmp_path_factory.mktemp("repair") / "dataset", codec=request.param)
        yield root, request.param, contents(root)


def lost_samples(root, path, damage, codec):
    """Return the ids that damage to this file must cost: those with a byte in what is gone, and no other."""
    if path.startswith("hsfmt/index/"):
        part = path.rpartition("/")[2].removesuffix(".safetensors")
        return {f"s{part[-1]}-{i}" for i in range(3)}
    if "/c/" not in path:
        return set()
    _, part, name, _, shard, *_ = path.split("/")
    store = open_store(root)
    manifest = load_manifest(store, part, read_header(store))
    index, column = load_index(store, manifest), manifest.columns[name]
    offsets = {"token": index.token_offsets, "sample": np.arange(index.n_samples + 1)}
    offsets = offsets.get(column.kind, index.offsets.get(name))
    size = (root / path).stat().st_size
    gone = (
        range(size)
        if damage in ("delete", "empty")
        else range(size // 2, size if damage == "truncate" else size // 2 + 1)
    )
    rows = set()
    first, end = column.shard_chunks(int(shard))
    for number in range(first, end):
        start, nbytes = int(index.chunks[name][number, 0]), int(index.chunks[name][number, 1])
        hit = range(max(start, gone.start), min(start + nbytes, gone.stop))
        row = number // column.n_planes * column.chunk_rows
        if not hit:
            continue
        if codec == "none":
            rows |= {row + (byte - start) // column.chunk_row_nbytes for byte in hit}
        else:
            rows |= set(range(row, row + column.chunk_rows))
    lost = set()
    for i in range(index.n_samples):
        needed = set(range(int(offsets[i]), int(offsets[i + 1])))
        valid = index.valid[name][i] if name in index.valid else 1
        if valid and needed & rows:
            lost.add(index.sample_id(i))
    return lost


@pytest.mark.deep
@pytest.mark.parametrize("damage", DAMAGES)
def test_exactly_the_whole_samples_are_kept(pristine, tmp_path, damage):
    n_cases, n_lost = check_damage(pristine, tmp_path, damage, files_of(pristine[0]))
    assert n_cases > 50
    assert n_lost > 5


def test_files_of_each_kind(pristine, tmp_path):
    """Every other file; with the other codec the ones between."""
    files = [path for path in files_of(pristine[0]) if "/part-1" not in path][pristine[1] == "none" :: 2]
    kinds = list(DAMAGES)
    counts = [check_damage(pristine, tmp_path, kind, files[number :: len(kinds)]) for number, kind in enumerate(kinds)]
    assert sum(n_cases for n_cases, _ in counts) == len(files)
    assert len(files) > 12
    assert sum(n_lost for _, n_lost in counts) > 2


def check_damage(pristine, tmp_path, damage, files):
    """Return how many cases there were, and how many samples they cost."""
    source, codec, before = pristine
    n_cases = n_lost = 0
    for path in files:
        root = shutil.copytree(source, tmp_path / "dataset")
        DAMAGES[damage](root / path)
        wanted = lost_samples(source, path, damage, codec)
        plan = repair(root, dry_run=True)
        assert set(plan.lost) == wanted, path
        report = repair(root)
        assert report.to_json() | {"dry_run": True, "snapshot": None} == plan.to_json(), path
        assert (report.changed, report.n_lost, report.ok) == (True, len(wanted), not wanted), path
        assert contents(root) == {key: value for key, value in before.items() if key not in wanted}, path
        verified = verify(root, level="full")
        assert verified.ok, (path, verified.errors)
        after = tree(root)
        assert not repair(root).changed, path
        assert tree(root) == after, path
        n_cases += 1
        n_lost += len(wanted)
        shutil.rmtree(root)
    return n_cases, n_lost


def test_swapped_and_foreign_files(pristine, tmp_path):
    source, _, before = pristine
    pairs = [
        ("parts/part-0/hidden_states/c/0/0/0", "parts/part-1/hidden_states/c/0/0/0"),
        ("hsfmt/manifests/part-0.json", "hsfmt/manifests/part-1.json"),
        ("hsfmt/index/part-0.safetensors", "hsfmt/index/part-1.safetensors"),
        ("parts/part-0/weight/zarr.json", "parts/part-0/topk/zarr.json"),
    ]
    for one, other in pairs:
        root = shutil.copytree(source, tmp_path / "dataset")
        first, second = (root / one).read_bytes(), (root / other).read_bytes()
        (root / one).write_bytes(second)
        (root / other).write_bytes(first)
        report = repair(root)
        found = contents(root)
        assert verify(root, level="full").ok, one
        assert found == {key: before[key] for key in before if key not in report.lost}, one
        assert len(found) + len(report.lost) == 6, one
        assert bool(report.lost) == ("zarr.json" not in one and "manifests" not in one)
        assert not repair(root).changed
        shutil.rmtree(root)


def test_damage_in_many_places_at_once(pristine, tmp_path):
    source, codec, before = pristine
    root = shutil.copytree(source, tmp_path / "dataset")
    flip(root / "parts/part-0/hidden_states/c/0/0/0")
    (root / "hsfmt/manifests/part-1.json").unlink()
    flip(root / "hsfmt/manifest.json")
    flip(root / "zarr.json")
    (root / "parts/zarr.json").unlink()
    for folder in (root / "hsfmt/snapshots").iterdir():
        flip(folder / "ids.safetensors")
    wanted = lost_samples(source, "parts/part-0/hidden_states/c/0/0/0", "flip", codec)
    report = repair(root)
    assert set(report.lost) == wanted
    assert wanted
    assert contents(root) == {key: value for key, value in before.items() if key not in wanted}
    assert verify(root, level="full").ok
    assert not repair(root).changed
