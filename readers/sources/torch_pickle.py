"""What the pickle in a torch file may do: the opcodes and classes that tensors in dicts and lists need, and no more.

`torch.load(weights_only=True)` calls only what is meant to be loaded, but among that is what lets a few bytes fill the
memory or never end: a bytearray of any size, a dict copied again and again, a tuple as a key whose hash takes 2**60
steps. So the opcodes are followed here first, without making anything.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError

if TYPE_CHECKING:
    from typing import BinaryIO

_ORDERED_DICT = "collections.OrderedDict"
_CALLS = {
    _ORDERED_DICT,
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
}
_DTYPES = (
    "bfloat16 float16 float32 float64 half float double int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool "
    "float8_e4m3fn float8_e5m2"
)
_STORAGES = "BFloat16 Half Float Double Char Short Int Long Byte Bool Untyped"
_NAMES = (
    _CALLS
    | {f"torch.{name}" for name in _DTYPES.split()}
    | {f"torch.{name}Storage" for name in _STORAGES.split()}
    | {"torch.storage.UntypedStorage"}
)
_SCALAR_OPCODES = (
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES"
)
_SCALARS = set(_SCALAR_OPCODES.split())
_GETS, _PUTS = {"BINGET", "LONG_BINGET"}, {"BINPUT", "LONG_BINPUT"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# Legacy files: magic number, protocol, machine, the value itself, keys of the storages.
_LEGACY_PICKLES = 5
_SCALAR, _NO_ARGUMENTS, _OTHER = object(), object(), object()


@dataclass(slots=True)
class _Machine:
    """The stack of a pickle, with what kind of thing is on it instead of the things.

    A name (str) is a class or function; the three constants are a scalar, an empty tuple, anything else.
    """

    stack: list[Any] = field(default_factory=list)
    marked: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    unsafe: set[str] = field(default_factory=set)
    refused: str | None = None

    def run(self, name: str, argument: Any) -> None:
        """Follow one opcode."""
        if name in _SCALARS:
            self.stack.append(_SCALAR)
        elif name in _GETS:
            self.stack.append(self.memo[argument])
        elif name in _PUTS:
            self.memo[argument] = self.stack[-1]
        elif name == "GLOBAL":
            self._name(str(argument).replace(" ", "."))
        elif name == "MARK":
            self.marked.append(self.stack)
            self.stack = []
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            self.stack.append(_OTHER)
        elif name == "EMPTY_TUPLE":
            self.stack.append(_NO_ARGUMENTS)
        elif not self._combine(name) and name not in ("PROTO", "FRAME", "STOP"):
            self.refused = self.refused or f"the opcode {name}"
            if name == "INST":
                self._name(str(argument).replace(" ", "."))

    def _combine(self, name: str) -> bool:
        """Follow an opcode that takes things from the stack; False for one that is not known here."""
        if name in _TUPLES:
            del self.stack[-_TUPLES[name] :]
            self.stack.append(_OTHER)
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, self.stack = self.stack, self.marked.pop()
            if name == "TUPLE":
                self.stack.append(_OTHER if items else _NO_ARGUMENTS)
            elif name == "SETITEMS":
                self._check_keys(items[::2])
        elif name == "SETITEM":
            self._check_keys(self.stack[-2:-1])
            del self.stack[-2:]
        elif name == "APPEND":
            self.stack.pop()
        elif name == "BINPERSID":
            self.stack[-1] = _OTHER
        elif name == "REDUCE":
            arguments, function = self.stack.pop(), self.stack.pop()
            self.stack.append(_OTHER)
            if function not in _CALLS or (function == _ORDERED_DICT and arguments is not _NO_ARGUMENTS):
                what = function if isinstance(function, str) else "something that is no function"
                self.refused = self.refused or f"a call of {what}"
        else:
            return False
        return True

    def _name(self, name: str) -> None:
        self.stack.append(name)
        if name not in _NAMES:
            self.unsafe.add(name.removeprefix("__builtin__.").removeprefix("builtins."))

    def _check_keys(self, keys: list[Any]) -> None:
        if any(key is not _SCALAR for key in keys):
            self.refused = self.refused or "a dict whose keys are neither text nor numbers"


def check_pickle(stream: BinaryIO, where: str) -> None:
    """Follow one pickle from the stream's position to its end; nothing is executed or made.

    Raises
    ------
    SourceError
        It is cut or damaged, or would make other things than torch.save does for tensors in dicts and lists; names the
        classes.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            # After the first fault only the names are of interest, to say all of them.
            if machine.refused is None or opcode.name == "GLOBAL":
                machine.run(opcode.name, argument)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise SourceError.at(
            where, expected="a PyTorch file", got=f"a pickle that is truncated or damaged: {str(error)[:200]}"
        ) from error
    if machine.unsafe or machine.refused:
        names = ", ".join(sorted(machine.unsafe)[:5])
        got = f"objects that only executing code would make: {names}" if names else f"a pickle with {machine.refused}"
        raise SourceError.at(
            where,
            expected="tensors, numbers, strings, lists and dicts",
            got=f"{got} (refused, not executed)",
            remedy="save it again as a dict of plain tensors, on a machine that trusts the file",
        )


def check_legacy_pickles(file: BinaryIO, limit: int, where: str) -> None:
    """Follow the pickles at the beginning of a legacy file, of at most `limit` bytes together.

    Raises
    ------
    SourceError
        As `check_pickle`, or they are longer.
    OSError
        The file can't be read.
    """
    file.seek(0)
    data = file.read(limit + 1)
    stream = BytesIO(data)
    try:
        for _ in range(_LEGACY_PICKLES):
            check_pickle(stream, where)
    except SourceError as error:
        if len(data) <= limit or stream.tell() < limit:
            raise
        got = f"pickles of more than {limit} bytes before its tensors"
        raise SourceError.at(where, expected="a PyTorch file", got=got) from error
