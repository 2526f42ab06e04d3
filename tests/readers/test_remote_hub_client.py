"""What goes through huggingface_hub itself: listing, verifying and writing, against the stand-in for the Hub."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from written import assert_same

from hsfmt import transfer
from hsfmt.cli.main import main
from hsfmt.errors import StorageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

NAME = "someone/states"
URL = f"hf://datasets/{NAME}/data/v1"
ALLOWED = {"allow_redirects_to": ["localhost"]}


@pytest.fixture
def empty(hub, no_credentials, monkeypatch, tmp_path):
    """A repository with nothing but a README, as `hf repo create` makes it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    hub.commit(NAME, {"README.md": b"# states\n"})
    return hub


def test_push_list_verify_and_read(empty, write):
    """And a second push finds all of it there; others of the repository's files stay."""
    written = write(hidden=64)
    place = open_store(URL, ALLOWED)
    report = transfer(written.path, place)
    assert report.files > 0
    files = {path.relative_to(written.path).as_posix() for path in written.path.rglob("*") if path.is_file()}
    there = {path for path, _ in place.walk("")}
    assert there <= files
    assert all("hsfmt/snapshots/" in path for path in files - there), "former snapshots stay where they are"
    assert set(place.list("")) == {path.partition("/")[0] for path in files}
    assert transfer(written.path, place).files == 0
    assert verify(place, level="full").ok
    reader = SampleReader(URL, storage_options=ALLOWED)
    for number, wanted in enumerate(written.content.values()):
        assert_same(reader.read(number), wanted)
    commit = empty.commit_of(NAME, "main")
    assert (empty.folder(NAME, commit) / "README.md").read_bytes() == b"# states\n"


def test_a_repository_that_is_not_there_is_one_line(empty, write):
    result = CliRunner().invoke(main, ["push", str(write([5]).path), "hf://datasets/no/body"])
    assert result.exit_code == 3
    (line,) = result.stderr.splitlines()
    assert "no/body" in line


def test_a_token_that_is_wrong_is_not_shown(empty, write):
    empty.private.add(NAME)
    token = "hf_wrongwrongwrong"
    place = open_store(URL, {**ALLOWED, "token": token})
    with pytest.raises(StorageError) as caught:
        transfer(write([5]).path, place)
    assert "the driver of" not in str(caught.value)
    assert token not in str(caught.value) + repr(place)
    assert NAME in str(caught.value)


def test_threads_do_not_share_what_they_remember_of_listings(empty, write):
    """One that lists before a commit must not make another one miss what was committed."""
    place = open_store(URL, ALLOWED)
    place.write("folder/first", b"1")
    own = place._fs()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(place.list, "folder").result() == ["first"]
        place.write("folder/second", b"2")
        own.invalidate_cache()
        assert other.submit(lambda: place._fs() is not own).result()
        assert own.info(place._key("folder/second"))["size"] == 1
        assert other.submit(place.list, "folder").result() == ["first", "second"]
