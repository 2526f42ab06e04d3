"""Torch dicts of SpecForge, EAGLE, ModelOpt and AngelSlim: every real file bit for bit, and what goes with them."""

import gzip
import io
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import SourceOptions, find_source, parse_key_map, settle_final_norm, settle_layers
from hsfmt.readers.sources.base import CONTAINER
from hsfmt.readers.sources.torch_file import read_torch_file

pytestmark = pytest.mark.torch

# Folder, source, items, keys in file order, final norm, words that say where the layers are from.
FOLDERS = [
    ("specforge/v020_eagle3_bs1", "specforge-eagle3", 6, ("aux_hidden_state", "hidden_state"), "post", "2,n//2,n-3,n"),
    ("specforge/v020_eagle3_gz", "specforge-eagle3", 5, ("aux_hidden_state", "hidden_state"), "post", "2,n//2,n-3,n"),
    (
        "specforge/v020_eagle3_bs4_padded_droplast",
        "specforge-eagle3",
        2,
        ("aux_hidden_state", "hidden_state"),
        "post",
        "2,n//2,n-3,n",
    ),
    ("specforge/v020_dflash", "specforge-dflash", 6, ("hidden_states",), "unknown", "each + 1"),
    (
        "specforge/v020_dspark",
        "specforge-dspark",
        6,
        ("hidden_states", "target_last_hidden_states"),
        "post",
        "each + 1",
    ),
    ("eagle_ge", "eagle-ge", 5, ("hidden_state",), "post", "n of a model of n"),
    ("modelopt/hf_answer_only", "modelopt-hf", 5, ("aux_hidden_states", "hidden_states"), "post", "2,n//2,n-3,n"),
    ("modelopt/vllm_dump", "modelopt-vllm", 5, ("aux_hidden_states", "hidden_states"), "pre", "1,n//2-1,n-4,n"),
    ("modelopt/trtllm_dump", "modelopt-trtllm", 5, ("aux_hidden_states", "hidden_states"), "post", "2,n//2,n-3,n"),
    ("angelslim/eagle3", "angelslim-eagle3", 5, ("hidden_states", "target_hiddens"), "post", "2,n//2,n-3,n"),
]
by_folder = pytest.mark.parametrize(
    ("name", "kind", "n_items", "keys", "norm", "layers"), FOLDERS, ids=[folder[0] for folder in FOLDERS]
)
T, H = 6, 8


def plain_load(path: Path) -> dict:
    data = path.read_bytes()
    return torch.load(io.BytesIO(gzip.decompress(data) if path.suffix == ".gz" else data), weights_only=True)


def open_source(root: Path, kind: str, **options):
    """Found by looking, but for files that only the user can tell."""
    name = kind if kind in ("modelopt-hf", "modelopt-trtllm") else None
    return find_source(root, name, options=SourceOptions(hidden_size=64, **options))


