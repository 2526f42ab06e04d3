import os
from pathlib import Path

import pytest

from hsfmt.errors import FormatError, HsfmtError, NotFoundError, StorageError, UsageError
from hsfmt.storage import open_store
from hsfmt.storage.base import check_path, check_prefix

ATTACKS = {
    "empty": "",
    "parent": "../outside",
    "parent-inside": "parts/../../outside",
    "parent-last": "parts/..",
    "dot": "./zarr.json",
    "absolute": "/etc/passwd",
    "double-slash": "parts//x",
    "trailing-slash": "parts/",
    "backslash": "parts\\..\\x",
    "drive": "C:x",
    "scheme": "file://etc/passwd",
    "chain": "a::b",
    "nul": "parts/x\0.json",
    "newline": "parts/x\n",
    "delete": "parts/\x7f",
    "surrogate": "parts/\udc80",
    "too-long": "x" * 1025,
}


@pytest.mark.parametrize("path", ATTACKS.values(), ids=ATTACKS.keys())
def test_unsafe_path_is_refused(path):
    with pytest.raises(FormatError):
        check_path(path)


@pytest.mark.parametrize("path", ["zarr.json", "parts/20261129t192107z-0123456789abcdef/c/0/0/0", "..a/b..", "ü/~x"])
def test_safe_path_is_returned(path):
    assert check_path(path) == path


def test_prefix_may_be_the_root_or_end_in_a_slash():
    assert check_prefix("") == ""
    assert check_prefix("parts/") == "parts"
    with pytest.raises(FormatError):
        check_prefix("/")


@pytest.mark.parametrize("url", ["{tmp}/ds", "memory://path-attacks"])
def test_every_method_refuses_unsafe_paths(url, tmp_path):
    store = open_store(url.format(tmp=tmp_path))
    calls = [
        lambda path: store.read(path, 10),
        lambda path: store.read_into(path, 0, memoryview(bytearray(1))),
        lambda path: store.read_ranges([(path, 0, 1)]),
        store.size,
        store.list,
        lambda path: list(store.walk(path)),
        lambda path: store.create(path, b""),
        lambda path: store.write(path, b""),
        lambda path: store.replace(path, b""),
        store.open_object,
        lambda path: store.sync([path]),
        store.remove,
        store.local_path,
    ]
    for call in calls:
        with pytest.raises(FormatError):
            call("../outside")
    assert list(tmp_path.iterdir()) == []


def test_folder_link_out_of_the_root_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "ds"
    root.mkdir()
    (root / "parts").symlink_to(outside)
    (root / "hsfmt").symlink_to("../outside")
    store = open_store(root)
    for folder in ("parts", "hsfmt"):
        for call in (
            lambda path: store.read(path, 10),
            lambda path: store.write(path, b"x"),
            lambda path: store.create(path, b"x"),
            store.open_object,
            store.size,
            store.remove,
        ):
            with pytest.raises(FormatError, match="symbolic link"):
                call(f"{folder}/secret")
        with pytest.raises(FormatError, match="symbolic link"):
            store.list(folder)
    assert (outside / "secret").read_bytes() == b"secret"
    assert list(outside.iterdir()) == [outside / "secret"]


def test_folder_links_are_listed_but_not_followed(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "x").write_bytes(b"x")
    (tmp_path / "loop").symlink_to(".")
    paths = [path for path, _ in open_store(tmp_path).walk("")]
    assert paths == ["inside/x", "loop"]


def test_links_to_files_and_within_the_root_work(tmp_path):
    # The download cache of a model hub is made of links to blobs outside the snapshot's folder.
    (tmp_path / "blob").write_bytes(b"content")
    root = tmp_path / "ds"
    (root / "real").mkdir(parents=True)
    (root / "real" / "x").symlink_to("../../blob")
    (root / "alias").symlink_to("real")
    (root / "nowhere").symlink_to("gone")
    store = open_store(root)
    assert store.read("real/x", 7) == b"content"
    assert store.read("alias/x", 7) == b"content"
    assert store.size("real/x") == 7
    assert store.size("nowhere") is None
    assert [path for path, _ in store.walk("")] == ["alias", "nowhere", "real/x"]
    assert dict(store.walk(""))["real/x"] == 7


def test_root_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = open_store(tmp_path / "link")
    store.write("a/b", b"x")
    assert (tmp_path / "real" / "a" / "b").read_bytes() == b"x"
    assert store.url == str(tmp_path / "link")


