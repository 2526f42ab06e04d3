"""Targets with a torch.save file a sample: what is in the files, bit by bit, and what is refused."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from exporting import NATIVE, export, handed_over, made_job, made_samples, tree

from hsfmt.errors import SampleError
from hsfmt.header import make_header
from hsfmt.writers.targets.registry import target_class

H = 8
FOUR = make_header(layers=[2, 4, 5, 8], hidden_size=H, final_norm="post", model="org/tiny")
CAPTURED = make_header(layers=[2, 4, 5], hidden_size=H, final_norm="unknown")
LAST = make_header(layers=[8], hidden_size=H, final_norm="post")
# For each target: a header it takes, the last sample's file, layers by key, and what has a batch axis.
FORMATS = {
    "specforge-eagle3": (FOUR, "rows_2-4/data_2.ckpt", {"aux_hidden_state": [0, 1, 2], "hidden_state": [3]}, "states"),
    "specforge-dspark": (
        FOUR, "rows_2-4/data_2.ckpt", {"hidden_states": [0, 1, 2], "target_last_hidden_states": [3]}, "states",
    ),
    "specforge-dflash": (CAPTURED, "rows_2-4/data_2.ckpt", {"hidden_states": [0, 1, 2]}, "states"),
    "angelslim-eagle3": (
        FOUR, "rank_0/rows_2-4/data_2.ckpt", {"hidden_states": [0, 1, 2], "target_hiddens": [3]}, "all",
    ),
    "modelopt": (FOUR, "%2E.%2F2%2F%C3%A9%0A.pt", {"aux_hidden_states": [0, 1, 2], "hidden_states": [3]}, "none"),
    "eagle-ge": (LAST, "0/data_2.ckpt", {"hidden_state": [0]}, "none"),
}  # fmt: skip
OPTIONS = {"specforge-dflash": {"rows": "2", "sparse_masks": "keep"}}
OPTIONS |= {"specforge-dspark": OPTIONS["specforge-dflash"], "modelopt": {}, "eagle-ge": {}}
LENGTHS = (3, 1, 17)


def options_of(name):
    return OPTIONS.get(name, {"rows": "2"})


def load(path):
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return torch.load(file, weights_only=True)


def bits(value):
    """A tensor's, or an array's, bytes."""
    return (
        value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if torch.is_tensor(value) else value.tobytes()
    )


def assert_tensor(tensor, array, shape):
    """A contiguous tensor of these values, whose storage holds nothing else."""
    assert str(tensor.dtype) == f"torch.{array.dtype.name}"
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    assert tensor.storage_offset() == 0
    assert tensor.untyped_storage().nbytes() == array.nbytes
    assert bits(tensor) == bits(array)


def problem_texts(name, header, **settings):
    samples = made_samples((2,), header)
    return [str(problem) for problem in target_class(name)(made_job(None, samples, header, **settings)).problems()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_sample_is_in_its_file_bit_by_bit(tmp_path, name, dtype):
    header, last_file, keys, batched = FORMATS[name]
    header = replace(header, dtype=dtype)
    samples = made_samples(LENGTHS, header)
    target = export(name, made_job(tmp_path, samples, header, options=options_of(name)), samples)
    files = [unit.paths[0] for unit in target.units()]
    assert files[-1] == last_file
    for sample, file in zip(samples, files, strict=True):
        found, n = load(tmp_path / file), len(sample.input_ids)
        assert set(found) - {"conversation_id"} == {"input_ids", "loss_mask", *keys}
        rows = (1, n) if batched == "all" else (n,)
        assert_tensor(found["input_ids"], sample.input_ids, rows)
        assert_tensor(found["loss_mask"], sample.loss_mask.astype(np.int64), rows)
        for key, layers in keys.items():
            shape = (n, len(layers) * H) if batched == "none" else (1, n, len(layers) * H)
            assert_tensor(found[key], np.ascontiguousarray(sample.hidden_states[:, layers]), shape)
        storages = [value.untyped_storage().data_ptr() for value in found.values() if torch.is_tensor(value)]
        assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_speculators_has_a_list_of_states_and_two_documents(tmp_path, dtype):
    header = replace(FOUR, final_norm="pre", dtype=dtype)
    samples = made_samples(LENGTHS, header)
    export("speculators-pt", made_job(tmp_path, samples, header), samples)
    for number, sample in enumerate(samples):
        found, n = load(tmp_path / f"data_{number}.pt"), len(sample.input_ids)
        assert list(found) == ["input_ids", "hidden_states", "loss_mask"]
        assert_tensor(found["input_ids"], sample.input_ids, (n,))
        assert_tensor(found["loss_mask"], sample.loss_mask.astype(np.int64), (n,))
        for i, states in enumerate(found["hidden_states"]):
            assert_tensor(states, np.ascontiguousarray(sample.hidden_states[:, i]), (n, H))
        assert i == 3
    assert json.loads((tmp_path / "sample_lengths.json").read_bytes()) == {"0": 3, "1": 1, "2": 17}
    config = json.loads((tmp_path / "data_config.json").read_bytes())
    assert config["hidden_states"]["layer_ids"] == [1, 3, 4, 7]  # HF ids, each - 1
    assert config["model"] == {"target_model_path": "org/tiny", "hidden_size": H}
    assert config["format"]["schema"]["hidden_states"]["num_tensors"] == 4
    assert config["format"]["schema"]["hidden_states"]["dtype"] == f"list[torch.{dtype}]"
    # Its reader takes every file of such a name for a sample.
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("pt")) == [
        "data_0.pt", "data_1.pt", "data_2.pt",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [*FORMATS, "speculators-pt"])
def test_the_same_samples_make_the_same_bytes(tmp_path, name):
    header = FORMATS[name][0] if name in FORMATS else replace(FOUR, final_norm="pre")
    samples = made_samples(LENGTHS, header)
    trees = []
    for folder in (tmp_path / "a", tmp_path / "longer-name"):
        export(name, made_job(folder, samples, header, options=options_of(name) if name in FORMATS else {}), samples)
        trees.append(tree(folder))
    assert trees[0] == trees[1]
    assert b"longer-name" not in b"".join(trees[1].values())


def test_gzip_has_no_name_and_no_time_in_it(tmp_path):
    samples = made_samples(LENGTHS, FOUR)
    job = made_job(tmp_path, samples, FOUR, options={"compression": "gzip", "rows": "2"})
    plain = export("specforge-eagle3", replace(job, folder=tmp_path / "plain", options={}), samples)
    target = export("specforge-eagle3", replace(job, folder=tmp_path / "gz"), samples)
    assert target.units()[2].paths == ("rows_2-4/data_2.ckpt.gz",)
    for zipped, unzipped in zip(target.units(), plain.units(), strict=True):
        data = (tmp_path / "gz" / zipped.paths[0]).read_bytes()
        assert data[3:8] == bytes(5)  # no flags, so no name; time 0
        assert gzip.decompress(data) == (tmp_path / "plain" / unzipped.paths[0]).read_bytes()


def test_read_only_and_strided_arrays_are_taken_as_they_are(tmp_path):
    whole = made_samples((6,), replace(FOUR, hidden_size=2 * H))[0]
    states = whole.hidden_states[::2, :, 1::2]
    states.flags.writeable = False
    ids = whole.input_ids[::2]
    ids.flags.writeable = False
    sample = replace(whole, hidden_states=states, input_ids=ids, loss_mask=whole.loss_mask[::2])
    export("specforge-eagle3", made_job(tmp_path, [sample], FOUR), [sample])
    found = load(tmp_path / "rows_0-2000/data_0.ckpt")
    assert_tensor(found["input_ids"], np.ascontiguousarray(ids), (3,))
    assert_tensor(found["hidden_state"], np.ascontiguousarray(states[:, -1]), (1, 3, H))
    assert_tensor(found["aux_hidden_state"], np.ascontiguousarray(states[:, :-1]), (1, 3, 3 * H))


@pytest.mark.parametrize("name", ["specforge-eagle3", "specforge-dspark", "angelslim-eagle3", "modelopt"])
def test_a_single_layer_has_nothing_to_fill_the_format_with(name):
    (*_, text) = problem_texts(name, LAST)
    assert "at least one layer beside the final state, got layer 8 alone" in text


@pytest.mark.parametrize("name", [*FORMATS, "speculators-pt"])
def test_the_embeddings_are_no_output_of_a_layer(name):
    last = () if name in ("specforge-dflash", "eagle-ge") else (8,)
    (text,) = problem_texts(name, replace(CAPTURED if not last else FOUR, layers=(0, 2, 4, 5, *last)))
    if name == "eagle-ge":
        assert text.endswith("got layers 0,2,4,5 — leave the others out: --layers 5")
    else:
        shown = ",".join(map(str, (2, 4, 5, *last)))
        assert f"got layer 0, the embeddings, among layers 0,{shown} — leave it out: --layers {shown}" in text


@pytest.mark.parametrize("name", ["specforge-eagle3", "angelslim-eagle3", "speculators-pt"])
def test_a_draft_model_with_a_fixed_width_takes_three_layers(name):
    five = replace(FOUR, layers=(2, 4, 5, 6, 7, 8))
    (text,) = problem_texts(name, five)
    assert "3 layers and the final state" in text
    assert "got 5: layers 2,4,5,6,7,8" in text
    assert "--option aux=any" in text
    assert problem_texts(name, five, options={"aux": "any"}) == []
    (text,) = problem_texts(name, FOUR, options={"aux": "some"})
    assert text == f"--to {name} --option aux: expected one of any, got 'some'"


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dflash_has_no_place_for_the_final_state(norm):
    (text,) = problem_texts("specforge-dflash", replace(FOUR, final_norm=norm))
    assert f"got layer 8, the final state ({norm}-norm) — leave it out: --layers 2,4,5" in text


@pytest.mark.parametrize("value", ["0", "-1", "many", "1e3", "٣", "9" * 30, ""])
def test_rows_have_to_be_a_number(value):
    (text,) = problem_texts("angelslim-eagle3", FOUR, options={"rows": value})
    assert text == f"--to angelslim-eagle3 --option rows: expected a number from 1 to 1000000000, got {value!r}"


def test_a_compression_that_is_none():
    (text,) = problem_texts("specforge-eagle3", FOUR, options={"compression": "zstd"})
    assert text.endswith("expected one of none, gzip, got 'zstd'")


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 0, 0], [1, 0, 1]])
@pytest.mark.parametrize("name", ["specforge-dflash", "specforge-dspark"])
def test_a_sample_at_which_the_trainer_stops_is_named(tmp_path, name, mask):
    header = FORMATS[name][0]
    sample = replace(made_samples((3,), header)[0], sample_id="conversation 7", loss_mask=np.array(mask, np.uint8))
    job = made_job(tmp_path, [sample], header)
    target = target_class(name)(job)
    with pytest.raises(SampleError, match="conversation 7: expected two neighbouring supervised tokens"):
        target.write(target.units()[0], handed_over([sample], (0,)))
    assert tree(tmp_path) == {}
    export(name, replace(job, options={"sparse_masks": "keep"}), [sample])
    assert load(tmp_path / "rows_0-2000/data_0.ckpt")["loss_mask"].tolist() == mask


def test_two_neighbours_are_enough(tmp_path):
    sample = replace(made_samples((3,), CAPTURED)[0], loss_mask=np.array([0, 1, 1], np.uint8))
    export("specforge-dflash", made_job(tmp_path, [sample], CAPTURED), [sample])
    assert load(tmp_path / "rows_0-2000/data_0.ckpt")["loss_mask"].tolist() == [0, 1, 1]


def test_all_samples_with_too_few_supervised_tokens_are_named_beforehand():
    samples = made_samples((3, 3, 3), CAPTURED)
    job = made_job(None, samples, CAPTURED, n_supervised=np.array([1, 2, 0]))
    (problem,) = target_class("specforge-dflash")(job).problems()
    assert problem.samples == (samples[0].sample_id, samples[2].sample_id)
    assert target_class("specforge-dflash")(replace(job, options={"sparse_masks": "keep"})).problems() == []


def test_modelopt_says_that_a_state_is_before_the_norm(tmp_path):
    samples = made_samples((3,), FOUR)
    for norm in ("pre", "post"):
        header = replace(FOUR, final_norm=norm)
        export("modelopt", made_job(tmp_path / norm, samples, header), samples)
    (pre,), (post,) = ([load(path) for path in (tmp_path / norm).iterdir()] for norm in ("pre", "post"))
    assert pre["hidden_states_prenorm"] is True
    assert set(pre) - set(post) == {"hidden_states_prenorm"}
    (text,) = problem_texts("modelopt", replace(FOUR, final_norm="unknown"))
    assert "got final_norm unknown" in text


def test_modelopt_gets_no_mask_that_nobody_gave(tmp_path):
    given, none = made_samples((3, 3), FOUR)
    samples = [replace(given, sample_id="given"), replace(none, sample_id="none", mask_given=False)]
    export("modelopt", made_job(tmp_path, samples, FOUR), samples)
    keys = {"input_ids", "hidden_states", "aux_hidden_states", "conversation_id"}
    assert set(load(tmp_path / "none.pt")) == keys
    assert set(load(tmp_path / "given.pt")) == keys | {"loss_mask"}


@pytest.mark.parametrize(
    ("metadata", "conversation"), [({}, "a/b"), ({"conversation_id": 7}, 7), ({"conversation_id": None}, "a/b")]
)
def test_modelopt_names_the_conversation(tmp_path, metadata, conversation):
    sample = replace(made_samples((3,), FOUR)[0], sample_id="a/b", metadata=metadata)
    export("modelopt", made_job(tmp_path, [sample], FOUR), [sample])
    assert load(tmp_path / "a%2Fb.pt")["conversation_id"] == conversation


@pytest.mark.parametrize("name", ["specforge-eagle3", "angelslim-eagle3", "speculators-pt"])
def test_a_vocabulary_goes_with_the_samples(tmp_path, name):
    header = replace(FOUR, final_norm="pre") if name == "speculators-pt" else FOUR
    samples = made_samples((3,), header)
    d2t, t2d = np.array([1, 1, 3], np.int32), np.array([0, 1, 1, 0, 0, 1], np.uint8)
    tables = {"d2t": d2t, "t2d": t2d, "token_freq": np.arange(6)}
    target = export(name, made_job(tmp_path, samples, header, attachments=tables), samples)
    if name == "speculators-pt":
        found = {name: torch.from_numpy(np.load(tmp_path / f"{name}.npy")) for name in ("d2t", "t2d")}
    else:
        found = load(next(tmp_path.rglob("vocab_mapping.pt")))
    assert_tensor(found["d2t"], d2t.astype(np.int64), (3,))
    assert_tensor(found["t2d"], t2d.astype(np.bool_), (6,))
    assert target.dropped() == ["attachment token_freq"]
    wrong = {"d2t": d2t, "t2d": t2d[::-1]}
    (text,) = problem_texts(name, header, attachments=wrong)
    assert text.startswith("attachments d2t, t2d: expected d2t with the distance")
    (text,) = problem_texts(name, header, attachments={"d2t": d2t})
    assert "d2t and t2d together" in text


def test_what_has_no_place_is_listed():
    samples = made_samples((2,), FOUR)
    job = made_job(None, samples, FOUR, extras={"scores": "float32", "position_ids": "int64"})
    job = replace(job, has_metadata=True, attachments={"d2t": np.zeros(1, np.int64)})
    for name in ("modelopt", "eagle-ge", "specforge-dflash"):
        dropped = ["metadata", "extra column scores", "extra column position_ids", "attachment d2t"]
        ids = ["sample ids"] if name == "eagle-ge" else []
        assert target_class(name)(job).dropped() == ids + dropped
    assert target_class("angelslim-eagle3")(job).dropped() == ["metadata", "extra column scores"]


def test_images_keep_their_columns_in_angelslim(tmp_path):
    samples = made_samples((3, 2), FOUR)
    embeds = made_samples((3,), LAST, seed=1)[0].hidden_states[:, 0]
    positions = np.arange(9).reshape(3, 3)
    samples[0] = replace(samples[0], extras={"inputs_embeds": embeds, "position_ids": positions})
    samples[1] = replace(samples[1], extras={"inputs_embeds": embeds[:2], "position_ids": None})
    extras = {"inputs_embeds": "bfloat16", "position_ids": "int64"}
    export("angelslim-eagle3", made_job(tmp_path, samples, FOUR, extras=extras), samples)
    first, second = (load(tmp_path / f"rank_0/rows_0-5000/data_{number}.ckpt") for number in range(2))
    assert_tensor(first["inputs_embeds"], embeds, (1, 3, H))
    assert_tensor(first["position_ids"], np.ascontiguousarray(positions.T), (3, 1, 3))
    assert second["position_ids"] is None
    wrong = replace(samples[0], extras={"inputs_embeds": embeds, "position_ids": positions[:2]})
    target = target_class("angelslim-eagle3")(made_job(tmp_path, [wrong], FOUR, extras=extras))
    with pytest.raises(SampleError, match=r"position_ids\]: expected shape \[3, 3\], got \[2, 3\]"):
        target.write(target.units()[0], handed_over([wrong], (0,)))


def test_ids_are_listed_beside_numbered_files(tmp_path):
    samples = made_samples(LENGTHS, FOUR)
    export("angelslim-eagle3", made_job(tmp_path, samples, FOUR), samples)
    lines = (tmp_path / "hsfmt_samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [sample.sample_id for sample in samples]


def test_every_dtype_that_is_tested_is_one_that_targets_take():
    for name in [*FORMATS, "speculators-pt"]:
        assert target_class(name).dtypes == ("bfloat16", "float16", "float32")
    assert set(NATIVE) & {"bfloat16"}
