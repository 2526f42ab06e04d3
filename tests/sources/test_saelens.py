"""Source `saelens`: real files of SAELens, and Arrow datasets beside what it writes; read row by row, never whole."""

import json
import pickle
import resource
import struct

import numpy as np
import pyarrow as pa
import pytest

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import (
    SourceOptions,
    find_source,
    parse_key_map,
    settle_final_norm,
    settle_layers,
)
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look
from hsfmt.readers.sources.saelens import SaeLensSource

ROWS, T, H = 6, 4, 8
RNG = np.random.default_rng(0)
STATES = {name: RNG.standard_normal((ROWS, T, H)).astype(np.float32) for name in "abc"}
IDS = RNG.integers(0, 99, (ROWS, T)).astype(np.int32)
POST, PRE, MLP = "blocks.4.hook_resid_post", "blocks.2.hook_resid_pre", "blocks.3.hook_mlp_out"


def by_arrow(folder):
    """The columns as pyarrow reads them, whole: an independent reading."""
    names = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
    table = pa.concat_tables([pa.ipc.open_stream(folder / name).read_all() for name in names])
    return {name: np.array(table.column(name).to_pylist()) for name in table.column_names}


@pytest.mark.parametrize(
    ("name", "hook", "layer"),
    [
        ("post_float32", "blocks.1.hook_resid_post", 2),
        ("pre_float16", "blocks.1.hook_resid_pre", 1),
    ],
)
def test_what_saelens_wrote(copy_of, name, hook, layer):
    source = find_source(copy_of(f"saelens/{name}"), "saelens")
    meaning, dtype = source.meaning(), name.rpartition("_")[2]
    assert (meaning.hidden_size, meaning.n_layers, meaning.dtype) == (16, 1, dtype)
    assert (settle_layers(meaning, None), settle_final_norm(meaning, None)) == ((layer,), "pre")
    files = sorted({item.shared[0].removesuffix(".arrow") for item in source.items})
    n = 16 // len(files)
    assert [item.sample_id for item in source.items] == [f"{file}/{i}" for file in files for i in range(n)]
    wanted = by_arrow(source.root)
    for number, item in enumerate(source.items):
        sample = pickle.loads(pickle.dumps(source)).load(item)
        assert sample.hidden_states.shape == (12, 1, 16)
        assert sample.hidden_states.tobytes() == wanted[hook][number].astype(dtype).tobytes()
        assert sample.input_ids.tolist() == wanted["token_ids"][number].tolist()
    assert {support.role for support in source.support} == {"container", "dataset description"}
    assert not source.strays
    sizes = sum((source.root / path).stat().st_size for path in {path for item in source.items for path in item.shared})
    assert sum(item.nbytes for item in source.items) == sizes
    assert SaeLensSource.claim(Look(list_folder(source.root))).certain


def test_shards_of_a_run_that_was_not_consolidated(copy_of):
    root = copy_of("saelens/post_float32")
    for i in range(2):
        folder = root / f"shard_{i:05d}"
        folder.mkdir()
        (root / f"data-{i:05d}-of-00002.arrow").rename(folder / "data-00000-of-00001.arrow")
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (root / "state.json").unlink()
    (root / "dataset_info.json").rename(root / "shard_00000/dataset_info.json")
    source = find_source(root, "saelens")
    ids = [item.sample_id for item in source.items][::8]
    assert ids == ["shard_00000/data-00000-of-00001/0", "shard_00001/data-00000-of-00001/0"]
    wanted = by_arrow(root / "shard_00001")
    sample = source.load(source.items[8 + 3])
    assert sample.hidden_states.tobytes() == wanted["blocks.1.hook_resid_post"][3].astype(np.float32).tobytes()
    assert SaeLensSource.claim(Look(list_folder(root))).certain


# Datasets of other columns, written with pyarrow.


def nested(array):
    inner = [pa.array(list(row), type=pa.list_(pa.from_numpy_dtype(array.dtype))) for row in array]
    return pa.array([row.to_pylist() for row in inner], type=pa.list_(pa.list_(pa.from_numpy_dtype(array.dtype))))


def arrays(**columns):
    return {name: nested(array) if isinstance(array, np.ndarray) else array for name, array in columns.items()}


@pytest.fixture
def write(tmp_path):
    """Write a dataset of these columns, in batches of so many rows, and open it."""

    def save(columns, *, batch_rows=4, options=None, compression=None):
        table = pa.table(columns)
        ipc = pa.ipc.IpcWriteOptions(compression=compression)
        with (
            pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema, options=ipc) as to,
        ):
            to.write_table(table, max_chunksize=batch_rows)
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        key_map = parse_key_map(options or "")
        return find_source(tmp_path, "saelens", options=SourceOptions(key_map=key_map))

    return save


TOKENS = pa.array(IDS.tolist(), type=pa.list_(pa.int32(), T))
TWO = {POST: nested(STATES["a"]), "token_ids": TOKENS, PRE: nested(STATES["b"])}


def check(source, *names):
    wanted = np.stack([STATES[name] for name in names], axis=2)
    for number, item in enumerate(source.items):
        sample = source.load(item)
        assert sample.hidden_states.tobytes() == wanted[number].tobytes()
        assert sample.input_ids.tolist() == IDS[number].tolist()


