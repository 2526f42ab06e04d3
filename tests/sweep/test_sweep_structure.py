"""Whole files deleted, cut, grown, swapped, stale, foreign or no files at all, by every path: the same, or the name."""

import json
import os
import shutil
from collections import Counter
from contextlib import closing, nullcontext
from itertools import combinations
from pathlib import Path

import pytest
import torch
from sweep_damage import Sweep, Tally
from sweep_paths import EXTRAS, PATHS, WRITTEN, everything, plain

from hsfmt import HiddenStateDataset
from hsfmt.catalog import read_snapshot
from hsfmt.errors import HsfmtError
from hsfmt.pointer import make_pointer
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

POINTER = "hsfmt/manifest.json"


def cut_at(eighth):
    def cut(path):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * eighth // 8])

    return cut


def cut_one(path):
    path.write_bytes(path.read_bytes()[:-1])


def grow(by):
    return lambda path: path.write_bytes(path.read_bytes() + by)


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_fifo(path):
    path.unlink()
    os.mkfifo(path)


def make_sparse(path):
    n = path.stat().st_size
    path.write_bytes(b"")
    os.truncate(path, n)


def link_to(target):
    def link(path):
        path.unlink()
        path.symlink_to(target)

    return link


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path)


DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "emptied": cut_at(0),
    **{f"cut at {eighth}/8": cut_at(eighth) for eighth in range(1, 8)},
    "cut by a byte": cut_one,
    "grown by a byte": grow(b"x"),
    "grown by zeros": grow(bytes(4096)),
    "a folder": make_folder,
    "a FIFO": make_fifo,
    "a sparse file": make_sparse,
    "linked to nowhere": link_to("/nowhere/at/all"),
    "linked to a device": link_to("/dev/zero"),
    "linked to a folder": link_to("/usr"),
    "linked to itself": link_to_itself,
    "not readable": lambda path: path.chmod(0),
}
LOCAL = [path for path in PATHS if not path.remote]
# Root may read whatever it likes.
UNSEEN = {"not readable"} if os.geteuid() == 0 else set()
GONE = {"deleted", "linked to nowhere"}


def put_back(sweep: Sweep) -> None:
    """Restore files, whatever stands in their place."""
    for name in sweep.contents:
        path = sweep.place.root / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif path.exists():
            path.chmod(0o644)
    sweep.restore_all()


def touches(sweep: Sweep, path, names) -> bool:
    """Whether a path opens one of these files; what lists or measures without opening is always tried."""
    lists = path.writes or path.name.startswith(("verify", "live", "committed"))
    return lists or not sweep.reads[path.name].isdisjoint(names)


def also_named(damage: str, names) -> set[str]:
    """Return what an error may name instead: of two documents that do not fit together, either one."""
    others = set(names)
    for name in names:
        folder, _, file = name.rpartition("/")
        if folder in ("hsfmt/manifests", "hsfmt/index"):
            part = file.partition(".")[0]
            others |= {f"hsfmt/manifests/{part}.json", f"hsfmt/index/{part}.safetensors"}
            # What is committed is what has a manifest: without it, the folder's listing is what is wrong.
            others |= {"hsfmt/manifests: "} if damage in GONE else set()
        if name == POINTER and damage.startswith("of another"):
            others.add("hsfmt/snapshots/")  # the snapshot that it names is not there
        if folder.startswith("hsfmt/snapshots/"):
            others.add(f"{folder}/")  # of its two files, the one that is left is what a listing shows
        if name == "zarr.json" and damage in GONE:
            others.add("no zarr.json")
    return others


def shrunk(sweep: Sweep, damage: str, names, path):
    """Return what else a producer may see: a part without a manifest is not committed, and is written again."""
    lost = {Path(name).stem for name in names if name.startswith("hsfmt/manifests/")}
    if damage not in GONE or not lost:
        return bool
    if path.name == "committed ids":
        _, ids, _ = sweep.expected[path.name]
        left = tuple(name for name in ids if name[0] not in lost)
        return lambda result: result[:2] == (len(left), left)
    if path.name == "resuming writer":
        return lambda result: result == tuple(name[0] in lost for name in WRITTEN)
    return bool


