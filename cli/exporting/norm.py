"""The model's final norm, applied to the last state as the model itself does it, and checked.

`rms` is LlamaRMSNorm of transformers and its many copies, `gemma` is GemmaRMSNorm, which multiplies by 1 + weight.
torch computes it, since another order of summation would give other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt.cli import units
from hsfmt.cli.exporting.norm_config import NormFacts, is_final, key_problem
from hsfmt.errors import HsfmtError, NotFoundError, SampleError, UsageError
from hsfmt.header import Header
from hsfmt.readers.sources.safetensors_file import read_entries, read_tensor

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

STYLES = ("rms", "gemma")
OPTION = "--norm-weight"
_BLOCK_TOKENS = 1024
_NORMED = 0.01
_MIN_TOKENS = 8  # fewer may look normed by chance
_LOWEST, _HIGHEST = 0.9, 1.02
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """A model's final norm.

    Attributes
    ----------
    weight
        [hidden], bit patterns of `dtype`.
    dtype
        Element type of the states that it is applied to, which the weight is cast to as the model's loader does.
    eps, style
        As the model's config has them; one of STYLES.
    source
        FILE:KEY, for the record.
    checked_against
        The config that has this eps and style, None where nothing says them both.
    """

    weight: Array
    dtype: str
    eps: float
    style: str
    source: str
    checked_against: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what names this norm in a job, wherever the file lies."""
        digest = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.weight).view(np.uint8).data)
        return {"eps": repr(self.eps), "key": self.source.rpartition(":")[2], "style": self.style, "weight": digest}

    def apply(self, states: Array, sample_id: str) -> Array:
        """Return states [token, hidden], of ml_dtypes' or NumPy's type, after the norm.

        Raises
        ------
        SampleError
            They are after the norm already, or so small that eps decides what becomes of them.
        """
        import torch

        from hsfmt.readers.views import as_array, as_tensor

        weight = as_tensor(self.weight, self.dtype)
        factor = weight if self.style == "rms" else 1.0 + weight.float()
        out = np.empty_like(self.weight, shape=states.shape)
        before, after = np.empty(len(states), np.float32), np.empty(len(states), np.float32)
        for at in range(0, len(states), _BLOCK_TOKENS):
            block = np.ascontiguousarray(states[at : at + _BLOCK_TOKENS]).view(self.weight.dtype)
            taken = as_tensor(block, self.dtype)
            made = self._normed(taken, factor)
            out[at : at + len(block)] = as_array(made, self.dtype)
            wide = factor.float()
            # A channel of weight 0 says nothing.
            used = wide != 0
            for sizes, values in ((before, taken), (after, made)):
                ratio = values.float()[:, used] / wide[used]
                sizes[at : at + len(block)] = torch.sqrt(ratio.pow(2).mean(-1)).numpy()
        self._check(before, after, sample_id)
        return out.view(states.dtype)

    def _normed(self, states: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        import torch

        wide = states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.style == "rms":
            return factor * wide.to(states.dtype)
        return (wide * factor).type_as(states)

    def _check(self, before: Array, after: Array, sample_id: str) -> None:
        where, samples = f"last state of sample {sample_id!r}", (sample_id,)
        if len(before) >= _MIN_TOKENS and np.all(np.abs(before - 1) < _NORMED):
            raise SampleError.at(
                where,
                expected="states before the final norm, as the dataset says",
                got="a root mean square of 1 at every token once divided by the weight: they are after it",
                remedy=f"leave {OPTION} out and write the dataset anew with --final-norm post",
                samples=samples,
            )
        size = float(np.median(after))
        if not _LOWEST <= size <= _HIGHEST:
            raise SampleError.at(
                where,
                expected="a root mean square of about 1 after the norm, once divided by the weight",
                got=f"{size:.3g} (median of {units.counted(len(after), 'token')})",
                remedy=f"compare {OPTION}, --norm-eps ({self.eps:g}) and --norm-style ({self.style}) with the model's",
                samples=samples,
            )


def norm_notes(norm: FinalNorm, facts: NormFacts | None) -> list[str]:
    """Say what of a norm nothing has checked, and what of it can't be exact."""
    notes = []
    key = norm.source.rpartition(":")[2]
    if not is_final(key):
        notes.append(f"{key} is not named as a final norm is (model.norm.weight): make sure that it is the model's")
    if norm.checked_against is None:
        factor = "the weight" if norm.style == "rms" else "1 + weight"
        why = "no config.json lies beside the weight" if facts is None else f"{facts.where} does not say them both"
        notes.append(
            f"the final norm is computed with --norm-style {norm.style}, which multiplies by {factor}, and --norm-eps "
            f"{norm.eps!r}, and nothing checked that the model does so: {why}; --model-config PATH checks it"
        )
    if facts is not None and facts.is_wide and norm.style == "rms":
        notes.append(
            f"models of type {facts.model_type} multiply by the weight before they round, not after it: values may "
            "differ from the model's by a rounding"
        )
    return notes


def read_norm(given: str, eps: float | None, style: str, header: Header, facts: NormFacts | None = None) -> FinalNorm:
    """Read the weight that --norm-weight names.

    Parameters
    ----------
    given
        FILE.safetensors:KEY.
    eps, style
        --norm-eps and --norm-style.
    header
        What the dataset's states mean.
    facts
        What the model's config says of the norm, None without one.

    Raises
    ------
    UsageError
        Something is missing, or the tensor is no weight of such a norm.
    NotFoundError
        No such file.
    """
    file, colon, key = given.rpartition(":")
    where = f"{OPTION} {given}"
    if not colon or not file or not key:
        raise UsageError.at(OPTION, expected="FILE.safetensors:KEY, as model.safetensors:model.norm.weight", got=given)
    if eps is None or not 0 <= eps < 1:
        remedy = "give the model's: rms_norm_eps of its config.json"
        if facts is not None and facts.eps is not None:
            remedy = f"--norm-eps {facts.eps!r}, which is {facts.eps_name} of {facts.where}"
        raise UsageError.at("--norm-eps", expected="a number from 0 to 1", got=f"{eps}", remedy=remedy)
    weight = _read_weight(Path(file), key, where, header.hidden_size)
    # float8 states are dequantised to bfloat16, in which the model computes.
    dtype = "bfloat16" if header.scaling else header.dtype
    checked = facts.where if facts is not None and facts.settles() else None
    return FinalNorm(_cast(weight, dtype, where), dtype, float(eps), style, given, checked)


def _read_weight(path: Path, key: str, where: str, hidden_size: int) -> Array:
    try:
        entries = read_entries(path, str(path))
    except OSError as error:
        if isinstance(error, HsfmtError):
            raise
        raise NotFoundError.at(where, expected="a safetensors file", got=error.strerror or str(error)) from error
    fitting = sorted(name for name, entry in entries.items() if entry.shape == (hidden_size,))
    # The final norm is the one that no layer owns.
    fitting.sort(key=lambda name: any(word.isdigit() for word in name.split(".")))
    more = f" and {len(fitting) - _SHOWN:,} more" if len(fitting) > _SHOWN else ""
    remedy = (
        f"tensors of {hidden_size} values in this file: {', '.join(fitting[:_SHOWN])}{more}"
        if fitting
        else "no tensor of this file has that size: model.safetensors.index.json says which file has the final norm"
    )
    if key not in entries:
        raise UsageError.at(where, expected=f"a tensor {key!r}", got="none of that name", remedy=remedy)
    entry = entries[key]
    if entry.shape != (hidden_size,) or entry.dtype.kind not in "fV":
        got = f"{entry.dtype.name} {list(entry.shape)}"
        raise UsageError.at(where, expected=f"{hidden_size} floats, the states' width", got=got, remedy=remedy)
    owned = key_problem(key, where, fitting)
    if owned is not None:
        raise UsageError([owned])
    weight = read_tensor(path, entry, str(path))
    if not np.all(np.isfinite(weight)):
        got = f"{np.count_nonzero(~np.isfinite(weight))} NaN or Inf values"
        raise UsageError.at(where, expected="finite weights", got=got, remedy="fetch the model's file again")
    return weight


def _cast(weight: Array, dtype: str, where: str) -> Array:
    """Return the weight as bit patterns of the dtype."""
    import torch

    from hsfmt.readers.views import as_array

    cast = torch.from_numpy(weight.astype(np.float32)).to(getattr(torch, dtype))
    if not bool(torch.isfinite(cast).all()):
        raise UsageError.at(where, expected=f"weights that {dtype} can hold", got="larger ones")
    if not bool(cast.any()):
        raise UsageError.at(where, expected="the weight of a norm", got="zeros throughout")
    return as_array(cast, dtype).copy()
