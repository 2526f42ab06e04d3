"""The header: what the data of a dataset means. It never changes after creation.

Spec: rules HDR-1 to HDR-9. It is the member `hsfmt` of the root group's attributes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from hsfmt import canonical, digests
from hsfmt.dtypes import STATE_DTYPES
from hsfmt.errors import FormatError, HeaderMismatchError, Problem
from hsfmt.versions import FORMAT, READABLE_FROM, WRITABLE_FROM, check_readable, is_version

# Of zarr.json at the root. The header itself may take half: the pointer repeats it, and has the same cap.
MAX_HEADER_NBYTES = 64 << 10
MAX_LAYERS = 4096
MAX_HIDDEN_SIZE = 1 << 20
NORMS = ("pre", "post", "unknown")
SCALING_RULES = ("bfloat16_product",)
_KNOWN = {
    "dtype", "final_norm", "format", "hidden_size", "layers", "model", "readable_from", "scaling", "tokenizer",
    "writable_from",
}  # fmt: skip
_IDENTITY = ("name", "revision", "weights_digest", "digest", "chat_template_digest")

Identity = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Header:
    """What the data means: one for a dataset, the same in all its parts.

    Attributes
    ----------
    layers
        HF `hidden_states` indices of the layer axis, strictly ascending: 0 the embeddings, k the output of decoder
        layer k-1.
    hidden_size
        Elements of the hidden axis.
    final_norm
        Whether the state after the last layer is before ("pre") or after ("post") the model's final norm.
    dtype
        Element type of `hidden_states`.
    model, tokenizer
        Identity (name, revision, digests) or None when it was not said.
    scaling
        For float8_e4m3fn: {"column", "rule"} of the dequantisation, else None.
    extra
        Members of a later format version, kept and ignored.
    """

    layers: tuple[int, ...]
    hidden_size: int
    final_norm: str
    dtype: str = "bfloat16"
    model: Identity | None = None
    tokenizer: Identity | None = None
    scaling: Identity | None = None
    format: str = FORMAT
    readable_from: str = READABLE_FROM
    writable_from: str = WRITABLE_FROM
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_layers(self) -> int:
        """Length of the layer axis."""
        return len(self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return the header as a JSON object."""
        return {
            **self.extra,
            "dtype": self.dtype,
            "final_norm": self.final_norm,
            "format": self.format,
            "hidden_size": self.hidden_size,
            "layers": list(self.layers),
            "model": _plain(self.model),
            "readable_from": self.readable_from,
            "scaling": _plain(self.scaling),
            "tokenizer": _plain(self.tokenizer),
            "writable_from": self.writable_from,
        }

    def digest(self) -> str:
        """Return the digest of the canonical JSON (rule HDR-8)."""
        return digests.digest(canonical.dumps(self.to_json()))


def make_header(
    *,
    layers: Sequence[int],
    hidden_size: int,
    final_norm: str,
    dtype: str = "bfloat16",
    model: str | Identity | None = None,
    tokenizer: str | Identity | None = None,
    scaling: Identity | None = None,
) -> Header:
    """Return the header of these settings, checked.

    Raises
    ------
    FormatError
        Anything is not as rules HDR-1 to HDR-7 say; all problems at once.
    """
    header = Header(
        layers=tuple(_index(i, "layers") for i in layers),
        hidden_size=_index(hidden_size, "hidden_size"),
        final_norm=final_norm,
        dtype=str(dtype).removeprefix("torch."),
        model=_identity(model),
        tokenizer=_identity(tokenizer),
        scaling=scaling,
    )
    return parse_header(header.to_json(), "header")


