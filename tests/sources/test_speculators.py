"""Source `speculators`: the join of rows and files by number, checked by token ids."""

import json
import shutil
import struct

import pyarrow as pa
import pyarrow.ipc
import pytest

from hsfmt.errors import NotFoundError, SourceError, UsageError
from hsfmt.readers.sources import AbsentSampleError, SourceOptions, find_source, hole_reason, settle_layers

ARROW = "data-00000-of-00001.arrow"


def rewrite(root, change, name=ARROW):
    """Write the Arrow file again with a changed table."""
    # From bytes: opened by its path the file would be mapped, and is now written again.
    table = change(pyarrow.ipc.open_stream((root / ARROW).read_bytes()).read_all())
    with pyarrow.ipc.new_stream(root / name, table.schema) as stream:
        stream.write_table(table)


def with_column(name, values):
    def change(table):
        kept = table.drop_columns([name]) if name in table.column_names else table
        return kept.append_column(name, values)

    return change


def test_a_row_without_a_file_is_a_normal_hole(copy_of, accounted_for):
    root = copy_of("speculators/0.6.0")
    (root / "hidden_states" / "hs_3.safetensors").unlink()
    source = find_source(root)
    accounted_for(source)
    assert len(source.items) == 12
    assert source.items[3].paths == ()
    with pytest.raises(AbsentSampleError) as info:
        source.load(source.items[3])
    assert hole_reason(info.value) == (
        "expected the states of row 3, got no file: the row was skipped or failed when states were generated"
    )
    assert source.load(source.items[4]).sample_id == "hs_4"


def test_the_first_rows_missing(copy_of):
    root = copy_of("speculators/0.6.0")
    for row in range(5):
        (root / "hidden_states" / f"hs_{row}.safetensors").unlink()
    assert find_source(root).meaning().hidden_size == 128


def test_a_file_beyond_the_rows_is_an_error(copy_of, refused, accounted_for):
    root = copy_of("speculators/0.6.0")
    shutil.copy(root / "hidden_states" / "hs_3.safetensors", root / "hidden_states" / "hs_12.safetensors")
    source = find_source(root)
    accounted_for(source)
    error = refused(source, "hidden_states/hs_12.safetensors")
    assert not isinstance(error, AbsentSampleError)
    assert "which has 12, got row 12" in str(error)
    assert (source.items[12].sample_id, source.items[12].index) == ("hs_12", 12)


def test_files_of_other_rows_are_found_by_their_ids(copy_of, refused):
    """Two files swapped: the right lengths would not help for rows 3 and 5, which both have 85 tokens."""
    root = copy_of("speculators/0.6.0")
    states = root / "hidden_states"
    (states / "hs_3.safetensors").rename(states / "swap")
    (states / "hs_5.safetensors").rename(states / "hs_3.safetensors")
    (states / "swap").rename(states / "hs_5.safetensors")
    source = find_source(root)
    for row in (3, 5):
        text = str(refused(source, f"hidden_states/hs_{row}.safetensors"))
        assert f"the 85 token ids of Arrow row {row}" in text
        assert "at token" in text


def test_strays_and_locks(copy_of, accounted_for):
    root = copy_of("speculators/0.6.0")
    states = root / "hidden_states"
    for name in ("hs_3.safetensors.lock", "hs_99.safetensors.lock", "hs_03.safetensors", "hs_3.safetensors.tmp"):
        (states / name).touch()
    (root / "old.arrow").touch()
    source = find_source(root)
    accounted_for(source)
    assert source.items[3].paths == ("hidden_states/hs_3.safetensors", "hidden_states/hs_3.safetensors.lock")
    assert {stray.path.rpartition("/")[2] for stray in source.strays} == {
        "hs_99.safetensors.lock",
        "hs_03.safetensors",
        "hs_3.safetensors.tmp",
        "old.arrow",
    }
    source.load(source.items[3])


