"""What an export is asked for, and what it finds at the dataset and at its destination. Nothing is written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import digests
from hsfmt.cli.exporting.dataset import survey
from hsfmt.cli.exporting.destination import Destination, look_at
from hsfmt.cli.exporting.meaning import settle
from hsfmt.cli.exporting.places import LocalPlace, Place, RemotePlace
from hsfmt.cli.exporting.selection import select, select_layers
from hsfmt.cli.exporting.states import FLOAT8_SCALING, StateChange
from hsfmt.cli.opening import snapshot_to_read
from hsfmt.cli.storage_options import open_places
from hsfmt.errors import Problem, UsageError
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.storage import Store, open_store
from hsfmt.writers.targets.base import ExportJob, Target, Unit
from hsfmt.writers.targets.registry import target_class


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; the names are those of the command's options."""

    url: str
    dst: str
    to: str
    snapshot: str | None = None
    layers: tuple[int, ...] | None = None
    ids: str | None = None
    span: str | None = None
    norm_weight: str | None = None
    norm_eps: float | None = None
    norm_style: str | None = None
    cast: str | None = None
    model_config: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1
    resume: bool = True
    dry_run: bool = False
    force: bool = False
    strict: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(slots=True)
class Plan:
    """An export about to run.

    Attributes
    ----------
    reader
        The snapshot.
    numbers
        int64 [sample]: the snapshot's number of each sample of the export.
    mask_given
        bool [sample]: whether it came with a loss mask.
    layers, change
        What is read of each, and what is done to it.
    target, units
        How it is written.
    job
        What makes two exports the same, as the journal has it.
    destination
        What is there.
    notes
        What the user should know.
    """

    request: Request
    reader: SampleReader
    numbers: npt.NDArray[np.int64]
    mask_given: npt.NDArray[np.bool_]
    layers: tuple[int, ...]
    change: StateChange
    target: Target
    units: Sequence[Unit]
    job: Mapping[str, Any]
    destination: Destination
    notes: list[str]

    @property
    def place(self) -> Place:
        """Where the files go."""
        return self.destination.place

    @property
    def pending(self) -> list[int]:
        """Numbers of the units that are not whole yet."""
        return [n for n, unit in enumerate(self.units) if unit.key not in self.destination.done]

    def look_again(self) -> None:
        """Look at the destination once more; raises as `make_plan`."""
        target, resume = self.target, self.request.resume
        self.destination = look_at(self.place, self.job, self.units, target.final_paths(), resume=resume)


def make_plan(request: Request) -> Plan:
    """Look at the dataset and the destination; writes nothing.

    Raises
    ------
    UsageError, SampleNotFoundError
        The target can't represent what is asked for, or the user has to say more; all that is wrong with the job at
        once.
    NotFoundError, CorruptionError
        No dataset, or a damaged one.
    """
    kind = target_class(request.to)
    store = open_places([request.url, request.dst], request.storage_options)[0]
    options = ReadOptions(n_threads=1 if request.workers > 1 else None)
    reader = SampleReader(store, snapshot=snapshot_to_read(store, request.snapshot), options=options)
    place = _place(request, store)
    numbers = select(reader, request.ids, request.span)
    layers = select_layers(reader, request.layers)
    meaning = settle(reader.header, layers, kind, request)
    found = survey(reader, numbers)
    extras = dict(found.extras)
    if meaning.change.dequantizes and reader.header.scaling:
        extras.pop(reader.header.scaling["column"], None)
    if meaning.change.quantizes:
        extras[FLOAT8_SCALING["column"]] = {"kind": "token", "dtype": "float32", "shape": []}
    ids = reader.sample_ids
    target = kind(
        ExportJob(
            folder=place.work,
            header=meaning.header,
            url=store.url,
            fingerprint=reader.fingerprint,
            n_tokens=reader.lengths[numbers],
            sample_ids=[ids[int(n)] for n in numbers],
            extras={name: column["dtype"] for name, column in extras.items()},
            masks_given=bool(found.mask_given.any()),
            options=request.options,
            attachments=reader.attachments(),
            has_metadata=found.has_metadata,
            n_supervised=found.n_supervised,
            extra_columns=extras,
        )
    )
    check_target(target, strict=request.strict)
    units = target.units()
    assert len({unit.key for unit in units}) == len(units), f"{target.name} has units of one key"
    job = _job(request, reader, numbers, layers, meaning.change)
    destination = look_at(place, job, units, target.final_paths(), resume=request.resume)
    notes = [*meaning.notes, *found.notes]
    return Plan(
        request=request,
        reader=reader,
        numbers=numbers,
        mask_given=found.mask_given,
        layers=layers,
        change=meaning.change,
        target=target,
        units=units,
        job=job,
        destination=destination,
        notes=notes,
    )


