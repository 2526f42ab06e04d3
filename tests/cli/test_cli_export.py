"""hsfmt export: what is written is what the dataset holds, read by the formats' own libraries."""

import json
from itertools import pairwise

import fsspec
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from export_sources import HIDDEN, LAYERS, NATIVE, every_target, journal_of, make_dataset, native, tree, values
from safetensors import safe_open

from hsfmt import DatasetWriter, attachments, seal
from hsfmt.cli.exporting.journal import Journal
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.writers.targets.registry import TARGET_NAMES, target_class

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
HOSTILE = ["../../escape", "é/日本語", "x" * 240, "7", ".", "..", "A", "a", "sub/dir", ".hidden", "-rf", "a\nb", " "]


@pytest.fixture
def source(tmp_path):
    make_dataset(tmp_path / "d")
    return tmp_path / "d"


def patterns(array):
    """An array's bit patterns, so that NaN and -0 compare too."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def read_safetensors(path):
    with safe_open(path, "np") as file:
        known = json.loads(file.metadata()["hsfmt"])
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        start = 8 + int.from_bytes(data[:8], "little")
        names = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F16": "float16", "F32": "float32", "I64": "int64",
                 "BOOL": "bool", "U8": "uint8"}  # fmt: skip
        arrays = {}
        for name in file.keys():  # noqa: SIM118  it is no dict
            entry = header[name]
            begin, end = entry["data_offsets"]
            raw = data[start + begin : start + end]
            arrays[name] = np.frombuffer(raw, native(names[entry["dtype"]])).reshape(entry["shape"])
    return arrays, known


def read_npz(path):
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "hsfmt" and not name.endswith(".dtype")}
        for name in file.files:
            if name.endswith(".dtype"):
                arrays[name.removesuffix(".dtype")] = arrays[name.removesuffix(".dtype")].view(NATIVE[str(file[name])])
        return arrays, json.loads(str(file["hsfmt"]))


READ = {"safetensors": read_safetensors, "npz": read_npz}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_a_sample_holds_all_of_it(hsfmt, tmp_path, name, dtype):
    ids = make_dataset(tmp_path / "d", dtype=dtype)
    report = hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", name)
    assert report["counts"] == {"asked": 20, "written": 20, "already_there": 0, "not_reached": 0}
    assert (report["files"], report["dropped"], report["complete"]) == (20, [], True)
    files = sorted((tmp_path / "out").iterdir())
    assert [path.stem for path in files] == ids
    assert report["nbytes"] == sum(path.stat().st_size for path in files)
    reader = SampleReader(str(tmp_path / "d"))
    for i, path in enumerate(files):
        arrays, known = READ[name](path)
        sample = reader.read(i)
        assert arrays["hidden_states"].dtype == native(dtype)
        assert arrays["hidden_states"].shape == (reader.lengths[i], len(LAYERS), HIDDEN)
        assert np.array_equal(patterns(arrays["hidden_states"]), patterns(values(i, reader.lengths[i], dtype)))
        assert np.array_equal(arrays["input_ids"], sample.input_ids)
        assert arrays["input_ids"].dtype == np.int64
        assert np.array_equal(arrays["loss_mask"], sample.loss_mask)
        for extra, value in sample.extras.items():
            assert value is None or np.array_equal(arrays[extra], value)
        assert set(arrays) == {"hidden_states", "input_ids", "loss_mask"} | {
            extra for extra, value in sample.extras.items() if value is not None
        }
        assert (known["sample_id"], known["metadata"], known["layers"]) == (ids[i], {"n": i}, list(LAYERS))
        assert (known["final_norm"], known["nulls"]) == ("pre", [k for k, v in sample.extras.items() if v is None])


@pytest.mark.parametrize("options", [(), ("chunk_tokens=8", "shard_tokens=24"), ("codec=none",)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zarr_group(hsfmt, tmp_path, dtype, options):
    ids = make_dataset(tmp_path / "d", dtype=dtype)
    words = [word for option in options for word in ("--option", option)]
    report = hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", "zarr", *words)
    assert report["counts"]["written"] == 20
    scales = dtype == "float8_e4m3fn"
    assert report["dropped"] == ["metadata", *(() if scales else ("extra column note", "extra column weight"))]
    group = zarr.open_group(tmp_path / "out", mode="r")
    offsets, id_offsets = group["token_offsets"][:], group["id_offsets"][:]
    states, text = group["hidden_states"][:], group["ids"][:].tobytes()
    assert states.dtype == native(dtype)
    assert states.shape == (offsets[-1], len(LAYERS), HIDDEN)
    reader = SampleReader(str(tmp_path / "d"))
    for i in range(20):
        sample, span = reader.read(i), slice(offsets[i], offsets[i + 1])
        assert np.array_equal(patterns(states[span]), patterns(sample.hidden_states))
        assert np.array_equal(group["input_ids"][span], sample.input_ids)
        assert np.array_equal(group["loss_mask"][span], sample.loss_mask)
        assert text[id_offsets[i] : id_offsets[i + 1]].decode() == ids[i]
        if scales:
            assert np.array_equal(group["hidden_states_scale"][span], sample.extras["hidden_states_scale"])
    said = group.attrs["hsfmt_export"]
    assert (said["layers"], said["final_norm"], said["dtype"]) == (list(LAYERS), "pre", dtype)
    if options[:1] == ("chunk_tokens=8",):
        assert group["hidden_states"].shards == (24, len(LAYERS), HIDDEN)
        assert group["hidden_states"].chunks == (8, 1, HIDDEN)
        assert len(list((tmp_path / "out" / "hidden_states" / "c").iterdir())) == -(-offsets[-1] // 24)


def test_tensorstore_reads_the_group_by_itself(hsfmt, source, tmp_path):
    hsfmt("export", source, tmp_path / "out", "--to", "zarr", "--option", "chunk_tokens=16")
    reader = SampleReader(str(source))

    def read(name):
        place = {"driver": "file", "path": str(tmp_path / "out" / name)}
        return tensorstore.open({"driver": "zarr3", "kvstore": place}).result().read().result()

    states, offsets = read("hidden_states"), read("token_offsets")
    assert states.dtype == native("bfloat16")
    for i in (0, 7, 19):
        assert np.array_equal(patterns(states[offsets[i] : offsets[i + 1]]), patterns(reader.read(i).hidden_states))


def test_zarr_patterns_are_for_a_zarr_python_without_hsfmt(hsfmt, source, tmp_path):
    hsfmt("export", source, tmp_path / "out", "--to", "zarr", "--option", "patterns=yes")
    document = json.loads((tmp_path / "out" / "hidden_states" / "zarr.json").read_text())
    assert document["data_type"] == "uint16"
    found = zarr.open_group(tmp_path / "out", mode="r")["hidden_states"][:1].view(ml_dtypes.bfloat16)
    assert np.array_equal(found, values(0, 1, "bfloat16"))


@pytest.mark.parametrize(
    ("option", "got"),
    [
        ("codec=gzip", "--option codec: expected one of none, zstd, got 'gzip'"),
        ("patterns=1", "--option patterns: expected yes or no, got '1'"),
        ("chunk_tokens=0", "--option chunk_tokens: expected a number of tokens from 1 on, got '0'"),
        ("shard_tokens=7", "--option shard_tokens: expected a multiple of the chunk's"),
        ("chunks=7", "--option chunks: expected one of: codec (none or zstd"),
        ("codec", "--option: expected NAME=VALUE, got 'codec'"),
    ],
)
def test_options_of_a_target_are_checked(hsfmt, source, tmp_path, option, got):
    result = hsfmt("export", source, tmp_path / "out", "--to", "zarr", "--option", option, code=2)
    assert got in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_an_option_twice_and_one_of_another_target(hsfmt, source, tmp_path):
    twice = ["--option", "codec=none", "--option", "codec=zstd"]
    assert "one value for codec" in hsfmt("export", source, tmp_path / "o", "--to", "zarr", *twice, code=2).stderr
    result = hsfmt("export", source, tmp_path / "o", "--to", "npz", "--option", "codec=none", code=2)
    assert "--option codec: expected no option, got an option that --to npz does not have" in result.stderr


def test_help_has_the_options_of_every_target(hsfmt):
    text = " ".join(hsfmt("export", "--help").stdout.partition("Settings for --option, by format:")[2].split())
    text = text.replace("- ", "-")  # names are broken at their hyphens
    said = {}
    for clause in text.rstrip(".").split("; "):
        formats, _, options = clause.partition(": ")
        said |= dict.fromkeys(formats.split(" and "), options.split(", "))
    assert said.pop("the others") == ["none"]
    assert said == {name: list(kind) for name in TARGET_NAMES if (kind := target_class(name).option_help)}


@pytest.mark.parametrize(
    ("given", "close"),
    [
        ("specforge", "specforge-eagle3, specforge-dflash, specforge-dspark"),
        ("safetensor", "safetensors"),
        ("zar", "zarr"),
    ],
)
def test_a_format_that_is_like_another(hsfmt, tmp_path, given, close):
    assert f"Did you mean {close}?" in hsfmt("export", tmp_path, "o", "--to", given, code=2).stderr


def test_a_format_that_is_like_no_other(hsfmt, tmp_path):
    stderr = hsfmt("export", tmp_path, "o", "--to", "quux", code=2).stderr
    assert "'quux' is not one of" in stderr
    assert "Did you mean" not in stderr


def test_layers(hsfmt, source, tmp_path):
    report = hsfmt.json("export", source, tmp_path / "out", "--to", "npz", "--layers", "1,5")
    assert report["header"]["layers"] == [1, 5]
    arrays, known = read_npz(tmp_path / "out" / "sample-004.npz")
    assert known["layers"] == [1, 5]
    assert np.array_equal(arrays["hidden_states"], values(4, 1 + 28 % 23, "bfloat16")[:, [0, 2]])


@pytest.mark.parametrize("layers", ["3", "5,1", "1,1"])
def test_layers_that_are_not_there(hsfmt, source, tmp_path, layers):
    result = hsfmt("export", source, tmp_path / "out", "--to", "npz", "--layers", layers, code=2)
    assert f"--layers: expected some of 1,2,5, in ascending order, got {layers}" in result.stderr


@pytest.mark.parametrize(
    ("span", "expected"), [("3:6", [3, 4, 5]), ("17:", [17, 18, 19]), (":2", [0, 1]), ("0:20", range(20))]
)
def test_range(hsfmt, source, tmp_path, span, expected):
    report = hsfmt.json("export", source, tmp_path / "out", "--to", "npz", "--range", span)
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == [f"sample-{i:03}" for i in expected]
    assert report["counts"]["asked"] == len(expected)


@pytest.mark.parametrize("span", ["3:21", "5:3", "-3:", "3", "a:b", "1:2:3"])
def test_ranges_that_make_no_sense(hsfmt, source, tmp_path, span):
    result = hsfmt("export", source, tmp_path / "out", "--to", "npz", "--range", span, code=2)
    assert "--range" in result.stderr


def test_ids(hsfmt, source, tmp_path):
    (tmp_path / "ids").write_bytes(b"sample-011\r\nsample-002\n\nsample-007")
    hsfmt("export", source, tmp_path / "out", "--to", "npz", "--ids", tmp_path / "ids")
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == ["sample-002", "sample-007", "sample-011"]
    hsfmt("export", source, tmp_path / "both", "--to", "npz", "--ids", tmp_path / "ids", "--range", "5:10")
    assert [path.stem for path in (tmp_path / "both").iterdir()] == ["sample-007"]
    result = hsfmt("export", source, tmp_path / "n", "--to", "npz", "--ids", tmp_path / "ids", "--range", "0:1", code=2)
    assert "expected samples to export, got none of 20 samples" in result.stderr


def test_ids_that_are_not_there_are_named(hsfmt, source, tmp_path):
    (tmp_path / "ids").write_text("sample-001\nsample-1\nother\n")
    document = hsfmt.json("export", source, tmp_path / "out", "--to", "npz", "--ids", tmp_path / "ids", code=3)
    (problem,) = document["error"]
    assert problem["got"] == "2 that it does not have: 'sample-1', 'other'"
    assert problem["samples"] == ["sample-1", "other"]
    (tmp_path / "ids").write_text("sample-001\nsample-001\n")
    result = hsfmt("export", source, tmp_path / "out", "--to", "npz", "--ids", tmp_path / "ids", code=2)
    assert "expected each id once, got 1 id more than once: 'sample-001'" in result.stderr
    hsfmt("export", source, tmp_path / "out", "--to", "npz", "--ids", tmp_path / "none", code=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["safetensors", "npz", "zarr"])
def test_hostile_ids_stay_inside_the_folder(hsfmt, tmp_path, name):
    make_dataset(tmp_path / "in" / "d", ids=HOSTILE)
    out = tmp_path / "in" / "out"
    report = hsfmt.json("export", tmp_path / "in" / "d", out, "--to", name)
    assert report["counts"]["written"] == len(HOSTILE)
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["d", "out", "out.hsfmt-export.jsonl"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    if name == "zarr":
        group = zarr.open_group(out, mode="r")
        text, offsets = group["ids"][:].tobytes(), group["id_offsets"][:]
        found = [text[a:b].decode() for a, b in pairwise(offsets)]
    else:
        paths = list(out.iterdir())
        assert len({path.name.lower() for path in paths}) == len(HOSTILE)
        found = [READ[name](path)[1]["sample_id"] for path in paths]
    assert sorted(found) == sorted(HOSTILE)


@pytest.mark.parametrize("name", ["safetensors", "npz", "zarr"])
def test_dry_run_writes_nothing(hsfmt, source, tmp_path, name):
    before = tree(tmp_path)
    report = hsfmt.json("export", source, tmp_path / "out", "--to", name, "--dry-run")
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert report["counts"] == {"asked": 20, "written": 0, "already_there": 0, "not_reached": 20}
    assert (report["dry_run"], report["complete"], report["files"]) == (True, False, 0)
    raw = report["tokens"] * len(LAYERS) * HIDDEN * 2
    assert raw <= report["estimate"]["nbytes"] <= 1.5 * raw
    text = hsfmt("export", source, tmp_path / "out", "--to", name, "--dry-run").stdout
    assert "dry run, nothing was written" in text
    assert "20 to write" in text


@pytest.mark.parametrize("name", ["safetensors", "npz", "zarr"])
def test_two_workers_write_the_same_bytes(hsfmt, process, source, tmp_path, name):
    options = ["--option", "chunk_tokens=8", "--option", "shard_tokens=32"] if name == "zarr" else []
    hsfmt("export", source, tmp_path / "one", "--to", name, *options)
    run = process("export", source, tmp_path / "two", "--to", name, *options, "--workers", "2", "--json")
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out)["workers"] == 2
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_the_same_export_twice_is_the_same_bytes(hsfmt, source, tmp_path):
    for name in ("safetensors", "npz", "zarr"):
        for number in (1, 2):
            hsfmt("export", source, tmp_path / f"{name}{number}", "--to", name)
        assert tree(tmp_path / f"{name}1") == tree(tmp_path / f"{name}2")


def test_what_a_format_drops_is_listed_and_refused_under_strict(hsfmt, source, tmp_path):
    result = hsfmt("export", source, tmp_path / "out", "--to", "zarr", "--strict", code=2)
    for what in ("metadata", "extra column note", "extra column weight"):
        assert f"--to zarr: expected a place for all that the samples have, got none for {what}" in result.stderr
    assert not journal_of(tmp_path / "out").exists()
    text = hsfmt("export", source, tmp_path / "out", "--to", "zarr").stdout
    assert "not kept    metadata, extra column note, extra column weight: the format has no place for it" in text
    hsfmt("export", source, tmp_path / "whole", "--to", "npz", "--strict")


@pytest.mark.parametrize("name", every_target())
def test_attachments_without_a_place_are_listed_and_refused_under_strict(hsfmt, tmp_path, name):
    """None of the formats has a place for an array of this name."""
    pre = name in ("vllm", "speculators", "speculators-fp8", "speculators-pt")
    layers = (8,) if name == "eagle-ge" else (1, 2, 5, 8)
    norm = {"layers": layers, "hidden_size": 8, "final_norm": "pre" if pre else "post", "model": "m"}
    with DatasetWriter(tmp_path / "d", **norm) as writer:
        writer.write("s", np.arange(4), np.ones((4, len(layers), 8), native("bfloat16")), np.ones(4, np.uint8))
    seal(tmp_path / "d", attachments={"merges": np.arange(5)})
    more = {"speculators-fp8": ["--cast", "float8_e4m3fn"], "specforge-dflash": ["--layers", "1,2"]}
    words = ["--to", name, *more.get(name, [])]
    result = hsfmt("export", tmp_path / "d", tmp_path / "out", *words, "--strict", code=2)
    assert (
        f"--to {name}: expected a place for all that the samples have, got none for attachment merges" in result.stderr
    )
    assert "attachment merges" in hsfmt.json("export", tmp_path / "d", tmp_path / "out", *words)["dropped"]


def test_a_link_to_the_folder_is_the_folder(hsfmt, source, tmp_path):
    """Journal and lock are the folder's, so two exports of other layers can't mix in it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to(tmp_path / "real")
    report = hsfmt.json("export", source, link, "--to", "npz", "--layers", "1")
    assert (report["folder"], report["journal"]) == (str(tmp_path / "real"), str(journal_of(tmp_path / "real")))
    assert [path.name for path in link.parent.iterdir()] == ["link"]
    for dst in (link, tmp_path / "real"):
        result = hsfmt("export", source, dst, "--to", "npz", "--layers", "2", code=2)
        assert "real: layers: expected 1, as in the export there, got 2" in result.stderr
        again = hsfmt.json("export", source, dst, "--to", "npz", "--layers", "1")
        assert again["counts"]["already_there"] == 20
    with Journal(journal_of(tmp_path / "real")):
        result = hsfmt("export", source, link, "--to", "npz", "--layers", "1", code=2)
    assert "expected no export at work, got one that is running" in result.stderr
    new = tmp_path / "links" / "new"
    new.symlink_to(tmp_path / "later")
    hsfmt("export", source, new, "--to", "npz")
    assert len(list((tmp_path / "later").iterdir())) == 20


