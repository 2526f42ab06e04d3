"""What a dataset says that it holds, by a reader that believes everything and shares no parser with the library."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dataset_forge import Forge
from numcodecs import blosc

Array = np.ndarray[Any, Any]
_WIDTHS = {"bfloat16": "<u2", "int32": "<i4", "int64": "<i8", "uint8": "u1"}


class Held(NamedTuple):
    """A sample as bytes: states [token, layer, hidden], token ids as int64, loss mask, and metadata as it is stored."""

    states: bytes
    ids: bytes
    mask: bytes
    meta: bytes


def held(root: Path) -> dict[str, Held]:
    """Return the samples of the current snapshot by their ids.

    Raises
    ------
    Exception
        Of any kind, if documents do not say it.
    """
    forge = Forge(root)
    arrays = forge.snapshot.arrays
    names, offsets = arrays["part_names"].tobytes().decode(), arrays["part_name_offsets"].tolist()
    parts = [names[start:stop] for start, stop in itertools.pairwise(offsets)]
    found = {}
    for part, row in zip(arrays["part"].tolist(), arrays["row"].tolist(), strict=True):
        index = forge.indexes[parts[part]].arrays
        first, end = index["token_offsets"][row : row + 2].tolist()
        states, ids, mask = (
            _rows(forge, parts[part], column, first, end) for column in ("hidden_states", "input_ids", "loss_mask")
        )
        sample_id = _text(index["ids"], index["id_offsets"], row).decode()
        meta = _text(index["meta"], index["meta_offsets"], row)
        found[sample_id] = Held(states.tobytes(), ids.astype(np.int64).tobytes(), mask.tobytes(), meta)
    return found


def _text(data: Array, offsets: Array, row: int) -> bytes:
    return data[offsets[row] : offsets[row + 1]].tobytes()


def _rows(forge: Forge, part: str, column: str, first: int, end: int) -> Array:
    entry = forge.manifests[part]["columns"][column]
    n_planes = entry["shape"][1] if column == "hidden_states" else 1
    n_rows = entry["chunk_shape"][0]
    rows = []
    for chunk_row in range(first // n_rows, (end - 1) // n_rows + 1):
        planes = [_chunk(forge, part, column, chunk_row * n_planes + plane) for plane in range(n_planes)]
        rows.append(np.concatenate(planes, axis=1) if column == "hidden_states" else planes[0])
    start = first // n_rows * n_rows
    return np.concatenate(rows)[first - start : end - start]


def _chunk(forge: Forge, part: str, column: str, number: int) -> Array:
    entry = forge.manifests[part]["columns"][column]
    payload = forge.payload(part, column, number)
    raw = payload if entry["codec"] == "none" else blosc.decompress(payload)
    return np.frombuffer(raw, _WIDTHS[entry["dtype"]]).reshape(entry["chunk_shape"])
