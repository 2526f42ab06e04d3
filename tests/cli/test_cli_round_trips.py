"""convert, export, convert: ids, vocabularies, metadata and extra columns are what they were, however often."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.readers.sample_reader import SampleReader

EAGLE = ["--layer-ids", "2,4,5,8"]
# Format to (layers, final norm, options of the export, options of the conversion).
NUMBERED = {
    "speculators": ((2, 4, 5, 8), "pre", [], EAGLE),
    "speculators-pt": ((2, 4, 5, 8), "pre", [], []),
    "specforge-eagle3": ((2, 4, 5, 8), "post", [], EAGLE),
    "specforge-dflash": ((2, 4, 5), "unknown", [], ["--layer-ids", "2,4,5", "--hidden-size", "16"]),
    "specforge-dspark": ((2, 4, 5, 8), "post", [], EAGLE),
    "angelslim-eagle3": ((2, 4, 5, 8), "post", [], EAGLE),
    "deepspec": ((2, 4, 5, 8), "post", [], EAGLE),
}
TORCHLESS = ("speculators", "deepspec")
IDS = [f"chat/é{i * 7 % 5} {i}" for i in range(12)]


def numbered(*names):
    return [pytest.param(name, marks=[] if name in TORCHLESS else pytest.mark.torch) for name in names or NUMBERED]


@pytest.fixture
def exported(hsfmt, tmp_path):
    """Export a dataset of 12 samples to a format; return it, the folder and the options to convert that again."""

    def make(name):
        layers, norm, to, back = NUMBERED[name]
        with DatasetWriter(
            tmp_path / "d", layers=layers, hidden_size=16, final_norm=norm, model="tiny", dtype="bfloat16"
        ) as writer:
            for i, sample_id in enumerate(IDS):
                n = 3 + i % 4
                states = np.random.default_rng(i).standard_normal((n, len(layers), 16)).astype(ml_dtypes.bfloat16)
                writer.write(sample_id, np.arange(n) + i, states, np.arange(n) > 0, source_index=i)
        hsfmt("export", tmp_path / "d", tmp_path / "x", "--to", name, *to)
        return tmp_path / "d", tmp_path / "x", back

    return make


@pytest.mark.parametrize("name", numbered())
def test_ids_of_numbered_formats_come_back(hsfmt, exported, tmp_path, name):
    dataset, folder, options = exported(name)
    report = hsfmt.json("convert", folder, tmp_path / "again", *options)
    assert report["source"]["format"] == name
    assert {"path": "hsfmt_samples.jsonl", "role": "sample ids"} in report["support"]
    assert report["strays"] == []
    before, after = SampleReader(dataset), SampleReader(tmp_path / "again")
    assert list(after.sample_ids) == IDS
    assert after.content_digest == before.content_digest


@pytest.mark.parametrize("name", numbered("speculators", "specforge-eagle3"))
def test_ids_come_back_under_a_prefix_and_in_several_processes(hsfmt, exported, tmp_path, name):
    _, folder, options = exported(name)
    hsfmt("convert", folder, tmp_path / "again", *options, "--id-prefix", "b/", "--workers", "2")
    assert list(SampleReader(tmp_path / "again").sample_ids) == [f"b/{sample_id}" for sample_id in IDS]


@pytest.mark.torch
def test_ids_stay_while_files_are_deleted(hsfmt, exported, tmp_path):
    dataset, folder, options = exported("specforge-eagle3")
    kept = shutil.copytree(folder, tmp_path / "kept")
    broken = folder / "rows_0-2000" / "data_5.ckpt"
    broken.write_bytes(b"")
    hsfmt("convert", folder, tmp_path / "again", *options, "--delete-source", "--part-size", "1KiB", code=1)
    left = {path.name for path in folder.glob("rows_*/*")}
    assert "data_0.ckpt" not in left
    assert "data_5.ckpt" in left
    shutil.copy(kept / "rows_0-2000" / "data_5.ckpt", broken)
    hsfmt("convert", folder, tmp_path / "again", *options, "--delete-source")
    assert SampleReader(tmp_path / "again").content_digest == SampleReader(dataset).content_digest
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["hsfmt_samples.jsonl"]


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines[:-1], "12"),
        (lambda lines: [*lines, json.dumps({"id": "more", "n_tokens": 3}) + "\n"], "13 lines"),
        (lambda lines: [*lines[:3], lines[2], *lines[4:]], "a second time"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "jsonl:12: expected a line with id and n_tokens"),
        (lambda lines: ["{}\n", *lines[1:]], "jsonl:1: expected a line with id and n_tokens"),
        (lambda lines: ["[" * 9000 + "\n", *lines[1:]], "jsonl:1: expected a line with id and n_tokens"),
        (lambda lines: ['{"id": 7, "n_tokens": 3}\n', *lines[1:]], "jsonl:1: expected a text as id"),
        (lambda lines: ['{"id": "a", "n_tokens": 0}\n', *lines[1:]], "jsonl:1: expected a text as id"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "tokens, as hsfmt_samples.jsonl says, got"),
        (lambda _: [], "0 lines"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(hsfmt, exported, tmp_path, damage, said):
    _, folder, options = exported("speculators")
    path = folder / "hsfmt_samples.jsonl"
    path.write_text("".join(damage(lines_of(path))), encoding="utf-8")
    result = hsfmt("convert", folder, tmp_path / "again", *options, code=1)
    assert said in result.stderr
    assert "move hsfmt_samples.jsonl away" in result.stderr
    path.unlink()
    hsfmt("convert", folder, tmp_path / "again", *options)
    assert SampleReader(tmp_path / "again").sample_ids[3] == "hs_3"


@pytest.mark.torch
@pytest.mark.parametrize("path", ["rows_0-2000/data_12.ckpt", "rows_0-2000/other.ckpt", "rows_2000-4000/data_3.ckpt"])
def test_a_file_that_the_list_has_no_line_for_is_refused(hsfmt, exported, tmp_path, path):
    _, folder, options = exported("specforge-eagle3")
    (folder / path).parent.mkdir(exist_ok=True)
    shutil.copy(folder / "rows_0-2000" / "data_4.ckpt", folder / path)
    result = hsfmt("convert", folder, tmp_path / "again", *options, code=1)
    assert "expected 12 lines, one for each sample of the folder" in result.stderr
    assert path in result.stderr


@pytest.mark.torch
def test_a_list_below_the_folder_is_named_as_not_read(hsfmt, exported, tmp_path):
    _, folder, options = exported("specforge-eagle3")
    (tmp_path / "all").mkdir()
    folder.rename(tmp_path / "all" / "one")
    report = hsfmt.json("convert", tmp_path / "all", tmp_path / "again", *options)
    (stray,) = report["strays"]
    assert stray["path"] == "one/hsfmt_samples.jsonl"
    assert "convert its folder by itself" in stray["reason"]


def arrays(path):
    """What a vocabulary file holds, by key."""
    if path.suffix == ".npy":
        return {"": np.load(path)}
    import torch

    return {key: np.asarray(value) for key, value in torch.load(path, weights_only=True).items()}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("folder", "name", "files", "names"),
    [
        ("speculators/0.9.0", "speculators", ["d2t-64.npy", "t2d-64.npy", "token_freq.pt"],
         ["d2t-64", "t2d-64", "token_freq"]),
        ("speculators/0.9.0_fp8", "speculators-fp8", ["token_freq.pt"], ["token_freq"]),
        ("specforge/v020_eagle3_gz", "specforge-eagle3", ["vocab_mapping/vocab_mapping.pt"], ["d2t", "t2d"]),
        ("angelslim/eagle3", "angelslim-eagle3", ["vocab_mapping.pt"], ["d2t", "t2d"]),
    ],
)  # fmt: skip
def test_vocabularies_of_real_folders_come_back(hsfmt, data_dir, tmp_path, folder, name, files, names):
    source = data_dir / folder
    report = hsfmt.json("convert", source, tmp_path / "d", *EAGLE)
    assert report["attachments"] == names
    info = hsfmt.json("info", tmp_path / "d")
    assert [entry["name"] for entry in info["attachments"]] == [f"{name}.npy" for name in names]
    assert f"{names[0]}.npy (" in hsfmt("info", tmp_path / "d").stdout
    hsfmt("verify", tmp_path / "d")
    hsfmt("export", tmp_path / "d", tmp_path / "x", "--to", name)
    for file in files:
        wanted, found = arrays(source / file), arrays(tmp_path / "x" / file)
        assert wanted.keys() == found.keys()
        for key, array in wanted.items():
            assert (found[key].dtype, found[key].tolist()) == (array.dtype, array.tolist())
        if file.endswith(".npy"):
            assert (source / file).read_bytes() == (tmp_path / "x" / file).read_bytes()
    again = hsfmt.json("convert", tmp_path / "x", tmp_path / "again", *EAGLE)
    assert again["attachments"] == names
    assert again["snapshot"]["content_digest"] == report["snapshot"]["content_digest"]


@pytest.fixture
def vocabulary(data_dir, tmp_path) -> Path:
    return Path(shutil.copytree(data_dir / "speculators" / "0.9.0", tmp_path / "source"))


@pytest.mark.torch
def test_running_again_changes_nothing_and_no_seal_says_so(hsfmt, vocabulary, tmp_path):
    report = hsfmt.json("convert", vocabulary, tmp_path / "d", *EAGLE, "--no-seal")
    assert any("d2t-64, t2d-64, token_freq: kept by a seal" in warning for warning in report["warnings"])
    first = hsfmt.json("convert", vocabulary, tmp_path / "d", *EAGLE)["snapshot"]
    assert len(hsfmt.json("info", tmp_path / "d")["attachments"]) == 3
    assert hsfmt.json("convert", vocabulary, tmp_path / "d", *EAGLE)["snapshot"] == first


@pytest.mark.torch
def test_another_mapping_in_the_same_dataset_is_refused_before_anything_is_written(hsfmt, vocabulary, tmp_path):
    hsfmt("convert", vocabulary, tmp_path / "d", *EAGLE)
    parts = sorted((tmp_path / "d" / "parts").iterdir())
    other = np.load(vocabulary / "d2t-64.npy")
    np.save(vocabulary / "d2t-64.npy", other + 1)
    result = hsfmt("convert", vocabulary, tmp_path / "d", *EAGLE, "--id-prefix", "b/", code=2)
    assert "attachment d2t-64.npy: expected the one that the dataset has" in result.stderr
    assert sorted((tmp_path / "d" / "parts").iterdir()) == parts
    hsfmt("seal", tmp_path / "d", "--drop-attachment", "d2t-64")
    hsfmt("convert", vocabulary, tmp_path / "d", *EAGLE, "--id-prefix", "b/")
    assert SampleReader(tmp_path / "d").attachments()["d2t-64"].tolist() == (other + 1).tolist()


@pytest.mark.torch
def test_support_files_stay_when_samples_are_deleted(hsfmt, vocabulary, tmp_path):
    hsfmt("convert", vocabulary, tmp_path / "d", *EAGLE, "--delete-source")
    assert not list(vocabulary.glob("hidden_states/*.safetensors"))
    assert {"d2t-64.npy", "t2d-64.npy", "token_freq.pt"} <= {path.name for path in vocabulary.iterdir()}


@pytest.mark.torch
def test_two_vocabularies_are_kept_apart_and_not_chosen_between(hsfmt, vocabulary, tmp_path):
    np.save(vocabulary / "d2t-2.npy", np.array([0, 4]))
    np.save(vocabulary / "t2d-2.npy", np.arange(512) % 256 == 0)
    hsfmt("convert", vocabulary, tmp_path / "d", *EAGLE)
    result = hsfmt("export", tmp_path / "d", tmp_path / "x", "--to", "speculators", code=2)
    assert "attachments d2t-2, d2t-64: expected one that is d2t, got 2" in result.stderr
    hsfmt("seal", tmp_path / "d", "--drop-attachment", "d2t-2", "--drop-attachment", "t2d-2")
    hsfmt("export", tmp_path / "d", tmp_path / "x", "--to", "speculators")
    assert (tmp_path / "x" / "d2t-64.npy").is_file()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("d2t-64.npy", b"", r"expected a .npy file of numbers"),
        ("d2t-64.npy", "cut", r"expected a .npy file of numbers, whole"),
        ("t2d-64.npy", np.zeros((2, 2), bool), "expected whole numbers, shape [vocabulary], got bool of shape [2, 2]"),
        ("t2d-64.npy", np.zeros(2), "got float64 of shape [2]"),
        ("token_freq.pt", {"a": 1}, "expected a dict of token ids"),
        ("token_freq.pt", {1 << 40: 1}, "expected a dict of token ids"),
        ("token_freq.pt", {1: -1}, "expected a dict of token ids"),
        ("token_freq.pt", {}, "expected a dict of token ids"),
        ("token_freq.pt", [1], "expected a dict of token ids"),
        ("token_freq.pt", Path("x"), "pathlib"),
    ],
)
def test_damaged_vocabularies_stop_with_their_name(hsfmt, vocabulary, tmp_path, name, data, said):
    path = vocabulary / name
    if isinstance(data, str):
        path.write_bytes(path.read_bytes()[:-8])
    elif isinstance(data, bytes):
        path.write_bytes(data)
    elif isinstance(data, np.ndarray):
        np.save(path, data)
    else:
        import torch

        torch.save(data, path)
    result = hsfmt("convert", vocabulary, tmp_path / "d", *EAGLE, code=1)
    assert name in result.stderr
    assert said in result.stderr
    assert not (tmp_path / "d").exists()
    path.unlink()
    hsfmt("convert", vocabulary, tmp_path / "d", *EAGLE)


EXTRAS = {
    "score": {"kind": "token", "dtype": "float32"},
    "flag": {"kind": "token", "dtype": "bool"},
    "label": {"kind": "sample", "dtype": "int64", "shape": [4]},
    "weight": {"kind": "sample", "dtype": "bfloat16"},
    "notes": {"kind": "ragged", "dtype": "int32", "shape": [2]},
}


@pytest.fixture
def columned(tmp_path) -> Path:
    """A dataset whose samples have four tokens, so that a row of `label` can't be told from a row a token."""
    with DatasetWriter(tmp_path / "d", layers=[2, 4], hidden_size=8, final_norm="pre", extras=EXTRAS) as writer:
        for i in range(3):
            states = np.random.default_rng(i).standard_normal((4, 2, 8)).astype(ml_dtypes.bfloat16)
            writer.write(
                f"a/{i}", np.arange(4), states, None, {"n": i} | ({"source": "web"} if i else {}), source_index=i,
                score=np.arange(4, dtype=np.float32), flag=np.arange(4) > i, label=np.arange(4) + i,
                weight=np.array(i, ml_dtypes.bfloat16) if i else None, notes=np.full((i, 2), i, np.int32),
            )  # fmt: skip
    return tmp_path / "d"


