"""The rows of a Hugging Face Arrow dataset (`save_to_disk`): token ids, loss mask, and what else a row holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
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
    names = named_files(root, present)
    for name in names:
        if name not in present:
            raise SourceError.at(
                "state.json",
                expected="the Arrow files that it names, in its folder",
                got=f"{name!r} missing",
                remedy="copy the dataset again, whole",
            )
    return names


def named_files(root: Path, present: frozenset[str]) -> list[str]:
    """Names of the Arrow files, in row order, as state.json gives them, whether they are there or not.

    Raises
    ------
    SourceError
        state.json is missing or malformed.
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
    if any(not isinstance(name, str) or "/" in name for name in names):
        raise SourceError.at("state.json", expected="_data_files, names of files", got=repr(names)[:200])
    return list(names)


class ArrowRows:
    """Rows of the dataset: the batches are found once, and read one at a time as rows are asked for.

    Not mapped into memory: a file that is written again while it is mapped ends the process with SIGBUS.

    Parameters
    ----------
    paths
        The Arrow files in row order.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.schema: Any = None
        self._batches: list[tuple[Path, int]] = []
        starts = [0]
        for path in paths:
            schema, batches = _scan(path)
            if self.schema is not None and not schema.equals(self.schema):
                raise SourceError.at(path.name, expected=f"the columns of {paths[0].name}", got="others")
            self.schema = schema
            for offset, n_rows in batches:
                self._batches.append((path, offset))
                starts.append(starts[-1] + n_rows)
        self.n_rows: int = starts[-1]
        self._starts = np.array(starts)
        self._open: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    @property
    def mask_dtype(self) -> str | None:
        """Value type of the loss mask: bool up to speculators 0.7, int64 since."""
        if "loss_mask" not in self.schema.names:
            return None
        return str(self.schema.field("loss_mask").type.value_type)

    @property
    def other_columns(self) -> dict[str, bool]:
        """Columns beyond the three that are read as tensors, and whether their values can be told in JSON."""
        return {field.name: _is_json_type(field.type) for field in self.schema if field.name not in COLUMNS}

    def input_ids(self, row: int) -> NDArray[np.int64]:
        """Token ids of a row, int64 [token].

        Raises
        ------
        SourceError
            They are no integers, or seq_len says another length.
        """
        ids = columns.token_ids(self._values("input_ids", row), f"row {row}[input_ids]")
        if "seq_len" in self.schema.names:
            seq_len = self._value("seq_len", row).as_py()
            if seq_len != len(ids):
                raise SourceError.at(f"row {row}[seq_len]", expected=str(len(ids)), got=str(seq_len))
        return ids

    def loss_mask(self, row: int, n_tokens: int) -> NDArray[np.uint8] | None:
        """Loss mask of a row, uint8 [token], or None where the dataset has none."""
        if "loss_mask" not in self.schema.names:
            return None
        return columns.loss_mask(self._values("loss_mask", row), n_tokens, f"row {row}[loss_mask]")

    def other_values(self, row: int) -> dict[str, Any]:
        """The row's values in other columns (`messages`, …) as far as JSON can hold them.

        Raises
        ------
        SourceError
            A number is NaN, infinite or beyond 64 bits.
        """
        values = {name: self._value(name, row).as_py() for name, is_json in self.other_columns.items() if is_json}
        try:
            canonical.dumps_metadata(values)
        except FormatError as error:
            problem = error.problems[0]
            raise SourceError.at(f"row {row}", expected=problem.expected, got=problem.got) from error
        return values

    def _values(self, column: str, row: int) -> NDArray[Any]:
        values = self._value(column, row).values
        if values is None or values.null_count:
            raise SourceError.at(f"row {row}[{column}]", expected="values", got="null")
        array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return array

    def _value(self, column: str, row: int) -> Any:
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        if self._open is None or self._open[0] != number:
            self._open = number, _read_batch(*self._batches[number], self.schema)
        return self._open[1].column(column)[row - int(self._starts[number])]


def _import_pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise UsageError.at(
            "pyarrow", expected="the package, to read Arrow datasets", got="none", remedy="pip install pyarrow"
        ) from error
    return pa


def _scan(path: Path) -> tuple[Any, list[tuple[int, int]]]:
    """Read the schema, and the offset and row count of every batch, up to the mark that ends the stream."""
    pa = _import_pyarrow()
    batches = []
    with _reading(path.name), pa.OSFile(str(path)) as file:
        schema = pa.ipc.read_schema(pa.ipc.read_message(file))
        _check_schema(schema, path.name)
        while True:
            offset = file.tell()
            try:
                message = pa.ipc.read_message(file)
            except EOFError:
                break
            batches.append((offset, pa.ipc.read_record_batch(message, schema).num_rows))
        if file.tell() == offset:
            # A file cut between two batches reads without an error, only with fewer rows.
            raise SourceError.at(path.name, expected="the mark that ends an Arrow stream", got="none: truncated")
    return schema, batches


def _read_batch(path: Path, offset: int, schema: Any) -> Any:
    pa = _import_pyarrow()
    with _reading(path.name), pa.OSFile(str(path)) as file:
        file.seek(offset)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
        for name in schema.names:
            # Offsets that lead out of the buffers would crash the process, not raise.
            batch.column(name).validate(full=True)
    return batch


@contextmanager
def _reading(where: str) -> Iterator[None]:
    pa = _import_pyarrow()
    try:
        yield
    except SourceError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        # Arrow says OSError, without a number, of a file that is too short.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise SourceError.at(where, expected="a sound Arrow stream file", got=str(error)) from error


def _check_schema(schema: Any, where: str) -> None:
    types = _import_pyarrow().types
    if "input_ids" not in schema.names:
        raise SourceError.at(where, expected="a column input_ids", got=", ".join(schema.names))
    for name in {"input_ids", "loss_mask"} & set(schema.names):
        kind = schema.field(name).type
        if not (types.is_list(kind) or types.is_large_list(kind)):
            raise SourceError.at(f"{where}[{name}]", expected="a list in each row", got=str(kind))


def _is_json_type(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind):
        return all(_is_json_type(kind.field(i).type) for i in range(kind.num_fields))
    simple = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_floating)
    return types.is_null(kind) or any(is_kind(kind) for is_kind in simple)
