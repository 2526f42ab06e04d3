"""verl-SpeCo's feature store: imitated stores bit for bit, and stores that lie, are torn, or hold something else."""

import json
import pickle
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from hsfmt.cli.main import main
from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.sources import SourceOptions, find_source, parse_key_map, settle_final_norm, settle_layers
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look
from hsfmt.readers.sources.verl_speco import VerlSpecoSource

HIDDEN = 16
LENGTHS = (7, 12, 3, 19, 5)
WIDE = SourceOptions(hidden_size=HIDDEN)


@pytest.fixture
def rollout(copy_of) -> Path:
    return copy_of("verl_speco/rollout")


@pytest.fixture
def listed(copy_of) -> Path:
    return copy_of("verl_speco/listed")


def open_store(folder: Path, **options: object) -> VerlSpecoSource:
    return find_source(folder, "verl-speco", options=SourceOptions(**{"hidden_size": HIDDEN} | options))


def shard_of(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.pt"))[number]


def edit(path: Path, change) -> None:
    """Save a shard again after `change` was applied to its dict."""
    shard = torch.load(path, weights_only=False)
    change(shard)
    torch.save(shard, path)


def edit_sample(folder: Path, number: int, **entries: object) -> None:
    """Change entries of a sample; None takes one away, `metadata` is changed member by member."""

    def change(shard: dict) -> None:
        sample = shard["samples"][number % 2]
        for name, value in entries.items():
            if name == "metadata":
                sample["metadata"] |= value
            elif value is None:
                del sample[name]
            else:
                sample[name] = value

    edit(shard_of(folder, number // 2), change)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


def write_lines(folder: Path, values: list[dict]) -> None:
    (folder / "manifest.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))


def own_samples(folder: Path) -> list[dict]:
    """The samples as verl-SpeCo's own reader takes them out of the shards."""
    return [
        sample
        for line in lines(folder)
        for sample in torch.load(folder / line["path"], map_location="cpu", weights_only=False)["samples"]
    ]


def refusals(source: VerlSpecoSource) -> dict[int, str]:
    errors = {}
    for number, item in enumerate(source.items):
        try:
            source.load(item)
        except SourceError as error:
            errors[number] = error
    for number, error in errors.items():
        name = source.items[number].key.rpartition(":")[0]
        assert all(problem.where.startswith(name) for problem in error.problems)
    return {number: str(error) for number, error in errors.items()}


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("name", ["rollout", "listed"])
def test_every_sample_comes_bit_for_bit(data_dir, name):
    folder = data_dir / "verl_speco" / name
    source = open_store(folder)
    own = own_samples(folder)
    assert len(source.items) == len(own) == len(LENGTHS)
    for item, theirs in zip(source.items, own, strict=True):
        sample = source.load(item)
        parts = theirs["hidden_states"]
        parts = parts.split(HIDDEN, dim=1) if torch.is_tensor(parts) else [*parts, theirs["last_hidden_states"]]
        np.testing.assert_array_equal(sample.hidden_states.view(np.uint16), bits(torch.stack(list(parts), dim=1)))
        np.testing.assert_array_equal(sample.input_ids, theirs["input_ids"].numpy())
        np.testing.assert_array_equal(sample.loss_mask, theirs["loss_mask"].numpy())
        assert sample.metadata["global_step"] == theirs["metadata"]["global_step"]
        assert sample.metadata["first_position"] == int(theirs["position_ids"][0])
        assert sample.metadata["algorithm"] == "EAGLE3"
        if "target_logprobs" in theirs:
            np.testing.assert_array_equal(sample.extras["target_logprobs"], theirs["target_logprobs"].numpy())
            assert sample.metadata["hidden_positions"] == theirs["metadata"]["hidden_positions"].tolist()
        else:
            assert sample.extras == {}


def test_items_files_and_shares_add_up(data_dir):
    source = open_store(data_dir / "verl_speco" / "rollout")
    names = [f"rank00000_pid4711_00000{i}" for i in range(3)]
    assert [item.sample_id for item in source.items] == [f"{names[i // 2]}/{i % 2}" for i in range(5)]
    assert [item.key for item in source.items] == [f"{names[i // 2]}.pt:{i % 2}" for i in range(5)]
    assert [item.index for item in source.items] == list(range(5))
    assert {(support.path, support.role) for support in source.support} == {
        ("manifest.jsonl", "manifest"),
        ("metadata.json", "metadata"),
        *((f"{name}.pt", "container") for name in names),
    }
    assert source.strays == []
    sizes = sum((source.root / f"{name}.pt").stat().st_size for name in names)
    assert sum(item.nbytes for item in source.items) == sizes


def test_what_the_format_leaves_open_is_demanded(data_dir):
    folder = data_dir / "verl_speco" / "rollout"
    with pytest.raises(UsageError, match="--hidden-size"):
        open_store(folder, hidden_size=None).meaning()
    meaning = open_store(folder).meaning()
    assert (meaning.hidden_size, meaning.n_layers, meaning.dtype) == (HIDDEN, 4, "bfloat16")
    with pytest.raises(UsageError, match=r"target_layer_ids here are \[1, 3, 4\]"):
        settle_layers(meaning, None)
    with pytest.raises(UsageError, match="--final-norm"):
        settle_final_norm(meaning, None)
    assert (settle_layers(meaning, (2, 4, 5, 8)), settle_final_norm(meaning, "post")) == ((2, 4, 5, 8), "post")
    assert meaning.model == "example/target"
    assert meaning.producer["verl_speco"]["target_layer_ids"] == [1, 3, 4]
    # A last state that lies apart shows the width.
    assert open_store(data_dir / "verl_speco" / "listed", hidden_size=None).meaning().hidden_size == HIDDEN


def test_states_without_the_last_one_need_no_norm(rollout):
    for number in range(5):
        edit_sample(rollout, number, metadata={"hidden_states_layout": "dflash_aux"})
    meaning = open_store(rollout).meaning()
    assert settle_final_norm(meaning, None) == "unknown"


def test_target_in_the_place_of_the_last_state(listed):
    last = [sample["last_hidden_states"] for sample in own_samples(listed)]
    for number, state in enumerate(last):
        edit_sample(listed, number, last_hidden_states=None, target=state)
    source = open_store(listed)
    np.testing.assert_array_equal(source.load(source.items[3]).hidden_states[:, 3].view(np.uint16), bits(last[3]))


def test_the_last_state_again_is_compared(listed, rollout):
    own = own_samples(listed)
    edit_sample(listed, 0, target=own[0]["last_hidden_states"].clone())
    edit_sample(listed, 1, target=own[1]["last_hidden_states"] + 1)
    found = refusals(open_store(listed))
    assert list(found) == [1]
    assert "--map ignore=target" in found[1]
    assert not refusals(open_store(listed, key_map=parse_key_map("ignore=target")))
    states = own_samples(rollout)[2]["hidden_states"]
    edit_sample(rollout, 2, last_hidden_states=states[:, -HIDDEN:].clone())
    edit_sample(rollout, 3, last_hidden_states=torch.zeros(19, HIDDEN, dtype=torch.bfloat16))
    assert list(refusals(open_store(rollout))) == [3]


def test_weights_are_refused_or_kept(rollout):
    mask = torch.linspace(0, 1, 12)
    edit_sample(rollout, 1, loss_mask=mask)
    values = lines(rollout)
    values[0]["num_tokens"] = 4 + int(mask.sum())
    write_lines(rollout, values)
    found = refusals(open_store(rollout))
    assert list(found) == [1]
    assert "--loss-weights" in found[1]
    source = open_store(rollout, loss_weights=True)
    sample = source.load(source.items[1])
    np.testing.assert_array_equal(sample.extras["loss_weight"], mask.numpy())
    assert sample.loss_mask.tolist() == [0] + [1] * 11
    assert source.meaning().extras["loss_weight"] == {"kind": "token", "dtype": "float32", "shape": []}
    source = open_store(rollout, key_map=parse_key_map("ignore=loss_mask"))
    assert source.load(source.items[1]).loss_mask is None


def test_log_probabilities_of_another_width_are_refused_or_left_out(rollout):
    edit_sample(rollout, 3, target_logprobs=torch.zeros(18, 5, 2))
    found = refusals(open_store(rollout))
    assert list(found) == [3]
    assert "[18, 5, 2]" in found[3]
    source = open_store(rollout, key_map=parse_key_map("ignore=target_logprobs"))
    assert not refusals(source)
    assert (source.meaning().extras, source.load(source.items[3]).extras) == ({}, {})


def test_a_missing_shard_and_an_orphan(rollout):
    shard_of(rollout, 1).unlink()
    orphan = rollout / "rank00000_pid4711_000003.pt"
    shutil.copyfile(shard_of(rollout, 0), orphan)
    (rollout / "rank00000_pid4711_000004.ptabc.tmp").write_bytes(b"x")
    source = open_store(rollout)
    found = refusals(source)
    assert list(found) == [2, 3]
    assert "no such file" in found[2]
    assert [item.shared for item in source.items[2:4]] == [(), ()]
    reasons = {stray.path: stray.reason for stray in source.strays}
    assert sorted(reasons) == [orphan.name, "rank00000_pid4711_000004.ptabc.tmp"]
    assert "does not name" in reasons[orphan.name]


def test_swapped_and_overwritten_shards_are_refused(rollout):
    one, other = shard_of(rollout, 0), shard_of(rollout, 1)
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)
    found = refusals(open_store(rollout))
    assert list(found) == [0, 1, 2, 3]
    assert "loss masks of" in found[0]


def test_a_line_twice(rollout):
    values = lines(rollout)
    write_lines(rollout, [values[0] | {"num_samples": 1024}, *values])
    source = open_store(rollout)
    assert len(source.items) == 5
    assert any("overwritten" in note for note in source.notes)
    assert not refusals(source)


@pytest.mark.parametrize(
    ("member", "value", "words"),
    [
        ("path", "../shard.pt", "path"),
        ("path", "a/shard.pt", "path"),
        ("path", "shard.bin", "path"),
        ("path", None, "path"),
        ("num_samples", -1, "num_samples"),
        ("num_samples", 2**70, "num_samples"),
        ("num_samples", 2.0, "num_samples"),
        ("num_samples", None, "num_samples"),
    ],
)
def test_lies_of_the_manifest(rollout, member, value, words):
    values = lines(rollout)
    values[1][member] = value
    write_lines(rollout, values)
    with pytest.raises(SourceError, match=rf"manifest.jsonl:2\[{words}\]"):
        open_store(rollout)


@pytest.mark.parametrize("n", [3, 1])
def test_another_number_of_samples(rollout, n):
    values = lines(rollout)
    values[1]["num_samples"] = n
    write_lines(rollout, values)
    found = refusals(open_store(rollout))
    assert list(found) == list(range(2, 2 + n))
    assert f"{n} samples, as manifest.jsonl:2 says" in found[2]


def test_a_giant_number_of_samples_costs_nothing(rollout):
    values = lines(rollout)
    values[1]["num_samples"] = 2**40
    values.append({"path": "shard_9.pt", "num_samples": 2**40})
    write_lines(rollout, values)
    tracemalloc.start()
    try:
        source = open_store(rollout)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    found = refusals(source)
    assert list(found) == [2, 4]
    assert "1099511627776 samples" in found[2]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("manifest.jsonl", b"<html></html>", "web page"),
        ("manifest.jsonl", b"", "a line for each shard"),
        ("manifest.jsonl", b'{"path": "a.pt", "num_sam', "JSON object"),
        ("manifest.jsonl", b"[" * 100_000, "JSON object"),
        ("manifest.jsonl", b"\n" * (17 << 20), "at most 16777216 bytes"),
        ("metadata.json", b"<!doctype html>", "web page"),
        ("metadata.json", b'{"schema_version": 2}', "schema_version"),
        ("metadata.json", b'{"format": "zarr"}', "format"),
    ],
)
def test_documents_that_are_none(rollout, name, data, words):
    (rollout / name).write_bytes(data)
    with pytest.raises(SourceError, match=words):
        open_store(rollout)


def test_a_store_without_metadata_says_so(rollout):
    (rollout / "metadata.json").unlink()
    source = open_store(rollout)
    assert any("metadata.json" in note for note in source.notes)
    assert source.meaning().model == "example/target"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "html", "empty", "other"])
