"""push, pull, merge and export between folders, buckets and web servers: the same bytes wherever they end up."""

import pytest
from flow_steps import held, objects, write_part

from hsfmt import layout
from hsfmt.storage import open_store


@pytest.fixture
def source(tmp_path):
    """A sealed folder of two parts, a hole, and a part that came after the seal."""
    folder = tmp_path / "source"
    write_part(folder, "p-one", range(4), holes=["h1"])
    write_part(folder, "p-two", range(4, 9), seal=True)
    return folder


@pytest.fixture
def served(source, serve, web_server):
    """Its URL below nginx."""
    return f"{web_server.url}/{serve(source)}"


def same_files(url, source):
    assert objects(url) == objects(source)
    assert held(url) == held(source)


def test_from_a_folder_through_buckets_and_back(hsfmt, as_user, source, make_bucket, tmp_path):
    one, two = (f"s3://{make_bucket()}/some/d" for _ in range(2))
    assert hsfmt.json("push", source, one)["files"] > 0
    same_files(one, source)
    assert hsfmt.json("push", one, two, "--verify", "full")["server_copied_nbytes"] > 0
    same_files(two, source)
    assert hsfmt.json("pull", two, tmp_path / "back")["files"] > 0
    same_files(tmp_path / "back", source)
    for url in (one, two, tmp_path / "back"):
        hsfmt("verify", url, "--level", "full", "-q")
        assert hsfmt.json("push", source, url)["files"] == 0


def test_what_came_later_follows(hsfmt, as_user, source, bucket, tmp_path):
    url = f"s3://{bucket}/d"
    hsfmt("push", source, url, "-q")
    write_part(source, "p-three", range(9, 11), seal=True)
    hsfmt("retract", source, "s2")
    report = hsfmt.json("push", source, url)
    assert report["parts"] == ["p-three"]
    hsfmt("pull", url, tmp_path / "d", "-q")
    assert held(tmp_path / "d") == held(url) == held(source)
    hsfmt("verify", url, "--level", "full", "-q")


def test_from_a_web_server(hsfmt, as_user, source, served, bucket, tmp_path):
    hsfmt("pull", served, tmp_path / "d", "-q")
    same_files(tmp_path / "d", source)
    hsfmt("push", served, f"s3://{bucket}/d", "-q")
    same_files(f"s3://{bucket}/d", source)
    hsfmt("verify", f"s3://{bucket}/d", "--level", "full", "-q")


@pytest.mark.parametrize("target", ["safetensors", "npz", "zarr", "vllm"])
def test_exports_are_the_same_files(hsfmt, as_user, source, served, bucket, tmp_path, target):
    hsfmt("push", source, f"s3://{bucket}/d", "-q")
    found = []
    for name, url in (("local", source), ("s3", f"s3://{bucket}/d"), ("web", served)):
        out = tmp_path / f"out-{name}"
        hsfmt("export", url, out, "--to", target, "-q")
        found.append({str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert len(found[0]) > 1
    assert found[0] == found[1] == found[2]


def test_a_web_server_is_looked_at(hsfmt, source, served, tmp_path):
    """All that reads a sealed dataset says there what it says in a folder."""
    for argv in (("ls", "--long"), ("ls", "--holes"), ("cat", "s5"), ("card",)):
        command, *options = argv
        texts = [hsfmt(command, url, *options).stdout.replace(str(url), "URL") for url in (served, source)]
        assert texts[0] == texts[1]
    for url, name in ((source, "a"), (served, "b")):
        hsfmt("cat", url, "s5", "-o", tmp_path / f"{name}.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    facts = [hsfmt.json("info", url) for url in (source, served)]
    for each in facts:
        for name in ("url", "newer"):
            del each[name]
    assert facts[0] == facts[1]


def test_what_needs_a_listing_says_so(hsfmt, source, served):
    for argv in (("verify", served), ("seal", served), ("compact", served), ("retract", served, "s1"),
                 ("repair", served), ("gc", served, "--older-than", "7d"), ("merge", served, source)):  # fmt: skip
        result = hsfmt(*argv, codes=(2, 3))
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert "web server" in result.stderr, argv
    assert layout.POINTER in objects(source)
    assert open_store(served).can_list is False


def test_a_merge_of_a_bucket_and_a_folder(hsfmt, as_user, source, bucket, tmp_path):
    url = f"s3://{bucket}/d"
    write_part(url, "p-there", range(20, 23), seal=True)
    write_part(tmp_path / "twin", "p-there", range(20, 23), seal=True)
    hsfmt("merge", url, source)
    hsfmt("merge", tmp_path / "twin", source)
    assert held(url) == held(tmp_path / "twin")
    hsfmt("merge", tmp_path / "new", url, "--verify", "full")
    assert held(tmp_path / "new") == held(url)
    hsfmt("verify", url, "--level", "full", "-q")
