"""Sources `safetensors` and `npz`: one sample a file, in every shape that `pt` takes, and what hsfmt itself writes."""

import io
import json
import struct
import zipfile
import zlib

import ml_dtypes
import numpy as np
import pytest

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import SourceOptions, find_source, parse_key_map, settle_final_norm, settle_layers
from hsfmt.readers.sources.generic_npz import GenericNpzSource
from hsfmt.readers.sources.generic_safetensors import GenericSafetensorsSource
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.look import Look
from hsfmt.writers.sample_files import FileTensor, write_sample_file

T, L, H = 5, 3, 8
BITS = np.arange(T * L * H, dtype=np.uint16).reshape(T, L, H) * 7
STATES = BITS.view(ml_dtypes.bfloat16)
IDS = np.arange(T) + 10
FLAT = STATES.reshape(T, L * H)
KINDS = ("safetensors", "npz")


@pytest.fixture
def dump(tmp_path, save_safetensors):
    """Save samples as sample_0.npz (or .safetensors), … and open them; bfloat16 in .npz as hsfmt writes it."""

    def save(kind, *samples, **options):
        if "key_map" in options:
            options["key_map"] = parse_key_map(options["key_map"])
        for i, arrays in enumerate(samples):
            path = tmp_path / f"sample_{i}.{kind}"
            if kind == "safetensors":
                save_safetensors(path, arrays)
                continue
            plain = {}
            for name, array in arrays.items():
                if array.dtype == ml_dtypes.bfloat16:
                    plain[name], plain[f"{name}.dtype"] = array.view(np.uint16), np.array("bfloat16")
                else:
                    plain[name] = array
            np.savez(path, **plain)
        return find_source(tmp_path, kind, options=SourceOptions(**options))

    return save


def check(source, bits=BITS):
    meaning = source.meaning()
    assert (meaning.hidden_size, meaning.n_layers, meaning.dtype) == (H, bits.shape[1], "bfloat16")
    sample = source.load(source.items[0])
    assert sample.input_ids.tolist() == IDS.tolist()
    assert sample.hidden_states.shape == bits.shape
    assert sample.hidden_states.tobytes() == bits.tobytes()
    return sample


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("entries", "options"),
    [
        ({"hidden_states": STATES}, {}),
        ({"hidden_states": STATES[None]}, {}),
        ({"hidden_states": FLAT}, {"hidden_size": H}),
        ({"hidden_states": STATES.transpose(1, 0, 2)}, {}),
        ({"hidden_states": STATES[:, 2], "aux_hidden_states": FLAT[:, : 2 * H]}, {}),
        ({"hidden_states": STATES[:, 2:], "aux_hidden_states": STATES[:, :2]}, {}),
        ({"h": FLAT[:, : 2 * H], "t": STATES[:, 2]}, {"key_map": "aux=h,last=t"}),
        ({"h": STATES, "junk": np.zeros((9, 9))}, {"key_map": "hidden_states=h,ignore=junk"}),
    ],
)
def test_shapes_of_states(dump, accounted_for, kind, entries, options):
    source = dump(kind, {"input_ids": IDS, **entries}, **options)
    check(source)
    accounted_for(source)


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_the_demand_for_layers_and_norm(dump, kind):
    source = dump(kind, {"token_ids": IDS[None], "hidden_states": STATES, "loss_mask": np.array([0, 1, 1, 0, 1])})
    assert check(source).loss_mask.tolist() == [0, 1, 1, 0, 1]
    with pytest.raises(UsageError, match="layer-ids"):
        settle_layers(source.meaning(), None)
    with pytest.raises(UsageError, match="final-norm"):
        settle_final_norm(source.meaning(), None)


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_entries_that_no_role_takes(dump, refused, kind):
    source = dump(kind, {"input_ids": IDS, "hidden_states": STATES, "logits": np.zeros((T, 4), np.float32)})
    assert "--map ignore=logits" in str(refused(source, f"sample_0.{kind}"))