@by_folder
def test_every_tensor_of_every_real_file(data_dir, name, kind, n_items, keys, norm, layers):
    source = open_source(data_dir / name, kind)
    assert (source.name, len(source.items), source.strays, source.notes) == (kind, n_items, [], [])
    assert [item.index for item in source.items] == list(range(n_items))
    for item in source.items:
        record, sample = plain_load(source.root / item.key), source.load(item)
        n_tokens = record["input_ids"].numel()
        states = torch.cat([record[key].reshape(n_tokens, -1) for key in keys], dim=-1)
        assert sample.hidden_states.dtype.name == str(states.dtype).removeprefix("torch.")
        assert sample.hidden_states.tobytes() == states.view(torch.int16).numpy().tobytes()
        assert sample.hidden_states.shape == (n_tokens, states.shape[1] // 64, 64)
        assert sample.hidden_states.flags.c_contiguous
        assert sample.input_ids.tolist() == record["input_ids"].flatten().tolist()
        assert sample.input_ids.dtype == np.int64
        if "loss_mask" in record:
            assert sample.loss_mask.dtype == np.uint8
            assert sample.loss_mask.tolist() == record["loss_mask"].flatten().tolist()
        else:
            assert sample.loss_mask is None
        known = {key: record[key] for key in ("conversation_id",) if key in record}
        assert (sample.sample_id, sample.metadata, sample.extras) == (item.sample_id, known, {})


@pytest.mark.parametrize(("name", "kind"), [folder[:2] for folder in FOLDERS])
def test_every_file_is_accounted_for(data_dir, accounted_for, name, kind):
    accounted_for(open_source(data_dir / name, kind))


@by_folder
def test_what_the_format_fixes(data_dir, name, kind, n_items, keys, norm, layers):
    meaning = open_source(data_dir / name, kind).meaning()
    assert (meaning.hidden_size, meaning.layers, meaning.final_norm) == (64, None, norm)
    assert layers in meaning.layers_from
    with pytest.raises(UsageError, match="the files do not record them") as info:
        settle_layers(meaning, None)
    assert info.value.problems[0].remedy == meaning.layers_from
    wrong = "pre" if norm != "pre" else "post"
    with pytest.raises(UsageError, match="leave --final-norm out"):
        settle_final_norm(meaning, wrong)
    assert settle_final_norm(meaning, None) == norm


@by_folder
def test_a_pickled_source_reads_the_same(data_dir, name, kind, n_items, keys, norm, layers):
    source = open_source(data_dir / name, kind)
    source.meaning()
    there = pickle.loads(pickle.dumps(source))
    for item in source.items[:2]:
        assert there.load(item).hidden_states.tobytes() == source.load(item).hidden_states.tobytes()


def test_the_files_of_eagle_hold_the_last_layer(data_dir, tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8, "hidden_size": 64}')
    source = open_source(data_dir / "eagle_ge", "eagle-ge", model_config=str(tmp_path))
    assert settle_layers(source.meaning(), None) == (8,)


def test_equal_names_on_ranks_are_other_samples(data_dir):
    source = open_source(data_dir / "angelslim/eagle3", "angelslim-eagle3")
    ids = [item.sample_id for item in source.items]
    assert ids == [f"rank_0/rows_0-5000/data_{i}" for i in range(3)] + [
        f"rank_1/rows_0-5000/data_{i}" for i in range(2)
    ]
    lengths = [len(source.load(item).input_ids) for item in source.items]
    assert lengths == [17, 61, 287, 30, 101]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("specforge/v020_eagle3_bs1", "vocab_mapping/vocab_mapping.pt"),
        ("specforge/v020_eagle3_gz", "vocab_mapping/vocab_mapping.pt"),
        ("angelslim/eagle3", "vocab_mapping.pt"),
    ],
)
def test_vocabulary_mappings_are_side_files(data_dir, name, path):
    source = find_source(data_dir / name)
    assert [(file.path, file.role) for file in source.support] == [(path, "vocab_mapping")]


def test_views_of_one_storage_and_others_are_not_mixed(copy_of, data_dir, refused):
    """The keys are the same; the last state is before the norm in one, after it in the other."""
    root = copy_of("modelopt/vllm_dump")
    target = root / "conv-0004.pt"
    target.write_bytes((data_dir / "modelopt/hf_answer_only/conv-0004.pt").read_bytes())
    text = str(refused(find_source(root), "conv-0004.pt"))
    assert "views of one storage, as in the source's first readable file" in text
    assert len(find_source(root, "modelopt-hf").items) == 5
    with pytest.raises(SourceError, match="--from modelopt-vllm"):
        find_source(root, "modelopt-hf").load(find_source(root, "modelopt-hf").items[0])


def test_files_that_were_saved_again_are_the_users_to_name(copy_of):
    """Copies of vLLM's states look as transformers' do."""
    root = copy_of("modelopt/vllm_dump")
    before = [find_source(root).load(item).hidden_states.tobytes() for item in find_source(root).items]
    for path in root.iterdir():
        record = torch.load(path, weights_only=True)
        clones = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in record.items()}
        torch.save(clones, path)
    with pytest.raises(UsageError, match=r"--from modelopt-hf .*\n.*--from modelopt-vllm "):
        find_source(root)
    for name, norm in (("modelopt-hf", "post"), ("modelopt-vllm", "pre")):
        source = find_source(root, name)
        assert source.meaning().final_norm == norm
        assert [source.load(item).hidden_states.tobytes() for item in source.items] == before


