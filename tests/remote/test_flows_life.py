"""A dataset's whole life in a bucket, by the command line: each step gives, bit by bit, what it gives in a folder."""

import json

import pytest
from flow_steps import converting, environment, held, in_a_process, objects, shards, source_folder, write_part

from hsfmt import layout
from hsfmt.storage import open_store

# Places, times, names of parts, and what is as long as those are.
VOLATILE = {
    "age_seconds", "content", "created", "dataset", "fingerprint", "free_nbytes", "name", "nbytes", "new", "new_part",
    "part", "parts", "path", "seconds", "sealed", "snapshot", "source", "started", "state", "stored_nbytes", "url",
    "why", "written_nbytes",
}  # fmt: skip


def fixed(document, *places):
    """A report without what differs between two runs."""
    if isinstance(document, dict):
        return {key: fixed(value, *places) for key, value in document.items() if key not in VOLATILE}
    if isinstance(document, list):
        return [fixed(each, *places) for each in document]
    if isinstance(document, str):
        for place in places:
            document = document.replace(place, "PLACE")
    return document


class Twins:
    """A dataset in a folder and one in a bucket, to which the same is done."""

    def __init__(self, hsfmt, folder, url):
        self.hsfmt, self.local, self.remote = hsfmt, str(folder), url

    def do(self, *argv, codes=(0,)):
        """Run a command on both, `DATASET` being their place; its report, and all that is there then, is the same."""
        reports = [
            self.hsfmt.json(*(place if word == "DATASET" else word for word in argv), codes=codes)
            for place in (self.local, self.remote)
        ]
        assert fixed(reports[0], self.local) == fixed(reports[1], self.remote), argv[0]
        return reports

    def same(self):
        assert held(self.remote) == held(self.local)
        assert shards(self.remote) == shards(self.local)


@pytest.fixture
def twins(hsfmt, as_user, tmp_path, bucket):
    return Twins(hsfmt, tmp_path / "dataset", f"s3://{bucket}/a folder/dataset")


def test_a_life(twins, hsfmt, tmp_path):
    first, second = source_folder(tmp_path / "first", range(5)), source_folder(tmp_path / "second", range(5, 9))
    twins.do(*converting(first, "DATASET"))
    twins.same()
    twins.do(*converting(second, "DATASET"))
    twins.same()
    for url in (twins.local, twins.remote):
        write_part(url, "p-by-a-writer", range(20, 24), holes=["h1"])
    twins.do("verify", "DATASET", "--level", "quick")
    twins.do("seal", "DATASET", "--expect", "13")
    twins.same()
    for options in (["--level", "quick"], ["--level", "complete"], ["--level", "full", "--workers", "2"]):
        twins.do("verify", "DATASET", *options)
    twins.do("info", "DATASET")
    twins.do("ls", "DATASET", "--long")
    twins.do("ls", "DATASET", "--holes")
    twins.do("cat", "DATASET", "s7")
    for place, name in ((twins.local, "here"), (twins.remote, "there")):
        hsfmt("cat", place, "s21", "-o", tmp_path / f"{name}.safetensors")
        hsfmt("export", place, tmp_path / f"export-{name}", "--to", "safetensors", "--workers", "2", "-q")
    assert tensors(tmp_path / "there.safetensors") == tensors(tmp_path / "here.safetensors")
    here, there = (sorted((tmp_path / f"export-{name}").glob("*.safetensors")) for name in ("here", "there"))
    assert [path.name for path in there] == [path.name for path in here] != []
    assert [tensors(path) for path in there] == [tensors(path) for path in here]
    cards = [hsfmt("card", url).stdout.splitlines() for url in (twins.remote, twins.local)]
    titles = [[line for line in card if line.startswith("#")] for card in cards]
    assert titles[0] == titles[1] != []

    twins.do("retract", "DATASET", "s3", "s21")
    twins.same()
    twins.do("compact", "DATASET")
    twins.same()
    twins.do("gc", "DATASET", "--older-than", "0s", "--force", "--keep-snapshots", "1")
    twins.same()
    assert open_store(twins.remote).unfinished_uploads() == []
    assert len(objects(twins.remote)) == len(objects(twins.local))
    twins.do("verify", "DATASET", "--level", "full")


def tensors(path):
    """The bytes of a file's tensors, without the header, which names the snapshot."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def test_repair(twins):
    for url in (twins.local, twins.remote):
        write_part(url, "p-one", range(4), codec="none", seal=True)
        store = open_store(url)
        path = next(path for path, _ in store.walk("parts/p-one/hidden_states/c"))
        data = bytearray(store.read(path, 1 << 20))
        data[5] ^= 0x10
        store.write(path, bytes(data))
    for level in ("complete", "full"):
        twins.do("verify", "DATASET", "--level", level, codes=(1,))
    twins.do("repair", "DATASET", "--dry-run", codes=(1,))
    reports = twins.do("repair", "DATASET", codes=(1,))
    assert all(json.dumps(report).count("s0") for report in reports)
    twins.same()
    twins.do("ls", "DATASET", "--holes")
    for url in (twins.local, twins.remote):
        write_part(url, "p-again", range(1), codec="none", seal=True)
    twins.same()
    twins.do("gc", "DATASET", "--older-than", "0s", "--force", "--keep-snapshots", "1")
    twins.do("verify", "DATASET", "--level", "full")


@pytest.mark.parametrize("how", [[], ["--copy"], ["--link"], ["--move"], ["--verify", "full"]])
def test_merge(hsfmt, as_user, tmp_path, make_bucket, how):
    """Two buckets into a third; the same parts as in folders, and the sources as they were, or empty."""
    local = [str(tmp_path / name) for name in ("target", "one", "two")]
    remote = [f"s3://{make_bucket()}/d" for _ in local]
    for target, *sources in (local, remote):
        for number, url in enumerate(sources):
            write_part(url, f"p-{number}", range(3 * number, 3 * number + 4), holes=[f"h{number}"], seal=True)
        before = [objects(url) for url in sources]
        hsfmt("merge", target, *sources, *how)
        if how == ["--move"]:
            assert not any(path.startswith("parts/p-") for url in sources for path in objects(url))
        else:
            assert [objects(url) for url in sources] == before
        hsfmt("verify", target, "--level", "full", "-q")
    kept = {path: data for path, data in objects(local[0]).items() if path.startswith("parts/p-")}
    assert kept == {path: data for path, data in objects(remote[0]).items() if path.startswith("parts/p-")}
    assert held(remote[0]) == held(local[0])
    assert len(held(remote[0])[2]) == 7


def test_programs(s3_server, bucket, tmp_path):
    """The same as programs of their own, which know no more than the environment says."""
    env = environment(s3_server)
    url, folder = f"s3://{bucket}/d", tmp_path / "copy"
    source = source_folder(tmp_path / "source", range(3))
    for argv in (
        (*converting(source, url), "--workers", "2"),
        ("verify", url, "--level", "full", "--workers", "2", "-q"),
        ("pull", url, folder, "-q"),
    ):
        done = in_a_process(*argv, **env)
        assert done.returncode == 0, done.stderr
    done = in_a_process("verify", folder, "--level", "full", "-q")
    assert done.returncode == 0, done.stderr
    assert objects(folder)[layout.POINTER]