def test_odd_names_of_strays_do_not_stop_a_walk(tmp_path):
    (tmp_path / "a:b\\c").mkdir()
    (tmp_path / "a:b\\c" / "x\n").write_bytes(b"1")
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    (tmp_path / os.fsdecode(b"\xff/y")).touch()
    assert [path for path, _ in open_store(tmp_path).walk("")] == ["a:b\\c/x\n", "\udcff/y"]


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_file_is_no_object(tmp_path, kind):
    if kind == "folder":
        (tmp_path / "x").mkdir()
    else:
        os.mkfifo(tmp_path / "x")  # must not hang
    store = open_store(tmp_path)
    assert store.size("x") is None
    with pytest.raises(HsfmtError):
        store.read("x", 10)
    with pytest.raises(HsfmtError):
        store.read_into("x", 0, memoryview(bytearray(1)))


def test_file_where_a_folder_should_be_is_not_found(tmp_path):
    (tmp_path / "x").write_bytes(b"")
    store = open_store(tmp_path)
    assert store.size("x/y") is None
    assert store.list("x") == []
    assert list(store.walk("x")) == []
    with pytest.raises(NotFoundError):
        store.read("x/y", 1)


@pytest.mark.parametrize(
    "url",
    [
        "s3:/bucket/states", "s3:bucket/states", Path("s3://bucket/states"), "S3:/bucket", "https:/host/states",
        "file:/srv/states", "hf:/datasets/owner/name", "gs:/bucket", "memory:/states",
    ],
)  # fmt: skip
def test_what_is_nearly_a_url_is_no_folder(url):
    with pytest.raises(UsageError, match=r"without // — write \w+://… as text"):
        open_store(url)


@pytest.mark.parametrize("path", ["./s3:/bucket", "/srv/s3:/bucket", "s3", "s3.zarr/x", "httpd:/x", "notes:x"])
def test_other_colons_are_of_paths(path):
    assert open_store(path).is_local


def test_schemes_are_read_in_any_case():
    assert open_store("S3://Bucket/States").url == "s3://Bucket/States"
    assert open_store("HTTP://127.0.0.1/States").url == "http://127.0.0.1/States"
    assert open_store("FILE:///srv/States").is_local


@pytest.mark.parametrize("secret", ["hunter2x", "hun/ter+2x", "hun@ter2x"])
@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "gcs", "S3"])
def test_credentials_in_a_buckets_url_are_refused_and_not_shown(scheme, secret):
    with pytest.raises(UsageError, match="a bucket's name") as caught:
        open_store(f"{scheme}://KEY:{secret}@bucket/states")
    assert secret not in repr(caught.value) + str(caught.value.problems)


def test_a_bucket_is_named():
    for url in ("s3://", "gs:///"):
        with pytest.raises(UsageError, match="a bucket's name, got none"):
            open_store(url)
    arn = "s3://arn:aws:s3:eu-central-1:123456789012:accesspoint/name/states"
    assert open_store(arn).url == arn


@pytest.mark.parametrize("url", ["http://u:hunter2@[::1/x", "http://u:hun/ter2@host/x", "https://host:port/x"])
def test_web_urls_that_cannot_be_read_are_refused_and_not_shown(url):
    with pytest.raises(UsageError, match="host or port can't be read") as caught:
        open_store(url).read("zarr.json", 10)
    assert "hun" not in repr(caught.value) + repr(caught.value.__cause__)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/x", "hunter2"),
        ("s3://bucket/x", [("secret", "hunter2")]),
        ("s3://bucket/x", {"config_kwargs": "hunter2"}),
        ("s3://bucket/x", {"client_kwargs": "hunter2"}),
        ("http://127.0.0.1:1/x", {"headers": "hunter2"}),
        ("http://127.0.0.1:1/x", {"client_kwargs": ["hunter2"]}),
    ],
)
def test_options_of_another_type_are_refused_and_not_shown(url, options):
    with pytest.raises(UsageError, match=r"expected a dict, got (str|list)") as caught:
        open_store(url, options).read("zarr.json", 10)
    assert "hunter2" not in repr(caught.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "minio"])
def test_an_endpoint_without_its_scheme_is_explained(endpoint):
    store = open_store("s3://bucket/x", {"endpoint_url": endpoint, "key": "k", "secret": "s"})
    with pytest.raises(StorageError, match=r"expected the URL of an endpoint.* as http://HOST:PORT"):
        store.read("zarr.json", 10)