def states(n: int, *, n_rows: int = 1) -> torch.Tensor:
    count = n_rows * T * n * H
    return torch.arange(count, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(n_rows, T, n * H)


def specforge(**changes) -> dict:
    record = {"input_ids": torch.arange(T), "loss_mask": torch.ones(T, dtype=torch.int64)}
    return record | {"aux_hidden_state": states(3), "hidden_state": states(1)} | changes


def angelslim(n_rows: int = 1, **changes) -> dict:
    ids = torch.arange(n_rows * T).reshape(n_rows, T)
    record = {"input_ids": ids, "loss_mask": (ids % 2).clone()}
    return record | {"hidden_states": states(3, n_rows=n_rows), "target_hiddens": states(1, n_rows=n_rows)} | changes


@pytest.fixture
def saved(tmp_path):
    """Save dicts as data_{i}.ckpt and open their folder."""

    def save(*records: dict, name: str | None = None, **options):
        for i, record in enumerate(records):
            torch.save(record, tmp_path / f"data_{i}.ckpt")
        return find_source(tmp_path, name, options=SourceOptions(**options))

    return save


def test_files_of_all_ages_in_one_folder_differ_in_layers(saved, refused):
    source = saved(specforge(), specforge(aux_hidden_state=None), {k: v for k, v in specforge().items() if k[0] != "a"})
    for key in ("data_1.ckpt", "data_2.ckpt"):
        assert "got 1 layers" in str(refused(source, key))


def test_other_keys_are_refused_by_name(saved, refused):
    records = specforge(), angelslim(), specforge(scores=torch.ones(T)), specforge(step=3)
    with pytest.raises(UsageError, match="convert each kind from a folder of its own"):
        saved(*records)
    source = saved(name="specforge-eagle3")
    assert "states under aux_hidden_state, hidden_state" in str(refused(source, "data_1.ckpt"))
    assert "scores [6]" in str(refused(source, "data_2.ckpt"))
    assert source.load(source.items[3]).metadata == {"step": 3}
    source = saved(name="specforge-eagle3", key_map=parse_key_map("ignore=scores"))
    assert source.load(source.items[2]).metadata == {}
    with pytest.raises(UsageError, match="--from pt"):
        saved(name="specforge-eagle3", key_map=parse_key_map("last=hidden_state"))


def test_a_width_that_the_last_state_does_not_divide(saved, refused):
    source = saved(specforge(), specforge(aux_hidden_state=torch.zeros(1, T, 3 * H + 1, dtype=torch.bfloat16)))
    assert f"a multiple of hidden size {H}" in str(refused(source, "data_1.ckpt"))


@pytest.mark.parametrize("kind", ["cuda", "legacy", "huge storage", "not contiguous", "expanded"])
def test_tensors_as_they_come(tmp_path, kind):
    record = specforge()
    expected = torch.cat([record["aux_hidden_state"], record["hidden_state"]], dim=-1)[0].view(torch.int16).clone()
    if kind == "huge storage":
        big = torch.zeros(1000, T, 3 * H, dtype=torch.bfloat16)
        big[500] = record["aux_hidden_state"][0]
        record["aux_hidden_state"] = big[500:501]
    if kind == "not contiguous":
        record["hidden_state"] = record["hidden_state"].transpose(1, 2).contiguous().transpose(1, 2)
        assert not record["hidden_state"].is_contiguous()
    if kind == "expanded":
        record["hidden_state"] = record["hidden_state"][:, :1].expand(1, T, H)
        expected[:, 3 * H :] = expected[0, 3 * H :]
    path = tmp_path / "data_0.ckpt"
    torch.save(record, path, _use_new_zipfile_serialization=kind != "legacy")
    if kind == "cuda":
        out = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
            for member in old.infolist():
                tagged = old.read(member).replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
                new.writestr(member.filename, tagged)
        assert b"cuda:0" in out.getvalue()
        path.write_bytes(out.getvalue())
    source = find_source(tmp_path)
    assert source.load(source.items[0]).hidden_states.tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float64])
def test_masks_of_any_dtype(saved, dtype):
    mask = torch.tensor([0, 1, 1, 0, 1, 0])
    sample = saved(specforge(loss_mask=mask.to(dtype)))
    loaded = sample.load(sample.items[0]).loss_mask
    assert (loaded.dtype, loaded.tolist()) == (np.uint8, mask.tolist())


