"""What `output_hidden_states=True` of transformers gives, as people save it: states by layer, each of a batch.

The states are a tuple or list with a tensor [batch, token, hidden] a layer, their stack [layer, batch, token, hidden],
or a dict by layer, which is an entry of the file's dict or that dict itself; the batch axis may be missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.torch_file import TorchFile, read_torch_file
from hsfmt.readers.sources.torch_record import Record
from hsfmt.readers.sources.torch_states import STATE_DTYPES, check_tensor, is_tensor, row_values

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hsfmt.readers.sources.options import KeyMap
    from hsfmt.readers.sources.torch_containers import TorchContainers

_LAYER_KEY = re.compile(r"(?:layers?|hidden_states?)?[._]?\[?([0-9]{1,6})\]?", re.IGNORECASE)
_CLASS = re.compile(r"transformers\.[\w.]+")
STATES = "hidden_states"
ATTENTION = "attention_mask"
SAVE = "save {'input_ids': ids, 'attention_mask': mask, 'hidden_states': outputs.hidden_states} with torch.save"
_IDS = ("input_ids", "token_ids")
_MOST_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Outputs:
    """A loaded file.

    Attributes
    ----------
    record
        Its entries but for the states.
    states
        A view [batch, token, hidden] a layer.
    numbers
        By which numbers the file calls the layers, if it does.
    """

    record: Record
    states: list[torch.Tensor]
    numbers: tuple[int, ...] | None

    @property
    def n_rows(self) -> int:
        """Samples in the batch."""
        return int(self.states[0].shape[0])

    @property
    def n_tokens(self) -> int:
        """Tokens of each row, with padding."""
        return int(self.states[0].shape[1])


def load_outputs(path: Path, where: str, key_map: KeyMap, containers: TorchContainers | None = None) -> Outputs:
    """Load a file; by `containers` if more than one row of it will be asked for.

    Raises
    ------
    SourceError
        As `read_torch_file` and `find_outputs`.
    OSError
        The file can't be read.
    """
    try:
        loaded = read_torch_file(path, where) if containers is None else containers.load(path, where)
    except SourceError as error:
        raise _with_class(error) from error
    return find_outputs(loaded, key_map)


def find_outputs(loaded: TorchFile, key_map: KeyMap) -> Outputs:
    """Find the states in a loaded file; reads no values.

    Raises
    ------
    SourceError
        The states can't be told by layer, row and token, or there are no token ids.
    """
    value, where = loaded.value, loaded.stamp.where
    if not isinstance(value, dict):
        raise SourceError.at(where, expected="token ids beside the states", got=f"{describe(value)} alone", remedy=SAVE)
    entries = {key: entry for key, entry in value.items() if entry is not None}
    states, numbers, rest = _find_states(entries, key_map, where)
    record = Record(loaded.stamp, rest, (), loaded.nbytes)
    ids = _ids(record, key_map)
    return Outputs(record, _by_layer(states, ids, f"{where}[{STATES}]", loaded.nbytes), numbers)


def _with_class(error: SourceError) -> SourceError:
    """Name the class of a pickled output of transformers, and how to save it instead."""
    found = [name for problem in error.problems for name in _CLASS.findall(problem.got)]
    if not found:
        return error
    # A cache of keys and values is pickled with the output that holds it.
    output = next((name for name in found if ".modeling_outputs." in name), found[0])
    got = f"a pickled {output}, which only executing code would make (refused, not executed)"
    return SourceError.at(error.problems[0].where, expected="tensors in dicts and lists", got=got, remedy=SAVE)


def describe(value: Any) -> str:
    """A loaded value in few words."""
    if isinstance(value, list | tuple):
        first = f" of {describe(value[0])}" if value and is_tensor(value[0]) else ""
        return f"a {type(value).__name__} of {len(value)}{first}"
    return f"a tensor {list(value.shape)}" if is_tensor(value) else f"a {type(value).__name__}"


def _find_states(
    entries: dict[Any, Any], key_map: KeyMap, where: str
) -> tuple[Any, tuple[int, ...] | None, dict[str, Any]]:
    """The states, as one tensor or a list by layer, the layers' numbers, and the other entries."""
    key = key_map.hidden_states or STATES
    if key in entries:
        states, rest = entries[key], {str(name): value for name, value in entries.items() if name != key}
        if not isinstance(states, dict):
            return states, None, rest
        numbers = {name: _number(name) for name in states}
        if not numbers or None in numbers.values():
            got = f"the keys {', '.join(map(repr, list(states)[:8]))}"
            raise SourceError.at(f"{where}[{key}]", expected="a tensor for each numbered layer", got=got)
    else:
        numbers = {name: _number(name) for name, value in entries.items() if is_tensor(value)}
        numbers = {name: number for name, number in numbers.items() if number is not None}
        states, rest = entries, {str(name): value for name, value in entries.items() if name not in numbers}
        if not numbers:
            got = f"the keys {', '.join(map(repr, list(entries)[:8])) or 'of an empty dict'}"
            expected = f"states under {key!r}, or under a number for each layer"
            raise SourceError.at(where, expected=expected, got=got, remedy=f"--map hidden_states=KEY, or {SAVE}")
    order = sorted(numbers, key=lambda name: numbers[name] or 0)
    found = tuple(numbers[name] or 0 for name in order)
    if len(set(found)) < len(found):
        got = ", ".join(map(repr, order[:8]))
        raise SourceError.at(where, expected="each layer once", got=f"several keys of one number among {got}")
    return [states[name] for name in order], found, rest


