"""`hsfmt cache`: what it says, clears and fills."""

import json
from pathlib import Path

import fsspec
import pytest


@pytest.fixture
def remote(tmp_path, write, monkeypatch):
    """The URL of a dataset in memory of samples a to j."""
    monkeypatch.delenv("HSFMT_CACHE_DIR", raising=False)
    monkeypatch.delenv("HSFMT_CACHE_SIZE", raising=False)
    write(tmp_path / "written", dict.fromkeys("abcdefghij"))
    fs = fsspec.filesystem("memory")
    fs.put(f"{tmp_path / 'written'}/", "/cli-cache/", recursive=True)
    yield "memory://cli-cache"
    fs.rm("/cli-cache", recursive=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HSFMT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HSFMT_CACHE_SIZE", "8MiB")
    return tmp_path / "cache"


def test_warm_info_clear(hsfmt, remote, cache):
    assert hsfmt.json("cache", "info")["entries"] == 0
    assert not cache.exists()
    report = hsfmt.json("cache", "warm", remote)
    assert (report["samples"], report["samples_wanted"], report["limit_nbytes"]) == (10, 10, 8 << 20)
    assert report["nbytes"] > 0
    info = hsfmt.json("cache", "info")
    assert info["entries"] > 4
    assert info["unfinished"] == 0
    assert 0 < info["nbytes"] <= 8 << 20
    assert info["oldest_use"] <= info["newest_use"]
    text = hsfmt("cache", "info").stdout
    assert str(cache) in text
    assert f"{info['entries']} entries" in text
    assert "10 samples" in hsfmt("cache", "warm", remote).stdout
    assert hsfmt.json("cache", "info")["entries"] == info["entries"]
    (cache / "notes.txt").write_text("mine")
    cleared = hsfmt.json("cache", "clear")
    assert (cleared["entries"], cleared["nbytes"]) == (info["entries"], info["nbytes"])
    assert [path.name for path in cache.iterdir()] == ["notes.txt"]
    assert "removed 0 entries" in hsfmt("cache", "clear").stdout


def test_what_is_warm_needs_no_data(hsfmt, remote, cache):
    hsfmt("cache", "warm", remote)
    fs = fsspec.filesystem("memory")
    for path in fs.find("/cli-cache/parts"):
        if "/c/" in path:
            fs.rm_file(path)
    assert hsfmt("cat", remote, "c").stdout
    hsfmt("cache", "clear")
    hsfmt("cat", remote, "c", code=1)


def test_some_samples_only(hsfmt, remote, cache, tmp_path):
    ids = tmp_path / "ids"
    ids.write_text("a\nb\n")
    report = hsfmt.json("cache", "warm", remote, "j", "a", "--ids", ids)
    assert (report["samples"], report["samples_wanted"]) == (3, 3)
    snapshot = report["snapshot"]
    assert hsfmt.json("cache", "warm", remote, "--snapshot", snapshot, "--layers", "3")["samples"] == 10
    hsfmt("cache", "warm", remote, "nobody", code=3)
    hsfmt("cache", "warm", remote, "--layers", "7", code=2)
    ids.write_text("")
    hsfmt("cache", "warm", remote, "--ids", ids, code=2)


def test_no_more_than_it_holds(hsfmt, remote, tmp_path, monkeypatch):
    from hsfmt.cli import cache as module

    monkeypatch.setattr(module, "_BATCH_NBYTES", 1)
    small = ["--cache-dir", tmp_path / "small", "--cache-size", "4KiB"]
    report = hsfmt.json("cache", "warm", remote, *small)
    assert 0 < report["samples"] < 10
    assert "of 10: the limit is 4.0 KiB" in hsfmt("cache", "warm", remote, *small).stdout
    monkeypatch.undo()
    monkeypatch.setattr(module.SampleReader, "warm", lambda *_: 10_000)  # all of it in one batch
    text = hsfmt("cache", "warm", remote, *small).stdout
    assert "10 samples, 9.8 KiB, of which 4.0 KiB at most stay in the cache" in text


def test_an_entry_that_never_fits_is_no_success(hsfmt, remote, tmp_path):
    result = hsfmt("cache", "warm", remote, "--cache-dir", tmp_path / "tiny", "--cache-size", "100", code=2)
    assert "expected room for an entry of" in result.stderr
    assert not result.stdout


def test_a_url_is_no_folder_of_a_cache(hsfmt, remote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = hsfmt("cache", "warm", remote, "--cache-dir", "s3://bucket/cache", code=2)
    assert "cache_dir: expected the path of a folder on a local disk, got 's3://bucket/cache'" in result.stderr
    monkeypatch.setenv("HSFMT_CACHE_DIR", "s3://bucket/cache")
    assert "HSFMT_CACHE_DIR: expected the path of a folder" in hsfmt("cache", "info", code=2).stderr
    assert not (tmp_path / "s3:").exists()


def test_what_can_not_be_done(hsfmt, remote, tmp_path, monkeypatch):
    for command in (["info"], ["clear"], ["warm", remote]):
        assert "HSFMT_CACHE_DIR" in hsfmt("cache", *command, code=2).stderr
    here = ["--cache-dir", tmp_path / "cache"]
    hsfmt("cache", "info", *here, "--cache-size", "much", code=2)
    hsfmt("cache", "warm", tmp_path / "written", *here, code=2)
    hsfmt("cache", "warm", "memory://nothing-there", *here, code=3)
    (tmp_path / "file").write_text("something else")
    result = hsfmt("cache", "warm", remote, "--cache-dir", tmp_path / "file", "--json", code=3)
    assert json.loads(result.stdout)["error"][0]["where"] == str(tmp_path / "file")
    assert Path(tmp_path / "file").read_text() == "something else"
    assert not (tmp_path / "cache").exists()
