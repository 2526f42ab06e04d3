"""Kill a collection or a merge at its k-th call of the system, and run it again; run by tests in a process of its own.

Arguments: kind ("gc", "link", "copy" or "move"), folder, first k, step. The last line of stdout is a JSON object.
"""

import json
import os
import re
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path

import ml_dtypes
import numpy as np
from killing import killing_at, no_fsync
from repair_cases import contents

from hsfmt import DatasetWriter, layout, seal
from hsfmt.catalog import committed_parts, load_index, load_manifest, read_header, read_pointer
from hsfmt.errors import NotFoundError
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.merge import merge
from hsfmt.maintenance.rewriting import PartSamples, settings_like, write_part
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

CALLS = ("open", "write", "rename", "link", "unlink", "mkdir", "rmdir")
SOURCES = ("a", "b", "c")


def write(url, ids, part, *, value=1, **settings):
    with DatasetWriter(
        url, layers=[1, 2], hidden_size=8, final_norm="pre", codec="none", part_names=lambda: part, **settings
    ) as writer:
        for sample_id in ids:
            writer.write(sample_id, np.arange(3), np.full((3, 2, 8), value, ml_dtypes.bfloat16))
        writer.hole(f"hole-{part}", "the engine gave nothing")


def supersede(url, old, new):
    """Commit a copy of the samples in a part that replaces the old one."""
    store = open_store(url)
    header = read_header(store)
    manifest = load_manifest(store, old, header)
    samples = PartSamples(store, header, manifest, load_index(store, manifest))
    rows = [samples.read(row) for row in range(manifest.counts.samples)]
    samples.close()
    settings = settings_like(manifest.columns, header, {})
    write_part(store, new, settings, rows, holes=dict(manifest.holes), replaces={old: manifest.digest()})


def dataset_to_collect(root):
    """Build what has one of everything that a collection removes."""
    write(root, ["a", "b"], "p-one")
    write(root, ["c"], "p-else")
    seal(root, attachments={"d2t": np.arange(3)})
    supersede(root, "p-one", "p-two")
    seal(root, drop_attachments=["d2t"], attachments={"t2d": np.arange(4)})
    supersede(root, "p-two", "p-three")
    seal(root)
    (root / "parts/dead/input_ids/c").mkdir(parents=True)
    (root / "parts/dead/input_ids/c/0").write_bytes(b"x")
    (root / "parts/hollow/input_ids/c").mkdir(parents=True)
    (root / "hsfmt/manifests/q.json.0123456789abcdef.tmp").write_bytes(b"x")
    (root / "hsfmt/quarantine").mkdir()
    (root / "hsfmt/quarantine/dead.json").write_bytes(b"x")


def sources_to_merge(root, *, chain):
    write(root / "a", ["x", "y"], "p-a")
    seal(root / "a", retract=["x"])
    write(root / "b", ["y", "z"], "p-b")
    write(root / "c", ["w"], "p-c")
    seal(root / "c", attachments={"d2t": np.arange(3)})
    seal(root / "c", drop_attachments=["d2t"])
    seal(root / "c", attachments={"d2t": np.arange(4)})
    if chain:
        supersede(root / "c", "p-c", "p-d")
        supersede(root / "c", "p-d", "p-e")
        seal(root / "c")


def build(kind, root):
    no_fsync()
    root.mkdir()
    if kind == "gc":
        dataset_to_collect(root / "d")
    else:
        sources_to_merge(root, chain=kind != "move")


def work(kind, root):
    no_fsync()
    if kind == "gc":
        collect(root / "d", older_than=timedelta(0), force=True, keep_snapshots=1)
    else:
        merge(root / "d", [root / name for name in SOURCES], how=kind)


def files(root):
    """Return path to content of all files; but of pointers, which tell when they were written."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.endswith(layout.POINTER)}


def result(root):
    """Return what must not depend on the kills: what is committed and served, and all that lies in the sources."""
    url = root / "d"
    pointer = read_pointer(open_store(url))
    sources = {name: data for name, data in files(root).items() if not name.startswith("d/")}
    manifests = {
        name: data for name, data in files(url).items() if re.fullmatch(r"hsfmt/manifests/[a-z-]+\.json", name)
    }
    return pointer and pointer.fingerprint, contents(url), manifests, sources


def check_after_kill(kind, root, want_parts):
    """Verify all that is there, and that each part that counts is committed somewhere."""
    found = set()
    for name in ("d", *SOURCES):
        url = root / name
        if not (url / "zarr.json").exists():
            # Not begun, or emptied: no part is left there.
            assert not list(url.rglob("hsfmt/manifests/*.json")), name
            continue
        try:
            report = verify(str(url), level="full")
        except NotFoundError:
            assert not list(url.rglob("hsfmt/manifests/*.json")), name
            continue
        assert report.errors == (), [str(each) for each in report.errors]
        found |= set(committed_parts(open_store(url)))
    assert want_parts <= found
    if kind == "gc":
        copy = Path(shutil.copytree(root / "d", root / "copy"))
        assert [ref.name for ref in seal(copy).snapshot.parts] == ["p-else", "p-three"]
        shutil.rmtree(copy)


def in_fork(function, *args):
    """All that starts threads runs in forks, so that this process can fork."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function(*args)
            code = 0
        except BaseException as error:  # noqa: BLE001  the status tells
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, (function.__name__, args)
    return False


def killed(kind, root, k):
    def run():
        killing_at(k, CALLS)()
        work(kind, root)

    return in_fork(run)


def compare(kind, root, clean):
    url = root / "d"
    if kind == "gc":
        assert files(url).keys() == files(clean / "d").keys()
        assert not (url / "parts/hollow").exists()
        assert not (url / "parts/dead").exists()
    assert verify(str(url), level="full").ok
    got, want = result(root), result(clean)
    assert got[:3] == want[:3]
    assert got[3].keys() == want[3].keys(), sorted(got[3].keys() ^ want[3].keys())
    assert got[3] == want[3]
    assert kind != "move" or not got[3]


def main():
    kind, folder, first, step = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    source, clean = folder / "source", folder / "clean"
    in_fork(build, kind, source)
    shutil.copytree(source, clean)
    in_fork(work, kind, clean)
    want = {"gc": {"p-else", "p-three"}, "move": {"p-a", "p-b", "p-c"}}.get(kind, {"p-a", "p-b", "p-e"})
    rounds = kills = 0
    k = first
    while True:
        root = Path(shutil.copytree(source, folder / f"round-{k}"))
        stopped = killed(kind, root, k)
        if stopped:
            in_fork(check_after_kill, kind, root, want)
            again = killed(kind, root, k // 2 + 1)
            in_fork(check_after_kill, kind, root, want)
            kills += 1 + again
        in_fork(work, kind, root)
        in_fork(compare, kind, root, clean)
        shutil.rmtree(root)
        rounds += 1
        if not stopped:
            break
        k += step
    sys.stdout.write(json.dumps({"calls": k, "kills": kills, "rounds": rounds}) + "\n")


if __name__ == "__main__":
    main()
