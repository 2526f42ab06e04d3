"""Write the datasets of format 1.0 that every later version has to read: tests/data/format-1.0/.

    python tests/compatibility/make_datasets.py FOLDER

Run once, on 30 November 2026, with hsfmt 0.1.0; its output is frozen. It stays to say how they came about.
"""

import hashlib
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]  # the checkout: spec/ is in no wheel

from hsfmt import DatasetWriter, seal  # noqa: E402  found through the line above
from hsfmt.readers.sample_reader import SampleReader  # noqa: E402
from spec.vectors.folder import Folder  # noqa: E402

LAYERS, HIDDEN = [1, 3], 8
SETTINGS = {"layers": LAYERS, "hidden_size": HIDDEN, "final_norm": "pre", "model": "example/tiny", "chunk_tokens": 4,
            "shard_tokens": 16, "seal": False, "producer": {"host": "example"}}  # fmt: skip
STATES = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4", "float8_e4m3fn": "u1"}
EXTRAS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bfloat16", "float16",
          "float32", "float64", "float8_e4m3fn"]  # fmt: skip


def native(name: str) -> np.dtype:
    """Return NumPy's dtype of an element type."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def sample(number: int, dtype: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Return what `write` takes; finite, different by number, one value of each extra null."""
    rng = np.random.default_rng(number)
    n = 3 + 2 * number
    states = rng.standard_normal((n, len(LAYERS), HIDDEN), np.float32).astype(native(dtype))
    given: dict[str, Any] = {"input_ids": rng.integers(0, 999, n), "hidden_states": states}
    if number:
        given["loss_mask"] = rng.integers(0, 2, n).astype(np.uint8)
        given["metadata"] = {"turn": number, "loss": 0.5 / number, "text": 'ü "quoted"'}
    if dtype == "float8_e4m3fn":
        given["hidden_states_scale"] = rng.random(n, np.float32)
    for k, (name, about) in enumerate(columns.items()):
        if number == 1 + k:
            continue  # null
        rows = {"token": (n,), "sample": (), "ragged": (number,)}[about["kind"]]
        values = rng.integers(0, 2, (*rows, *about["shape"])) if about["dtype"] == "bool" else rng.random(
            (*rows, *about["shape"])) * 100  # fmt: skip
        given[name] = values.astype(native(about["dtype"]))
    return given


def make(folder: Path, dtype: str, codec: str, kinds: list[str]) -> None:
    """Write one dataset, of two parts and two snapshots (in two, a third part replaces one), and what it must give."""
    dataset = folder / "dataset"
    columns = {
        f"{kind}_{name}": {"kind": kind, "dtype": name, "shape": [2] if kind == "ragged" else []}
        for kind, name in zip(("token", "sample", "ragged"), kinds, strict=True)
    }

    def write(part: str, numbers: list[int], hole: str) -> None:
        names = iter([part])
        with DatasetWriter(
            dataset, **SETTINGS, dtype=dtype, codec=codec, extras=columns, part_names=lambda: next(names)
        ) as writer:
            for number in numbers:
                writer.write(f"sample-{number}", **sample(number, dtype, columns))
            writer.hole(hole, "the server timed out")

    write("a-first", [0, 1, 2], "sample-3")
    seal(dataset, attachments={"d2t": np.arange(4), "token_freq": np.ones(3, np.float32)})
    write("b-second", [3, 4], "never")
    if (dtype, codec) in (("bfloat16", "zstd"), ("float8_e4m3fn", "none")):  # in two, to keep all small
        committed, aside = dataset / "hsfmt/manifests/b-second.json", folder / "b-second.json"
        committed.rename(aside)  # the writer would refuse the ids
        write("c-instead", [3, 4], "never")
        aside.rename(committed)
        edited = Folder(dataset)
        manifest = edited.manifest("c-instead")
        manifest["replaces"] = [{"digest": edited.manifest("b-second")["digest"], "part": "b-second"}]
        edited.put_manifest("c-instead", manifest)
    seal(dataset, retract=["sample-2"], drop_attachments=["token_freq"])
    text = json.dumps(expected(dataset), sort_keys=True, ensure_ascii=False)
    (folder / "expected.json").write_text(text + "\n", encoding="utf-8")


def expected(dataset: Path) -> dict[str, Any]:
    """Return what a reader gets, of each snapshot; states and extras as sha256 of their little-endian bytes."""
    result = {}
    for name in sorted(path.name for path in (dataset / "hsfmt/snapshots").iterdir()):
        reader = SampleReader(dataset, snapshot=f"xxh3_128:{name}")
        result[name] = {
            "attachments": [entry["name"] for entry in reader.snapshot.attachments],
            "content_digest": reader.content_digest,
            "counts": dict(reader.snapshot.counts),
            "header": reader.header.to_json(),
            "samples": [shown(reader, i) for i in range(reader.snapshot.n_samples)],
        }
    return result


def shown(reader: SampleReader, i: int) -> dict[str, Any]:
    """Return one sample as expected.json has it."""
    found = reader.read(i)
    return {
        "extras": {name: None if rows is None else sha256(rows) for name, rows in sorted(found.extras.items())},
        "hidden_states": sha256(found.hidden_states),
        "id": reader.sample_ids[i],
        "input_ids": found.input_ids.tolist(),
        "loss_mask": found.loss_mask.astype(int).tolist(),
        "metadata": found.metadata,
        "shape": list(found.hidden_states.shape),
    }


def sha256(array: np.ndarray) -> str:
    """Return the digest of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    kinds = itertools.cycle(EXTRAS)
    for dtype in STATES:
        for codec in ("none", "zstd"):
            target = folder / f"{dtype}-{codec}"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            make(target, dtype, codec, [next(kinds) for _ in range(3)])


if __name__ == "__main__":
    main()