def columns_of(url):
    reader = SampleReader(url)
    samples = [reader.read(number) for number in range(len(reader))]
    return [
        {name: None if value is None else (value.shape, value.tobytes()) for name, value in sample.extras.items()}
        for sample in samples
    ]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["safetensors", "npz"])
def test_extra_columns_of_every_kind_and_metadata_stay_the_same(hsfmt, columned, tmp_path, name):
    before, current, metadata = columns_of(columned), columned, []
    for turn in range(3):
        folder, again = tmp_path / f"x{turn}", tmp_path / f"d{turn}"
        hsfmt("export", current, folder, "--to", name)
        hsfmt("convert", folder, again)
        assert columns_of(again) == before
        assert hsfmt.json("info", again)["columns"] == hsfmt.json("info", columned)["columns"]
        reader = SampleReader(again)
        assert reader.content_digest == SampleReader(columned).content_digest
        metadata.append([reader.read(number).metadata for number in range(3)])
        current = again
    file = f"a%2F1.{name}"
    assert metadata[0][1] == {"columns": {"n": 1, "source": "web"}, "source": file}
    assert metadata[0][1:] == metadata[1][1:] == metadata[2][1:]
    # Without a `source` of its own, a sample has that of its first conversion from then on.
    assert metadata[0][0] == {"n": 0, "source": f"a%2F0.{name}"}
    assert metadata[1][0] == metadata[2][0] == {"columns": metadata[0][0], "source": f"a%2F0.{name}"}