@pytest.mark.parametrize("batch_rows", [1, 4, 100])
def test_hooks_become_layers_in_their_order(write, batch_rows):
    source = write(TWO, batch_rows=batch_rows)
    assert source.meaning().layers == (2, 5)
    check(source, "b", "a")


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.list_(pa.float32(), H), T),
        pa.list_(pa.list_(pa.float32()), T),
        pa.large_list(pa.list_(pa.float32(), H)),
        pa.large_list(pa.large_list(pa.float32())),
    ],
    ids=str,
)
def test_kinds_of_lists(write, kind):
    check(write({"token_ids": pa.array(IDS.tolist()), POST: pa.array(STATES["a"].tolist(), type=kind)}), "a")


def test_columns_before_the_states(write):
    columns = {
        "text": pa.array(["x" * i for i in range(ROWS)]),
        "nothing": pa.nulls(ROWS),
        "record": pa.array([{"a": 1, "b": ["x"]}] * ROWS),
        "flag": pa.array([True, None] * 3),
        **TWO,
    }
    with pytest.raises(SourceError, match=r"\[text\].*--map ignore=text"):
        write(columns)
    check(write(columns, options="ignore=text,ignore=nothing,ignore=record,ignore=flag"), "b", "a")


def test_hooks_that_are_no_residual_states(write):
    columns = {**TWO, MLP: nested(STATES["c"])}
    meaning = write(columns).meaning()
    assert (meaning.layers, meaning.final_norm) == (None, None)
    with pytest.raises(UsageError, match="outputs of attention or MLP are no states between layers"):
        settle_layers(meaning, None)
    check(write(columns, options=f"ignore={MLP}"), "b", "a")
    check(write(columns, options=f"hidden_states={MLP}"), "c")
    with pytest.raises(UsageError, match="hidden_states, input_ids or ignore"):
        write(columns, options="aux=a,last=b")


def test_two_names_of_one_state(write):
    columns = {"token_ids": TOKENS, POST: nested(STATES["a"]), "blocks.5.hook_resid_pre": nested(STATES["b"])}
    with pytest.raises(UsageError, match="both state 5"):
        write(columns).meaning()


def test_modules_of_transformers(write):
    meaning = write({"token_ids": TOKENS, "model.layers.7": nested(STATES["a"])}).meaning()
    assert (meaning.layers, meaning.final_norm) == ((8,), "pre")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({POST: nested(STATES["a"])}, "samples need them"),
        ({POST: nested(STATES["a"]), "token_ids": pa.array([1] * ROWS)}, "a list of integers"),
        ({"token_ids": TOKENS}, "a column with the states of a hook"),
        ({"token_ids": TOKENS, POST: nested(STATES["a"].astype(np.float64))}, "float32 or float16, got double|float64"),
        ({"token_ids": TOKENS, POST: pa.array([[1.0] * T] * ROWS)}, "states of two axes"),
        (
            {"token_ids": TOKENS, POST: pa.array(["a"] * ROWS).dictionary_encode()},
            "a schema, then record batches",
        ),
    ],
)
def test_columns_that_are_none(write, columns, words):
    with pytest.raises(SourceError, match=rf"data\.arrow.*({words})"):
        write(columns)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([[[1.0] * H] * (T - 1)] * ROWS, "4 states, one a token"),
        ([[[1.0] * H, [1.0], [1.0] * H, [1.0] * H]] * ROWS, "inner lists of one length, got lists of 1 to 8"),
        ([None, *[[[1.0] * H] * T] * (ROWS - 1)], "nulls in this column"),
        ([[[None] * H] * T] * ROWS, "nulls in this column"),
        ([[]] * ROWS, "ascending"),
        ([[[]] * T] * ROWS, "one a token"),
    ],
)
def test_rows_of_other_shapes(write, states, words):
    source = write({"token_ids": TOKENS, POST: pa.array(states, type=pa.list_(pa.list_(pa.float32())))})
    with pytest.raises(SourceError, match=rf"data\.arrow\[.*{words}"):
        source.load(source.items[0])


def test_rows_of_another_width(write):
    states = STATES["a"].tolist()
    states[2] = [[0.0] * (H + 1)] * T
    source = write({"token_ids": TOKENS, POST: pa.array(states, type=pa.list_(pa.list_(pa.float32())))})
    with pytest.raises(SourceError, match="hidden size 8 as in the source's first readable file, got hidden size 9"):
        source.load(source.items[2])


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_are_not_unpacked(write, compression):
    with pytest.raises(SourceError, match="not compressed"):
        write(TWO, compression=compression)


def test_every_truncation_is_refused(write, tmp_path):
    write(TWO)
    data = (tmp_path / "data.arrow").read_bytes()
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    # Cut between two batches, a stream reads well elsewhere, only with fewer rows.
    for nbytes in {*range(0, len(data), 41), *range(len(data) - 20, len(data))}:
        (tmp_path / "data.arrow").write_bytes(data[:nbytes])
        with pytest.raises(SourceError, match=r"data\.arrow.*(truncated|an empty file)"):
            find_source(tmp_path, "saelens")


