"""A small folder for every source, and what has to be said to convert it."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from hsfmt.writers.tensor_files import FORMATS, FileTensor

HIDDEN = 16
LENGTHS = (5, 9, 17)
_IDS = "2,4,5,8"


@dataclass(frozen=True)
class Folder:
    """A folder of a source: where it is below tests/data, or what writes it; flags of `convert`."""

    source: str
    path: str | Callable[[Path], None]
    flags: Sequence[str] = ()
    torch: bool = True

    def place(self, data_dir: Path, scratch: Path) -> Path:
        """Return the folder; one that is made lies in `scratch`."""
        if isinstance(self.path, str):
            return data_dir / self.path
        made = scratch / "made"
        made.mkdir()
        self.path(made)
        return made


def samples(n_layers: int) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Number, token ids, mask and bfloat16 states [token, layer, hidden]."""
    rng = np.random.default_rng(n_layers)
    for number, n_tokens in enumerate(LENGTHS):
        states = rng.standard_normal((n_tokens, n_layers, HIDDEN), np.float32) * 3
        mask = (np.arange(n_tokens) > 1).astype(np.int64)
        yield number, rng.integers(0, 1000, n_tokens), mask, states.astype(ml_dtypes.bfloat16)


def _tensor(array: np.ndarray):
    import torch

    bits = array.view(np.int16) if array.dtype == ml_dtypes.bfloat16 else array
    tensor = torch.from_numpy(np.ascontiguousarray(bits))
    return tensor.view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else tensor


def write_angelslim_dflash(folder: Path) -> None:
    """As AngelSlim's generate_dflash_data.py saves them, on two ranks."""
    import torch

    for number, ids, mask, states in samples(5):
        record = {
            "input_ids": _tensor(ids)[None],
            "hidden_states": _tensor(states.reshape(1, len(ids), -1)),
            "loss_mask": _tensor(mask)[None],
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        }
        torch.save(record, folder / f"sample_{number:08d}_rank{number % 2}.ckpt")


def write_activault(folder: Path) -> None:
    """As activault's HookUploader saves batches of two rows: a folder for each hook."""
    import torch

    rng = np.random.default_rng(0)
    for layer in (3, 6):
        hook = folder / f"blocks.{layer - 1}.hook_resid_post"
        hook.mkdir()
        for group in range(2):
            ids = torch.arange(14).reshape(2, 7) + 100 * group
            states = _tensor(rng.standard_normal((2, 7, HIDDEN), np.float32).astype(ml_dtypes.bfloat16))
            record = {"states": states, "input_ids": ids, "tensor_bytes": states.nbytes + ids.nbytes}
            torch.save(record, hook / f"{group}--1_0.saved.pt")


def write_memmap(folder: Path) -> None:
    """As the ActivationCache of dictionary_learning's forks: two submodules, two shards each."""
    import torch

    found = list(samples(2))
    states = np.concatenate([states for *_, states in found]).view(np.int16)
    torch.save(torch.from_numpy(np.concatenate([ids for _, ids, *_ in found])), folder / "tokens.pt")
    torch.save(torch.tensor(np.cumsum([0, *LENGTHS])), folder / "sequence_ranges.pt")
    for layer in range(2):
        place = folder / f"layer_{layer}_out"
        place.mkdir()
        for shard, rows in enumerate((states[:11, layer], states[11:, layer])):
            (place / f"shard_{shard}.memmap").write_bytes(rows.tobytes())
            meta = {"shape": list(rows.shape), "dtype": "torch.bfloat16"}
            (place / f"shard_{shard}.meta").write_text(json.dumps(meta))
        config = {"d_model": HIDDEN, "io": "out", "shard_count": 2, "shuffle_shards": False, "total_size": len(states)}
        (place / "config.json").write_text(json.dumps(config | {"store_tokens": True, "store_sequence_ranges": True}))


def write_pt(folder: Path) -> None:
    """Dicts under keys of nobody's."""
    import torch

    for number, ids, mask, states in samples(3):
        torch.save({"tokens": _tensor(ids), "acts": _tensor(states), "weights": _tensor(mask)}, folder / f"{number}.pt")