@pytest.mark.torch
def test_strings_become_metadata(tmp_path, save_safetensors):
    entries = {"__metadata__": {"prompt": "hello", "format": "pt"}}
    save_safetensors(tmp_path / "a.safetensors", {"input_ids": IDS, "hidden_states": STATES}, entries=entries)
    sample = check(find_source(tmp_path, "safetensors"))
    assert sample.metadata == {"prompt": "hello", "format": "pt"}
    (tmp_path / "a.safetensors").unlink()
    np.savez(
        tmp_path / "a.npz",
        input_ids=IDS,
        hidden_states=BITS.view(np.int16),
        prompt=np.array("hello"),
        n=np.array(3),
        **{"hidden_states.dtype": np.array("bfloat16")},
    )
    assert check(find_source(tmp_path, "npz")).metadata == {"prompt": "hello", "n": 3}


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [np.uint16, np.int16, "V2"])
def test_untyped_patterns_are_asked_about(dump, dtype):
    arrays = {"input_ids": IDS, "hidden_states": BITS.view(dtype)}
    with pytest.raises(SourceError, match="--map hidden_states=hidden_states:bfloat16"):
        dump("npz", arrays).meaning()
    check(dump("npz", arrays, key_map="hidden_states=hidden_states:bfloat16"))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_byte_and_axis_order(dump, dtype, order):
    states = np.asarray(np.random.default_rng(1).standard_normal((T, L, H)), dtype=dtype, order=order)
    sample = dump("npz", {"input_ids": IDS.astype(">i4"), "hidden_states": states}).items
    source = find_source(dump("npz").root, "npz")
    loaded = source.load(sample[0])
    assert loaded.hidden_states.tobytes() == states.astype(states.dtype.newbyteorder("<")).tobytes(order="C")
    assert loaded.input_ids.tolist() == IDS.tolist()


@pytest.mark.torch
def test_a_type_that_is_none(dump):
    bad = {"input_ids": IDS, "hidden_states": BITS, "hidden_states.dtype": np.array("float4")}
    with pytest.raises(SourceError, match="said to be 'float4'"):
        dump("npz", bad).meaning()


# What hsfmt wrote itself.

NOTE = {"layers": [2, 5, 8], "final_norm": "pre", "model": {"name": "tiny"}, "metadata": {"a": 1}, "scaling": None}


