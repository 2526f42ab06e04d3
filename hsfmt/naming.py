"""Which dataset an error is about: said once, where documents and samples of a dataset are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from hsfmt.errors import (
    CorruptionError,
    FormatError,
    HeaderMismatchError,
    NotFoundError,
    SampleNotFoundError,
    StorageError,
)

_S = TypeVar("_S")
_P = ParamSpec("_P")
_R = TypeVar("_R")

# Of what is stored. Others are about arguments, or about samples that are not stored yet.
_OF_DATASETS = (CorruptionError, FormatError, HeaderMismatchError, NotFoundError, SampleNotFoundError, StorageError)


@contextmanager
def about_dataset(url: str) -> Iterator[None]:
    """Name the dataset in errors about what is stored there, unless they name one."""
    try:
        yield
    except _OF_DATASETS as error:
        error.dataset = error.dataset or url
        raise


def names_dataset(function: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Make a function, whose first argument is a store or has one as `store`, name the dataset as `about_dataset`."""

    @wraps(function)
    def named(first: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        place: Any = getattr(first, "store", first)
        with about_dataset(place.url):
            return function(first, *args, **kwargs)

    return named