def test_the_default_layers_are_told_not_taken(data_dir):
    source = find_source(
        data_dir / "speculators" / "0.9.0", options=SourceOptions(model_config=str(data_dir / "tiny-llama"))
    )
    meaning = source.meaning()
    assert meaning.layers is None
    with pytest.raises(UsageError, match="here 2,4,5,8"):
        settle_layers(meaning, None)


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("loss_mask", pa.array([[2] * 29]), "a mask of 0 and 1"),
        ("loss_mask", pa.array([[0.5] * 29]), "a mask of 0 and 1"),
        ("loss_mask", pa.array([[1] * 28]), "a mask of 29 tokens, got 28"),
        ("loss_mask", pa.array([[1] * 28 + [None]]), "got null"),
        ("loss_mask", pa.array([None], pa.list_(pa.int64())), "got null"),
        ("seq_len", pa.array([28]), "expected 29, got 28"),
        ("input_ids", pa.array([[0.5] * 29]), "integer token ids"),
        ("input_ids", pa.array([[]], pa.list_(pa.int32())), "at least one token"),
        ("input_ids", pa.array([[1] * 29]), "token ids of Arrow row 0"),
        ("input_ids", pa.array([[1] * 30]), "expected 30, got 29"),
        ("score", pa.array([float("nan")]), "finite"),
    ],
)
def test_rows_that_do_not_fit_their_file(copy_of, refused, column, values, words):
    root = copy_of("speculators/0.6.0")
    rewrite(root, lambda table: with_column(column, values)(table.slice(0, 1)))
    source = find_source(root)
    with pytest.raises(SourceError, match=words):
        source.load(source.items[0])
    refused(source, "hidden_states/hs_0.safetensors")


def test_a_dataset_without_masks(copy_of):
    root = copy_of("speculators/0.6.0")
    rewrite(root, lambda table: table.drop_columns(["loss_mask"]))
    source = find_source(root)
    assert source.load(source.items[0]).loss_mask is None
    assert "speculators_version" not in source.meaning().producer


def test_other_columns(copy_of):
    root = copy_of("speculators/0.6.0")
    messages = pa.array([[{"role": "user", "content": "a"}]] * 12)

    def change(table):
        return with_column("image", pa.array([b"x"] * 12))(with_column("messages", messages)(table))

    rewrite(root, change)
    source = find_source(root)
    assert source.load(source.items[2]).metadata == {"row": 2, "messages": [{"role": "user", "content": "a"}]}
    assert source.notes == [
        "Arrow columns that are kept as metadata of the samples: messages",
        "Arrow columns that hold no JSON and are left out: image",
    ]


def test_several_arrow_files_large_lists_and_batches(copy_of):
    root = copy_of("speculators/0.6.0")
    whole = pyarrow.ipc.open_stream((root / ARROW).read_bytes()).read_all()
    wide = whole.cast(whole.schema.set(0, pa.field("input_ids", pa.large_list(pa.int32()))))
    names = []
    for i, start in enumerate(range(0, 12, 5)):
        names.append(f"data-0000{i}-of-00003.arrow")
        part = wide.slice(start, 5)
        with pyarrow.ipc.new_stream(root / names[-1], part.schema) as stream:
            stream.write_table(part, max_chunksize=2)
    (root / ARROW).unlink()
    state = json.loads((root / "state.json").read_text())
    state["_data_files"] = [{"filename": name} for name in names]
    (root / "state.json").write_text(json.dumps(state))
    source = find_source(root)
    assert len(source.items) == 12
    for row, item in enumerate(source.items):
        assert source.load(item).input_ids.tolist() == whole["input_ids"][row].as_py()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("{", "file names"),
        ("[]", "file names"),
        ("{}", "file names"),
        ('{"_data_files": []}', "each once"),
        (f'{{"_data_files": [{{"filename": "{ARROW}"}}, {{"filename": "{ARROW}"}}]}}', "each once"),
        ('{"_data_files": [{"filename": "../secret.arrow"}]}', "secret"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "'gone.arrow' missing — copy the dataset again"),
        (f'{{"_data_files": [{{"filename": "{ARROW}"}}], "_indices_data_files": [1]}}', "index mapping"),
        ('{"_data_files": [{"filename": "dataset_info.json"}]}', "Arrow stream"),
    ],
)
def test_state_documents_that_do_not_hold(copy_of, state, words):
    root = copy_of("speculators/0.6.0")
    (root / "state.json").write_text(state)
    with pytest.raises(SourceError, match=words):
        find_source(root)


