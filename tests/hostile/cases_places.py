# ruff: noqa: E501  a case a line
"""Places on the file system: what lies there is planted once all is signed."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import INDEX, MANIFEST, PART, case
from dataset_forge import POINTER, ROOT

Place = Callable[[Path, Path], Any]


def placed(name: str, kind: str, plant: Place, *, but: tuple[str, ...] = ()) -> None:
    case(name, kind, lambda forge: forge.later.append(plant), but=but)


def _linked_out(path: str) -> Place:
    """Move a file or folder out of the dataset and leave a link to it."""

    def plant(root: Path, outside: Path) -> None:
        target = outside / Path(path).name
        shutil.move(root / path, target)
        (root / path).symlink_to(target)

    return plant


def _replaced(path: str, make: Callable[[Path, Path], Any]) -> Place:
    def plant(root: Path, outside: Path) -> None:
        place = root / path
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        make(place, outside)

    return plant


def _socket(place: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(place.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(place.name)
    finally:
        os.chdir(here)


SHARD = f"parts/{PART}/hidden_states/c/0/0/0"
MAKE: dict[str, Callable[[Path, Path], Any]] = {
    "a dangling link": lambda place, outside: place.symlink_to(outside / "nowhere"), "a link to itself": lambda place, outside: place.symlink_to(place),
    "a loop": lambda place, outside: ((place.parent / "loop").symlink_to(place.name), place.symlink_to("loop")), "a link to a secret": lambda place, outside: place.symlink_to(outside / "secret"),
    "a link to a folder": lambda place, outside: place.symlink_to(outside), "a link to the root": lambda place, outside: place.symlink_to("/"), "a FIFO": lambda place, outside: os.mkfifo(place), "a folder": lambda place, outside: place.mkdir(),
    "a socket": _socket, "a link to /dev/zero": lambda place, outside: place.symlink_to("/dev/zero"), "a link to /proc/self/mem": lambda place, outside: place.symlink_to("/proc/self/mem"), "an empty file": lambda place, outside: place.touch(),
}  # fmt: skip
for _name, _make in MAKE.items():
    placed(f"shard: {_name}", "chunk", _replaced(SHARD, _make))
    placed(f"manifest: {_name}", "manifest", _replaced(MANIFEST, _make))
    placed(f"index: {_name}", "index", _replaced(INDEX, _make), but=("ls --holes",))
    placed(f"pointer: {_name}", "nobody", _replaced(POINTER, _make))
    placed(f"root: {_name}", "nobody", _replaced(ROOT, _make))
for _folder in ("parts", f"parts/{PART}", f"parts/{PART}/hidden_states", f"parts/{PART}/hidden_states/c"):
    placed(f"{_folder} leads out", "chunk", _linked_out(_folder))
for _folder in ("hsfmt", "hsfmt/manifests", "hsfmt/index"):
    placed(
        f"{_folder} leads out",
        "manifest",
        _linked_out(_folder),
        but=("ls --holes",) if _folder == "hsfmt/index" else (),
    )
placed("hsfmt/snapshots lead out", "pointer", _linked_out("hsfmt/snapshots"))
placed("hsfmt/attachments lead out", "attachment", _linked_out("hsfmt/attachments"))
for _file in (SHARD, MANIFEST, INDEX, POINTER, ROOT):
    # As a hub's cache keeps its files. What is behind the link is read, compared with its digest, and never written.
    placed(f"{_file} is a link to the very file", "nobody", _linked_out(_file))
_STRAYS = (
    "\udcff",
    "a\nb",
    "\x1b[2J",
    "\u202egpj",
    "a" * 255,
    "Part-0.json",
    "part-0.JSON",
    "..json",
    ".json",
    "part-0.json.json",
    "p\u00e4rt.json",
    "-rf",
    "$(id)",
    "part-3.json.0123456789abcdef.tmp",
)
for _place in ("", "hsfmt/manifests", "hsfmt/snapshots", "parts", f"parts/{PART}"):
    placed(
        f"strays in {_place or 'the root'}",
        "nobody",
        lambda root, outside, p=_place: [(root / p / name).write_bytes(b"x") for name in _STRAYS],
    )  # type: ignore[misc]
placed(
    "a manifest of a part that is another",
    "nobody",
    lambda root, outside: shutil.copy(root / MANIFEST, root / "hsfmt/manifests/part-9.json"),
)
placed(
    "a snapshot of another name",
    "nobody",
    lambda root, outside: shutil.copytree(
        next((root / "hsfmt/snapshots").iterdir()), root / "hsfmt/snapshots" / ("0" * 32)
    ),
)
# What no document names: a collection removes the link at most, and looks at nothing behind it.
for _path, _target in {
    "parts/part-9": "",
    "parts/part-9/hidden_states": "folder",
    f"parts/{PART}/extra": "",
    f"parts/{PART}/hidden_states/c/9": "folder",
    "hsfmt/index/part-9.safetensors": "secret",
    "hsfmt/manifests/part-9.json.0123456789abcdef.tmp": "secret",
    f"parts/{PART}/hidden_states/c/0/0/0.0123456789abcdef.tmp": "secret",
    f"hsfmt/snapshots/{'0' * 32}": "folder",
    f"hsfmt/snapshots/{'0' * 32}/index.safetensors": "secret",
    f"hsfmt/attachments/{'0' * 32}": "folder",
    f"hsfmt/attachments/{'0' * 32}/d2t.npy": "secret",
    "hsfmt/quarantine": "folder",
    "quarantine": "",
    "x": "folder",
}.items():

    def _stray_link(root: Path, outside: Path, path: str = _path, target: str = _target) -> None:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(outside / target)

    placed(f"a link out that nothing names: {_path}", "nobody", _stray_link)
# One manifest under names that a file system without case, or one that composes characters, takes for the same.
placed(
    "manifests of names that differ in case alone",
    "nobody",
    lambda root, outside: shutil.copy(root / MANIFEST, root / "hsfmt/manifests/PART-0.json"),
)
placed(
    "manifests of names that are one when normalized",
    "nobody",
    lambda root, outside: [
        shutil.copy(root / MANIFEST, root / f"hsfmt/manifests/{name}.json") for name in ("p\u00e9", "pe\u0301")
    ],
)
