"""Broken and hostile folders, each with one fault (tests/data/adversarial/EXPECT.json)."""

import gzip
import json

import pytest
import torch

from hsfmt.errors import SourceError
from hsfmt.readers.sources import find_source

# Folders whose every file is refused show no source.
UNREADABLE = {"pickle_reduce_call"}
COVERED = {
    "truncated_ckpt",
    "bitflip_tensor_data",
    "both_ckpt_and_gz",
    "lexical_order",
    "zero_assistant_tokens",
    "length_mismatch",
    "nan_inf_rows",
    "mixed_dtypes",
    "layer_count_mismatch",
    "shared_storage_strided",
    "none_value",
    "list_of_dict",
    "pickle_reduce_call",
    "stray_files",
    "padded_tail",
}
FOUND = COVERED - UNREADABLE


@pytest.fixture
def adversarial(data_dir, accounted_for):
    def open_folder(name, kind="specforge-eagle3"):
        found = None if name in FOUND else kind
        source = find_source(data_dir / "adversarial" / name, found)
        assert source.name == kind
        accounted_for(source)
        return source

    return open_folder


def loadable(source):
    good = []
    for item in source.items:
        try:
            good.append((item.key, source.load(item)))
        except SourceError:
            continue
    return good


def test_every_case_is_tested_here(data_dir):
    assert set(json.loads((data_dir / "adversarial" / "EXPECT.json").read_text())) == COVERED


def test_a_truncated_file_is_named_and_the_others_load(adversarial, refused):
    source = adversarial("truncated_ckpt")
    assert "truncated or damaged" in str(refused(source, "data_2.ckpt"))
    good = loadable(source)
    assert [key for key, _ in good] == [f"data_{i}.ckpt" for i in (0, 1, 3, 4, 5)]
    lengths = [len(sample.input_ids) for _, sample in good]
    assert lengths == [17, 61, 30, 101, 344]


def test_a_flipped_bit_is_found_by_the_crc(adversarial, refused, data_dir):
    source = adversarial("bitflip_tensor_data")
    (bad,) = {item.key for item in source.items} - {key for key, _ in loadable(source)}
    error = refused(source, bad)
    assert "CRC-32" in str(error)
    assert "/data/" in error.problems[0].where
    # torch itself takes it.
    torch.load(data_dir / "adversarial" / "bitflip_tensor_data" / bad, weights_only=True)


def test_a_compressed_twin_is_the_same_sample(adversarial, item_of):
    source = adversarial("both_ckpt_and_gz")
    assert [item.sample_id for item in source.items] == [f"data_{i}" for i in range(6)]
    item = item_of(source, "data_0.ckpt")
    assert item.paths == ("data_0.ckpt", "data_0.ckpt.gz")
    assert len(source.load(item).input_ids) == 17
    (note,) = source.notes
    assert note.startswith("1 file is a duplicate")
    assert note.endswith("data_0.ckpt.gz")


def test_a_twin_of_other_content_is_refused(copy_of, refused):
    root = copy_of("adversarial/both_ckpt_and_gz")
    with gzip.open(root / "data_0.ckpt.gz", "wb") as file:
        file.write((root / "data_3.ckpt").read_bytes())
    error = refused(find_source(root), "data_0.ckpt")
    assert "data_0.ckpt.gz" in str(error)
    assert "got another one" in str(error)


def test_order_is_natural(adversarial):
    source = adversarial("lexical_order")
    assert [item.sample_id for item in source.items] == ["data_0", "data_1", "data_2", "data_10", "data_11"]
    assert [item.index for item in source.items] == [0, 1, 2, 3, 4]


def test_a_mask_of_zeros_is_taken(adversarial):
    source = adversarial("zero_assistant_tokens")
    sums = [int(source.load(item).loss_mask.sum()) for item in source.items]
    assert 0 in sums


def test_missing_states_are_refused(adversarial, refused):
    source = adversarial("length_mismatch")
    text = str(refused(source, "data_0.ckpt"))
    assert "a state for each of the 17 token ids" in text
    assert "16 tokens" in text
    assert [key for key, _ in loadable(source)] == ["data_1.ckpt"]
    # What the folder means is told from the first file that can be read.
    assert (source.meaning().n_layers, source.meaning().hidden_size) == (4, 64)


def test_nan_and_inf_are_the_writers_matter(adversarial):
    source = adversarial("nan_inf_rows")
    assert len(loadable(source)) == 2


def test_other_dtypes_are_named(adversarial, refused):
    source = adversarial("mixed_dtypes")
    for key, dtype in (("data_1.ckpt", "float16"), ("data_2.ckpt", "float32")):
        error = refused(source, key)
        assert (error.problems[0].expected.split()[0], error.problems[0].got.split()[0]) == ("bfloat16", dtype)


def test_another_layer_count_is_named(adversarial, refused):
    text = str(refused(adversarial("layer_count_mismatch"), "data_1.ckpt"))
    assert "expected 4 layers" in text
    assert "got 6 layers" in text


def test_strided_views_of_one_storage(adversarial, data_dir):
    source = adversarial("shared_storage_strided", "modelopt-vllm")
    assert source.meaning().final_norm == "pre"
    sample = source.load(source.items[0])
    record = torch.load(data_dir / "adversarial/shared_storage_strided/conv-0003.pt", weights_only=True)
    assert not record["hidden_states"].is_contiguous()
    expected = torch.cat([record["aux_hidden_states"], record["hidden_states"]], dim=1).reshape(287, 4, 64)
    assert sample.hidden_states.tobytes() == expected.view(torch.int16).numpy().tobytes()
    assert sample.metadata == {"conversation_id": "conv-0003"}


def test_none_is_absent(adversarial):
    source = adversarial("none_value")
    assert source.load(source.items[0]).hidden_states.shape == (17, 1, 64)
    assert source.meaning().n_layers == 1


def test_a_list_of_one_dict(adversarial):
    source = adversarial("list_of_dict", "modelopt-trtllm")
    sample = source.load(source.items[0])
    assert sample.hidden_states.shape == (17, 4, 64)
    assert sample.loss_mask is None
    assert list(sample.metadata) == ["id"]
    assert source.meaning().final_norm == "post"


def test_a_pickled_call_is_named_and_not_executed(adversarial, refused):
    source = adversarial("pickle_reduce_call")
    error = refused(source, "data_0.ckpt")
    assert "posixpath.join" in str(error)
    assert "not executed" in str(error)
    with pytest.raises(SourceError, match=r"posixpath\.join"):
        source.meaning()


def test_strays_are_listed(adversarial):
    source = adversarial("stray_files")
    assert [item.key for item in source.items] == [f"data_{i}.ckpt" for i in range(6)]
    assert {stray.path for stray in source.strays} == {"data_9.ckpt.tmp", "optimizer.pt"}
    assert [(file.path, file.role) for file in source.support] == [("vocab_mapping.pt", "vocab_mapping")]
    assert len(loadable(source)) == 6


def test_padding_is_not_trimmed(adversarial):
    source = adversarial("padded_tail")
    assert len(source.load(source.items[0]).input_ids) == 287


def test_hostile_files_alone_are_an_error_not_an_absence(data_dir):
    with pytest.raises(SourceError, match="not executed"):
        find_source(data_dir / "adversarial" / "pickle_reduce_call")
