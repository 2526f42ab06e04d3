"""Which source a folder is of: found by looking where that is safe, asked for where it is not."""

import json
import os

import numpy as np
import pytest
import torch

from hsfmt.errors import HsfmtError, NotFoundError, SourceError, StorageError, UsageError
from hsfmt.readers.sources import SOURCE_NAMES, SourceOptions, find_source, parse_key_map
from hsfmt.readers.sources.folder import natural_key, stem

T, H = 6, 8


def wide(n: int, *, batch: bool = False) -> torch.Tensor:
    states = torch.zeros(T, n * H, dtype=torch.bfloat16)
    return states[None] if batch else states


IDS = {"input_ids": torch.arange(T), "loss_mask": torch.ones(T, dtype=torch.int64)}
BATCHED = {key: value[None] for key, value in IDS.items()}
MODELOPT = {"hidden_states": wide(1), "aux_hidden_states": wide(3), "conversation_id": "c"}
# What programs write: the file's name, the dict, the source.
KNOWN = {
    "specforge-eagle3": (
        "data_0.ckpt",
        IDS,
        {"aux_hidden_state": wide(3, batch=True), "hidden_state": wide(1, batch=True)},
    ),
    "specforge-eagle3 with None": ("data_0.ckpt", IDS, {"aux_hidden_state": None, "hidden_state": wide(1, batch=True)}),
    "specforge-eagle3 without aux": ("data_0.ckpt", IDS, {"hidden_state": wide(1, batch=True)}),
    "specforge-dflash": ("rows_0-2000/data_0.ckpt", IDS, {"hidden_states": wide(5, batch=True)}),
    "specforge-dspark": (
        "data_0.ckpt",
        IDS,
        {"hidden_states": wide(5, batch=True), "target_last_hidden_states": wide(1, batch=True)},
    ),
    "eagle-ge": ("0/data_0.ckpt", IDS, {"hidden_state": wide(1)}),
    "modelopt-trtllm": (
        "dp_0_1.pt",
        {"input_ids": IDS["input_ids"], "id": "1"},
        {"hidden_state": wide(1), "aux_hidden_states": wide(3)},
    ),
    "modelopt-vllm": (
        "conv.pt",
        IDS,
        dict(zip(("aux_hidden_states", "hidden_states"), wide(4).split([3 * H, H], dim=1), strict=True)),
    ),
    "angelslim-eagle3": (
        "rank_0/rows_0-5000/data_0.ckpt",
        BATCHED,
        {"hidden_states": wide(3, batch=True), "target_hiddens": wide(1, batch=True)},
    ),
    "angelslim-dflash": (
        "sample_00000000_rank0.ckpt",
        BATCHED,
        {"hidden_states": wide(5, batch=True), "attention_mask": torch.ones(1, T)},
    ),
}
# What several programs write: the candidates.
SHARED = {
    ("specforge-eagle3",): IDS | {"aux_hidden_state": wide(3), "hidden_state": wide(1)},
    ("modelopt-hf", "modelopt-vllm"): IDS | MODELOPT,
    ("modelopt-hf", "modelopt-vllm", "modelopt-trtllm"): {"input_ids": IDS["input_ids"]} | MODELOPT,
    ("specforge-dflash",): IDS | {"hidden_states": wide(5, batch=True)},
    ("angelslim-dflash",): BATCHED | {"hidden_states": wide(5, batch=True)},
}
# What no source of its own reads: the program that is named, and a map that reads it.
OTHERS = [
    ({"hidden_states": wide(1)}, "a dump of the last state"),
    ({"hidden_states": wide(3), "last_hidden_states": wide(1)}, "verl-SpeCo"),
    ({"target_hidden_states": wide(3), "target_last_hidden_states": wide(1)}, "DeepSpec"),
    ({"some_states": wide(3)}, "no program known here"),
]