def _number(key: Any) -> int | None:
    if isinstance(key, int) and not isinstance(key, bool):
        return key if 0 <= key < 1_000_000 else None
    match = _LAYER_KEY.fullmatch(key) if isinstance(key, str) else None
    return int(match[1]) if match else None


def _ids(record: Record, key_map: KeyMap) -> tuple[int, int]:
    """Number of rows and tokens of the token ids."""
    key = ids_key(record, key_map)
    ids = row_values(record.entries[key], record.at(key), record.nbytes)
    if ids.ndim not in (1, 2) or not 1 <= (ids.shape[0] if ids.ndim == 2 else 1) <= _MOST_ROWS:
        raise SourceError.at(record.at(key), expected="shape [batch, token]", got=f"shape {list(ids.shape)}")
    return (1, ids.shape[0]) if ids.ndim == 1 else (ids.shape[0], ids.shape[1])


def ids_key(record: Record, key_map: KeyMap) -> str:
    """The key of the token ids.

    Raises
    ------
    SourceError
        There is none.
    """
    names = (key_map.input_ids,) if key_map.input_ids else _IDS
    found = next((name for name in names if name in record.entries), None)
    if found is None:
        got = f"states beside {', '.join(sorted(record.entries)) or 'nothing'}"
        raise SourceError.at(record.where, expected="token ids under input_ids", got=got, remedy=SAVE)
    return found


def _by_layer(states: Any, ids: tuple[int, int], where: str, nbytes: int) -> list[torch.Tensor]:
    """Views [batch, token, hidden], one a layer, of states whose axes are told by the token ids' shape."""
    if isinstance(states, list | tuple):
        layers = [check_tensor(state, f"{where}[{i}]", nbytes) for i, state in enumerate(states)]
    else:
        layers = _unstack(check_tensor(states, where, nbytes), ids, where)
    if not layers:
        raise SourceError.at(where, expected="at least one layer", got="none")
    shapes = {(tuple(layer.shape), str(layer.dtype).removeprefix("torch.")) for layer in layers}
    if len(shapes) > 1:
        got = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in sorted(shapes)[:3])
        raise SourceError.at(where, expected="layers of one shape and dtype", got=got)
    if layers[0].dtype not in STATE_DTYPES:
        raise SourceError.at(where, expected="bfloat16, float16 or float32 states", got=str(layers[0].dtype))
    shape = tuple(layers[0].shape)
    if len(shape) == 2 and ids[0] == 1:
        layers, shape = [layer[None] for layer in layers], (1, *shape)
    if len(shape) != 3 or shape[:2] != ids or not shape[2]:
        raise SourceError.at(
            where,
            expected=f"[batch, token, hidden] for token ids of shape {list(ids)}",
            got=f"{len(layers)} layers of shape {list(shape)}",
            remedy=SAVE,
        )
    return layers