def test_weights_are_kept_only_where_asked_for(saved, refused):
    weights = torch.tensor([0, 0.5, 1, 0, 2, 0])
    source = saved(specforge(), specforge(loss_mask=weights))
    assert "--loss-weights" in str(refused(source, "data_1.ckpt"))
    source = saved(loss_weights=True)
    assert source.meaning().extras == {"loss_weight": {"kind": "token", "dtype": "float32", "shape": []}}
    sample = source.load(source.items[1])
    assert sample.loss_mask.tolist() == [0, 1, 1, 0, 1, 0]
    assert (sample.extras["loss_weight"].dtype, sample.extras["loss_weight"].tolist()) == (np.float32, weights.tolist())
    assert source.load(source.items[0]).extras["loss_weight"].tolist() == [1] * T


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e300])
def test_weights_that_are_none(saved, refused, weight):
    mask = torch.ones(T, dtype=torch.float64)
    mask[2] = weight
    source = saved(specforge(), specforge(loss_mask=mask), loss_weights=True)
    assert "finite weights from 0 on" in str(refused(source, "data_1.ckpt"))


def test_generic_dumps_keep_weights_too(saved):
    weights = torch.full((T,), 0.25)
    record = {"input_ids": torch.arange(T), "hidden_states": torch.zeros(T, 3, H), "loss_mask": weights}
    source = saved(record, name="pt", loss_weights=True)
    assert source.meaning().extras == {"loss_weight": {"kind": "token", "dtype": "float32", "shape": []}}
    assert source.load(source.items[0]).extras["loss_weight"].tolist() == weights.tolist()


def test_what_models_that_see_have_more(saved, refused):
    embeds, positions = states(1) * 2, torch.arange(3 * T).reshape(3, 1, T)
    seeing = angelslim(inputs_embeds=embeds, position_ids=positions)
    source = saved(seeing, angelslim(inputs_embeds=embeds, position_ids=None), angelslim(), angelslim(inputs_embeds=1))
    assert source.name == "angelslim-eagle3"
    assert source.meaning().extras == {
        "inputs_embeds": {"kind": "token", "dtype": "bfloat16", "shape": [H]},
        "position_ids": {"kind": "token", "dtype": "int64", "shape": [3]},
    }
    extras = source.load(source.items[0]).extras
    assert extras["inputs_embeds"].tobytes() == embeds.view(torch.int16).numpy().tobytes()
    assert extras["position_ids"].tolist() == positions[:, 0].T.tolist()
    assert list(source.load(source.items[1]).extras) == ["inputs_embeds"]
    assert source.load(source.items[2]).extras == {}
    refused(source, "data_3.ckpt")


def test_columns_that_the_first_file_does_not_have(saved, refused):
    source = saved(angelslim(), angelslim(position_ids=torch.arange(T)[None]), angelslim(position_ids=torch.ones(2, 3)))
    assert "no such entry as in the source's first readable file" in str(refused(source, "data_1.ckpt"))
    assert "integers [axis, 1, 6]" in str(refused(source, "data_2.ckpt"))
    source = saved(name="angelslim-eagle3", key_map=parse_key_map("ignore=position_ids"))
    assert source.load(source.items[1]).extras == {}


def test_attention_masks_of_dflash_are_a_column(tmp_path):
    """An imitation after AngelSlim's generate_dflash_data.py: shards, ranks, a batch axis everywhere."""
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    ids = torch.arange(T)[None]
    record = {"input_ids": ids, "hidden_states": states(5), "loss_mask": mask * 0, "attention_mask": mask}
    for i, rank in ((0, 0), (1, 1)):
        folder = tmp_path / f"shard_0000{i}"
        folder.mkdir()
        torch.save(record, folder / f"sample_0000000{i}_rank{rank}.ckpt")
    source = find_source(tmp_path, options=SourceOptions(hidden_size=H))
    assert source.name == "angelslim-dflash"
    assert [item.sample_id for item in source.items][1] == "shard_00001/sample_00000001_rank1"
    assert source.meaning().extras == {"attention_mask": {"kind": "token", "dtype": "uint8", "shape": []}}
    sample = source.load(source.items[1])
    assert (sample.hidden_states.shape, sample.extras["attention_mask"].tolist()) == ((T, 5, H), mask[0].tolist())
    with pytest.raises(UsageError, match="--hidden-size"):
        find_source(tmp_path).meaning()