def run(sweep: Sweep, paths, damage: str, names, apply, tally: Tally) -> None:
    """Do a damage once for each path, and judge."""
    what = f"{damage}: {', '.join(sorted(names))}"
    for path in paths:
        if not touches(sweep, path, names):
            tally.note(path.name, "unread")
            continue
        apply()
        try:
            also = shrunk(sweep, damage, names, path)
            outcome = sweep.judge(path, also_named(damage, names), what, tally, also)
        finally:
            put_back(sweep)
        if path.name in ("verify complete", "verify full") and outcome == "same" and damage not in UNSEEN:
            tally.silent.append(f"{path.name} says nothing of {what}")


def kind(name: str) -> str:
    """Return what files of a kind have in common."""
    parts = name.split("/")
    if parts[0] == "parts" and "c" in parts:
        return parts[2]
    return f"{parts[:2] if parts[0] == 'hsfmt' else ''}{parts[-1].rpartition('.')[2] if 'zarr' in name else ''}"


@pytest.fixture(scope="module")
def exchanges(sweep, build_swept, tmp_path_factory):
    """(damage, {file: bytes}) of files in each other's place, and of files of other datasets."""
    found = []
    for left, right in combinations(sweep.contents, 2):
        a, b = sweep.contents[left], sweep.contents[right]
        if kind(left) == kind(right) and a != b:
            found += [("swapped", {left: b, right: a}), ("duplicated", {left: a, right: a})]
    folder = tmp_path_factory.mktemp("foreign")
    for damage, seeds, settings in (
        ("of another dataset", (4, 5, 6, 7), {}),
        ("of another header", (0, 1, 2, 3), {"model": "another"}),
    ):
        other = folder / damage
        build_swept(other, seeds, **settings)
        for name, data in sweep.contents.items():
            path = other / name
            if path.is_file() and path.read_bytes() != data:
                found.append((damage, {name: path.read_bytes()}))
        # A whole part that fits together, as a restored copy of another time does.
        starts = ("hsfmt/manifests/a", "hsfmt/index/a", "parts/a/")
        paths = {path.relative_to(other).as_posix(): path for path in other.rglob("*") if path.is_file()}
        of_part = {name: path.read_bytes() for name, path in paths.items() if name.startswith(starts)}
        assert len(of_part) > 5
        found.append((f"whole part {damage}", of_part))
    return found


def exchange(sweep: Sweep, files) -> None:
    for name, data in files.items():
        (sweep.place.root / name).parent.mkdir(exist_ok=True)
        (sweep.place.root / name).write_bytes(data)


def cases(sweep: Sweep, exchanges):
    """Yield (damage, names, what does it) of all there are."""
    for name in sweep.contents:
        for damage, apply in DAMAGES.items():
            yield damage, [name], lambda apply=apply, name=name: apply(sweep.place.root / name)
    for damage, files in exchanges:
        yield damage, list(files), lambda files=files: exchange(sweep, files)


def some(cases):
    """Yield every damage to every file; but of the seven cuts of a file one, of the many pairs of zarr.json a few."""
    for number, case in enumerate(cases):
        damage, names = case[0], list(case[1])
        if damage.startswith("cut at"):
            chosen = damage == f"cut at {1 + len(names[0]) % 7}/8"
        else:
            chosen = len(names) != 2 or not names[0].endswith("zarr.json") or number % 7 == 0
        if chosen:
            yield case


def test_damage_of_every_kind_to_every_file(sweep, exchanges):
    """Each by one of the paths that read the file, which take turns."""
    tally = Tally()
    n = 0
    for turn, (damage, names, apply) in enumerate(some(cases(sweep, exchanges))):
        reading = [path for path in LOCAL if not sweep.reads[path.name].isdisjoint(names)]
        run(sweep, [reading[turn % len(reading)]], damage, names, apply, tally)
        n += 1
    assert tally.silent == [], tally.table()
    assert n > 700
    assert tally.total("error") > 400
    assert tally.counts.keys() == {path.name for path in LOCAL}


