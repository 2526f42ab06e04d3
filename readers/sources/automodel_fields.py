"""The fields of an Automodel shard, and how a sample is taken out of them.

Automodel stores what its trainer is fed: token ids, loss mask and target probabilities are shifted one place to the
left against the states and the attention mask. With the real tokens in places a to b - 1, the state in place t + 1 goes
with what the shifted fields have in place t, and a sample is the b - a - 1 tokens of which both are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import SourceError
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.base import SourceSample
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.safetensors_file import TensorEntry, read_entries, read_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

PROBS = ("target_probs", "target_probs_values", "target_probs_indices")
_INT64 = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Fields:
    """What the manifest says of each sample's fields.

    Attributes
    ----------
    length
        Places of a sample, padding included.
    n_layers, hidden_size, dtype
        Of the states; the probabilities have the same dtype.
    vocab, topk
        Tokens of the draft vocabulary, and how many of them have a probability; 0 for all.
    """

    length: int
    n_layers: int
    hidden_size: int
    dtype: np.dtype[Any]
    vocab: int
    topk: int

    @property
    def probs(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Dtype and width of the fields with the target's distribution."""
        if not self.topk:
            return {"target_probs": (self.dtype, self.vocab)}
        return {"target_probs_values": (self.dtype, self.topk), "target_probs_indices": (np.dtype("<i4"), self.topk)}

    def entries(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Dtype and shape of a sample's fields."""
        n = self.length
        return {
            "input_ids": (_INT64, (n,)),
            "attention_mask": (_INT64, (n,)),
            "loss_mask": (_INT64, (n,)),
            "aux_hidden_states": (self.dtype, (n, self.n_layers * self.hidden_size)),
            "position_mask": (np.dtype("?"), (n, 1)),
            **{name: (dtype, (n, width)) for name, (dtype, width) in self.probs.items()},
        }

    @property
    def nbytes(self) -> int:
        """Bytes of a sample's fields together."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.entries().values())

    def extras(self, ignored: Collection[str]) -> dict[str, dict[str, Any]]:
        """The columns beside the states that a sample has, without those that the user leaves out."""
        found: dict[str, dict[str, Any]] = {"position_mask": {"kind": "token", "dtype": "bool", "shape": []}}
        for name, (dtype, width) in self.probs.items():
            found[name] = {"kind": "token", "dtype": dtype.name, "shape": [width]}
        left_out = set(ignored) | (set(PROBS) if "target_probs" in ignored else set())
        return {name: column for name, column in found.items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard whose header was checked: where its fields lie, and the stamp that it had then."""

    path: Path
    where: str
    entries: Mapping[str, TensorEntry]
    fields: Fields
    stamp: FileStamp

    def read(self, name: str, row: int, begin: int, end: int) -> NDArray[Any]:
        """Places begin to end - 1 of a field of one sample, in memory of their own."""
        entry = self.entries[name]
        place = entry.dtype.itemsize * math.prod(entry.shape[2:])
        offset = entry.offset + (row * self.fields.length + begin) * place
        part = TensorEntry(entry.dtype, (end - begin, *entry.shape[2:]), offset)
        return read_tensor(self.path, part, f"{self.where}[{name}]")


def open_fields(path: Path, where: str, fields: Fields, n_samples: int) -> OpenShard:
    """Check the header of a shard against what the manifest says of it.

    Raises
    ------
    SourceError
        It is damaged, or its fields are of other dtypes, shapes or numbers of samples.
    OSError
        The file can't be read.
    """
    stamp = FileStamp.take(path, where)
    entries = read_entries(path, where)
    wanted = fields.entries()
    if set(entries) != set(wanted):
        got = ", ".join(sorted(entries)[:12]) or "none"
        raise SourceError.at(where, expected=f"the fields {', '.join(sorted(wanted))}", got=got)
    for name, (dtype, shape) in wanted.items():
        entry = entries[name]
        if (entry.dtype, entry.shape) != (dtype, (n_samples, *shape)):
            raise SourceError.at(
                f"{where}[{name}]",
                expected=f"{dtype.name} {[n_samples, *shape]}, as the manifest says",
                got=f"{entry.dtype.name} {list(entry.shape)}",
                remedy="the shard is of another cache, or of another place in this one",
            )
    return OpenShard(path, where, entries, fields, stamp)


def real_tokens(shard: OpenShard, row: int) -> tuple[int, int]:
    """The first place with a real token and the one after the last, by the attention mask.

    Raises
    ------
    SourceError
        The mask is none, has a hole, or leaves fewer than two tokens.
    """
    length, where = shard.fields.length, f"{shard.where}[attention_mask]"
    mask = columns.loss_mask(shard.read("attention_mask", row, 0, length), length, where)
    n_real = int(mask.sum())
    begin = int(mask.argmax())
    if n_real < 2 or not mask[begin : begin + n_real].all():
        got = f"{n_real} ones" + ("" if n_real < 2 else f", from {begin} on with zeros between them")
        raise SourceError.at(where, expected="two or more ones in a row, and the zeros of padding around", got=got)
    return begin, begin + n_real


def take_sample(
    shard: OpenShard, row: int, sample_id: str, order: NDArray[np.int64], ignored: Collection[str]
) -> SourceSample:
    """Copy a sample out of a shard, without padding and with its fields aligned.

    Parameters
    ----------
    shard, row
        Which sample.
    sample_id
        Its id.
    order
        int64 [layer]: the layers of the file in ascending order.
    ignored
        Columns to leave out.

    Raises
    ------
    SourceError
        Masks that are none, or fields that are not shifted as Automodel does it.
    """
    begin, end = real_tokens(shard, row)
    fields, n_tokens = shard.fields, end - begin - 1
    ids = shard.read("input_ids", row, begin, fields.length)
    loss = shard.read("loss_mask", row, begin, fields.length)
    if ids[-1] or loss[-1] or loss[n_tokens]:
        raise SourceError.at(
            f"{shard.where}[loss_mask]",
            expected="token ids and loss mask one place to the left of the states, as precompute_eagle3.py puts them",
            got=f"token {ids[-1]} and mask {loss[-1]} in the last place, mask {loss[n_tokens]} in place {end - 1}",
            remedy="fields that are not shifted have another meaning: say which program wrote them",
        )
    aux = shard.read("aux_hidden_states", row, begin + 1, end)
    states = aux.reshape(n_tokens, fields.n_layers, fields.hidden_size)
    extras = {name: shard.read(name, row, begin, end - 1) for name in fields.extras(ignored)}
    if "position_mask" in extras:
        extras["position_mask"] = extras["position_mask"].reshape(n_tokens)
    shard.stamp.check_unchanged()
    return SourceSample(
        sample_id,
        columns.token_ids(ids[:n_tokens], f"{shard.where}[input_ids]"),
        np.ascontiguousarray(states[:, order]),
        columns.loss_mask(loss[:n_tokens], n_tokens, f"{shard.where}[loss_mask]"),
        {"padding": fields.length - (end - begin)},
        extras,
    )
