"""Reading hf:// URLs, from a stand-in for the Hub."""

import pickle
import shutil

import pytest
from servers.hub import COMMITS, TOKEN
from written import assert_same

from hsfmt import HiddenStateDataset
from hsfmt.errors import FormatError, StorageError, UsageError
from hsfmt.readers.sample_reader import SampleReader

NAME = "someone/states"
URL = f"hf://datasets/{NAME}/data/v1"
ALLOWED = {"allow_redirects_to": ["localhost"]}


@pytest.fixture
def published(hub, write, no_credentials):
    """Two commits of a repository, each with another dataset in it."""
    both = [write(hidden=64), write((9, 40), hidden=64)]
    for commit, written in zip(COMMITS, both, strict=True):
        shutil.copytree(written.path, hub.folder(NAME, commit) / "data" / "v1")
    return both


def test_read(hub, published):
    dataset = HiddenStateDataset(URL, storage_options=ALLOWED)
    assert len(hub.log) <= 4
    assert len(dataset) == 2
    for number, wanted in enumerate(published[1].content.values()):
        assert_same(dataset.reader.read(number), wanted)
    assert any(path.startswith("/cdn/") for _, path, _, _ in hub.log)


def test_the_commit_is_found_once_and_kept(hub, published):
    """In copies too, when the branch has moved on."""
    shutil.move(hub.folder(NAME, COMMITS[1]), hub.root / "later")
    reader = SampleReader(URL, storage_options=ALLOWED)
    assert_same(reader.read(3), published[0].content["id-003"])
    shutil.move(hub.root / "later", hub.folder(NAME, COMMITS[1]))
    again = pickle.loads(pickle.dumps(reader))
    assert len(reader) == len(again) == 10
    assert_same(again.read(9), published[0].content["id-009"])
    assert sum("/revision/" in path for _, path, _, _ in hub.log) == 1
    assert len(SampleReader(URL, storage_options=ALLOWED)) == 2


def test_a_commit_in_the_url_needs_no_question(hub, published):
    reader = SampleReader(f"hf://datasets/{NAME}@{COMMITS[0]}/data/v1", storage_options=ALLOWED)
    assert len(reader) == 10
    assert len(hub.log) <= 4
    assert not any("/revision/" in path for _, path, _, _ in hub.log)


def test_a_private_repository_wants_the_token_and_its_cdn_never_sees_it(hub, published, monkeypatch):
    hub.private.add(NAME)
    with pytest.raises(StorageError, match=r"a repository 'someone/states'.*401.*HF_TOKEN"):
        SampleReader(URL, storage_options=ALLOWED)
    for given in ({"token": TOKEN}, {}):
        if not given:
            monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.log.clear()
        reader = SampleReader(URL, storage_options=ALLOWED | given)
        assert_same(reader.read(1), published[1].content["id-001"])
        seen = {(path.startswith("/cdn/"), authorization) for _, path, _, authorization in hub.log}
        assert seen == {(False, f"Bearer {TOKEN}"), (True, "")}
        assert TOKEN not in repr(reader.store) + repr(reader.store._reader().client.place)


def test_a_host_that_is_not_the_hubs_is_refused_unless_allowed(hub, published):
    with pytest.raises(StorageError, match="one to localhost") as caught:
        SampleReader(URL).read(1)
    assert "sigsigsig" not in str(caught.value)


def test_what_is_not_there(hub, published):
    for url in (f"hf://datasets/{NAME}@nowhere/data/v1", "hf://datasets/no/body/data"):
        with pytest.raises(StorageError, match="check both names"):
            SampleReader(url)


@pytest.mark.parametrize("url", ["hf://datasets/onlyone", "hf://datasets/a/b@", "hf://", "hf://datasets/a/b c/d"])
def test_other_urls_are_refused(url):
    with pytest.raises(UsageError, match="hf://datasets/OWNER/NAME"):
        SampleReader(url)


def test_paths_stay_in_the_repository():
    with pytest.raises(FormatError, match="segment"):
        SampleReader("hf://datasets/a/b/../../c/d")