def check_target(target: Target, *, strict: bool) -> None:
    """Refuse a job that the target can't represent.

    Raises
    ------
    UsageError
        All that is wrong.
    """
    name, given = target.name, target.job.options
    problems = [
        Problem(f"--option {key}", _options_of(target), f"an option that --to {name} does not have")
        for key in given
        if key not in target.option_help
    ]
    problems += target.problems()
    if strict:
        remedy = "leave --strict out to export without it, or choose another --to"
        problems += [
            Problem(f"--to {name}", "a place for all that the samples have", f"none for {what}", remedy)
            for what in target.dropped()
        ]
    if problems:
        raise UsageError(problems)


def _options_of(target: Target) -> str:
    known = "; ".join(f"{name} ({text})" for name, text in target.option_help.items())
    return f"one of: {known}" if known else "no option"


def _place(request: Request, dataset: Store) -> Place:
    """Return the destination; refuses what is no folder of its own."""
    store = open_store(request.dst)
    if store.is_local:
        return LocalPlace(_folder(Path(store.url), dataset.url if dataset.is_local else None))
    place = RemotePlace(request.dst, request.storage_options)
    here, there = f"{place.name}/", f"{dataset.url}/"
    if here.startswith(there) or there.startswith(here):
        got = f"{place.name} beside {dataset.url}"
        raise UsageError.at(place.name, expected="a folder apart from the dataset", got=got)
    return place


def _folder(folder: Path, dataset: str | None) -> Path:
    """Return a local destination as an absolute path without links."""
    if folder.exists() and not folder.is_dir():
        raise UsageError.at(str(folder), expected="a folder, or a name for one", got="a file")
    if folder.parent == folder:
        raise UsageError.at(str(folder), expected="a folder of its own", got="the root of the file system")
    try:
        # Journal and lock lie beside the folder itself, whichever link leads to it.
        place = folder.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise UsageError.at(str(folder), expected="a folder, or a name for one", got=str(error)) from error
    if dataset is not None:
        source = Path(dataset).resolve()
        if source.is_relative_to(place) or place.is_relative_to(source):
            raise UsageError.at(
                str(folder), expected="a folder apart from the dataset", got=f"{folder} beside {source}"
            )
    return place


def _job(
    request: Request,
    reader: SampleReader,
    numbers: npt.NDArray[np.int64],
    layers: Sequence[int],
    change: StateChange,
) -> dict[str, Any]:
    """Return what decides the bytes of every file, by names that mean something to the user."""
    return {
        "cast": request.cast,
        "dtype": change.dtype,
        "layers": list(layers),
        "norm": change.norm.to_json() if change.norm else None,
        "options": dict(sorted(request.options.items())),
        "samples": f"{len(numbers)} with {digests.digest(np.ascontiguousarray(numbers, '<i8').data)}",
        "snapshot": reader.fingerprint,
        "to": request.to,
    }


def parse_options(given: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE words.

    Raises
    ------
    UsageError
        A word of another form, or a name twice.
    """
    options: dict[str, str] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError.at("--option", expected="NAME=VALUE", got=repr(word))
        if options.setdefault(name, value) != value:
            raise UsageError.at("--option", expected=f"one value for {name}", got=f"{options[name]!r} and {value!r}")
    return options