@pytest.mark.parametrize("name", KNOWN)
def test_key_sets_that_one_program_writes(tmp_path, name):
    path, ids, states = KNOWN[name]
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(ids | states, tmp_path / path)
    source = find_source(tmp_path, options=SourceOptions(hidden_size=H))
    assert source.name == name.partition(" ")[0]
    widths = sum(value.shape[-1] for key, value in states.items() if "hidden" in key and value is not None)
    assert source.load(source.items[0]).hidden_states.shape == (T, widths // H, H)
    # The same by name, in a folder where the files' names say nothing.
    torch.save(ids | states, tmp_path / "x.pt")
    (tmp_path / path).unlink()
    assert find_source(tmp_path, source.name, options=SourceOptions(hidden_size=H)).meaning() == source.meaning()


@pytest.mark.parametrize("names", SHARED, ids="+".join)
def test_key_sets_of_several_programs_are_asked_about(tmp_path, names):
    torch.save(SHARED[names], tmp_path / "x.pt")
    with pytest.raises(UsageError) as info:
        find_source(tmp_path)
    lines = str(info.value).splitlines()
    assert len(lines) == len(info.value.problems)
    for name in names:
        (line,) = [line for line in lines if line.startswith(f"to read as {name}: ")]
        assert f"--from {name} --layer-ids" in line
        assert "x.pt with " in line
        for key, value in SHARED[names].items():
            assert f"{key} {list(value.shape) if isinstance(value, torch.Tensor) else 'str'}" in line
        source = find_source(tmp_path, name, options=SourceOptions(hidden_size=H))
        assert source.load(source.items[0]).hidden_states.shape[::2] == (T, H)
    alone = "hidden_states" in SHARED[names] and "aux_hidden_states" not in SHARED[names]
    assert ("--from pt --map hidden_states=hidden_states" in str(info.value)) == alone
    assert ("--from pt --map aux=KEY,last=KEY" in str(info.value)) == (not alone)


@pytest.mark.parametrize(("states", "program"), OTHERS, ids=["+".join(sorted(states)) for states, _ in OTHERS])
def test_keys_without_a_source_are_asked_about(tmp_path, states, program):
    torch.save(IDS | states, tmp_path / "data_0.ckpt")
    with pytest.raises(UsageError) as info:
        find_source(tmp_path)
    text = str(info.value)
    assert "\n" not in "".join(f"{problem.where}{problem.expected}{problem.got}" for problem in info.value.problems)
    assert program in text
    # A dump of all layers in one entry is no program's own, but anyone's.
    key = next(iter(states)) if len(states) == 1 else "KEY"
    assert f"to read one entry as all layers: expected --from pt --map hidden_states={key}" in text
    for words in ("--hidden-size N", "--layer-ids", "--final-norm"):
        assert words in text
    for key, value in states.items():
        assert f"{key} {list(value.shape)}" in text


@pytest.mark.parametrize(
    ("states", "program"), OTHERS[:-1], ids=["+".join(sorted(states)) for states, _ in OTHERS[:-1]]
)
def test_the_suggested_command_reads_them(tmp_path, states, program):
    torch.save(IDS | states, tmp_path / "data_0.ckpt")
    with pytest.raises(UsageError, match=program) as info:
        find_source(tmp_path)
    key_map = str(info.value).partition("--map ")[2].partition(" ")[0]
    source = find_source(tmp_path, "pt", options=SourceOptions(key_map=parse_key_map(key_map), hidden_size=H))
    n_layers = source.load(source.items[0]).hidden_states.shape[1]
    assert n_layers == sum(value.shape[-1] for value in states.values()) // H


def test_generic_sources_step_back(tmp_path):
    """A shape that shows the layers is a generic dump only where no program is known to write it."""
    torch.save(IDS | {"hidden_states": [torch.zeros(T, H)] * 4}, tmp_path / "data_0.pt")
    assert find_source(tmp_path).name == "pt"
    (tmp_path / "data_config.json").write_text('{"hidden_states": {"layer_ids": [2, 4, 5, 7]}}')
    assert find_source(tmp_path).name == "speculators-pt"


@pytest.mark.parametrize(
    "states",
    [torch.zeros(T, 3, H), torch.zeros(1, T, 3, H), [torch.zeros(T, H)] * 3],
    ids=["[T,L,H]", "[1,T,L,H]", "list"],
)
def test_states_whose_rank_shows_the_layers(tmp_path, states):
    torch.save(IDS | {"hidden_states": states}, tmp_path / "x.pt")
    source = find_source(tmp_path)
    assert (source.name, source.meaning().n_layers) == ("pt", 3)


def test_unreadable_first_files_do_not_matter(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "b.pt")
    torch.save(IDS | {"hidden_states": torch.zeros(T, 3, H)}, tmp_path / "c.pt")
    source = find_source(tmp_path)
    assert source.meaning().n_layers == 3
    for item, words in zip(source.items, ("empty file", "token ids under|as in the first"), strict=False):
        with pytest.raises(SourceError, match=words):
            source.load(item)


def test_other_torch_files(tmp_path):
    torch.save({"weights": torch.zeros(3)}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match=r"weights in model\.pt"):
        find_source(tmp_path)


def test_two_sources_in_one_folder(tmp_path, save_safetensors):
    save_safetensors(
        tmp_path / "r.safetensors", {"hidden_states": np.zeros((2, 3, 4), np.float32), "token_ids": np.arange(2)}
    )
    torch.save(IDS | {"hidden_states": torch.zeros(T, 3, H)}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="--from vllm or --from pt"):
        find_source(tmp_path)
    source = find_source(tmp_path, "vllm")
    assert [stray.path for stray in source.strays] == ["x.pt"]


def test_other_safetensors_files(tmp_path, save_safetensors):
    save_safetensors(tmp_path / "model.safetensors", {"weight": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match=r"model\.safetensors with weight \[3\]"):
        find_source(tmp_path)


@pytest.mark.parametrize("name", ["specforge", "", "VLLM"])
def test_unknown_names(tmp_path, name):
    with pytest.raises(UsageError, match="one of vllm, speculators, speculators-pt, specforge-eagle3"):
        find_source(tmp_path, name)


def test_every_source_says_what_it_is(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    for name in SOURCE_NAMES:
        with pytest.raises((NotFoundError, SourceError)):
            find_source(tmp_path, name)


def test_no_folder(tmp_path):
    with pytest.raises(NotFoundError):
        find_source(tmp_path / "gone")
    with pytest.raises(NotFoundError, match="an empty folder"):
        find_source(tmp_path)
    (tmp_path / "file.pt").touch()
    with pytest.raises(UsageError, match="a folder"):
        find_source(tmp_path / "file.pt")


def test_other_files(tmp_path):
    (tmp_path / "a.bin").touch()
    (tmp_path / "b.idx").touch()
    with pytest.raises(NotFoundError, match=r"2 files of other kinds \(\.bin, \.idx\)"):
        find_source(tmp_path)


def test_natural_order():
    names = [
        "data_10",
        "data_2",
        "data_1",
        "data_01",
        "a/data_3",
        "a10/x",
        "a9/x",
        "data",
        "9",
        "10",
        "x-1-12",
        "x-1-2",
    ]
    order = [
        "9",
        "10",
        "a/data_3",
        "a9/x",
        "a10/x",
        "data",
        "data_01",
        "data_1",
        "data_2",
        "data_10",
        "x-1-2",
        "x-1-12",
    ]
    assert sorted(names, key=natural_key) == order


def test_numbers_of_any_length_are_counted():
    zeros, nines = "0" * 5000, "9" * 5000
    order = [zeros, "2", zeros + "3", "10", "8" + nines[1:], nines, "1" + zeros]
    for names in (order[::-1], order[3:] + order[:3]):
        assert sorted(names, key=natural_key) == order


@pytest.mark.parametrize(
    ("path", "expected"), [("a/b.c.pt", "a/b.c"), ("x.pt", "x"), ("a.b/x", "a.b/x"), ("a/.pt", "a/.pt"), ("ü.pt", "ü")]
)
def test_stem(path, expected):
    assert stem(path) == expected


def test_states_in_a_dict(tmp_path):
    record = IDS | {"hidden_states": {layer: torch.zeros(T, H) for layer in (2, 5)}}
    torch.save(record, tmp_path / "x.pt")
    with pytest.raises(SourceError, match=r"got dict with the keys 2, 5 — save the layers as a list"):
        find_source(tmp_path, "pt").meaning()


@pytest.mark.parametrize("name", [None, "vllm", "pt"])
def test_a_dataset_is_no_source(tmp_path, name):
    def make(folder, attributes):
        (folder / "hsfmt" / "index").mkdir(parents=True)
        (folder / "hsfmt" / "index" / "p.safetensors").touch()
        (folder / "zarr.json").write_text(json.dumps({"attributes": attributes}))

    make(tmp_path / "data", {"hsfmt": {}})
    with pytest.raises(UsageError, match=r"data: expected .* got an hsfmt dataset already — hsfmt info"):
        find_source(tmp_path / "data", name)
    (tmp_path / "outer" / "hsfmt").mkdir(parents=True)
    (tmp_path / "data").rename(tmp_path / "outer" / "hsfmt" / "data")
    with pytest.raises(UsageError, match=r"hsfmt/data: .* already — move it out"):
        find_source(tmp_path / "outer", name)
    make(tmp_path / "other", {})
    with pytest.raises(HsfmtError, match="safetensors"):
        find_source(tmp_path / "other").meaning()


def test_storage_failures_are_not_the_datas_fault(tmp_path, monkeypatch):
    for i in range(2):
        torch.save(IDS | {"hidden_states": torch.zeros(T, 3, H)}, tmp_path / f"x{i}.pt")
    source = find_source(tmp_path)
    source.meaning()
    (tmp_path / "x1.pt").unlink()
    with pytest.raises(StorageError, match=r"x1\.pt"):
        source.load(source.items[1])

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        find_source(tmp_path)


def test_importing_sources_imports_no_torch(run_python, repo_root):
    code = "import hsfmt.readers.sources, sys; print([m for m in ('torch', 'zarr', 'pyarrow') if m in sys.modules])"
    assert run_python(code, path=repo_root).strip() == "[]"


def test_connector_files_need_no_torch(run_python, repo_root, data_dir):
    code = f"""
import sys
from hsfmt.readers.sources import find_source
for name in ("vllm/vllm032_bf16_prompt", "speculators/0.9.0_fp8"):
    source = find_source({str(data_dir)!r} + "/" + name)
    print(len([source.load(item) for item in source.items]), "torch" in sys.modules)
"""
    assert run_python(code, path=repo_root).split() == ["8", "False", "24", "False"]


def test_workers_of_a_spawned_pool(run_python, repo_root, data_dir):
    code = f"""
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from hsfmt.readers.sources import find_source
if __name__ == "__main__":
    for name in ("speculators/0.6.0", "speculators/0.4.0"):
        source = find_source({str(data_dir)!r} + "/" + name)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            lengths = [len(sample.input_ids) for sample in pool.map(source.load, source.items[:3])]
        print(*lengths)
"""
    assert run_python(code, path=repo_root).split() == ["29", "58", "205", "29", "58", "205"]