@pytest.mark.parametrize("data", [b"<html></html>", b"ARROW1\0\0" + bytes(200), b"\xff" * 64, bytes(64)])
def test_files_that_are_none(write, tmp_path, data):
    write(TWO)
    (tmp_path / "data.arrow").write_bytes(data)
    with pytest.raises(SourceError, match=r"data\.arrow"):
        find_source(tmp_path, "saelens")


def test_no_changed_byte_does_harm(write, tmp_path):
    """Whatever a header says: an error that names the file, or states of some values; never a crash or much memory."""
    write(TWO)
    data = (tmp_path / "data.arrow").read_bytes()
    places = [i for i in range(len(data)) if data[i : i + 4] == b"\xff\xff\xff\xff"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    n_refused = 0
    for start in places:
        (header_nbytes,) = struct.unpack("<i", data[start + 4 : start + 8])
        for at in range(start, start + 8 + header_nbytes, 3):
            for value in (0x7F, 0xFF):
                (tmp_path / "data.arrow").write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
                try:
                    source = find_source(tmp_path, "saelens")
                    source.meaning()
                    source.load(source.items[-1])
                except (SourceError, UsageError):
                    n_refused += 1
    assert n_refused > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10


def test_offsets_that_lead_elsewhere(write, tmp_path):
    """The offsets are data, of which no header says that they are sound."""
    source = write({"token_ids": pa.array(IDS.tolist()), POST: nested(STATES["a"])}, batch_rows=100)
    path = tmp_path / "data.arrow"
    data = path.read_bytes()
    offsets = np.arange(0, ROWS * T + 1, T, dtype=np.int32).tobytes()
    at = data.index(offsets, data.index(offsets) + 1)
    for first, second in ((0, 1 << 30), (-4, 4), (8, 4), (4, 4)):
        path.write_bytes(data[:at] + struct.pack("<ii", first, second) + data[at + 8 :])
        with pytest.raises(SourceError, match=r"data\.arrow\[0\]|data\.arrow\[blocks"):
            source.load(source.items[0])


@pytest.mark.parametrize("state", [{}, {"_data_files": []}, {"_data_files": [{"filename": "../data.arrow"}]}, []])
def test_states_that_are_none(write, tmp_path, state):
    write(TWO)
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(SourceError, match=r"state\.json"):
        find_source(tmp_path, "saelens")


def test_files_of_other_columns(write, tmp_path):
    write(TWO)
    (tmp_path / "data.arrow").rename(tmp_path / "first.arrow")
    write({"token_ids": TOKENS, POST: nested(STATES["a"])})
    files = [{"filename": "first.arrow"}, {"filename": "data.arrow"}]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    with pytest.raises(SourceError, match=r"data\.arrow: expected the columns of first\.arrow"):
        find_source(tmp_path, "saelens")


def test_claims(write, tmp_path):
    write(TWO)
    assert SaeLensSource.claim(Look(list_folder(tmp_path))) is None
    array = {"_type": "Array2D", "shape": [T, H], "dtype": "float32"}
    for features, certain in (({POST: array, "token_ids": {}}, True), ({POST: array}, False)):
        (tmp_path / "dataset_info.json").write_text(json.dumps({"features": features}))
        assert SaeLensSource.claim(Look(list_folder(tmp_path))).certain is certain
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": {"input_ids": {"_type": "List"}}}))
    assert SaeLensSource.claim(Look(list_folder(tmp_path))) is None


def test_a_file_that_is_gone(copy_of):
    """The rows of the other one keep their ids, as after a conversion that deleted a part."""
    root = copy_of("saelens/post_float32")
    whole = {item.sample_id: item for item in find_source(root, "saelens").items}
    (root / "data-00000-of-00002.arrow").unlink()
    source = find_source(root, "saelens")
    assert "names 1 files that are not there: data-00000-of-00002.arrow" in " ".join(source.notes)
    assert not source.items[0].normal_hole, "state.json says that it belongs to the dataset"
    with pytest.raises(SourceError, match=r"data-00000-of-00002\.arrow: .*no such file"):
        source.load(source.items[0])
    assert [item.sample_id for item in source.items[1:]] == list(whole)[8:]
    source.load(source.items[1])


def test_a_file_of_more_rows_than_listed(write):
    """The first rows are where they were; those behind them would be lost with the file."""
    source = write(TWO, batch_rows=4)
    source.load(source.items[0])
    more = {name: pa.concat_arrays([column, column]) for name, column in TWO.items()}
    write(more, batch_rows=4)
    for item in source.items:
        with pytest.raises(SourceError, match=r"data\.arrow"):
            source.load(item)


def test_what_a_remedy_says_to_type_names_the_source(write, tmp_path):
    with pytest.raises(SourceError) as info:
        write(TWO | {"more": pa.array(["a"] * ROWS)})
    assert info.value.problems[0].remedy == "--from saelens --map ignore=more"
    source = find_source(tmp_path, "saelens", options=SourceOptions(key_map=parse_key_map("ignore=more")))
    check(source, "b", "a")