def write_safetensors(folder: Path) -> None:
    """The same."""
    _write_arrays(folder, ".safetensors")


def write_npz(folder: Path) -> None:
    """The same."""
    _write_arrays(folder, ".npz")


def _write_arrays(folder: Path, suffix: str) -> None:
    for number, ids, mask, states in samples(3):
        arrays = {
            "acts": FileTensor("bfloat16", states.view(np.uint16)),
            "tokens": FileTensor("int64", ids),
            "weights": FileTensor("int64", mask),
        }
        with (folder / f"{number}{suffix}").open("wb") as file:
            FORMATS[suffix](file, arrays, {})


_MAPPED = ("--map", "input_ids=tokens", "--map", "hidden_states=acts", "--map", "loss_mask=weights")
_MADE = (*_MAPPED, "--layer-ids", "1,2,5", "--final-norm", "post")

# Real files where there are any, after each source the smallest; tests/data/README.md says which are imitated.
FOLDERS = {
    "vllm": Folder("vllm", "vllm/vllm032_bf16_prompt", ("--layer-ids", _IDS), torch=False),
    "speculators": Folder("speculators", "speculators/0.6.0", ("--layer-ids", _IDS), torch=False),
    "speculators fp8": Folder("speculators", "speculators/0.9.0_fp8", ("--layer-ids", _IDS), torch=False),
    "speculators-pt": Folder("speculators-pt", "speculators/0.4.0"),
    "speculators-pt 0.2": Folder("speculators-pt", "speculators/0.2.0_ckpt", ("--layer-ids", "3,5,6,8")),
    "specforge-eagle3": Folder("specforge-eagle3", "specforge/v020_eagle3_bs1", ("--layer-ids", _IDS)),
    "specforge-dflash": Folder(
        "specforge-dflash", "specforge/v020_dflash", ("--layer-ids", "2,3,4,5,6", "--hidden-size", "64")
    ),
    "specforge-dspark": Folder("specforge-dspark", "specforge/v020_dspark", ("--layer-ids", "2,3,4,5,6,8")),
    "eagle-ge": Folder("eagle-ge", "eagle_ge", ("--layer-ids", "8")),
    "modelopt-hf": Folder("modelopt-hf", "modelopt/hf_answer_only", ("--from", "modelopt-hf", "--layer-ids", _IDS)),
    "modelopt-vllm": Folder("modelopt-vllm", "modelopt/vllm_dump", ("--layer-ids", _IDS)),
    "modelopt-trtllm": Folder(
        "modelopt-trtllm", "modelopt/trtllm_dump", ("--from", "modelopt-trtllm", "--layer-ids", _IDS)
    ),
    "angelslim-eagle3": Folder("angelslim-eagle3", "angelslim/eagle3", ("--layer-ids", _IDS)),
    "angelslim-dflash": Folder(
        "angelslim-dflash", write_angelslim_dflash, ("--layer-ids", "2,3,4,5,6", "--hidden-size", str(HIDDEN))
    ),
    "deepspec": Folder("deepspec", "deepspec/target_cache", ("--layer-ids", _IDS), torch=False),
    "verl-speco": Folder("verl-speco", "verl_speco/listed", ("--layer-ids", _IDS, "--final-norm", "post")),
    "automodel": Folder("automodel", "automodel/dense", torch=False),
    "transformers": Folder("transformers", "transformers/dict", ("--layer-ids", "0,1,2,3", "--final-norm", "post")),
    "saelens": Folder("saelens", "saelens/post_float32", torch=False),
    "saelens 16": Folder("saelens", "saelens/pre_float16", torch=False),
    "activault": Folder("activault", write_activault, ("--final-norm", "post")),
    "memmap": Folder("memmap", write_memmap, ("--layer-ids", "1,3", "--final-norm", "pre")),
    "pt": Folder("pt", write_pt, _MADE),
    "safetensors": Folder("safetensors", write_safetensors, _MADE),
    "npz": Folder("npz", write_npz, _MADE),
}
