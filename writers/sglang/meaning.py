"""What the captured states mean: read from the model that SGLang loaded, never from the command line.

The same `--return-aux-hidden-state-layer-ids` mean different layers on different models and conventions; what the model
resolved them to (`layers_to_capture`) is the HF `hidden_states` index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hsfmt.errors import UsageError

# Where models keep it; composed ones delegate to their language model.
_PLACES = ("model", "language_model.model", "language_model", "")


@dataclass(frozen=True, slots=True)
class Meaning:
    """Layer axis and element of a capture.

    Attributes
    ----------
    captured
        HF `hidden_states` indices of the columns of the auxiliary tensor [token, layer x hidden], ascending: SGLang
        appends a layer when its loop comes to it, whatever the order on the command line.
    n_layers
        Decoder layers of the model: the index of the final state.
    hidden_size
        Elements of a state.
    dtype
        "bfloat16", "float16" or "float32".
    final
        Whether the state after the final norm follows the captured layers.
    """

    captured: tuple[int, ...]
    n_layers: int
    hidden_size: int
    dtype: str
    final: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """HF indices of the dataset's layer axis."""
        return (*self.captured, self.n_layers) if self.final else self.captured

    @property
    def final_norm(self) -> str:
        """Always "post": SGLang has the final state only after the norm."""
        return "post"

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token's states."""
        return len(self.layers) * self.hidden_size * (4 if self.dtype == "float32" else 2)

    def check_rows(self, aux_shape: Sequence[int], final_shape: Sequence[int] | None, dtype: str, n_rows: int) -> str:
        """Return what is wrong with a forward's tensors, "" for nothing. More rows than asked for are padding."""
        width = len(self.captured) * self.hidden_size
        if dtype != self.dtype:
            return f"auxiliary states of {dtype}, expected {self.dtype}"
        if len(aux_shape) != 2 or aux_shape[1] != width or aux_shape[0] < n_rows:
            return f"auxiliary states {list(aux_shape)}, expected at least {n_rows} rows of {width}"
        if not self.final:
            return ""
        if final_shape is None:
            return "no final hidden states"
        if len(final_shape) != 2 or final_shape[1] != self.hidden_size or final_shape[0] < n_rows:
            return f"final states {list(final_shape)}, expected at least {n_rows} rows of {self.hidden_size}"
        return ""


def resolved_layers(model: Any, n_layers: int) -> tuple[int, ...]:
    """Return the HF `hidden_states` indices that a loaded SGLang model captures, ascending.

    Raises
    ------
    UsageError
        The model says nothing, or what no HF index can be.
    """
    found = [_layers_at(model, place) for place in _PLACES]
    layers = next((value for value in found if value), None)
    name = type(model).__name__
    if layers is None:
        remedy = "the model's class may keep them elsewhere: this version of hsfmt does not know it"
        raise UsageError.at(f"{name}.layers_to_capture", expected="layer indices", got="nothing", remedy=remedy)
    if len(set(layers)) != len(layers) or not all(0 <= layer < n_layers for layer in layers):
        expected = f"distinct indices from 0 to {n_layers - 1}"
        remedy = "the state after the last layer is captured by itself, after the final norm: leave its id out"
        raise UsageError.at(f"{name}.layers_to_capture", expected=expected, got=str(layers), remedy=remedy)
    return tuple(sorted(layers))


def _layers_at(model: Any, place: str) -> list[int] | None:
    for name in filter(None, place.split(".")):
        model = getattr(model, name, None)
    layers = getattr(model, "layers_to_capture", None)
    if not isinstance(layers, Iterable):
        return None
    values = list(layers)
    return values if all(isinstance(value, int) for value in values) else None
