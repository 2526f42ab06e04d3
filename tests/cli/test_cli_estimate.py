"""`hsfmt estimate` and convert's own estimate, held to the bytes that a conversion then stores."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from hsfmt.readers.sources import find_source
from hsfmt.storage.local import LocalStore

LAYERS = "2,4,5,8"
GIB = 1 << 30


def stored_nbytes(dataset: Path) -> int:
    return sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file())


def write_connector_file(path: Path, ids: np.ndarray, states: np.ndarray) -> None:
    """Write the two keys of vLLM's connector as a safetensors file of bfloat16 states."""
    blobs = {"hidden_states": ("BF16", states), "token_ids": ("I64", ids)}
    header, offset = {}, 0
    for name, (dtype, array) in blobs.items():
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).view(np.uint8).tobytes() for _, array in blobs.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture(scope="module")
def large(vllm, tmp_path_factory) -> Path:
    """Real states, 40 times: in each copy the channels lie in another order, so that no text is there twice."""
    folder = tmp_path_factory.mktemp("large")
    source = find_source(vllm)
    real = [source.load(item) for item in source.items]
    rng = np.random.default_rng(0)
    for copy in range(40):
        channels = rng.permutation(128)
        for number in rng.permutation(len(real)):
            sample = real[number]
            path = folder / f"copy{copy}-{number}.safetensors"
            write_connector_file(path, sample.input_ids, sample.hidden_states[:, :, channels])
    return folder


def test_the_shape_of_a_real_run(hsfmt):
    facts = hsfmt.json(
        "estimate", "--samples", 10_000, "--tokens", 17_300_000, "--hidden", 7168, "--layers", 4, "--ratio", 1.46
    )
    assert facts["states_nbytes"] / GIB == pytest.approx(924, abs=1)
    assert facts["stored_nbytes"] / GIB == pytest.approx(633, abs=1)
    assert (facts["samples"], facts["tokens"], facts["parts"]) == (10_000, 17_300_000, 29)
    assert facts["files"] < 700
    assert facts["free_nbytes"] is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_dtypes(hsfmt, dtype):
    given = ("--samples", 3, "--tokens", 300, "--hidden", 64, "--layers", 2, "--codec", "none", "--dtype", dtype)
    facts = hsfmt.json("estimate", *given)
    itemsize = {"float32": 4, "float8_e4m3fn": 1}.get(dtype, 2)
    assert facts["states_nbytes"] == 300 * 2 * 64 * itemsize
    assert facts["ratio"] == 1


def test_lengths_from_a_file(hsfmt, tmp_path):
    (tmp_path / "lengths").write_text("10\n20\n\n30\n")
    shape = ("--hidden", 64, "--layers", 2)
    facts = hsfmt.json("estimate", "--lengths", tmp_path / "lengths", *shape)
    assert (facts["samples"], facts["tokens"]) == (3, 60)
    for bad in ("10\nx\n", "0\n", "-3\n", "", "99999999999\n"):
        (tmp_path / "lengths").write_text(bad)
        assert "a number a line" in hsfmt("estimate", "--lengths", tmp_path / "lengths", *shape, code=2).stderr
    hsfmt("estimate", "--lengths", tmp_path / "none", *shape, code=3)


@pytest.mark.parametrize("tokens", [7, 100, 101, 106, 1000])
@pytest.mark.parametrize("part_size", ["1", "300", "5000", "32GiB"])
def test_even_lengths_are_those_of_a_file(hsfmt, tmp_path, tokens, part_size):
    shape = ("--hidden-size", 8, "--layers", 2, "--part-size", part_size)
    short, n_long = divmod(tokens, 7)
    (tmp_path / "lengths").write_text("\n".join(map(str, [short + 1] * n_long + [short] * (7 - n_long))))
    facts = hsfmt.json("estimate", "--samples", 7, "--tokens", tokens, *shape)
    assert facts["tokens"] == tokens
    assert facts == hsfmt.json("estimate", "--lengths", tmp_path / "lengths", *shape)