def test_damaged_shards(rollout, damage):
    path = shard_of(rollout, 1)
    data = bytearray(path.read_bytes())
    at = data.index(bits(own_samples(rollout)[3]["hidden_states"]).tobytes())
    data[at + 100] ^= 1
    if damage == "other":
        torch.save([1, 2], path)
    else:
        path.write_bytes({"truncated": data[:-40], "flipped": data, "html": b"<html>" * 200, "empty": b""}[damage])
    source = open_store(rollout)
    assert [n for n in refusals(source) if n in (2, 3)]
    assert not {0, 1, 4} & set(refusals(source))


class Exploding:
    """A pickle that would write a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return open, (str(self._path), "w")


def test_no_pickle_is_executed(rollout, tmp_path):
    edit_sample(rollout, 2, metadata={"evil": Exploding(tmp_path / "executed")})
    found = refusals(open_store(rollout))
    assert list(found) == [2, 3]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"input_ids": torch.arange(11)}, "11"),
        ({"loss_mask": torch.zeros(13)}, "13"),
        ({"hidden_states": torch.zeros(11, 64, dtype=torch.bfloat16)}, "11 tokens"),
        ({"hidden_states": torch.zeros(12, 80, dtype=torch.bfloat16)}, "5 layers"),
        ({"hidden_states": torch.zeros(12, 64)}, "float32"),
        ({"hidden_states": torch.zeros(1, dtype=torch.bfloat16).expand(1 << 20, 1 << 20)}, "expanded view"),
        ({"hidden_states": "none"}, "tensor"),
        ({"input_ids": torch.zeros(12)}, "integer"),
        ({"position_ids": torch.arange(11)}, "12 positions"),
        ({"schema_version": 2}, "schema_version"),
        ({"surprise": torch.zeros(12, 3)}, "surprise"),
        ({"metadata": {"target_layer_ids": [1, 3, 5]}}, r"\[1, 3, 4\]"),
        ({"metadata": {"hidden_states_layout": "new"}}, "dflash_aux"),
        ({"metadata": {"trace": torch.zeros(1 << 18)}}, "ignore=trace"),
        ({"metadata": {"trace": "x" * (1 << 17)}}, "ignore=trace"),
    ],
    ids=lambda value: value.replace("\\", "") if isinstance(value, str) else "",
)
def test_samples_that_do_not_fit(rollout, entries, words):
    edit_sample(rollout, 1, **entries)
    values = lines(rollout)
    del values[0]["num_tokens"]
    write_lines(rollout, values)
    source = open_store(rollout)
    with pytest.raises(SourceError, match=words) as info:
        source.load(source.items[1])
    assert all(problem.where.startswith(source.items[1].key) for problem in info.value.problems)
    source.load(source.items[0])


def test_a_sample_again_and_again(rollout):
    """A few bytes in the pickle name the one sample with a MiB of states a hundred times, then its states alone."""
    path, n = shard_of(rollout, 0), 100
    sample = own_samples(rollout)[0]
    sample["hidden_states"] = torch.zeros(7, 4 * HIDDEN << 10, dtype=torch.bfloat16)
    values = lines(rollout)
    values[0] = {"path": path.name, "num_samples": n}
    write_lines(rollout, values)
    torch.save({"samples": [sample] * n, "metadata": {}}, path)
    assert "again" in refusals(open_store(rollout))[n - 1]
    sample["hidden_states"] = [torch.zeros(7, HIDDEN, dtype=torch.bfloat16)] * 2000
    torch.save({"samples": [sample] * n, "metadata": {}}, path)
    assert "again" in refusals(open_store(rollout))[0]


def test_a_sample_that_is_none(rollout):
    edit(shard_of(rollout, 0), lambda shard: shard["samples"].__setitem__(1, [1, 2]))
    found = refusals(open_store(rollout))
    assert list(found) == [1]


def test_the_shard_is_loaded_once_for_its_samples(rollout, monkeypatch):
    from hsfmt.readers.sources import verl_speco_sample

    loads = []
    original = verl_speco_sample.read_torch_file
    monkeypatch.setattr(
        verl_speco_sample, "read_torch_file", lambda path, where: loads.append(where) or original(path, where)
    )
    source = open_store(rollout)
    for item in source.items:
        source.load(item)
    assert loads == [path.name for path in sorted(rollout.glob("*.pt"))]
    copy = pickle.loads(pickle.dumps(source))
    assert copy._shard is None  # a shard in memory does not travel to workers
    assert len(copy.load(copy.items[4]).input_ids) == 5


def test_a_broken_shard_is_read_once(rollout, monkeypatch):
    from hsfmt.readers.sources import verl_speco_sample

    path = shard_of(rollout, 1)
    path.write_bytes(path.read_bytes()[:-40])
    loads = []
    original = verl_speco_sample.read_torch_file
    monkeypatch.setattr(
        verl_speco_sample, "read_torch_file", lambda path, where: loads.append(where) or original(path, where)
    )
    assert list(refusals(open_store(rollout))) == [2, 3]
    assert loads.count(path.name) == 1


def test_a_shard_that_was_written_again_is_read_again(rollout):
    source = open_store(rollout)
    source.load(source.items[0])
    time.sleep(0.02)
    edit_sample(rollout, 0, input_ids=torch.arange(7))
    assert source.load(source.items[0]).input_ids.tolist() == list(range(7))


def test_a_shard_of_another_number_of_samples_than_listed(rollout):
    """The store's next run wrote over the shard, and its line too."""
    source = open_store(rollout)
    item = source.items[0]
    source.load(item)
    path = rollout / item.shared[0]
    value = torch.load(path, weights_only=True)
    value["samples"].append(value["samples"][0])
    torch.save(value, path)
    with pytest.raises(SourceError, match=r"as manifest\.jsonl:1 says"):
        source.load(item)