def export(path, sample_id, *, bits=BITS, **changes):
    tensors = {
        "hidden_states": FileTensor("bfloat16", bits),
        "input_ids": FileTensor("int64", IDS),
        "loss_mask": FileTensor("bool", np.array([0, 1, 1, 0, 1], dtype=np.uint8)),
        "score": FileTensor("float32", np.arange(T, dtype=np.float32)),
    }
    write_sample_file(path, tensors, NOTE | {"sample_id": sample_id} | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_hsfmt_wrote(tmp_path, kind):
    export(tmp_path / f"x.{kind}", "chat 7/é")
    export(tmp_path / f"{'y' * 200}.{kind}", "y" * 300)
    source = find_source(tmp_path, kind)
    assert [item.sample_id for item in source.items] == ["chat 7/é", "y" * 300]
    sample = check(source)
    meaning = source.meaning()
    assert (meaning.layers, meaning.final_norm, meaning.model) == ((2, 5, 8), "pre", "tiny")
    assert meaning.extras == {"score": {"kind": "token", "dtype": "float32", "shape": []}}
    assert sample.loss_mask.tolist() == [0, 1, 1, 0, 1]
    assert sample.metadata == {"a": 1}
    assert sample.extras["score"].tolist() == [0, 1, 2, 3, 4]
    look = Look(list_folder(tmp_path))
    claims = [cls.claim(look) for cls in (GenericSafetensorsSource, GenericNpzSource)]
    assert [claim.certain for claim in claims if claim] == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_hsfmt_noted(tmp_path, kind):
    noted = {
        "label": {"kind": "sample", "dtype": "int64", "shape": [2]},
        "score": {"kind": "token", "dtype": "float32", "shape": []},
        "absent": {"kind": "ragged", "dtype": "int32", "shape": []},
    }
    tensors = {
        "hidden_states": FileTensor("bfloat16", BITS),
        "input_ids": FileTensor("int64", IDS),
        "label": FileTensor("int64", np.array([7, 8])),
        "score": FileTensor("float32", np.arange(T, dtype=np.float32)),
    }
    write_sample_file(tmp_path / f"x.{kind}", tensors, NOTE | {"sample_id": "x", "extras": noted, "nulls": ["absent"]})
    source = find_source(tmp_path, kind)
    assert source.meaning().extras == noted
    extras = source.load(source.items[0]).extras
    assert (extras["label"].tolist(), sorted(extras)) == ([7, 8], ["label", "score"])


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_that_hsfmt_wrote(tmp_path, kind):
    patterns = np.arange(T * L * H, dtype=np.uint8).reshape(T, L, H)
    tensors = {
        "hidden_states": FileTensor("float8_e4m3fn", patterns),
        "hidden_states_scale": FileTensor("float32", np.ones(T, np.float32)),
        "input_ids": FileTensor("int64", IDS),
    }
    scaling = {"column": "hidden_states_scale", "rule": "bfloat16_product"}
    write_sample_file(tmp_path / f"x.{kind}", tensors, NOTE | {"sample_id": "x", "scaling": scaling})
    source = find_source(tmp_path, kind)
    assert (source.meaning().dtype, source.meaning().scaling, source.meaning().extras) == ("float8_e4m3fn", scaling, {})
    sample = source.load(source.items[0])
    assert sample.hidden_states.tobytes() == patterns.tobytes()
    assert sample.extras["hidden_states_scale"].tolist() == [1] * T


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": [2, 5, 9]}, r"\[layers\]: expected \(2, 5, 8\)"),
        ({"layers": [2, 5]}, "3 ids, one a state"),
        ({"layers": "all"}, "a list of layer ids"),
        ({"final_norm": "post"}, r"\[final_norm\]: expected pre"),
        ({"final_norm": None}, "pre, post, unknown"),
    ],
)
def test_files_of_hsfmt_that_disagree(tmp_path, refused, kind, changes, words):
    export(tmp_path / f"a.{kind}", "a")
    export(tmp_path / f"b.{kind}", "b", **changes)
    source = find_source(tmp_path, kind)
    with pytest.raises(SourceError, match=words):
        source.load(source.items[1])


@pytest.mark.parametrize("kind", KINDS)
def test_two_files_of_one_id(tmp_path, refused, kind):
    export(tmp_path / f"a.{kind}", "same")
    export(tmp_path / f"b.{kind}", "same")
    source = find_source(tmp_path, kind)
    assert "2 files that note this id" in str(refused(source, f"b.{kind}"))


@pytest.mark.torch
def test_other_files_among_those_of_hsfmt(tmp_path, refused, save_safetensors):
    export(tmp_path / "b.safetensors", "b")
    save_safetensors(tmp_path / "c.safetensors", {"input_ids": IDS, "hidden_states": STATES})
    assert "another program's file" in str(refused(find_source(tmp_path, "safetensors"), "c.safetensors"))
    save_safetensors(tmp_path / "a.safetensors", {"input_ids": IDS, "hidden_states": STATES})
    assert "one that hsfmt wrote" in str(refused(find_source(tmp_path, "safetensors"), "b.safetensors"))


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_a_map_goes_before_what_hsfmt_noted(tmp_path, kind):
    export(tmp_path / f"a.{kind}", "a")
    options = SourceOptions(key_map=parse_key_map("hidden_states=hidden_states,ignore=score"))
    source = find_source(tmp_path, kind, options=options)
    assert source.meaning().layers is None
    check(source)


def test_rows_that_are_no_tokens(tmp_path, refused):
    tensors = {
        "hidden_states": FileTensor("bfloat16", BITS),
        "input_ids": FileTensor("int64", IDS),
        "label": FileTensor("int64", np.arange(2)),
    }
    write_sample_file(tmp_path / "a.npz", tensors, NOTE | {"sample_id": "a"})
    assert "--map ignore=label" in str(refused(find_source(tmp_path, "npz"), "a.npz"))
    options = SourceOptions(key_map=parse_key_map("ignore=label"))
    check(find_source(tmp_path, "npz", options=options))


