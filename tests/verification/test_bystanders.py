"""What file browsers, NFS, version control and dataset hubs leave in a dataset."""

import re

import pytest

from hsfmt import layout
from hsfmt.readers.verification import verify

PLACES = {
    ".DS_Store": ".DS_Store",
    "parts/.DS_Store": "parts/.DS_Store",
    "parts/part-0/hidden_states/c/._0": "parts/part-0/hidden_states/c/._0",
    "parts/part-0/.nfs000000000000abcd": "parts/part-0/.nfs000000000000abcd",
    "hsfmt/manifests/._part-0.json": "hsfmt/manifests/._part-0.json",
    "hsfmt/snapshots/Thumbs.db": "hsfmt/snapshots/Thumbs.db",
    "README.md": "README.md",
    ".gitattributes": ".gitattributes",
    ".git/objects/00/11": ".git",
    ".cache/huggingface/download/x.lock": ".cache",
}


@pytest.mark.parametrize("name", PLACES)
def test_bystanders_are_an_info(dataset, name):
    path = dataset / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    for level in ("complete", "full"):
        (finding,) = verify(dataset, level=level).problems
        assert (finding.severity, finding.code, finding.where) == ("info", "foreign", PLACES[name])
    assert verify(dataset, level="quick").problems == ()


@pytest.mark.parametrize("name", ["README.txt", "git", ".DS_Store2", "parts/part-0/x._y", ".hidden"])
def test_the_list_is_closed(dataset, name):
    (dataset / name).write_bytes(b"x")
    assert [f.code for f in verify(dataset, level="complete").errors] == ["unexpected"]


def test_a_folder_of_many_is_one_finding(dataset):
    for number in range(20):
        path = dataset / f".git/objects/{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"xx")
    (finding,) = verify(dataset, level="complete").problems
    assert finding.got.startswith("20 objects, 40 bytes")


def test_the_spec_lists_the_same_names(repo_root):
    prose = (repo_root / "spec/hsfmt-1.0.md").read_text()
    rule = prose.partition("**VFY-13**")[2].partition("- **VFY-14**")[0]
    assert re.findall(r"`([^`]+)`", rule) == [*layout.BYSTANDERS, *layout.BYSTANDER_PREFIXES]