def validate_header(document: Any, where: str) -> list[Problem]:
    """Return every problem of a header object."""
    if not isinstance(document, dict):
        return [Problem(where, "an object", type(document).__name__)]
    problems: list[Problem] = []

    def expect(ok: bool, key: str, expected: str) -> None:  # noqa: FBT001  reads as a sentence
        if not ok:
            problems.append(Problem(f"{where}: {key}", expected, repr(document.get(key, "nothing"))[:100]))

    layers: Any = document.get("layers")
    good = isinstance(layers, list) and 0 < len(layers) <= MAX_LAYERS and all(_is_int(i) and i >= 0 for i in layers)
    expect(
        good and layers == sorted(set(layers)), "layers", "strictly ascending HF hidden_states indices (0 = embeddings)"
    )
    size: Any = document.get("hidden_size")
    expect(_is_int(size) and 0 < size <= MAX_HIDDEN_SIZE, "hidden_size", f"an integer from 1 to {MAX_HIDDEN_SIZE}")
    expect(document.get("final_norm") in NORMS, "final_norm", "pre, post or unknown")
    expect(document.get("dtype") in STATE_DTYPES, "dtype", f"one of {', '.join(STATE_DTYPES)}")
    for key in ("model", "tokenizer"):
        expect(
            key in document and _is_identity(document[key]),
            key,
            f"null or an object of strings with members of {_IDENTITY}",
        )
    scaling = document.get("scaling")
    if document.get("dtype") == "float8_e4m3fn":
        good = (
            isinstance(scaling, dict)
            and scaling.get("rule") in SCALING_RULES
            and isinstance(scaling.get("column"), str)
        )
        expect(good, "scaling", f"column and rule ({', '.join(SCALING_RULES)}) for float8_e4m3fn")
    else:
        expect("scaling" in document and scaling is None, "scaling", "null but for float8_e4m3fn")
    for key in ("format", "readable_from", "writable_from"):
        expect(is_version(document.get(key)), key, "a format version like 1.0")
    if not problems and (nbytes := len(canonical.dumps(document))) > MAX_HEADER_NBYTES // 2:
        problems.append(Problem(where, f"at most {MAX_HEADER_NBYTES // 2} bytes", f"{nbytes}"))
    return problems


def parse_header(document: Any, where: str) -> Header:
    """Return the header of a JSON object.

    Raises
    ------
    FormatVersionError
        It needs a newer library.
    FormatError
        It breaks the format; all problems at once.
    """
    check_readable(document, where)
    problems = validate_header(document, where)
    if problems:
        raise FormatError(problems)
    return Header(
        layers=tuple(document["layers"]),
        hidden_size=document["hidden_size"],
        final_norm=document["final_norm"],
        dtype=document["dtype"],
        model=document["model"],
        tokenizer=document["tokenizer"],
        scaling=document["scaling"],
        format=document["format"],
        readable_from=document["readable_from"],
        writable_from=document["writable_from"],
        extra={key: value for key, value in document.items() if key not in _KNOWN},
    )


def check_same_meaning(found: Header, wanted: Header, where: str) -> None:
    """Refuse a header of another meaning. A `wanted` without model or tokenizer takes what is found.

    Raises
    ------
    HeaderMismatchError
        Names each member that differs (rule HDR-9).
    """
    problems = []
    for key in ("layers", "final_norm", "hidden_size", "dtype", "model", "tokenizer", "scaling"):
        have, want = getattr(found, key), getattr(wanted, key)
        if have != want and not (want is None and key in ("model", "tokenizer")):
            remedy = "use another dataset for these samples"
            problems.append(Problem(f"{where}: {key}", _show(have), _show(want), remedy))
    if problems:
        raise HeaderMismatchError(problems)


def check_same_header(found: Header, wanted: Header, where: str) -> None:
    """Refuse to put parts under a header that is not the very same.

    Raises
    ------
    HeaderMismatchError
        Names each member that differs.
    """
    check_same_meaning(found, wanted, where)
    if found.digest() != wanted.digest():
        remedy = "choose another destination, or convert one of the two again"
        expected = f"header {found.digest()}, as only datasets with the very same header can be put together"
        raise HeaderMismatchError.at(where, expected=expected, got=wanted.digest(), remedy=remedy)


def _show(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def _plain(value: Identity | None) -> dict[str, str] | None:
    return None if value is None else dict(value)


def _identity(value: str | Identity | None) -> Identity | None:
    return {"name": value} if isinstance(value, str) else value


def _is_identity(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and bool(value) and all(isinstance(member, str) for member in value.values())


def _index(value: object, where: str) -> int:
    """Return an integer of any kind as int; 2.5 or "3" is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise FormatError.at(where, expected="integers", got=repr(value)[:60])
    return operator.index(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
