"""`hsfmt cache`: the local cache of what is read of remote datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps
from hsfmt.cli.opening import snapshot_to_read
from hsfmt.cli.options import json_option, layer_ids, quiet_option, snapshot_option
from hsfmt.cli.progress import open_progress
from hsfmt.cli.seal import read_ids
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.dtypes import dtype
from hsfmt.errors import StorageError, UsageError
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.storage import Store
from hsfmt.storage.cache_folder import CacheFolder
from hsfmt.storage.cache_settings import FOLDER_VARIABLE, SIZE_VARIABLE, cache_settings
from hsfmt.storage.local import os_errors_typed

F = TypeVar("F", bound=Callable[..., Any])

# What is warmed at once, decoded: enough for many requests in flight.
_BATCH_NBYTES = 128 << 20
# Subfolders have quotas of their own, and some are full before others.
_FILLED_SHARE = 0.95


def _cache_options(function: F) -> F:
    size = f"The most that it may hold, as 200GiB. [default: ${SIZE_VARIABLE}, else 32GiB]"
    function = click.option("--cache-size", metavar="SIZE", help=size)(function)
    folder = f"The cache's folder. [default: ${FOLDER_VARIABLE}]"
    return click.option("--cache-dir", metavar="DIR", help=folder)(function)


@click.group()
def command() -> None:
    """Look at, clear or fill the local cache of what is read of remote datasets."""


@command.command()
@_cache_options
@json_option
def info(*, cache_dir: str | None, cache_size: str | None, as_json: bool) -> None:
    """Say how much the cache holds, of how much it may."""
    folder = _folder(cache_dir, cache_size)
    with os_errors_typed(folder.path):
        usage = folder.usage()
    if as_json:
        document = {
            "dir": folder.path,
            "entries": usage.n_entries,
            "limit_nbytes": folder.limit_nbytes,
            "nbytes": usage.nbytes,
            "newest_use": _time(usage.newest),
            "oldest_use": _time(usage.oldest),
            "unfinished": usage.n_unfinished,
            "unfinished_nbytes": usage.unfinished_nbytes,
        }
        click.echo(dumps(document))
        return
    share = 100 * usage.nbytes / folder.limit_nbytes
    rows = [
        ("limit", units.nbytes(folder.limit_nbytes)),
        (
            "in use",
            f"{units.nbytes(usage.nbytes)} ({share:.1f} %), {units.counted(usage.n_entries, 'entry', 'entries')}",
        ),
    ]
    if usage.n_entries:
        rows.append(("used", f"between {_time(usage.oldest)} and {_time(usage.newest)}"))
    if usage.n_unfinished:
        counted = units.counted(usage.n_unfinished, "entry", "entries")
        rows.append(("unfinished", f"{counted}, {units.nbytes(usage.unfinished_nbytes)}"))
    click.echo(f"{folder.path}\n{units.aligned(rows, '  ')}")


@command.command()
@_cache_options
@json_option
def clear(*, cache_dir: str | None, cache_size: str | None, as_json: bool) -> None:
    """Remove all that is in the cache; files that are not its own stay. Processes that use it begin it anew."""
    folder = _folder(cache_dir, cache_size)
    with os_errors_typed(folder.path):
        n_entries, nbytes = folder.clear()
    if as_json:
        click.echo(dumps({"dir": folder.path, "entries": n_entries, "nbytes": nbytes}))
        return
    click.echo(f"removed {units.counted(n_entries, 'entry', 'entries')}, {units.nbytes(nbytes)}: {folder.path}")


@command.command()
@dataset_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--ids",
    "ids_file",
    type=click.File("r", encoding="utf-8"),
    metavar="FILE",
    help="Also these: an id a line, or a JSON list. - is stdin.",
)
@snapshot_option
@click.option("--layers", metavar="IDS", callback=layer_ids, help="Only these layers, as 2,4,5,8. [default: all]")
@_cache_options
@storage_option
@quiet_option
@json_option
def warm(  # noqa: PLR0913  one argument an option
    *,
    store: Store,
    ids: tuple[str, ...],
    ids_file: Any,
    snapshot: str | None,
    layers: tuple[int, ...] | None,
    cache_dir: str | None,
    cache_size: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Bring samples of the dataset at URL into the cache: those of the ids, or all, as many as it can hold."""
    folder = _folder(cache_dir, cache_size)
    options = ReadOptions(cache_dir=cache_dir, cache_size=cache_size)
    reader = SampleReader(store, snapshot=snapshot_to_read(store, snapshot), options=options)
    wanted = {*ids, *(read_ids(ids_file.read(), "--ids") if ids_file is not None else ())}
    numbers = sorted(map(reader.index_of, wanted)) if wanted or ids_file is not None else range(len(reader))
    done = nbytes = 0
    assert len(reader.sample_ids) == len(reader), "read, so that they are there too"
    with open_progress("warm", shown=not quiet and not as_json) as progress:
        for batch in _batches(reader, numbers, layers):
            if nbytes >= _FILLED_SHARE * folder.limit_nbytes:
                break
            nbytes += reader.warm(batch, layers)
            _check_writable(reader)
            done += len(batch)
            progress.update(nbytes, f"{done:,} of {len(numbers):,} samples")
    _check_writable(reader)
    if as_json:
        document = {
            "dir": folder.path,
            "limit_nbytes": folder.limit_nbytes,
            "nbytes": nbytes,
            "samples": done,
            "samples_wanted": len(numbers),
            "snapshot": reader.fingerprint,
            "url": store.url,
        }
        click.echo(dumps(document))
        return
    counted = units.counted(done, "sample")
    rest = "" if done == len(numbers) else f" of {len(numbers):,}: the limit is {units.nbytes(folder.limit_nbytes)}"
    amount = units.nbytes(nbytes)
    if nbytes > folder.limit_nbytes:  # within one batch
        amount += f", of which {units.nbytes(folder.limit_nbytes)} at most stay"
    click.echo(f"{counted}{rest}, {amount} in the cache: {folder.path}")


def _folder(cache_dir: str | None, cache_size: str | None) -> CacheFolder:
    settings = cache_settings(cache_dir, cache_size)
    if settings is None:
        remedy = f"give --cache-dir DIR, or set {FOLDER_VARIABLE}"
        raise UsageError.at("--cache-dir", expected="the folder of a cache", got="none", remedy=remedy)
    return CacheFolder(settings.folder, settings.limit_nbytes)


def _batches(reader: SampleReader, numbers: Iterable[int], layers: tuple[int, ...] | None) -> Iterator[list[int]]:
    header = reader.header
    n_layers = len(header.layers if layers is None else layers)
    token_nbytes = n_layers * header.hidden_size * dtype(header.dtype).storage.itemsize
    batch: list[int] = []
    nbytes = 0
    for number in numbers:
        batch.append(number)
        nbytes += int(reader.lengths[number]) * token_nbytes
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _check_writable(reader: SampleReader) -> None:
    """Raise what a reader only warns of: the one purpose here is to fill the cache."""
    if reader.cache is not None and not reader.cache.folder.writable:
        raise StorageError.at(
            reader.cache.folder.path,
            expected="to write entries",
            got=reader.cache.folder.failure,
            remedy="free space there, check its permissions, or name another folder",
        )
    if reader.cache is not None and reader.cache.folder.too_large:
        largest = units.nbytes(reader.cache.folder.too_large)
        remedy = "raise the limit, or run `hsfmt cache clear` if it was lower before"
        raise UsageError.at("--cache-size", expected=f"room for an entry of {largest}", got="less", remedy=remedy)


def _time(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None