def test_a_batch_is_split_into_samples(saved, accounted_for, tmp_path):
    positions = torch.arange(3 * 3 * T).reshape(3, 3, T)
    record = angelslim(3, position_ids=positions)
    source = saved(record, angelslim(position_ids=positions[:, :1]))
    accounted_for_batches = [(item.sample_id, item.key, item.paths, item.shared) for item in source.items]
    batch = [(f"data_0/{i}", f"data_0.ckpt:{i}", (), ("data_0.ckpt",)) for i in range(3)]
    assert accounted_for_batches == [*batch, ("data_1", "data_1.ckpt", ("data_1.ckpt",), ())]
    assert [(file.path, file.role) for file in source.support] == [("data_0.ckpt", CONTAINER)]
    assert sum(item.nbytes for item in source.items[:3]) == (tmp_path / "data_0.ckpt").stat().st_size
    assert [item.index for item in source.items] == [0, 1, 2, 3]
    for row in range(3):
        sample = source.load(source.items[row])
        expected = torch.cat([record["hidden_states"][row], record["target_hiddens"][row]], dim=-1)
        assert sample.hidden_states.tobytes() == expected.view(torch.int16).numpy().tobytes()
        assert sample.input_ids.tolist() == record["input_ids"][row].tolist()
        assert sample.loss_mask.tolist() == record["loss_mask"][row].tolist()
        assert sample.extras["position_ids"].tolist() == positions[:, row].T.tolist()
    assert source.load(source.items[3]).hidden_states.shape == (T, 4, H)


def test_a_batch_among_single_samples(saved, refused):
    source = saved(angelslim(), angelslim(2, hidden_states=states(3)), angelslim(4, hidden_states=states(3, n_rows=4)))
    assert [item.sample_id for item in source.items] == [
        "data_0",
        "data_1/0",
        "data_1/1",
        *[f"data_2/{i}" for i in range(4)],
    ]
    with pytest.raises(SourceError, match="a row for each of the 2 samples"):
        source.load(source.items[1])
    assert source.load(source.items[6]).input_ids.tolist() == list(range(3 * T, 4 * T))


def test_a_sample_of_a_batch_and_a_file_of_one_id(saved, tmp_path, refused):
    (tmp_path / "data_0").mkdir()
    torch.save(angelslim(), tmp_path / "data_0" / "1.ckpt")
    source = saved(angelslim(2))
    assert [item.sample_id for item in source.items] == ["data_0/1", "data_0/0", "data_0/1"]
    for key in ("data_0/1.ckpt", "data_0.ckpt:1"):
        assert "data_0/1, as another has" in str(refused(source, key))
    assert source.load(source.items[1]).input_ids.tolist() == list(range(T))


def test_a_file_that_became_a_batch(saved, refused, tmp_path):
    source = saved(angelslim(), angelslim())
    torch.save(angelslim(2), tmp_path / "data_1.ckpt")
    assert "got a batch of 2" in str(refused(source, "data_1.ckpt"))


@pytest.mark.parametrize(
    ("paths", "notes"),
    [
        (["data_0", "data_1", "data_3"], ["1 without a file: no data_2"]),
        (["rows_0-2/data_0", "rows_0-2/data_1", "rows_2-4/data_3"], ["1 without a file: no data_2"]),
        (["rows_2-4/data_2", "rows_2-4/data_3"], []),
        (["rows_2-4/data_3"], ["1 without a file: no data_2"]),
        (
            ["rank_0/rows_0-9/data_0", "rank_1/rows_0-9/data_1"],
            ["files in rank_1 have holes, 1 without a file: no data_0"],
        ),
        (["data_30"], ["30 without a file: no data_0, data_1, data_2, data_3, data_4, data_5"]),
        (["conv-7", "data_x"], []),
    ],
)
def test_holes_in_the_numbers_are_noted(tmp_path, paths, notes):
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(specforge(), tmp_path / f"{path}.ckpt")
    found = find_source(tmp_path).notes
    assert len(found) == len(notes)
    assert all(note in text for note, text in zip(notes, found, strict=True))