def test_claim(data_dir, rollout, tmp_path):
    assert find_source(data_dir / "verl_speco" / "listed").name == "verl-speco"
    (rollout / "metadata.json").unlink()
    assert find_claim(rollout).certain
    (tmp_path / "manifest.jsonl").write_text('{"text": 1}\n')
    assert find_claim(tmp_path) is None
    (tmp_path / "manifest.jsonl").write_text("<html>")
    assert find_claim(tmp_path) is None


def find_claim(folder: Path):
    return VerlSpecoSource.claim(Look(list_folder(folder)))


def convert(source: Path, dataset: Path, *args: str) -> dict:
    argv = ["convert", str(source), str(dataset), "--from", "verl-speco", "--hidden-size", str(HIDDEN)]
    argv += ["--layer-ids", "2,4,5,8", "--final-norm", "post", "--json", *args]
    result = CliRunner().invoke(main, argv)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def test_conversion_keeps_columns_and_resumes(rollout, tmp_path):
    report = convert(rollout, tmp_path / "dataset")
    assert report["counts"]["sample"] == 5
    assert report["files"]["total"] == 5
    reader = SampleReader(str(tmp_path / "dataset"))
    for i, theirs in enumerate(own_samples(rollout)):
        column = reader.read(i).extras["target_logprobs"]
        np.testing.assert_array_equal(column, theirs["target_logprobs"].numpy())
    again = convert(rollout, tmp_path / "dataset")
    assert again["counts"]["skipped"] == 5


def test_shards_that_were_added_are_taken(rollout, tmp_path):
    whole = convert(rollout, tmp_path / "whole")["snapshot"]["content_digest"]
    values, last = lines(rollout), shard_of(rollout, 2)
    data = last.read_bytes()
    last.unlink()
    write_lines(rollout, values[:2])
    assert convert(rollout, tmp_path / "dataset")["counts"]["sample"] == 4
    last.write_bytes(data)
    write_lines(rollout, values)
    report = convert(rollout, tmp_path / "dataset")
    assert (report["counts"]["sample"], report["counts"]["skipped"]) == (1, 4)
    assert not any("another place" in text for text in report["warnings"])
    assert report["snapshot"]["content_digest"] == whole
