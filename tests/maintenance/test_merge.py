"""`merge` loses nothing, refuses what differs, and gives one result in any order."""

import itertools
import os

import ml_dtypes
import numpy as np
import pytest

from hsfmt import DatasetWriter, HiddenStateDataset, seal
from hsfmt.errors import CorruptionError, HeaderMismatchError, UsageError
from hsfmt.maintenance.merge import merge
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def write(url, ids, part, *, value=1, norm="pre", sealed=True):
    with DatasetWriter(
        url, layers=[1, 2], hidden_size=8, final_norm=norm, codec="none", seal=sealed, part_names=lambda: part
    ) as writer:
        for sample_id in ids:
            writer.write(sample_id, np.arange(3), np.full((3, 2, 8), value, ml_dtypes.bfloat16))
        writer.hole(f"hole-{part}", "the engine gave nothing")


@pytest.fixture
def sources(tmp_path):
    for name, ids in (("a", ["x", "y"]), ("b", ["y", "z"]), ("c", ["w"])):
        write(tmp_path / name, ids, f"p-{name}")
    seal(tmp_path / "c", attachments={"d2t": np.arange(4)})
    seal(tmp_path / "a", retract=["x"])
    return [tmp_path / name for name in "abc"]


def check(url):
    assert verify(str(url), level="full").errors == ()


@pytest.mark.parametrize("how", ["auto", "link", "copy", "move"])
def test_all_is_carried_over(tmp_path, sources, how):
    report = merge(tmp_path / "d", sources, how=how)
    check(tmp_path / "d")
    dataset = HiddenStateDataset(str(tmp_path / "d"))
    assert len(dataset) == 3
    assert (report.same, report.retracted, report.attachments) == (1, ("x",), ("d2t",))
    assert report.counts["holes"] == 3
    assert [source.exists() and any(source.rglob("*.json")) for source in sources] == [how != "move"] * 3 or report.left
    assert bool(report.copied_nbytes) == (how == "copy")


def test_any_order_and_repetition_give_the_same_snapshot(tmp_path, sources):
    found = set()
    for i, order in enumerate(itertools.permutations(sources)):
        found.add(merge(tmp_path / f"d{i}", order).fingerprint)
        found.add(merge(tmp_path / f"d{i}", order).fingerprint)
    for source in reversed(sources):
        last = merge(tmp_path / "one-by-one", [source]).fingerprint
    assert found == {last}


def test_other_meaning_and_other_content_are_refused(tmp_path, sources):
    write(tmp_path / "post", ["q"], "p-post", norm="post")
    with pytest.raises(HeaderMismatchError, match="final_norm"):
        merge(tmp_path / "d", [*sources, tmp_path / "post"])
    write(tmp_path / "other", ["z"], "p-other", value=2)
    with pytest.raises(UsageError, match="1 ids with different ones"):
        merge(tmp_path / "d", [*sources, tmp_path / "other"])
    write(tmp_path / "twin", ["v"], "p-a")
    with pytest.raises(UsageError, match="one part of this name"):
        merge(tmp_path / "d", [*sources, tmp_path / "twin"])
    with pytest.raises(UsageError, match="beside the destination"):
        merge(tmp_path / "a", [tmp_path / "a"], how="move")
    assert not (tmp_path / "d").exists()
    report = merge(tmp_path / "d", [*sources, tmp_path / "other"], on_duplicate="first")
    assert report.conflicts == (("z", "p-b", "p-other"),)


def test_damage_in_a_source_is_not_copied(tmp_path, sources):
    shard = next(path for path in (sources[1] / "parts").rglob("c/0/0/0"))
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(data)
    for options in ({"how": "copy"}, {"verify": "full"}):
        with pytest.raises(CorruptionError, match="hidden_states"):
            merge(tmp_path / f"d-{len(options)}-{next(iter(options))}", sources, **options)


def test_a_move_leaves_a_source_that_grew(tmp_path, sources):
    (sources[0] / "parts/open").mkdir()
    (sources[0] / "parts/open/zarr.json").write_bytes(b"x")
    report = merge(tmp_path / "d", sources, how="move")
    assert [*report.left] == [str(sources[0])]
    check(sources[0])
    assert report.emptied == (str(sources[1]), str(sources[2]))


@pytest.mark.parametrize("how", ["auto", "copy", "move"])
def test_object_stores_on_both_sides(tmp_path, sources, how):
    url = f"memory://merge-{how}"
    first = merge(f"{url}/one", sources[:2], how="copy")
    second = merge(f"{url}/two", [f"{url}/one"], how=how)
    assert second.fingerprint == first.fingerprint
    back = merge(tmp_path / "back", [f"{url}/two"])
    assert back.fingerprint == first.fingerprint
    check(tmp_path / "back")


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize("how", ["auto", "copy"])
def test_killed_at_any_step_and_started_again(tmp_path, sources, how, step, monkeypatch):
    class Killed(BaseException):
        pass

    want = merge(tmp_path / "want", sources).fingerprint
    n_killed = 0
    for k in range(1, 400, step):
        left = k

        def counted(real):
            def call(*args):
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return real(*args)

            return call

        url = tmp_path / f"d{k}"
        with monkeypatch.context() as patch:
            for name in ("link", "create", "write", "open_object", "sync"):
                patch.setattr(LocalStore, name, counted(getattr(LocalStore, name)))
            try:
                merge(url, sources, how=how)
            except Killed:
                n_killed += 1
            else:
                break
        for part in open_store(url).list("hsfmt/manifests"):
            assert part.endswith(".json")
        if n_killed % 5 == 0 and (url / "zarr.json").exists():
            check(url)
        assert merge(url, sources, how=how).fingerprint == want
    assert n_killed >= 25 // step
