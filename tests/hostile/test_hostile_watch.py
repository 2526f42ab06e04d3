"""The watch sees what it is there for: each kind of finding, by a consumer that does just that."""

import subprocess
import sys
import time

import numpy as np
import outcomes
import pytest
from outcomes import RefusedError, observe

from hsfmt.storage.local import LocalStore


@pytest.fixture
def places(tmp_path):
    for name in ("root", "scratch", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    (tmp_path / "root/leads-out").symlink_to(tmp_path / "outside")
    return tmp_path


def findings(places, consume, *, writes=False):
    return observe(consume, places / "root", places / "scratch", writes=writes).findings


def swallowing():
    try:
        time.sleep(20)
    except OSError as error:
        raise RefusedError.at("x", expected="the storage to work", got=str(error)) from error


WRONG = {
    "raised ValueError": lambda places: int("x"),
    "opened": lambda places: (places / "outside/secret").read_bytes(),
    "changed": lambda places: (places / "root/new").touch(),
    "memory grew": lambda places: np.ones(100 << 20, np.uint8).sum(),
    "did subprocess.Popen": lambda places: subprocess.run([sys.executable, "-c", ""], check=True),
}


@pytest.mark.parametrize("expected", WRONG)
def test_what_a_consumer_must_not_do_is_found(places, expected):
    assert [line for line in findings(places, lambda: WRONG[expected](places)) if line.startswith(expected)]


def test_writing_through_a_link_is_found(places):
    (found,) = findings(places, (places / "root/leads-out/new").touch, writes=True)
    assert found.endswith(f"which leads to {places / 'outside'}")
    assert findings(places, lambda: (places / "root/leads-out/secret").chmod(0o600), writes=True)
    assert findings(places, (places / "root/leads-out/secret").unlink, writes=True)
    assert not findings(places, (places / "root/leads-out").unlink, writes=True)


def test_a_hang_is_found_whoever_catches_errors_of_the_storage(places, monkeypatch):
    monkeypatch.setattr(outcomes, "MAX_SECONDS", 0.1)
    assert findings(places, swallowing) == ["raised HungError: no end after 0.1 s"]


def test_a_refusal_that_takes_long_is_found(places, monkeypatch):
    monkeypatch.setattr(outcomes, "MAX_CPU_SECONDS", -1)

    def refuse():
        raise RefusedError.at("x", expected="less", got="more")

    (found,) = findings(places, refuse)
    assert found.endswith("s of CPU time to refuse")


def test_what_is_allowed_is_not_found(places):
    def consume():
        (places / "root/leads-out/secret").read_bytes()  # a file behind a link of the root: the digest judges it
        (places / "scratch/new").write_text("x")
        raise RefusedError.at("x", expected="less", got="more")

    assert findings(places, consume) == []


def test_an_object_is_held_once_while_it_is_read(places):
    nbytes = 64 << 20
    (places / "root/large").write_bytes(bytes(nbytes))
    outcome = observe(
        lambda: len(LocalStore(places / "root").read("large", nbytes)), places / "root", places / "scratch"
    )
    assert outcome.value == nbytes
    assert outcome.grown_nbytes < nbytes * 3 // 2
