"""docs/formats.md names every format that there is, and none that is not; what it says of norms is what is enforced."""

import re
from pathlib import Path

import numpy as np
import pytest

from hsfmt.header import make_header
from hsfmt.readers.sources import SOURCE_NAMES
from hsfmt.writers.targets.base import ExportJob
from hsfmt.writers.targets.registry import TARGET_NAMES, target_class


@pytest.fixture(scope="module")
def sections(repo_root):
    text = (repo_root / "docs" / "formats.md").read_text()
    return {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}


def rows(section: str) -> dict[str, list[str]]:
    """The cells of the rows of a section's table by the name in the first one."""
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        match = re.fullmatch(r"`([a-z][a-z0-9-]*)`", cells[0]) if cells else None
        if match:
            assert match[1] not in found
            found[match[1]] = cells[1:]
    return found


def test_every_source_has_a_row(sections):
    found = rows(sections["Sources"])
    assert tuple(found) == SOURCE_NAMES
    assert {len(cells) for cells in found.values()} == {5}
    assert all(all(cells[:2]) for cells in found.values()), "how it is recognised, and what its states are"


def test_every_target_has_a_row(sections):
    found = rows(sections["Targets"])
    assert tuple(found) == TARGET_NAMES
    assert {len(cells) for cells in found.values()} == {4}
    assert all(all(cells[:3]) for cells in found.values())


def test_the_norms_of_targets_are_those_that_are_enforced(sections):
    for name, cells in rows(sections["Targets"]).items():
        norm = target_class(name).final_norm
        assert cells[1] == norm if norm else cells[1].startswith(("as it is", "either", "none"))


def test_what_is_not_kept_is_what_the_targets_say(sections):
    header = make_header(layers=[2, 4, 8], hidden_size=8, final_norm="post", model="m")
    job = ExportJob(Path("out"), header, "url", "fingerprint", np.array([3]), ["a"], {"score": "float32"})
    for name, cells in rows(sections["Targets"]).items():
        dropped = " ".join(target_class(name)(job).dropped())
        for what in ("metadata", "extra column", "loss masks", "sample ids"):
            assert (what in cells[2]) == (what in dropped), (name, what)


def test_both_ways_names_each_once(sections):
    table = sections["Both ways"]
    named = [cell for line in table.splitlines()[3:] for cell in line.split("|")[2:4]]
    into, out = " ".join(named[::2]), " ".join(named[1::2])
    assert sorted(re.findall(r"`([a-z0-9-]+)`", into)) == sorted(SOURCE_NAMES)
    same = ["specforge-eagle3", "specforge-dflash", "specforge-dspark"]
    assert sorted(re.findall(r"`([a-z0-9-]+)`", out) + same) == sorted(TARGET_NAMES)


@pytest.mark.parametrize("page", ["index", "converting", "exporting"])
def test_it_is_linked(repo_root, page):
    assert "(formats.md)" in (repo_root / "docs" / f"{page}.md").read_text()


def test_the_command_line_page_names_them_too(repo_root):
    text = (repo_root / "docs" / "cli.md").read_text()
    assert "(formats.md)" in text