@pytest.mark.deep
@pytest.mark.parametrize("path", LOCAL, ids=lambda path: path.name.replace(" ", "_"))
def test_damage_of_every_kind_to_every_file_by_every_path(sweep, exchanges, path, record_property):
    tally = Tally()
    for damage, names, apply in cases(sweep, exchanges):
        run(sweep, [path], damage, names, apply, tally)
    record_property("counts", json.dumps(tally.sums()))
    assert tally.silent == [], tally.table()
    assert tally.total() > 1000
    if path.opens:
        assert tally.total("error") > 40
    else:  # what has its files open reads those that were there
        assert tally.total("same") == tally.total()


REMOTE = [path for path in PATHS if path.remote]
REMOTE_DAMAGES = {
    "deleted": lambda data: None,
    "emptied": lambda data: b"",
    **{f"cut at {eighth}/8": lambda data, eighth=eighth: data[: len(data) * eighth // 8] for eighth in range(1, 8)},
    "cut by a byte": lambda data: data[:-1],
    "grown by a byte": lambda data: data + b"x",
    "grown by zeros": lambda data: data + bytes(4096),
    "zeros": lambda data: bytes(len(data)),
}


def test_damage_of_every_kind_to_every_object_of_a_remote_copy(sweep, exchanges):
    tally = Tally()
    cases = [(damage, {name: change(data)}) for name, data in sweep.contents.items()
             for damage, change in REMOTE_DAMAGES.items()] + exchanges  # fmt: skip
    for turn, (damage, objects) in enumerate(some(cases)):
        path = REMOTE[turn % 2]
        for name, data in objects.items():
            sweep.put_remote(name, data)
        try:
            what = f"{damage}: {', '.join(objects)}"
            outcome = sweep.judge(path, also_named(damage, objects), what, tally)
        finally:
            for name in objects:
                sweep.put_remote(name, sweep.contents.get(name))
        if path.name.startswith("verify") and outcome == "same":
            tally.silent.append(f"{path.name} says nothing of {what}")
    assert tally.silent == [], tally.table()
    assert tally.total() > 400
    assert tally.total("error") > 250


def test_a_worker_of_a_loader_hands_on_the_error_that_names_the_file(sweep):
    """One flipped byte of a file of each kind; the batch comes out of another process."""
    tally, wrong = Counter(), []
    expected = None
    for name in [None, *{kind(name): name for name in reversed(sweep.contents)}.values()]:
        at = len(sweep.contents[name]) // 3 if name else 0  # of a shard, in its chunks: readers skip its own index
        with sweep.flipped(name, at, 0x80) if name else nullcontext():
            try:
                with closing(HiddenStateDataset(sweep.place.root, n_threads=1, extras=tuple(EXTRAS))) as dataset:
                    loader = torch.utils.data.DataLoader(dataset, 1, collate_fn=list, num_workers=1)
                    found = plain(list(loader))
            except HsfmtError as error:
                found = str(error)
        expected = expected or found
        tally["same" if found == expected else "error"] += 1
        if found != expected:
            wrong += [] if isinstance(found, str) and name in found else [(name, found)]
    assert wrong == []
    assert tally["error"] > 4
    assert tally["same"] > 2


def test_an_older_pointer_is_the_older_snapshot_and_nothing_between(sweep):
    """What a restored pointer names is whole: readers serve just that, and verification counts the newer parts."""
    root = sweep.place.root
    snapshot, data = read_snapshot(open_store(root), sweep.place.old)
    (root / POINTER).write_bytes(make_pointer(snapshot, len(data), "2026-01-01T00:00:00+00:00").to_bytes())
    try:
        reader = SampleReader(root)
        assert reader.fingerprint == sweep.place.old
        assert plain(everything(reader)) == sweep.expected["old snapshot"]
        reader.close()
        for level in ("quick", "complete", "full"):
            report = verify(root, level=level)
            assert ("info", "newer_parts") in {(finding.severity, finding.code) for finding in report.problems}
    finally:
        put_back(sweep)