def _unstack(stack: torch.Tensor, ids: tuple[int, int], where: str) -> list[torch.Tensor]:
    """The layers of a stack [layer, batch, token, hidden]; without the batch axis where there is one row."""
    shape = tuple(stack.shape)
    if len(shape) == 3 and ids[0] > 1:
        return [stack]
    if len(shape) == 3 or len(shape) != 4:
        return list(stack.unbind(0)) if len(shape) == 3 else [stack]
    readings = {
        "[layer, batch, token, hidden]": shape[1:3] == ids,
        "[batch, layer, token, hidden]": (shape[0], shape[2]) == ids,
        "[batch, token, layer, hidden]": shape[:2] == ids,
    }
    found = [name for name, fits in readings.items() if fits]
    if len(found) > 1 and set(shape[:3]) != {1}:
        got = f"shape {list(shape)}, which may be {' or '.join(found)}"
        remedy = "save the tuple as transformers gives it, or a batch of another size"
        raise SourceError.at(where, expected="axes that the token ids tell apart", got=got, remedy=remedy)
    if not readings["[layer, batch, token, hidden]"]:
        got = f"shape {list(shape)}" + (f", which is {found[0]}" if found else f" for token ids of shape {list(ids)}")
        raise SourceError.at(where, expected="a stack [layer, batch, token, hidden]", got=got, remedy=SAVE)
    return list(stack.unbind(0))


def take_sample(outputs: Outputs, row: int, key_map: KeyMap) -> tuple[Record, KeyMap]:
    """The record of one row of the batch, without its padding as the attention mask has it, and its roles.

    Raises
    ------
    SourceError
        A mask of another shape or with holes, or several rows and no mask that tells padding from tokens.
    """
    record = outputs.record
    ids, mask = ids_key(record, key_map), key_map.loss_mask
    if mask is None and "loss_mask" in record.entries and "loss_mask" not in key_map.ignore:
        mask = "loss_mask"
    window = _window(outputs, row, key_map)
    entries = {key: value for key, value in record.entries.items() if key != ATTENTION}
    for key in filter(None, (ids, mask)):
        entries[key] = _row(outputs, key, row)[window]
    entries[STATES] = [layer[row, window] for layer in outputs.states]
    roles = replace(key_map, input_ids=ids, hidden_states=STATES, loss_mask=mask)
    return replace(record, entries=entries), roles


def _row(outputs: Outputs, key: str, row: int) -> Any:
    record = outputs.record
    values = row_values(record.entry(key), record.at(key), record.nbytes)
    values = values[None] if values.ndim == 1 else values
    if values.shape != (outputs.n_rows, outputs.n_tokens):
        expected = f"shape {[outputs.n_rows, outputs.n_tokens]} as the token ids"
        raise SourceError.at(record.at(key), expected=expected, got=f"shape {list(values.shape)}")
    return values[row].tolist()


def _window(outputs: Outputs, row: int, key_map: KeyMap) -> slice:
    """Where the row's tokens are, between padding on one side."""
    record = outputs.record
    if ATTENTION in key_map.ignore:
        return slice(0, outputs.n_tokens)
    if ATTENTION not in record.entries:
        if outputs.n_rows == 1:
            return slice(0, outputs.n_tokens)
        raise MissingMaskError.at(
            record.where,
            expected=f"an attention_mask, which tells tokens from padding in {outputs.n_rows} rows",
            got=", ".join(sorted(record.entries)),
            remedy=f"{SAVE}; if no row of any file is padded, say --map ignore=attention_mask",
        )
    import numpy as np

    where = record.at(ATTENTION)
    values = columns.loss_mask(np.array(_row(outputs, ATTENTION, row)), outputs.n_tokens, where)
    real = np.flatnonzero(values)
    if not len(real):
        raise SourceError.at(f"{where}[{row}]", expected="at least one token", got="padding throughout")
    start, stop = int(real[0]), int(real[-1]) + 1
    if len(real) != stop - start or (start > 0 and stop < outputs.n_tokens):
        raise SourceError.at(
            f"{where}[{row}]",
            expected="padding on one side of the tokens",
            got=f"{outputs.n_tokens - len(real)} zeros, around or between the tokens {start} to {stop - 1}",
            remedy="what is masked otherwise can't be left out: take it as it is with --map ignore=attention_mask",
        )
    return slice(start, stop)


class MissingMaskError(SourceError):
    """Several rows and nothing that tells padding from tokens: what only the user can say."""
