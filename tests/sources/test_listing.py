"""What lies in a folder: every file once, links followed, and nothing that looks like a sample left out in silence."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hsfmt.errors import NotFoundError, SourceError, UsageError
from hsfmt.readers.sources import AbsentSampleError, find_source
from hsfmt.readers.sources.listing import list_folder

SAMPLE = {"input_ids": torch.arange(4), "hidden_states": torch.zeros(4, 2, 8)}


@pytest.fixture
def root(tmp_path):
    """A folder with a sample, beside which tests put others."""
    (tmp_path / "root").mkdir()
    torch.save(SAMPLE, tmp_path / "root" / "a.pt")
    return tmp_path / "root"


def paths(files) -> list[str]:
    return [file.path for file in files]


def test_links_pipes_and_odd_names(root):
    (root / "real").mkdir()
    (root / "a.pt").rename(root / "real" / "a.pt")
    (root / "link.pt").symlink_to(root / "real" / "a.pt")
    (root / "dangling.pt").symlink_to(root / "gone")
    (root / "self.pt").symlink_to(root / "self.pt")
    os.mkfifo(root / "pipe.pt")
    (root / "ü.pt").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff.pt")).touch()
    listing = list_folder(root)
    assert paths(listing.files) == ["link.pt", "real/a.pt", "ü.pt"]
    assert {file.path: file.problem.got for file in listing.broken} == {
        "dangling.pt": "a link to nothing",
        "pipe.pt": "neither a file nor a folder",
        "self.pt": "a link that leads back to itself",
        "\\udcff.pt": "a file whose name is not UTF-8",
    }
    assert listing.strays == ()


def test_entries_that_cannot_be_read_are_bad_samples(root, refused, accounted_for):
    (root / "b.pt").symlink_to(root / "gone")
    (root / "c.txt").symlink_to(root / "gone")
    source = find_source(root)
    accounted_for(source)
    assert [item.key for item in source.items] == ["a.pt", "b.pt"]
    assert "a link to nothing — restore what it leads to" in str(refused(source, "b.pt"))
    assert [(stray.path, stray.reason) for stray in source.strays] == [("c.txt", "a link to nothing")]
    (root / "a.pt").unlink()
    with pytest.raises(SourceError, match="a link to nothing"):
        find_source(root)


def test_a_row_whose_file_is_a_link_to_nothing_is_not_merely_absent(copy_of, item_of):
    root = copy_of("speculators/0.9.0")
    key = "hidden_states/hs_3.safetensors"
    (root / key).unlink()
    with pytest.raises(AbsentSampleError):
        find_source(root).load(item_of(find_source(root), key))
    (root / key).symlink_to("gone")
    source = find_source(root)
    with pytest.raises(SourceError, match="a link to nothing") as info:
        source.load(item_of(source, key))
    assert not isinstance(info.value, AbsentSampleError)


def test_a_request_that_is_a_link_to_nothing(tmp_path, save_safetensors, refused, accounted_for):
    tensors = {"hidden_states": np.zeros((3, 2, 4), np.float32), "token_ids": np.arange(3)}
    save_safetensors(tmp_path / "a.safetensors", tensors)
    for name in ("0.safetensors", "b.safetensors"):
        (tmp_path / name).symlink_to("gone")
    source = find_source(tmp_path)
    accounted_for(source)
    assert source.meaning().n_layers == 2
    refused(source, "0.safetensors")
    refused(source, "b.safetensors")


def test_links_to_folders_are_followed_once(root, tmp_path):
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    torch.save(SAMPLE, tmp_path / "disk" / "b.pt")
    torch.save(SAMPLE, tmp_path / "disk" / "deep" / "c.pt")
    (tmp_path / "disk" / "deep" / "back").symlink_to(root)
    (tmp_path / "disk" / "deep" / "again").symlink_to(tmp_path / "disk")
    (root / "l10").symlink_to(tmp_path / "disk")
    (root / "l9").symlink_to(tmp_path / "disk" / "deep")
    (root / "loop").symlink_to(root)
    (root / "up").symlink_to(tmp_path)
    source = find_source(root)
    assert [item.key for item in source.items] == ["a.pt", "l9/c.pt", "l10/b.pt"]
    for item in source.items:
        source.load(item)
    assert [stray.path for stray in source.strays] == ["l9/again", "l9/back", "l10/deep", "loop", "up"]
    assert {stray.reason.partition(",")[0] for stray in source.strays} == {
        "a link to a folder whose files are read already",
        "a folder whose files are read already",
        "a link to a folder around this one",
    }


def test_hidden_files_and_folders(root, accounted_for):
    (root / ".cache" / "deep").mkdir(parents=True)
    torch.save(SAMPLE, root / ".cache" / "deep" / "b.pt")
    (root / ".c.pt").touch()
    (root / "._a.pt").touch()
    (root / ".link.pt").symlink_to(root / "gone")
    source = find_source(root)
    accounted_for(source)
    assert [item.key for item in source.items] == ["a.pt"]
    assert {stray.reason for stray in source.strays} == {"hidden files are not read"}
    (note,) = source.notes
    assert note.startswith("3 files look like samples but are not read: .c.pt, .cache/deep/b.pt, .link.pt (")


def test_a_hidden_folder_may_be_the_source(root):
    root = root.rename(root.with_name(".root"))
    assert [item.key for item in find_source(root).items] == ["a.pt"]


LEFT_ASIDE = {
    "b.PT": "rename it to b.pt",
    "b.Safetensors": "rename it to b.safetensors",
    "c.safetensors.gz": "unpack it first (gunzip)",
    "c.ckpt.ZST": "unpack it first (unzstd)",
    "d.pt.tmp": "rename it to d.pt if",
    "e.pth.part": "rename it to e.pth if",
    "f.pt.1": "rename it to f.pt if",
    "g.pt~": "rename it to g.pt if",
    "h.safetensors": "not a .pt, .ckpt, .pth file",
}
KNOWN = {
    "optimizer.pt": "the state of a training run",
    "notes.txt": "not a .pt, .ckpt, .pth file",
    "a.pt.json": "not a .pt, .ckpt, .pth file",
    "model.safetensors.index.json": "not a .pt, .ckpt, .pth file",
}


def test_files_that_look_like_samples_are_noted(root, accounted_for):
    for name in (*LEFT_ASIDE, *KNOWN):
        (root / name).touch()
    source = find_source(root, "pt")
    accounted_for(source)
    assert [item.key for item in source.items] == ["a.pt"]
    for stray in source.strays:
        assert (
            stray.reason.endswith(KNOWN[stray.path]) if stray.path in KNOWN else LEFT_ASIDE[stray.path] in stray.reason
        )
    (note,) = source.notes
    assert note.startswith(
        "9 files look like samples but are not read: b.PT, b.Safetensors, c.ckpt.ZST, c.safetensors.gz, d.pt"
    )
    for name in LEFT_ASIDE:
        if name != "d.pt.tmp":
            (root / name).unlink()
    assert find_source(root).notes[0].startswith("1 file looks like a sample but is not read: d.pt.tmp (")
    (root / "d.pt.tmp").unlink()
    assert find_source(root).notes == []


def test_other_sources_note_them_too(copy_of):
    for folder, name, left in (
        ("vllm/vllm032_bf16_prompt", "vllm", "x.SAFETENSORS"),
        ("speculators/0.9.0", "speculators", "hidden_states/hs_01.safetensors"),
        ("speculators/0.4.0", "speculators-pt", "other.pt"),
    ):
        root = copy_of(folder)
        (root / left).touch()
        notes = find_source(root, name).notes
        assert [note for note in notes if f"1 file looks like a sample but is not read: {left} (" in note], notes


def test_a_folder_whose_name_is_not_utf8(root):
    Path(os.fsdecode(os.fsencode(root) + b"/\xff")).mkdir()
    with pytest.raises(UsageError, match=r"udcff: expected folder names in UTF-8, .* rename the folder"):
        list_folder(root)


def test_nothing_but_hidden_files(tmp_path):
    (tmp_path / ".a.pt").touch()
    with pytest.raises(NotFoundError, match="got hidden files, which are not read"):
        find_source(tmp_path)


@pytest.mark.parametrize(("name", "words"), [("a.PT", "rename it to a.pt"), ("a.pt.xz", "unxz")])
def test_nothing_but_files_that_look_like_samples(tmp_path, name, words):
    (tmp_path / name).touch()
    with pytest.raises(NotFoundError, match=words):
        find_source(tmp_path)


@pytest.mark.parametrize("url", ["s3://bucket/dump/*.pt", "https://user:secret@host/dump"])
def test_folders_at_urls(url):
    with pytest.raises(UsageError, match=r"expected a local folder of files, got a URL — copy it here first") as caught:
        find_source(url)
    assert "secret" not in str(caught.value)