def test_a_folder_of_rows_by_itself_begins_with_its_own_number(tmp_path):
    root = tmp_path / "rows_2000-4000"
    root.mkdir()
    for number in (2000, 2001, 2003):
        torch.save(specforge(), root / f"data_{number}.ckpt")
    (note,) = find_source(root).notes
    assert note == "the numbers of the files have holes, 1 without a file: no data_2002"


def test_a_number_of_many_digits_costs_nothing(tmp_path):
    torch.save(specforge(), tmp_path / "data_999999999999.ckpt")
    (note,) = find_source(tmp_path).notes
    assert "999999999999 without a file" in note


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("said", "right", "wrong"), [(True, "vllm", "hf"), (False, "hf", "vllm")])
def test_what_a_modelopt_file_says_of_its_norm_decides(tmp_path, said, right, wrong, as_tensor):
    record = {
        "input_ids": torch.arange(T), "aux_hidden_states": torch.randn(T, 3 * H), "hidden_states": torch.randn(T, H),
        "loss_mask": torch.ones(T, dtype=torch.int64),
        "hidden_states_prenorm": torch.tensor(said) if as_tensor else said,
    }  # fmt: skip
    torch.save(record, tmp_path / "0.pt")
    source = find_source(tmp_path)
    assert source.name == f"modelopt-{right}"
    assert source.load(source.items[0]).hidden_states.shape == (T, 4, H)
    assert settle_final_norm(source.meaning(), None) == ("pre" if said else "post")
    with pytest.raises(SourceError, match=f"hidden_states_prenorm.*--from modelopt-{right}"):
        find_source(tmp_path, f"modelopt-{wrong}").meaning()


def test_a_modelopt_norm_that_is_no_boolean_is_refused(tmp_path):
    record = {
        "input_ids": torch.arange(T), "aux_hidden_states": torch.randn(T, 3 * H), "hidden_states": torch.randn(T, H),
        "hidden_states_prenorm": "yes",
    }  # fmt: skip
    torch.save(record, tmp_path / "0.pt")
    for name in ("modelopt-hf", "modelopt-vllm", "modelopt-trtllm"):
        with pytest.raises(SourceError, match="expected true or false, got 'yes'"):
            find_source(tmp_path, name).meaning()


@pytest.mark.parametrize("name", ["modelopt-hf", "modelopt-vllm", "modelopt-trtllm"])
def test_empty_auxiliary_states_of_modelopt_are_none(tmp_path, name):
    record = {"input_ids": torch.arange(T), "hidden_states": states(1)[0], "aux_hidden_states": torch.empty(0)}
    torch.save(record | {"conversation_id": 7}, tmp_path / "7.pt")
    with pytest.raises(UsageError, match=f"--from {name} "):
        find_source(tmp_path)
    source = find_source(tmp_path, name)
    sample = source.load(source.items[0])
    assert (sample.hidden_states.shape, sample.metadata) == ((T, 1, H), {"conversation_id": 7})
    assert "n of a model of n" in source.meaning().layers_from


def packed(path: Path, record: dict) -> None:
    out = io.BytesIO()
    torch.save(record, out)
    path.write_bytes(gzip.compress(out.getvalue()))


@pytest.mark.parametrize(("n_rows", "n_twin"), [(2, 4), (4, 2), (1, 4), (4, 1)])
def test_a_twin_with_another_number_of_samples(saved, tmp_path, n_rows, n_twin):
    """Both hold the rows that both have: those that one has alone would be lost with it."""
    packed(tmp_path / "data_0.ckpt.gz", angelslim(n_twin))
    source = saved(angelslim(n_rows), angelslim(9))
    source.meaning()
    assert len(source.items) == n_rows + 9
    for item in source.items[:n_rows]:
        with pytest.raises(SourceError) as info:
            source.load(item)
        (problem,) = info.value.problems
        sizes = [f"a batch of {n}" if n > 1 else "one sample" for n in (n_rows, n_twin)]
        assert problem.where == "data_0.ckpt.gz"
        assert problem.expected == f"{sizes[0]}, as in data_0.ckpt, its twin"
        assert problem.got == f"a batch of {n_twin}"
    assert source.load(source.items[-1]).input_ids.tolist() == list(range(8 * T, 9 * T))