def test_no_state_document(copy_of):
    root = copy_of("speculators/0.6.0")
    (root / "state.json").unlink()
    with pytest.raises(SourceError, match=r"state\.json"):
        find_source(root)


@pytest.mark.parametrize("n_missing", [1, 4, 8, 9, 1000, 5000, 5088])
def test_a_truncated_arrow_file(copy_of, n_missing):
    """Without the last 8 bytes pyarrow reads it without an error: that is a file cut between two batches."""
    root = copy_of("speculators/0.6.0")
    data = (root / ARROW).read_bytes()
    (root / ARROW).write_bytes(data[: len(data) - n_missing])
    with pytest.raises(SourceError, match=r"\.arrow"):
        find_source(root)


def test_flipped_bits_never_crash(copy_of):
    """Arrow stores no checksum: a flipped bit is refused where something can tell, and never ends the process."""
    root = copy_of("speculators/0.6.0")
    data = (root / ARROW).read_bytes()
    refused = 0
    for position in [*range(350, 560), *range(0, len(data), 29)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        (root / ARROW).write_bytes(damaged)
        try:
            source = find_source(root)
            source.load(source.items[0])
        except SourceError:
            refused += 1
    assert refused > 50


def test_an_arrow_file_written_again(copy_of):
    """The batches that were found are not where they were; nothing is mapped, so nothing crashes."""
    root = copy_of("speculators/0.6.0")
    source = find_source(root)
    (root / ARROW).write_bytes((root / ARROW).read_bytes()[:2000])
    with pytest.raises(SourceError, match="a sound Arrow stream"):
        source.load(source.items[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.drop_columns(["input_ids"]), "a column input_ids"),
        (with_column("input_ids", pa.array(range(12))), "a list in each row"),
        (with_column("loss_mask", pa.array(range(12))), "a list in each row"),
    ],
)
def test_tables_of_another_kind(copy_of, change, words):
    root = copy_of("speculators/0.6.0")
    rewrite(root, change)
    with pytest.raises(SourceError, match=words):
        find_source(root)


def test_offsets_outside_the_buffers_do_not_crash(copy_of):
    root = copy_of("speculators/0.6.0")
    data = (root / ARROW).read_bytes()
    for wrong in (2**31 - 1, -(2**31), 10_000):
        damaged = data.replace(struct.pack("<3i", 0, 29, 87), struct.pack("<3i", 0, wrong, 87))
        assert damaged != data
        (root / ARROW).write_bytes(damaged)
        source = find_source(root)
        with pytest.raises(SourceError, match="a sound Arrow stream"):
            source.load(source.items[0])


def test_states_without_their_dataset(data_dir, copy_of):
    with pytest.raises(UsageError, match=r"give the dataset's folder instead: hsfmt convert .*speculators/0\.6\.0 DST"):
        find_source(data_dir / "speculators" / "0.6.0" / "hidden_states")
    source = find_source(copy_of("speculators/0.6.0/hidden_states"), "vllm")
    assert source.load(source.items[0]).loss_mask is None


def test_a_dataset_without_states(copy_of):
    root = copy_of("speculators/0.6.0")
    shutil.rmtree(root / "hidden_states")
    with pytest.raises(NotFoundError, match="generate-offline-data first"):
        find_source(root)


def test_mixed_fp8_and_bfloat16(copy_of, data_dir, refused):
    root = copy_of("speculators/0.9.0")
    name = "hidden_states/hs_5.safetensors"
    (root / name).chmod(0o644)
    shutil.copyfile(data_dir / "speculators" / "0.9.0_fp8" / name, root / name)
    error = refused(find_source(root), name)
    assert [problem.got for problem in error.problems] == ["float8_e4m3fn states", "a scale for each token"]


def test_strings_of_a_header_are_kept(copy_of):
    root = copy_of("speculators/0.6.0")
    path = root / "hidden_states" / "hs_3.safetensors"
    before = find_source(root).load(find_source(root).items[3])
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size]) | {"__metadata__": {"prompt": "hello", "row": "x"}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    sample = find_source(root).load(find_source(root).items[3])
    assert sample.metadata == before.metadata | {"prompt": "hello", "__metadata__": {"row": "x"}}
    assert sample.hidden_states.tobytes() == before.hidden_states.tobytes()