def test_links_in_a_circle(hsfmt, source, tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "expected a folder" in hsfmt("export", source, tmp_path / "a", "--to", "npz", code=2).stderr


def test_no_room(hsfmt, source, tmp_path, monkeypatch):
    monkeypatch.setattr("hsfmt.storage.local.LocalStore.free_nbytes", lambda self: 1000)
    result = hsfmt("export", source, tmp_path / "out", "--to", "npz", code=3)
    assert "got 1000 bytes free — free space, choose another destination, or pass --force" in result.stderr
    assert not (tmp_path / "out").exists()
    report = hsfmt.json("export", source, tmp_path / "out", "--to", "npz", "--dry-run", code=3)
    assert report["estimate"]["fits"] is False
    hsfmt("export", source, tmp_path / "out", "--to", "npz", "--force")
    assert len(list((tmp_path / "out").iterdir())) == 20


@pytest.mark.parametrize(
    ("dst", "says"),
    [
        ("s3://bucket", "got all of a storage — name a folder in it: s3://bucket/export"),
        ("simplecache::memory://a/out", "got a chained one"),
        ("/", "expected a folder of its own, got the root of the file system"),
    ],
)
def test_destinations_that_are_none(hsfmt, source, dst, says):
    assert says in hsfmt("export", source, dst, "--to", "npz", code=2).stderr


def test_destinations_beside_the_dataset_only(hsfmt, source, tmp_path):
    for dst in (source, source / "sub", tmp_path):
        result = hsfmt("export", source, dst, "--to", "npz", code=2)
        assert "expected a folder apart from the dataset" in result.stderr
    (tmp_path / "file").write_text("x")
    assert "got a file" in hsfmt("export", source, tmp_path / "file", "--to", "npz", code=2).stderr
    hsfmt("export", tmp_path / "none", tmp_path / "out", "--to", "npz", code=3)


def test_a_dataset_at_a_url(hsfmt, source, tmp_path):
    hsfmt("export", source, tmp_path / "one", "--to", "npz")
    fsspec.filesystem("memory").put(str(source), "/exported/d", recursive=True)
    hsfmt("export", "memory://exported/d", tmp_path / "two", "--to", "npz")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_a_snapshot_by_its_fingerprint(hsfmt, write, tmp_path):
    url = tmp_path / "d"
    write(url, {"a": None, "b": [1, 0]})
    first = SampleReader(str(url)).fingerprint
    write(url, {"c": None, "d": [1, 0], "e": None})
    hsfmt("export", url, tmp_path / "all", "--to", "npz")
    assert sorted(path.stem for path in (tmp_path / "all").iterdir()) == list("abcde")
    report = hsfmt.json("export", url, tmp_path / "some", "--to", "npz", "--snapshot", first)
    assert sorted(path.stem for path in (tmp_path / "some").iterdir()) == ["a", "b"]
    assert report["snapshot"] == first
    warning = "1 sample came without a loss mask: every token of such a sample counts as supervised"
    assert report["warnings"] == [warning]


def test_a_dataset_that_was_never_sealed_is_exported_live(hsfmt, write, tmp_path):
    write(tmp_path / "d", {"a": [1], "b": [1, 0]}, seal=False)
    assert hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", "npz")["counts"]["written"] == 2


def test_a_damaged_attachment_stops_the_export(hsfmt, source, tmp_path):
    (entry,) = seal(source, attachments={"d2t": np.arange(5)}).snapshot.attachments
    path = source / attachments.entry_path(entry, "")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    result = hsfmt("export", source, tmp_path / "out", "--to", "npz", code=1)
    assert "d2t.npy: expected a file of xxh3_128:" in result.stderr


def test_damage_stops_the_export_and_keeps_what_is_whole(hsfmt, source, tmp_path):
    shard = next(source.glob("parts/*/hidden_states/c/0/0/0"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(bytes(data))
    document = hsfmt.json("export", source, tmp_path / "out", "--to", "npz", code=1)
    counts = document["counts"]
    assert counts["not_reached"] > 0
    assert sum(counts.values()) == 2 * counts["asked"]
    assert document["error"][0]["samples"]
    assert document["complete"] is False


@pytest.mark.parametrize("name", TARGET_NAMES)
def test_every_target_says_what_it_is(hsfmt, name):
    assert name in hsfmt("export", "--help").stdout