def test_a_twin_with_the_same_samples(saved, tmp_path):
    packed(tmp_path / "data_0.ckpt.gz", angelslim(3))
    source = saved(angelslim(3))
    assert [item.shared for item in source.items] == [("data_0.ckpt", "data_0.ckpt.gz")] * 3
    assert [source.load(item).input_ids[0] for item in source.items] == [0, T, 2 * T]


@pytest.mark.parametrize("n_rows", [1, 2, 4])
def test_a_batch_of_another_size_than_listed(saved, tmp_path, n_rows):
    source = saved(angelslim(3))
    source.load(source.items[0])
    torch.save(angelslim(n_rows), tmp_path / "data_0.ckpt")
    for item in source.items:
        words = f"a batch of 3, as when the folder was listed, got a batch of {n_rows}"
        with pytest.raises(SourceError, match=words):
            source.load(item)


@pytest.mark.parametrize("kind", ["zip", "legacy", "gz"])
def test_a_batch_is_read_once(tmp_path, monkeypatch, kind):
    read = []

    def count(path, where):
        read.append(where)
        return read_torch_file(path, where)

    for i in range(2):
        path = tmp_path / f"data_{i}.ckpt"
        torch.save(angelslim(8), path, _use_new_zipfile_serialization=kind != "legacy")
        if kind == "gz":
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    source = find_source(tmp_path)
    source.meaning()
    source = pickle.loads(pickle.dumps(source))
    monkeypatch.setattr("hsfmt.readers.sources.torch_containers.read_torch_file", count)
    ids = [source.load(item).input_ids.tolist() for item in source.items]
    assert ids == [list(range(row * T, (row + 1) * T)) for row in range(8)] * 2
    assert read == [item.shared[0] for item in (source.items[0], source.items[8])]


@pytest.mark.parametrize(
    ("records", "name"),
    [
        ((specforge(), specforge(scores=torch.ones(1, T, H), more=torch.ones(T, H))), "specforge-eagle3"),
        ((angelslim(), angelslim(scores=torch.arange(T))), "angelslim-eagle3"),
        ((angelslim(), angelslim(position_ids=torch.arange(T)[None])), "angelslim-eagle3"),
        ((specforge(), specforge(loss_mask=torch.full((T,), 0.5))), "specforge-eagle3"),
    ],
)
def test_what_a_remedy_says_to_type_works(saved, tmp_path, records, name):
    """As it stands: `--map` without `--from` would mean `pt`."""
    source = saved(*records, name=name)
    with pytest.raises(SourceError) as info:
        source.load(source.items[1])
    (command,) = re.findall(r"--from (\S+) --map ([^\s,]+(?:,ignore=[^\s,]+)*)", info.value.problems[0].remedy)
    key_map = command[1].replace("KEY", "loss_mask")
    again = find_source(tmp_path, command[0], options=SourceOptions(key_map=parse_key_map(key_map)))
    assert again.name == name
    sample = again.load(again.items[1])
    assert sample.hidden_states.tobytes() == source.load(source.items[0]).hidden_states.tobytes()


def test_strided_states_that_are_after_the_norm(tmp_path):
    """What is no file of ModelOpt's vLLM script, though it looks so, the source `pt` reads as the user says."""
    full = states(4)[0]
    record = {"input_ids": torch.arange(T), "aux_hidden_states": full[:, : 3 * H], "hidden_states": full[:, 3 * H :]}
    torch.save(record, tmp_path / "x.pt")
    assert find_source(tmp_path).meaning().final_norm == "pre"
    source = find_source(tmp_path, "modelopt-hf")
    with pytest.raises(SourceError, match="views of one storage") as info:
        source.load(source.items[0])
    remedy = info.value.problems[0].remedy
    assert "--from pt --map aux=aux_hidden_states,last=hidden_states --final-norm post" in remedy
    key_map = parse_key_map("aux=aux_hidden_states,last=hidden_states")
    source = find_source(tmp_path, "pt", options=SourceOptions(key_map=key_map))
    assert settle_final_norm(source.meaning(), "post") == "post"
    assert source.load(source.items[0]).hidden_states.tobytes() == full.contiguous().view(torch.int16).numpy().tobytes()
