"""Errors that say which dataset is meant: where several are open, in a folder of one, and what to do about one."""

import itertools
import json

import pytest
from flow_steps import COMMANDS, source_folder, write_part
from servers.fault_proxy import Fault

from hsfmt import DatasetWriter, HiddenStateDataset
from hsfmt.errors import FormatError, NotFoundError, UsageError
from hsfmt.root import enclosing_dataset
from hsfmt.storage import open_store

INNER = ["hsfmt", "hsfmt/manifests", "parts", "parts/p-one", "parts/p-one/hidden_states"]


@pytest.fixture
def dataset(as_user, bucket):
    """The URL of a sealed dataset."""
    write_part(f"s3://{bucket}/states", "p-one", range(2), seal=True)
    return f"s3://{bucket}/states"


@pytest.mark.parametrize("inner", INNER)
def test_a_folder_within_a_dataset(dataset, s3_faults, as_user, inner):
    """It takes one request more, where no dataset can be opened anyway."""
    as_user(AWS_ENDPOINT_URL=s3_faults.url)
    s3_faults.reset()
    with pytest.raises(NotFoundError):
        HiddenStateDataset(f"{dataset}-2")
    n_requests = len(s3_faults.requests)
    s3_faults.reset()
    with pytest.raises(NotFoundError) as caught:
        HiddenStateDataset(f"{dataset}/{inner}")
    assert str(caught.value) == (
        f"{dataset}/{inner}: expected the folder of a dataset, got a folder within one — "
        f"name the dataset, which lies further up: {dataset}"
    )
    assert s3_faults.count("/states/zarr.json") == 1
    assert len(s3_faults.requests) <= n_requests + 1


@pytest.mark.parametrize(("name", "inner"), [*zip(COMMANDS, itertools.cycle(["hsfmt", "parts"]), strict=False)])
def test_every_command_says_so(hsfmt, dataset, tmp_path, name, inner):
    words = [{"URL": f"{dataset}/{inner}", "OUT": tmp_path / "out"}.get(word, word) for word in COMMANDS[name]]
    (line,) = hsfmt(name, *words, codes=(3,)).stderr.splitlines()
    assert f"got a folder within one — name the dataset, which lies further up: {dataset}" in line
    assert line.startswith(f"error: {dataset}/{inner}: expected ")


@pytest.mark.parametrize("inner", INNER)
def test_nothing_is_made_there(dataset, inner):
    url = f"{dataset}/{inner}/new"
    with pytest.raises(UsageError, match=f"one inside the dataset {dataset} "):
        DatasetWriter(url, layers=[1], hidden_size=4, final_norm="pre")
    assert open_store(url).list("") == []


def test_a_dataset_opens_without_a_look_above(dataset, s3_faults, as_user):
    """Also below folders of those names, with no dataset above or one."""
    url = dataset.replace("/states", "/parts/hsfmt/states")
    write_part(url, "p-one", range(2), seal=True)
    as_user(AWS_ENDPOINT_URL=s3_faults.url)
    s3_faults.reset()
    assert len(HiddenStateDataset(url)) == 2
    assert len(s3_faults.requests) == 2
    with pytest.raises(NotFoundError, match=f"{url}/deeper: expected an hsfmt dataset, got no zarr.json there"):
        HiddenStateDataset(f"{url}/deeper")
    assert s3_faults.count("^/[^/]+/zarr.json") == 1
    assert s3_faults.count("/parts/zarr.json") == 1


@pytest.mark.parametrize(
    ("url", "above"),
    [
        ("s3://b/ds", []),
        ("s3://hsfmt/parts-1", []),
        ("s3://hsfmt/parts", ["s3://hsfmt"]),
        ("s3://b/ds/parts/p/hidden_states", ["s3://b/ds"]),
        ("s3://b/a?/hsfmt/x", ["s3://b/a?"]),
        ("s3://b/parts/hsfmt/x/parts/y", ["s3://b/parts/hsfmt/x", "s3://b/parts"]),
        ("https://u:p@host/ds/hsfmt?sig=a/parts/b", ["https://u:p@host/ds?sig=a/parts/b"]),
        ("hf://datasets/o/name@main/hsfmt", ["hf://datasets/o/name@main"]),
        ("memory://ds/parts", ["memory://ds"]),
        ("simplecache::s3://b/ds/hsfmt", ["simplecache::s3://b/ds"]),
        ("zip://hsfmt/x::s3://b/hsfmt/file.zip", []),
    ],
)
def test_what_lies_above(url, above):
    store = open_store(url, {"anon": True})
    stores = list(store.above({"hsfmt", "parts"}))
    assert [each._url for each in stores] == above
    assert all((type(each), each._options) == (type(store), {"anon": True}) for each in stores)