# Hostile archives.


def member(descr="<f4", shape=(5, 3, 8), order=False, *, data=None):
    text = repr({"descr": descr, "fortran_order": order, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + (bytes(480) if data is None else data)


@pytest.fixture
def archive(tmp_path):
    """Write an archive of these members beside good token ids; the words with which it is refused."""

    def refuse(members, *, method=zipfile.ZIP_STORED, edit=lambda data: data):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as target:
            for name, data in members.items():
                target.writestr(name, data)
        path = tmp_path / "x.npz"
        path.write_bytes(edit(file.getvalue()))
        source = find_source(tmp_path, "npz")
        with pytest.raises(SourceError) as info:
            source.meaning()
        assert all(problem.where.startswith("x.npz") for problem in info.value.problems)
        return str(info.value)

    return refuse


GOOD_IDS = member("<i8", (5,), data=bytes(40))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (member(shape=(1 << 40, 3, 8)), "a member of"),
        (member(shape=(-1, 3)), "axes"),
        (member(shape=[5, 3, 8]), "axes"),
        (member(shape=(1,) * 40), "at most 8 axes"),
        (member(shape=(5, 3, 9)), "a member of"),
        (member("|O", (5,)), "pickled Python objects"),
        (member([("a", "<f4")], (5,)), "dtype"),
        (member("V9999999999", (5,)), "dtype"),
        (member("<f4,<f4", (5,)), "dtype"),
        (b"\x93NUMPY\x03\x00" + member()[8:], "version 1.0 or 2.0"),
        (b"\x93NUMPY\x02\x00" + b"\xff\xff\xff\x7f" + bytes(90), "a header of at most"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 4000) + b"(" * 4000, "the header of an array"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 4) + b"{}  ", "the header of an array"),
        (b"\x93NUMPY\x01\x00\x04", "truncated or damaged"),
        (b"<html></html>", "version 1.0 or 2.0"),
        (b"", "version 1.0 or 2.0"),
    ],
)
def test_malformed_members(archive, data, words):
    assert words in archive({"input_ids.npy": GOOD_IDS, "hidden_states.npy": data})


def test_pickles_are_not_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    np.savez(tmp_path / "x.npz", input_ids=IDS, hidden_states=np.array([Trap(), 1], dtype=object), allow_pickle=True)
    with pytest.raises(SourceError, match=r"hidden_states\.npy\]: .*pickled Python objects \(refused, not executed\)"):
        find_source(tmp_path, "npz").meaning()
    assert not (tmp_path / "executed").exists()


