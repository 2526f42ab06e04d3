"""The rows of a Hugging Face Arrow dataset (`save_to_disk`): token ids, loss mask, and what else a row holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt import canonical
from hsfmt.errors import FormatError, SourceError, UsageError
from hsfmt.readers.sources import columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STATE_NBYTES = 16 << 20
COLUMNS = ("input_ids", "loss_mask", "seq_len")


def data_files(root: Path, present: frozenset[str]) -> list[str]:
    """Names of the Arrow files, in row order, as the dataset's state.json gives them.

    Raises
    ------
    SourceError
        state.json is missing or malformed, or names a file that is not there.
    """
    if "state.json" not in present:
        raise SourceError.at("state.json", expected="the document of an Arrow dataset", got="nothing")
    try:
        with (root / "state.json").open("rb") as file:
            state = json.loads(file.read(_STATE_NBYTES))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError.at("state.json", expected="a list _data_files of file names", got=repr(error)) from error
    if state.get("_indices_data_files"):
        raise SourceError.at(
            "state.json", expected="a dataset without an index mapping", got="one", remedy="flatten_indices() and save"
        )
    if not names or len(set(names)) != len(names):
        raise SourceError.at("state.json", expected="_data_files, each once", got=repr(names)[:200])
    for name in names:
        if name not in present:
            raise SourceError.at("state.json", expected="names of files in its folder", got=repr(name))
    return names


class ArrowRows:
    """Rows of the dataset, mapped into memory on first use in each process.

    Parameters
    ----------
    paths
        The Arrow files in row order.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._table: Any = None
        self.n_rows: int = self.table.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "n_rows": self.n_rows, "_table": None}

    @property
    def table(self) -> Any:
        """The pyarrow table, checked so far that no row can point outside its buffers."""
        if self._table is None:
            self._table = _open_table(self.paths)
        return self._table

    @property
    def mask_dtype(self) -> str | None:
        """Value type of the loss mask: bool up to speculators 0.7, int64 since."""
        if "loss_mask" not in self.table.column_names:
            return None
        return str(self.table.schema.field("loss_mask").type.value_type)

    @property
    def other_columns(self) -> dict[str, bool]:
        """Columns beyond the three that are read as tensors, and whether their values can be told in JSON."""
        return {field.name: _is_json_type(field.type) for field in self.table.schema if field.name not in COLUMNS}

    def input_ids(self, row: int) -> NDArray[np.int64]:
        """Token ids of a row, int64 [token].

        Raises
        ------
        SourceError
            They are no integers, or seq_len says another length.
        """
        ids = columns.token_ids(self._values("input_ids", row), f"row {row}[input_ids]")
        if "seq_len" in self.table.column_names:
            seq_len = self.table.column("seq_len")[row].as_py()
            if seq_len != len(ids):
                raise SourceError.at(f"row {row}[seq_len]", expected=str(len(ids)), got=str(seq_len))
        return ids

    def loss_mask(self, row: int, n_tokens: int) -> NDArray[np.uint8] | None:
        """Loss mask of a row, uint8 [token], or None where the dataset has none."""
        if "loss_mask" not in self.table.column_names:
            return None
        return columns.loss_mask(self._values("loss_mask", row), n_tokens, f"row {row}[loss_mask]")

    def other_values(self, row: int) -> dict[str, Any]:
        """The row's values in other columns (`messages`, …) as far as JSON can hold them.

        Raises
        ------
        SourceError
            A number is NaN, infinite or beyond 64 bits.
        """
        values = {name: self.table.column(name)[row].as_py() for name, is_json in self.other_columns.items() if is_json}
        try:
            canonical.dumps_metadata(values)
        except FormatError as error:
            problem = error.problems[0]
            raise SourceError.at(f"row {row}", expected=problem.expected, got=problem.got) from error
        return values

    def _values(self, column: str, row: int) -> NDArray[Any]:
        values = self.table.column(column)[row].values
        if values is None or values.null_count:
            raise SourceError.at(f"row {row}[{column}]", expected="values", got="null")
        array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return array


def _open_table(paths: list[Path]) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise UsageError.at(
            "pyarrow", expected="the package, to read Arrow datasets", got="none", remedy="pip install pyarrow"
        ) from error
    tables = []
    for path in paths:
        try:
            with pa.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                tables.append(stream.read_all())
        except pa.ArrowException as error:
            raise SourceError.at(path.name, expected="an Arrow stream file", got=str(error)) from error
    try:
        table = pa.concat_tables(tables)
        for name in COLUMNS:
            if name in table.column_names:
                # Offsets that lead out of the buffers would crash the process, not raise.
                table.column(name).validate(full=True)
    except pa.ArrowException as error:
        raise SourceError.at(paths[0].name, expected="a sound Arrow table", got=str(error)) from error
    for name in ("input_ids", "loss_mask"):
        given = table.schema.field(name).type if name in table.column_names else None
        if given is None and name == "input_ids":
            raise SourceError.at(paths[0].name, expected="a column input_ids", got=", ".join(table.column_names))
        if given is not None and not (pa.types.is_list(given) or pa.types.is_large_list(given)):
            raise SourceError.at(f"{paths[0].name}[{name}]", expected="a list in each row", got=str(given))
    return table


def _is_json_type(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind):
        return all(_is_json_type(kind.field(i).type) for i in range(kind.num_fields))
    simple = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_floating)
    return types.is_null(kind) or any(is_kind(kind) for is_kind in simple)