def test_behind_a_web_server(web_server, serve, tmp_path):
    write_part(tmp_path / "dataset", "p-one", range(2), seal=True)
    name = serve(tmp_path / "dataset")
    url = f"{web_server.url.replace('//', '//someone:her-own-password@')}/{name}"
    with pytest.raises(NotFoundError) as caught:
        HiddenStateDataset(f"{url}/parts/p-one?sig=0123456789")
    text = str(caught.value)
    assert f"lies further up: http://…@{web_server.host}/{name}?…" in text
    assert "her-own" not in text
    assert "0123456789" not in text


def test_who_may_not_look_above_is_told_what_there_is(dataset, s3_faults, as_user):
    """And nobody who does not name a folder of a dataset asks."""
    as_user(AWS_ENDPOINT_URL=s3_faults.url)
    s3_faults.faults.append(Fault("status", "/states/zarr.json", None, status=403))
    store = open_store(f"{dataset}/parts")
    assert enclosing_dataset(store) is None
    with pytest.raises(FormatError, match=f"^{dataset}/parts: zarr.json: expected a Zarr v3 group with the attribute"):
        HiddenStateDataset(store)


@pytest.fixture
def place(as_user, bucket, web_server, serve, tmp_path):
    """Make a dataset that was never sealed, or lost its pointer; return where it is."""

    def make(where, *, pointer_lost):
        url = f"s3://{bucket}/states" if where == "bucket" else str(tmp_path / "dataset")
        write_part(url, "p-one", range(2), seal=pointer_lost)
        if pointer_lost:
            open_store(url).remove("hsfmt/manifest.json")
        return f"{web_server.url}/{serve(url)}" if where == "web" else url

    return make


@pytest.mark.parametrize("where", ["bucket", "folder", "web"])
@pytest.mark.parametrize("pointer_lost", [False, True], ids=["never", "lost"])
@pytest.mark.parametrize("name", ["push", "pull", "card"])
def test_commands_of_sealed_datasets_say_how_to_seal(hsfmt, place, tmp_path, where, pointer_lost, name):
    url = place(where, pointer_lost=pointer_lost)
    words = [url] if name == "card" else [url, tmp_path / "out"]
    (line,) = hsfmt(name, *words, codes=(3,)).stderr.splitlines()
    assert ("run `hsfmt seal` where its files are" if where == "web" else f"run `hsfmt seal {url}`") in line
    assert "live" not in line
    assert line.count(f"{url}: ") == 1
    if where != "web":
        refused = hsfmt(name, *words, "--snapshot", "live", codes=(2,)).stderr
        assert f"run `hsfmt seal {url}`" in refused
        hsfmt("seal", url)
        hsfmt(name, *words)
    assert "live" not in hsfmt(name, *words, "--snapshot", "newest", codes=(2,)).stderr


@pytest.mark.parametrize("name", ["info", "ls", "cat", "export", "cache warm"])
def test_commands_that_take_a_live_one_say_so(hsfmt, place, tmp_path, name):
    """What is advised does: here by a dataset whose pointer was lost, since one that was never sealed is read live."""
    url = place("bucket", pointer_lost=True)
    rest = {"cat": ["s1"], "export": [tmp_path / "out", "--to", "safetensors", "-q"]}.get(name, [])
    rest += ["--cache-dir", tmp_path / "cache"] if name == "cache warm" else []
    (line,) = hsfmt(*name.split(), url, *rest, codes=(3,)).stderr.splitlines()
    assert f"run `hsfmt seal {url}`" in line
    assert "--snapshot live" in line
    hsfmt(*name.split(), url, *rest, "--snapshot", "live")


def test_what_machines_read_is_as_it_was(hsfmt, dataset, tmp_path):
    """The line has the URL once; the JSON has the path inside the dataset."""
    store = open_store(dataset)
    body = store.read("hsfmt/manifest.json", 1 << 16)
    store.write("hsfmt/manifest.json", body.replace(b'"samples":2', b'"samples":3'))
    out = tmp_path / "out", "-q"
    for words in (["info", dataset], ["push", dataset, *out], ["pull", dataset, *out]):
        (line,) = hsfmt(*words, codes=(1,)).stderr.splitlines()
        assert line.startswith(f"error: {dataset}: hsfmt/manifest.json: expected ")
        assert line.count(dataset) == 1
        (problem,) = json.loads(hsfmt(*words, "--json", codes=(1,)).stdout)["error"]
        assert problem["where"].startswith("hsfmt/manifest.json")


def test_keys_with_question_marks_are_shown_whole(hsfmt, as_user, bucket, tmp_path):
    url = f"s3://{bucket}/why?/run #7"
    assert f"error: {url}: expected an hsfmt dataset" in hsfmt("info", url, codes=(3,)).stderr
    hsfmt("convert", source_folder(tmp_path / "source", range(2)), url, "--from", "vllm", "--layer-ids", "1,3", "-q")
    assert hsfmt.json("info", url)["url"] == url
    assert repr(HiddenStateDataset(url)).startswith(f"HiddenStateDataset('{url}'")