def test_as_many_samples_as_there_may_be(hsfmt):
    """In as many steps as for few: one by one they would take hours and all memory."""
    shape = ("--hidden-size", 7168, "--layers", 4)
    facts = hsfmt.json("estimate", "--samples", 1 << 32, "--tokens", 1 << 40, *shape)
    assert (facts["samples"], facts["tokens"]) == (1 << 32, 1 << 40)
    assert facts["states_nbytes"] == (1 << 40) * 7168 * 4 * 2
    result = hsfmt("estimate", "--samples", 1, "--tokens", 1 << 31, *shape, code=2)
    assert "1 to 2,147,483,647 for each of 1 sample" in result.stderr


@pytest.mark.parametrize(
    ("args", "missing", "said"),
    [
        (("--samples", 100), "--tokens, --hidden-size, --layers", "only --samples"),
        (("--hidden", 8, "--layers", 2), "--samples and --tokens (or --lengths)", "only --layers, --hidden-size"),
        (("--samples", 1, "--tokens", 1, "--layer-ids", "1"), "--hidden-size", "only --samples, --tokens, --layer-ids"),
        ((), "--samples and --tokens (or --lengths), --hidden-size, --layers", "nothing"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(hsfmt, args, missing, said):
    assert f"expected {missing}, or a folder SRC, got {said}\n" in hsfmt("estimate", *args, code=2).stderr


def test_layer_ids_are_their_number(hsfmt):
    shape = ("--samples", 3, "--tokens", 300, "--hidden-size", 64)
    facts = hsfmt.json("estimate", *shape, "--layer-ids", "2,4,5,8")
    assert (facts["n_layers"], facts["states_nbytes"]) == (4, 300 * 4 * 64 * 2)
    assert facts["states_nbytes"] == hsfmt.json("estimate", *shape, "--layers", 4)["states_nbytes"]
    assert "as many as --layer-ids" in hsfmt("estimate", *shape, "--layers", 3, "--layer-ids", "2,4", code=2).stderr
    assert "ascending" in hsfmt("estimate", *shape, "--layer-ids", "4,2", code=2).stderr


def test_layer_ids_of_a_folder_are_held_to_it(hsfmt, vllm):
    assert hsfmt.json("estimate", vllm, "--layer-ids", LAYERS)["n_layers"] == 4
    assert "4 ids, one for each state" in hsfmt("estimate", vllm, "--layer-ids", "2,4", code=2).stderr


@pytest.mark.torch
def test_options_that_a_folder_asks_for_are_taken(hsfmt, data_dir):
    dflash = data_dir / "specforge" / "v020_dflash"
    assert "give --hidden-size" in hsfmt("estimate", dflash, code=2).stderr
    facts = hsfmt.json("estimate", dflash, "--hidden-size", 64)
    assert facts["n_layers"] == 5
    assert facts == hsfmt.json("estimate", dflash, "--hidden", 64)
    modelopt = data_dir / "modelopt" / "hf_answer_only"
    stderr = hsfmt("estimate", modelopt, code=2).stderr
    assert "--from modelopt-hf --layer-ids 2,n//2,n-3,n" in stderr
    assert "--from pt --map aux=KEY,last=KEY --layer-ids IDS, got" in stderr
    assert "--final-norm" not in stderr
    keys = "aux=aux_hidden_states,last=hidden_states,ignore=conversation_id"
    assert hsfmt.json("estimate", modelopt, "--from", "pt", "--map", keys, "--layer-ids", LAYERS)["samples"] == 5


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--samples", 3),
        ("--samples", 3, "--tokens", 2, "--hidden", 4, "--layers", 1),
        ("--samples", 3, "--tokens", 30, "--hidden", 4, "--layers", 1, "--measure"),
        ("--samples", 3, "--tokens", 30, "--hidden", 4, "--layers", 1, "--from", "vllm"),
        ("SRC", "--samples", 3),
        ("SRC", "--layers", 3),
        ("SRC", "--measure", "--ratio", 2),
    ],
    ids=str,
)
def test_contradictions_are_refused(hsfmt, vllm, args):
    hsfmt("estimate", *[vllm if arg == "SRC" else arg for arg in args], code=2)


def test_no_room(hsfmt, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_nbytes", lambda _: 1000)
    shape = ("--samples", 3, "--tokens", 300, "--hidden", 64, "--layers", 2, "--dst", tmp_path / "d")
    result = hsfmt("estimate", *shape, code=3)
    assert "NOT ENOUGH" in result.stdout
    assert "--force" not in result.stderr
    document = hsfmt.json("estimate", *shape, code=3)
    assert (document["fits"], document["free_nbytes"], document["exit_code"]) == (False, 1000, 3)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(LocalStore, "free_nbytes", lambda _: 1 << 40)
    assert hsfmt.json("estimate", *shape)["fits"] is True


def test_without_a_codec_only_the_producer_is_unknown(hsfmt, vllm, tmp_path):
    facts = hsfmt.json("estimate", vllm, "--codec", "none")
    report = hsfmt.json("convert", vllm, tmp_path / "d", "--layer-ids", LAYERS, "--codec", "none")
    stored = stored_nbytes(tmp_path / "d")
    assert facts["exact_lengths"]
    assert facts["states_nbytes"] == report["written"]["raw_nbytes"]
    assert abs(facts["stored_nbytes"] - stored) < 1000
    assert facts["files"] == sum(path.is_file() for path in (tmp_path / "d").rglob("*"))


@pytest.mark.parametrize("places", [2, 12])
def test_a_measured_ratio_is_within_two_percent(hsfmt, large, tmp_path, monkeypatch, places):
    """Of real states, where these have some chunks and the small files do not count; not all of them are read."""
    from hsfmt.cli import measured_ratio

    monkeypatch.setattr(measured_ratio, "_PLACES", places)
    facts = hsfmt.json("estimate", large, "--measure")
    assert facts["measured"]["n_chunks"] == 4 * min(places, 5)
    assert facts["measured"]["n_samples"] < 320 or places == 12
    hsfmt("convert", large, tmp_path / "d", "--layer-ids", LAYERS, "-q")
    assert facts["stored_nbytes"] == pytest.approx(stored_nbytes(tmp_path / "d"), rel=0.02)


def test_converts_own_estimate_uses_the_same_arithmetic(hsfmt, large, tmp_path):
    plain = hsfmt.json("convert", large, tmp_path / "d", "--layer-ids", LAYERS, "--codec", "none", "--dry-run")
    facts = hsfmt.json("estimate", large, "--codec", "none")
    assert plain["estimate"]["stored_nbytes"] == facts["stored_nbytes"]
    assert plain["estimate"]["size"]["files"] == facts["files"]
    hsfmt("convert", large, tmp_path / "d", "--layer-ids", LAYERS, "--codec", "none", "-q")
    assert facts["stored_nbytes"] == pytest.approx(stored_nbytes(tmp_path / "d"), rel=0.001)


REAL = ["vllm/vllm032_bf16_prompt", "speculators/0.9.0", "speculators/0.9.0_fp8", "deepspec/target_cache"]
REAL_TORCH = [
    "specforge/v020_eagle3_bs1",
    "specforge/v020_eagle3_gz",
    "modelopt/vllm_dump",
    "angelslim/eagle3",
    "eagle_ge",
]


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("folder", [*REAL, *(pytest.param(name, marks=pytest.mark.torch) for name in REAL_TORCH)])
def test_real_folders_are_measured_within_two_percent(hsfmt, data_dir, tmp_path, folder, codec):
    """Small as they are; how many bytes a token takes in torch's files and in compressed ones, reading some tells."""
    facts = hsfmt.json("estimate", data_dir / folder, "--measure", "--codec", codec)
    layers = "8" if folder == "eagle_ge" else LAYERS
    report = hsfmt.json("convert", data_dir / folder, tmp_path / "d", "--layer-ids", layers, "--codec", codec)
    assert facts["tokens"] == pytest.approx(report["written"]["tokens"], rel=0.005)
    assert facts["stored_nbytes"] == pytest.approx(stored_nbytes(tmp_path / "d"), rel=0.02)


def test_a_damaged_file_is_left_out(hsfmt, vllm, tmp_path):
    import shutil

    source = Path(shutil.copytree(vllm, tmp_path / "source"))
    longest = max(source.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    longest.write_bytes(longest.read_bytes()[:-9])
    facts = hsfmt.json("estimate", source, "--measure")
    assert facts["tokens"] == 537 - 301
    assert facts["measured"]["n_samples"] == 7
    text = hsfmt("estimate", source, "--measure").stdout
    assert "measured on 4 chunks of 7 samples" in text
