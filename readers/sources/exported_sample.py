"""A file that hsfmt wrote of one sample (`hsfmt cat -o`, an export): it says of itself what its states are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hsfmt.columns import CORE_COLUMNS, IDS, MASK, STATES
from hsfmt.dtypes import STATE_DTYPES
from hsfmt.errors import SourceError
from hsfmt.header import NORMS
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.array_record import typed
from hsfmt.readers.sources.base import SourceSample
from hsfmt.readers.sources.meaning import SourceMeaning

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsfmt.readers.sources.array_record import ArrayFile

_SCALE = "hidden_states_scale"
# Keys of a conversion's own; metadata that have one are put under `columns` beside it.
_WRAPPED_FOR = frozenset({"source", "conversion"})


def exported_meaning(file: ArrayFile, types: dict[str, str], producer: dict[str, Any]) -> SourceMeaning:
    """What the file says of its states.

    Parameters
    ----------
    types
        Names of the types of which arrays hold bit patterns.

    Raises
    ------
    SourceError
        It says something else than hsfmt would, or its states are others.
    """
    states = _states(file, types)
    attributes, where = _attributes(file), f"{file.stamp.where}[hsfmt]"
    layers, norm, model = attributes.get("layers"), attributes.get("final_norm"), attributes.get("model")
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise SourceError.at(f"{where}[layers]", expected="a list of layer ids", got=repr(layers)[:100])
    if len(layers) != states.shape[1]:
        got = f"{len(layers)}: {layers}"[:100]
        raise SourceError.at(f"{where}[layers]", expected=f"{states.shape[1]} ids, one a state", got=got)
    if norm not in NORMS:
        raise SourceError.at(f"{where}[final_norm]", expected=", ".join(NORMS), got=repr(norm)[:100])
    scaling = attributes.get("scaling")
    return SourceMeaning(
        hidden_size=states.shape[2],
        n_layers=states.shape[1],
        dtype=states.dtype.name,
        layers=tuple(layers),
        layers_from=f"the layers that hsfmt noted in {file.stamp.where}",
        final_norm=norm,
        final_norm_from=f"hsfmt noted it in {file.stamp.where}",
        scaling=scaling if isinstance(scaling, dict) else None,
        model=model["name"] if isinstance(model, dict) and isinstance(model.get("name"), str) else None,
        producer=producer,
        extras=_declared(file, _extras(file, types, states.shape[0])),
    )


def exported_sample(file: ArrayFile, types: dict[str, str], meaning: SourceMeaning, sample_id: str) -> SourceSample:
    """The sample.

    Raises
    ------
    SourceError
        The file is none of hsfmt's, or it says something else of its states than the first one does.
    """
    found = exported_meaning(file, types, meaning.producer)
    for name in ("layers", "final_norm"):
        if getattr(found, name) != getattr(meaning, name):
            raise SourceError.at(
                f"{file.stamp.where}[hsfmt][{name}]",
                expected=f"{getattr(meaning, name)} as in the source's first readable file",
                got=str(getattr(found, name)),
                remedy="convert each kind from a folder of its own",
            )
    where = file.stamp.where
    states = _states(file, types)
    extras = _extras(file, types, len(states))
    kinds = {name: column.get("kind") for name, column in _noted(file).items() if isinstance(column, dict)}
    sample = SourceSample(
        sample_id,
        input_ids=columns.token_ids(file.arrays[IDS], f"{where}[{IDS}]"),
        hidden_states=states,
        loss_mask=_loss_mask(file, len(states)),
        metadata=_metadata(file),
        extras=extras,
        whole_extras=frozenset(name for name in extras if kinds.get(name, "token") != "token"),
    )
    file.stamp.check_unchanged()
    return sample


def _loss_mask(file: ArrayFile, n_tokens: int) -> NDArray[Any] | None:
    """The loss mask; None where the dataset had ones that nobody gave."""
    if MASK not in file.arrays:
        return None
    mask = columns.loss_mask(file.arrays[MASK], n_tokens, f"{file.stamp.where}[{MASK}]")
    is_given = _attributes(file).get("loss_mask_given") is not False
    return mask if is_given or not mask.all() else None


def _metadata(file: ArrayFile) -> dict[str, Any]:
    """The sample's metadata; where an earlier conversion of such a file wrapped them to note its own, what it wrapped.

    So they stay the same however often a sample is exported and converted.
    """
    noted = _attributes(file).get("metadata")
    metadata = noted if isinstance(noted, dict) else {}
    wrapped = metadata.get("columns")
    if metadata.keys() == {"source", "columns"} and isinstance(wrapped, dict) and wrapped.keys() & _WRAPPED_FOR:
        return wrapped
    return metadata


def _attributes(file: ArrayFile) -> dict[str, Any]:
    if file.attributes is None:
        raise SourceError.at(
            file.stamp.where,
            expected="what hsfmt notes of a sample, as in the source's first readable file",
            got="none: another program's file",
            remedy="convert each kind from a folder of its own",
        )
    return file.attributes


def _states(file: ArrayFile, types: dict[str, str]) -> NDArray[Any]:
    where = file.stamp.where
    for name in (STATES, IDS):
        if name not in file.arrays:
            raise SourceError.at(where, expected=f"{name}, as hsfmt writes it", got=", ".join(sorted(file.arrays)))
    states = file.arrays[STATES]
    if STATES in types:
        states = typed(states, types[STATES], f"{where}[{STATES}]")
    if states.ndim != 3 or 0 in states.shape or states.dtype.name not in STATE_DTYPES:
        got = f"{states.dtype.name} of shape {list(states.shape)}"
        expected = f"{', '.join(STATE_DTYPES)} of shape [token, layer, hidden]"
        raise SourceError.at(f"{where}[{STATES}]", expected=expected, got=got)
    columns.check_n_tokens(states.shape[0], file.arrays[IDS].size, where, "write the file again")
    return states


def _noted(file: ArrayFile) -> dict[str, Any]:
    """What the file says of the dataset's extra columns, if it does: `kind`, `dtype` and `shape` by name."""
    noted = _attributes(file).get("extras")
    return noted if isinstance(noted, dict) else {}


def _declared(file: ArrayFile, extras: dict[str, NDArray[Any]]) -> dict[str, dict[str, Any]]:
    """The extra columns as a writer declares them, without that of the scaling."""
    found = {
        name: {"kind": "token", "dtype": array.dtype.name, "shape": list(array.shape[1:])}
        for name, array in extras.items()
    }
    declared = found | {name: column for name, column in _noted(file).items() if isinstance(column, dict)}
    return {name: column for name, column in declared.items() if name != _SCALE}


def _extras(file: ArrayFile, types: dict[str, str], n_tokens: int) -> dict[str, NDArray[Any]]:
    """The extra columns; where the file says nothing of them, only those of a row a token can be told."""
    extras = {}
    for name, array in file.arrays.items():
        if name in CORE_COLUMNS:
            continue
        where = f"{file.stamp.where}[{name}]"
        if name not in _noted(file) and (not array.ndim or array.shape[0] != n_tokens):
            raise SourceError.at(
                where,
                expected=f"a row for each of the {n_tokens} tokens",
                got=f"shape {list(array.shape)}: whether it is a row a sample or any number of them is not recorded",
                remedy=f"leave it out: --map ignore={name}",
            )
        extras[name] = typed(array, types[name], where) if name in types else array
    return extras
