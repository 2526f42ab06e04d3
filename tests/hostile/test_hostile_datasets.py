"""Hostile datasets with valid digests through everything that takes a dataset: an error of ours, or the right data."""

import itertools
from collections.abc import Iterable, Mapping
from contextlib import suppress

import consumers
import hostile_table
import pytest
from covering import by_kind, covering
from dataset_forge import Forge, build
from forged_data import held
from hostile_cases import CASES, Case
from hostile_table import contents, plant, run

from hsfmt.errors import SampleError

READERS = list(consumers.READING)
CHANGERS = [*consumers.WRITING, *consumers.MAINTAINING]
TORCH = list(consumers.TORCH)
BULKY = [name for name in CASES if " MB" in name]
NAMES = [name for name in CASES if name not in BULKY]
N_LOTS = 40
# In CI every case meets three consumers or more: one whose data is compared with what the documents say, the others in
# turn, so that each consumer meets each kind of case. Those that change a dataset need a new one each, and those of
# torch are slow to a fault: they meet fewer cases. The deep test has every case on every consumer.
_GIVEN = covering(CASES, NAMES, list(consumers.GIVING))
_READ = covering(CASES, NAMES, [name for name in READERS if name not in consumers.GIVING], least=2)
CHOSEN = {
    "read": {name: [*_GIVEN[name], *_READ[name]] for name in NAMES},
    "changed": covering(CASES, NAMES, CHANGERS, every=3),
    "trained on": covering(CASES, NAMES, TORCH, every=4),
}


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    """Nothing here is about power cuts."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = build(tmp_path_factory.mktemp("hostile") / "base")
    # Imports open files, take memory and, of torch, long: they come before anything is watched.
    with suppress(ImportError):
        import torch  # noqa: F401
    run(Case(lambda forge: None, "nobody"), path, tmp_path_factory.mktemp("warm"), [*READERS, *CHANGERS])
    return path


def lot(number: int, names: Iterable[str] = NAMES) -> list[str]:
    return list(names)[number::N_LOTS]


def failures(chosen: Mapping[str, list[str]], base, place) -> dict[str, list[str]]:
    found = {name: run(CASES[name], base, place / "case", meets)[0] for name, meets in chosen.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def chosen(way: str, number: int) -> dict[str, list[str]]:
    return {name: CHOSEN[way][name] for name in lot(number, CHOSEN[way])}


def test_there_are_many_cases():
    assert len(NAMES) > 1000
    assert sum(len(CASES[name].refused_by) > 20 for name in NAMES) > 500
    assert sum("read" not in CASES[name].refused_by for name in NAMES) > 100
    assert sorted(itertools.chain(*map(lot, range(N_LOTS)))) == sorted(NAMES)


def test_an_unchanged_forgery_is_the_dataset(base, tmp_path):
    """The forge signs as the library does, and every consumer takes what it made."""
    root, _ = plant(Case(lambda forge: None, "nobody"), base, tmp_path / "case")
    files = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert files == {path.relative_to(base): path.read_bytes() for path in base.rglob("*") if path.is_file()}
    for name in [*READERS, *CHANGERS]:
        known = {**consumers.READING, **consumers.WRITING, **consumers.MAINTAINING}
        if name not in READERS:
            root, _ = plant(Case(lambda forge: None, "nobody"), base, tmp_path / f"to {name}")
        (tmp_path / name).mkdir()
        known[name](root, tmp_path / name)


def bodies(folder) -> dict[str, bytes]:
    return {path: body for path, (_, _, body) in contents(folder).items()}


def test_a_case_changes_the_dataset(base, tmp_path):
    """A case that plants nothing would be taken by all and prove nothing."""
    same = []
    for name in NAMES[::29]:
        root, _ = plant(CASES[name], base, tmp_path / f"case-{NAMES.index(name)}")
        same += [name] if bodies(root) == bodies(base) else []
    assert same == []


def test_what_is_chosen_covers():
    """Every case meets three consumers, every consumer every kind of case."""
    met: dict[str, set[str]] = {}
    for way in CHOSEN.values():
        for name, names in way.items():
            met.setdefault(name, set()).update(names)
    assert met.keys() == set(NAMES)
    assert min(map(len, met.values())) >= 3
    kinds = by_kind(CASES, NAMES)
    pairs = {(CASES[name].kind, consumer) for name, names in met.items() for consumer in names}
    assert pairs == set(itertools.product(kinds, [*READERS, *CHANGERS, *TORCH]))
    assert sum(map(len, kinds.values())) == len(NAMES)


@pytest.mark.parametrize("number", range(N_LOTS))
@pytest.mark.parametrize("way", ["read", "changed"])
def test_hostile_datasets(base, tmp_path, way, number):
    assert failures(chosen(way, number), base, tmp_path) == {}


@pytest.mark.torch
@pytest.mark.parametrize("number", range(N_LOTS))
def test_hostile_datasets_are_trained_on(base, tmp_path, number):
    warm_torch(base, tmp_path)
    assert failures(chosen("trained on", number), base, tmp_path) == {}


@pytest.mark.parametrize("name", BULKY)
def test_64_megabytes(base, tmp_path, name):
    assert failures({name: ["read"]}, base, tmp_path) == {}


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.parametrize("number", range(N_LOTS))
def test_every_case_on_every_consumer(base, tmp_path, number):
    warm_torch(base, tmp_path)
    assert failures({name: [*READERS, *TORCH, *CHANGERS] for name in lot(number)}, base, tmp_path) == {}


@pytest.mark.deep
@pytest.mark.torch
@pytest.mark.parametrize("name", BULKY)
def test_64_megabytes_on_every_consumer(base, tmp_path, name):
    warm_torch(base, tmp_path)
    assert failures({name: [*READERS, *TORCH, *CHANGERS]}, base, tmp_path) == {}


def warm_torch(base, tmp_path):
    """Import it before anything is watched."""
    run(Case(lambda forge: None, "nobody"), base, tmp_path / "warm", TORCH)


def test_what_the_documents_say_is_told_without_the_library(base, tmp_path):
    """The judge of what is given: right of the dataset as it was, and moved by a lie that no digest of bytes shows."""
    given = consumers.sampled(base, tmp_path)
    assert held(base) == given == consumers.sampled_one_by_one(base, tmp_path)
    assert len(given) == 6
    root, _ = plant(CASES["a chunk in the place of another"], base, tmp_path / "case")
    forged = consumers.sampled(root, tmp_path)
    assert held(root) == forged != given
    changed = {name: sample._replace(ids=b"") for name, sample in given.items()}
    assert not hostile_table._is_said(changed, root, base)


def test_the_writer_does_not_go_through_a_link(base, tmp_path):
    """A pointer that is a link to a file elsewhere is replaced; that file is not written to."""
    from hsfmt import seal

    root, outside = plant(CASES["hsfmt/manifest.json is a link to the very file"], base, tmp_path / "case")
    secret = (outside / "manifest.json").read_bytes()
    seal(root, retract=["s-1"])
    assert (outside / "manifest.json").read_bytes() == secret
    assert not (root / "hsfmt/manifest.json").is_symlink()
    assert Forge(root).pointer["samples"] == 5


def test_behind_a_part_that_took_the_last_place_a_writer_wants_to_be_told_one(base, tmp_path):
    root, _ = plant(CASES[f"source_index {2**63 - 1}"], base, tmp_path / "case")
    with pytest.raises(SampleError, match=r"source_index: expected below 2\*\*63"):
        consumers.written(root, tmp_path)