def test_a_bomb_is_not_unpacked(archive, monkeypatch):
    n = 96 << 20
    bomb = member("<f4", (n // 4,), data=bytes(n))
    monkeypatch.setattr(np, "empty", None)
    words = archive({"input_ids.npy": GOOD_IDS, "hidden_states.npy": bomb}, method=zipfile.ZIP_DEFLATED)
    assert "bytes when unpacked" in words


def test_other_members(archive):
    assert "another file" in archive({"input_ids.npy": GOOD_IDS, "../run.sh": b"x"})
    packed = archive({"input_ids.npy": GOOD_IDS, "hidden_states.npy": member()}, method=zipfile.ZIP_BZIP2)
    assert "packed in another way" in packed


def test_members_that_share_bytes(archive):
    def overlap(data):
        """Let the second member's directory entry point at the first one's."""
        at = data.rindex(b"PK\x01\x02")
        return data[: at + 42] + struct.pack("<I", 0) + data[at + 46 :]

    both = {"input_ids.npy": member(), "hidden_states.npy": member()}
    assert "overlaps" in archive(both, edit=overlap)


def test_every_truncation_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", input_ids=IDS, hidden_states=np.ones((T, L, H), np.float32))
    data = (tmp_path / "x.npz").read_bytes()
    for nbytes in {0, 1, 4, 30, 100, len(data) // 2, len(data) - 22, len(data) - 1}:
        (tmp_path / "x.npz").write_bytes(data[:nbytes])
        with pytest.raises(SourceError, match=r"x\.npz"):
            find_source(tmp_path, "npz").meaning()


@pytest.mark.torch
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_bit(archive, method):
    states = np.random.default_rng(0).standard_normal((T, L, H)).astype(np.float32)
    data = member(data=states.tobytes())

    def flip(archived):
        at = archived.index(states.tobytes()[:64]) + 8 if method == zipfile.ZIP_STORED else len(archived) // 2
        return archived[:at] + bytes([archived[at] ^ 1]) + archived[at + 1 :]

    assert "damaged" in archive({"input_ids.npy": GOOD_IDS, "hidden_states.npy": data}, method=method, edit=flip)
    assert zlib.crc32(states.tobytes())


@pytest.mark.parametrize("data", [b"", b"<!DOCTYPE html><html>", b"\x1f\x8b" + bytes(60), bytes(100)])
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_none(tmp_path, kind, data):
    (tmp_path / f"x.{kind}").write_bytes(data)
    with pytest.raises(SourceError, match=rf"x\.{kind}"):
        find_source(tmp_path, kind).meaning()


def test_a_note_that_is_none(tmp_path, save_safetensors):
    entries = {"__metadata__": {"hsfmt": "[" * 100000}}
    save_safetensors(tmp_path / "a.safetensors", {"input_ids": IDS, "hidden_states": STATES}, entries=entries)
    with pytest.raises(SourceError, match=r"a JSON object, as hsfmt writes it"):
        find_source(tmp_path, "safetensors").meaning()
    np.savez(tmp_path / "a.npz", input_ids=IDS, hsfmt=np.array(json.dumps([1])))
    with pytest.raises(SourceError, match="a JSON object, as hsfmt writes it, got list"):
        find_source(tmp_path, "npz").meaning()


@pytest.mark.parametrize(
    ("arrays", "certain"),
    [
        ({"input_ids": IDS, "hidden_states": STATES.astype(np.float32)}, True),
        ({"input_ids": IDS, "hidden_states": FLAT.astype(np.float32)}, False),
        ({"input_ids": IDS.reshape(1, T), "hidden_states": STATES[None].astype(np.float32)}, True),
        ({"input_ids": np.zeros((4, T)), "hidden_states": np.zeros((4, T, H), np.float32)}, False),
        ({"weight": FLAT.astype(np.float32)}, False),
    ],
)
def test_claims(tmp_path, save_safetensors, arrays, certain):
    np.savez(tmp_path / "a.npz", **arrays)
    save_safetensors(tmp_path / "a.safetensors", arrays)
    look = Look(list_folder(tmp_path))
    for cls in (GenericNpzSource, GenericSafetensorsSource):
        claim = cls.claim(look)
        assert claim.certain is certain
        assert "--final-norm" in claim.options


def test_the_connectors_keys_are_not_claimed(tmp_path, save_safetensors):
    save_safetensors(tmp_path / "a.safetensors", {"token_ids": IDS, "hidden_states": STATES})
    assert GenericSafetensorsSource.claim(Look(list_folder(tmp_path))) is None


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_hsfmt_need_no_torch(tmp_path, run_python, repo_root, kind):
    export(tmp_path / f"a.{kind}", "a")
    code = f"""
import sys
from hsfmt.readers.sources import find_source
source = find_source({str(tmp_path)!r}, {kind!r})
print(source.load(source.items[0]).hidden_states.shape, "torch" in sys.modules)
"""
    assert run_python(code, path=repo_root).split(") ") == [f"({T}, {L}, {H}", "False\n"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_without_a_name(tmp_path, save_safetensors, kind):
    arrays = {"ids": IDS, "states": STATES.astype(np.float32)}
    np.savez(tmp_path / "a.npz", **arrays) if kind == "npz" else save_safetensors(tmp_path / "a.safetensors", arrays)
    options = SourceOptions(key_map=parse_key_map("input_ids=ids,hidden_states=states"))
    assert find_source(tmp_path, options=options).name == kind
    (tmp_path / "a.pt").write_bytes(b"")
    assert find_source(tmp_path, options=options).name == "pt"
