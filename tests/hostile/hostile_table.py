"""The table: a case is planted in a copy of a small dataset, and consumers are let loose on it."""

import gc
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import consumers
from cases import Case
from dataset_forge import Forge
from forged_data import Held, held
from outcomes import ALLOWANCE_NBYTES, observe


def plant(case: Case, base: Path, place: Path) -> tuple[Path, Path]:
    """Return (dataset, folder outside of it) with the lie in it, in an empty place."""
    root, outside = place / "dataset", place / "outside"
    shutil.copytree(base, root)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (outside / "folder").mkdir()
    (outside / "folder/secret").write_text("secret")
    forge = Forge(root)
    case.change(forge)
    forge.save()
    for step in forge.later:
        step(root, outside)
    return root, outside


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return path to (mode, time of the last change of its content, content or target) of all that is in a folder."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        body = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = status.st_mode, status.st_mtime_ns, body
    return found


@cache
def _untouched(base: Path) -> dict[str, Held]:
    return held(base)


def _is_said(value: dict[str, Held], root: Path, base: Path) -> bool:
    """Say whether samples are those of the dataset before the lie, or exactly what the documents now say."""
    if value == _untouched(base):
        return True
    try:
        return value == held(root)
    except Exception:  # noqa: BLE001  the documents say nothing
        return False


def run(case: Case, base: Path, place: Path, names: Iterable[str]) -> tuple[list[str], dict[str, tuple[float, int]]]:
    """Return what is wrong with how these consumers took a case, and the seconds and bytes that each took."""
    wrong: list[str] = []
    measured: dict[str, tuple[float, int]] = {}
    known = {**consumers.READING, **consumers.TORCH, **consumers.WRITING, **consumers.MAINTAINING}
    fresh = True
    for name in sorted(names, key=list(known).index):
        writes = name in consumers.WRITING or name in consumers.MAINTAINING
        if fresh or writes:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            root, outside = plant(case, base, place)
            before, fresh = contents(outside), writes
        # Whoever makes what it writes durable opens the folder above it, which is none of the dataset's.
        scratch = place / "scratch/folder"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        gc.collect(1)
        outcome = observe(
            lambda name=name, root=root, scratch=scratch: known[name](root, scratch),  # type: ignore[misc]
            root,
            scratch.parent,
            writes=writes,
            allowance=ALLOWANCE_NBYTES + case.allowance,
        )
        wrong += [f"{name}: {finding}" for finding in outcome.findings]
        if name in case.refused_by and outcome.error is None:
            wrong.append(f"{name}: took it")
        if name in consumers.GIVING and outcome.error is None and not _is_said(outcome.value, root, base):
            wrong.append(f"{name}: gave other data than the documents say")
        if contents(outside) != before:
            wrong.append(f"{name}: changed what lies outside")
        measured[name] = outcome.seconds, outcome.grown_nbytes
    shutil.rmtree(place, ignore_errors=True)
    return wrong, measured