@pytest.mark.torch
@pytest.mark.parametrize("name", ["safetensors", "npz"])
def test_what_cat_wrote_has_its_columns_too(hsfmt, columned, tmp_path, name):
    (tmp_path / "x").mkdir()
    for i in range(3):
        hsfmt("cat", columned, f"a/{i}", "-o", f"{tmp_path / 'x'}/", "--format", name)
    hsfmt("convert", tmp_path / "x", tmp_path / "again")
    assert columns_of(tmp_path / "again") == columns_of(columned)


@pytest.mark.torch
def test_windows_get_their_rows_of_tokens_and_all_of_the_sample_and_ragged_columns_are_refused(
    hsfmt, columned, tmp_path
):
    hsfmt("export", columned, tmp_path / "x", "--to", "safetensors")
    convert = ("convert", tmp_path / "x", tmp_path / "again", "--split-long", "3")
    result = hsfmt(*convert, code=2)
    assert "notes: any number of rows a sample" in result.stderr
    assert "--map ignore=notes" in result.stderr
    assert not (tmp_path / "again").exists()
    hsfmt(*convert, "--map", "ignore=notes")
    reader = SampleReader(tmp_path / "again")
    first, second = reader.read(0), reader.read(1)
    assert (first.sample_id, second.sample_id) == ("a/0#0", "a/0#1")
    assert (first.extras["score"].tolist(), second.extras["score"].tolist()) == ([0, 1, 2], [3])
    assert first.extras["label"].tolist() == second.extras["label"].tolist() == [0, 1, 2, 3]


def test_a_seal_of_ones_own_attaches_and_info_lists(hsfmt, columned):
    seal(columned, attachments={"token_freq": np.arange(5)})
    assert [entry["name"] for entry in hsfmt.json("info", columned)["attachments"]] == ["token_freq.npy"]
    hsfmt("seal", columned, "--drop-attachment", "nothing", code=2)
    hsfmt("seal", columned, "--drop-attachment", "token_freq")
    assert hsfmt.json("info", columned)["attachments"] == []
