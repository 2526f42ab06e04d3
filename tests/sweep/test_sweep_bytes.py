"""Changed bytes, anywhere in any file, by every path out: the same as before, or an error with the file's name."""

import json
from contextlib import ExitStack

import pytest
import torch  # noqa: F401  views and packed batches are torch's: without it these tests are left out
from sweep_damage import MASKS, Sweep, Tally
from sweep_paths import PATHS

BY_NAME = {path.name: path for path in PATHS}
POINTER, INDEX = "hsfmt/manifest.json", "index.safetensors"
PROMISED = {"verify quick", "verify complete", "verify full", "verify full, remote"}


def positions(sweep: Sweep, step: int, first: int = 0):
    """Yield (number, file, byte) for one byte in `step` of all bytes of all files."""
    at, number = first, 0
    for name, data in sweep.contents.items():
        while at < len(data):
            yield number, name, at
            at += step
            number += 1
        at -= len(data)


def check(sweep: Sweep, path, name: str, position: int, mask: int, tally: Tally) -> None:
    """Flip, read, note; what a path does not open, it was shown not to read."""
    if name in sweep.reads[path.name]:
        with sweep.flipped(name, position, mask):
            outcome = sweep.judge(path, {name}, f"{name}, byte {position}, mask {mask:02x}", tally)
        if path.writes:
            sweep.restore_all()
    else:
        outcome = "unread"
        tally.note(path.name, outcome)
    check_outcome(sweep, path, name, f"byte {position}, mask {mask:02x}", outcome, tally)


def check_outcome(sweep: Sweep, path, name: str, what: str, outcome: str, tally: Tally) -> None:
    if outcome != "silent" and outcome not in allowed(sweep, path.name, name):
        tally.silent.append(f"{path.name} has {outcome} for {name}, {what}")


def allowed(sweep: Sweep, path: str, name: str) -> tuple[str, ...]:
    """Return the outcomes that a changed byte of a file may have.

    Verification sees every one; its tier quick, of the documents of what is served now. Of what only old snapshots use,
    a warning will do.
    """
    is_old = sweep.place.old.partition(":")[2] in name
    is_document = "/c/" not in name and not name.startswith("hsfmt/attachments/")
    if path not in PROMISED or (path == "verify quick" and (is_old or not is_document)):
        return ("error", "same", "unread")
    return ("error", "warning") if is_old else ("error",)


def check_tally(tally: Tally) -> None:
    assert tally.silent == [], tally.table()


def test_a_root_of_a_later_minor_format_is_named(sweep):
    """A byte of the header that changes no meaning: each path that compares it with a part names the file."""
    tally = Tally()
    data = sweep.contents["zarr.json"]
    for position in [at for at in range(len(data)) if data[at - 2 : at + 1] == b"1.0"]:
        for path in PATHS:
            check(sweep, path, "zarr.json", position, 0x01, tally)
    check_tally(tally)
    assert tally.total("error") > 6


def test_one_byte_in_many_by_every_path(sweep):
    tally = Tally()
    for number, name, position in positions(sweep, 127):
        for turn, path in enumerate(PATHS):
            if (number + turn) % 3 == 0 or path.name == "verify full":
                check(sweep, path, name, position, MASKS[(number // 3 + turn) % 3], tally)
    check_tally(tally)
    assert tally.counts.keys() == BY_NAME.keys()
    assert tally.total() > 1500
    assert tally.total("error") > 500
    assert all(counts["error"] for path, counts in tally.counts.items() if BY_NAME[path].opens)


STEP = 61


def sweep_bytes(sweep: Sweep, first: int, turn: int, tally: Tally) -> int:
    """Change one byte in `STEP` of each file for each path; return how many.

    The masks take turns: in each of three turns a byte meets all of them, and by any one path, over the three, too.
    """
    n_bytes = 0
    for name, data in sweep.contents.items():
        for position in range(first, len(data), STEP):
            n_bytes += 1
            for at, path in enumerate(PATHS):
                if path.name not in PROMISED:
                    check(sweep, path, name, position, MASKS[(position + at + turn) % 3], tally)
    for names in together(sweep):
        for position in range(first, max(len(sweep.contents[name]) for name in names), STEP):
            changed = [name for name in names if position < len(sweep.contents[name])]
            for at, path in enumerate(PATHS):
                if path.name in PROMISED:
                    verify_all(sweep, path, changed, position, MASKS[(position + at + turn) % 3], tally)
    return n_bytes


def together(sweep: Sweep):
    """Yield the files whose damage verification must see at once: of any, what is below it can't be known any more."""
    above = [name for name in sweep.contents if name.startswith("hsfmt/manifests/") or name.endswith(f"/{INDEX}")]
    yield [POINTER]
    yield above
    yield [name for name in sweep.contents if name != POINTER and name not in above]


def verify_all(sweep: Sweep, path, names: list[str], position: int, mask: int, tally: Tally) -> None:
    """Change a byte of each of the files; verification names every one of them."""
    what = f"byte {position}, mask {mask:02x}"
    with ExitStack() as damage:
        for name in names:
            damage.enter_context(sweep.flipped(name, position, mask))
        for name, outcome in sweep.judge_each(path, {name: f"{name}, {what}" for name in names}, tally):
            check_outcome(sweep, path, name, what, outcome, tally)


@pytest.mark.deep
@pytest.mark.parametrize("turn", range(len(MASKS)))
@pytest.mark.parametrize("first", range(STEP))
def test_every_byte_by_every_path(sweep, first, turn, record_property):
    """All of them together: every byte, with every mask, by every path."""
    tally = Tally()
    n_bytes = sweep_bytes(sweep, first, turn, tally)
    record_property("counts", json.dumps({"flips": n_bytes} | tally.sums()))
    check_tally(tally)
    assert n_bytes > 300
    assert tally.total() == n_bytes * len(PATHS)
    assert tally.total("error") > 5 * n_bytes
