"""What is done to a small dataset while a call fails: a table of scenarios.

A scenario has a state before it, and one step that can be repeated until it succeeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conditions import committed_bytes
from jobs import DATASET, JOB, command, connector_file, put, states, writer

from hsfmt import seal
from hsfmt.catalog import read_pointer
from hsfmt.layout import POINTER
from hsfmt.storage import open_store

N_FILES = 3


def all_committed(*names, without=()):
    """Return a function from a folder to the bytes of all that is committed in these datasets."""

    def kept(folder):
        return {
            f"{name}/{path}": data
            for name in names
            for path, data in committed_bytes(folder / name, without=without).items()
        }

    return kept


COMMITTED = all_committed(DATASET)


def nothing(folder):
    return None


@dataclass(frozen=True)
class Scenario:
    """`before(folder)` makes the state; `step(folder, acknowledged)` is what fails, and is repeated.

    `makes` is whether it leaves anything behind; `datasets` are those that must hold the samples between them; `kept`
    is what no fault may change; `damaged` is whether something is wrong before; `left` is what else must be the same
    in the end, however often the step was repeated.
    """

    name: str
    before: Callable[[Path], None]
    step: Callable[[Path, set], None]
    makes: bool = True
    datasets: tuple[str, ...] = (DATASET,)
    kept: Callable[[Path], dict] = COMMITTED
    damaged: bool = False
    left: Callable[[Path], object] = nothing


def _empty(folder):
    folder.mkdir(parents=True, exist_ok=True)


def _committed(folder):
    put(folder / DATASET, range(3))


def _sealed(folder):
    _committed(folder)
    seal(folder / DATASET)


def _grown(folder):
    _sealed(folder)
    put(folder / DATASET, range(3, JOB))


def _closed(folder, acknowledged):
    with writer(folder / DATASET, seal=True) as open_writer:
        for number in range(3, JOB):
            open_writer.write(f"s{number}", *states(number))


def _source(folder):
    _empty(folder)
    for number in range(N_FILES):
        connector_file(folder / "source" / f"s{number}.safetensors", number)


def _converted(folder):
    _source(folder)
    _convert(folder, set())


def _convert(folder, acknowledged, *flags):
    args = ("--from", "vllm", "--layer-ids", "1,3", "--part-size", "200B", "--workers", "1", *flags)
    command("convert", folder / "source", folder / DATASET, *args)
    acknowledged |= {f"s{number}" for number in range(N_FILES)}


def _deleting(folder, acknowledged):
    _convert(folder, acknowledged, "--delete-source")


def _export(folder, target):
    command("export", folder / DATASET, folder / f"out-{target}" / "a" / "b", "--to", target, "--workers", "1")


# --- maintenance ------------------------------------------------------------------------------------------------------

SOURCES = ("x", "y")


def _three(folder):
    _empty(folder)
    for name, numbers in zip((DATASET, *SOURCES), (range(2), range(2, 4), range(4, JOB)), strict=True):
        put(folder / name, numbers)
        seal(folder / name, retract=["s4"] if name == "y" else [])


def _merge(*flags):
    return lambda folder, done: command("merge", folder / DATASET, *(folder / name for name in SOURCES), *flags)


def files(*names):
    """Return a function from a folder to all paths in these datasets."""
    return lambda folder: sorted(
        str(path.relative_to(folder)) for name in names for path in (folder / name).rglob("*") if path.is_file()
    )


def _parts(folder):
    _empty(folder)
    put(folder / DATASET, range(JOB), every=2)
    seal(folder / DATASET)


def _compacted(folder):
    _parts(folder)
    command("compact", folder / DATASET, "-q")
    url = folder / DATASET
    left = (
        "parts/p-dead/input_ids/c/0",
        "hsfmt/index/p-dead.safetensors",
        "hsfmt/manifests/q.json.0123456789abcdef.tmp",
    )
    for path in left:
        (url / path).parent.mkdir(parents=True, exist_ok=True)
        (url / path).write_bytes(b"left by a killed writer")


def _still_named(folder):
    """Return the bytes of what a collection has to keep: the newest snapshot, and the part that it names."""
    url = folder / DATASET
    current = read_pointer(open_store(url)).fingerprint.partition(":")[2]
    parts = [path.stem for path in (url / "hsfmt/manifests").glob("*-*-c*.json")]
    assert len(parts) == 1, parts
    found = COMMITTED(folder)
    kept = {path: data for path, data in found.items() if parts[0] in path or current in path}
    return kept | {f"{DATASET}/{POINTER}": (url / POINTER).read_bytes()}


def _damaged(folder):
    """Flip a byte of the first part's states, cut the second part's manifest, lose a document of the third."""
    _empty(folder)
    url = folder / DATASET
    put(url, range(JOB), every=2, codec="none")
    seal(url)
    first, second, third = sorted(path.stem for path in (url / "hsfmt/manifests").iterdir())
    shard = url / f"parts/{first}/hidden_states/c/0/0/0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 0x10
    shard.write_bytes(data)
    manifest = url / f"hsfmt/manifests/{second}.json"
    manifest.write_bytes(manifest.read_bytes()[:-50])
    (url / f"parts/{third}/input_ids/zarr.json").unlink()


def _repair(folder, acknowledged):
    command("repair", folder / DATASET, "-q", codes=(0, 1))


def _pointer_lost(folder):
    _parts(folder)
    (folder / DATASET / POINTER).write_bytes(b"{}")


def _scenarios():
    d = DATASET
    put_all = {"every": 2}
    yield Scenario("write", _empty, lambda folder, done: put(folder / d, range(3), acknowledged=done))
    yield Scenario("commit", _sealed, lambda folder, done: put(folder / d, range(JOB), acknowledged=done, **put_all))
    yield Scenario("roll", _empty, lambda folder, done: put(folder / d, range(4), part_nbytes=60, acknowledged=done))
    yield Scenario("seal", _committed, lambda folder, done: seal(folder / d))
    yield Scenario("re-seal", _grown, lambda folder, done: seal(folder / d, retract=["s1"]))
    yield Scenario("close", _sealed, _closed)
    yield Scenario("convert", _source, _convert)
    yield Scenario("convert --delete-source", _source, _deleting)
    yield Scenario("delete what was converted", _converted, _deleting)
    yield Scenario("export safetensors", _sealed, lambda folder, done: _export(folder, "safetensors"))
    yield Scenario("export npz", _sealed, lambda folder, done: _export(folder, "npz"))
    yield Scenario(
        "verify", _sealed, lambda folder, done: command("verify", folder / d, "--level", "full", "-q"), makes=False
    )
    three = {"datasets": (d, *SOURCES)}
    kept = all_committed(d, *SOURCES)
    yield Scenario("merge", _three, _merge(), **three, kept=kept, left=files(*SOURCES))
    yield Scenario("merge --copy", _three, _merge("--copy"), **three, kept=kept, left=files(*SOURCES))
    yield Scenario("merge --move", _three, _merge("--move"), **three, left=files(*SOURCES))
    yield Scenario("compact", _parts, lambda folder, done: command("compact", folder / d, "-q"))
    collecting = ("--older-than", "0s", "--force", "--keep-snapshots", "1")
    yield Scenario(
        "gc", _compacted, lambda folder, done: command("gc", folder / d, *collecting), kept=_still_named, left=files(d)
    )
    sound = all_committed(d, without=("zarr.json",))
    yield Scenario("repair", _damaged, _repair, kept=sound, damaged=True)
    yield Scenario("repair of a pointer", _pointer_lost, _repair, damaged=True)


SCENARIOS = {scenario.name: scenario for scenario in _scenarios()}
