"""Foreign folders as datasets, and datasets through a target, without the command line."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hsfmt import DatasetWriter
from hsfmt.cli.exporting.dataset import survey
from hsfmt.header import make_header
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.sources import SourceOptions, find_source
from hsfmt.writers.targets.base import ExportJob, ExportSample, Target
from hsfmt.writers.targets.registry import target_class

NATIVE = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}
HEADER = make_header(layers=[2, 8], hidden_size=8, final_norm="pre", model="tiny")


def convert(folder: Path, url: Path, name: str, layers: Sequence[int], **options: Any) -> SampleReader:
    """Read all of a foreign folder into a new dataset."""
    source = find_source(folder, name, options=SourceOptions(layer_ids=tuple(layers), **options))
    meaning = source.meaning()
    with DatasetWriter(
        str(url),
        layers=layers,
        hidden_size=meaning.hidden_size,
        final_norm=meaning.final_norm,
        dtype=meaning.dtype,
        scaling=meaning.scaling,
        model=meaning.model,
    ) as writer:
        for item in source.items:
            sample = source.load(item)
            arrays = (sample.input_ids, sample.hidden_states, sample.loss_mask)
            writer.write(item.sample_id, *arrays, source_index=item.index, **sample.extras)
    return SampleReader(str(url))


def job_of(reader: SampleReader, folder: Path, **settings: Any) -> ExportJob:
    """The export of a whole dataset."""
    extras = {reader.header.scaling["column"]: "float32"} if reader.header.scaling else {}
    facts = (reader.header, str(reader.store.url), reader.fingerprint, reader.lengths, list(reader.sample_ids))
    return replace(ExportJob(folder, *facts, extras=extras, has_metadata=False), **settings)


def stored(reader: SampleReader) -> list[ExportSample]:
    """The samples of a dataset, as a driver hands them over."""
    given = survey(reader, np.arange(len(reader))).mask_given
    return [
        ExportSample(
            number=number,
            sample_id=sample.sample_id,
            input_ids=sample.input_ids,
            hidden_states=sample.hidden_states.view(NATIVE.get(reader.header.dtype, sample.hidden_states.dtype)),
            loss_mask=sample.loss_mask.view(np.uint8),
            metadata=sample.metadata,
            extras=sample.extras,
            mask_given=bool(given[number]),
        )
        for number, sample in enumerate(reader.read_many(range(len(reader))))
    ]


def made_samples(lengths: Sequence[int], header: Any = HEADER, seed: int = 0) -> list[ExportSample]:
    """Samples of these lengths, with ids that no file name could be."""
    rng = np.random.default_rng(seed)
    shape = header.n_layers, header.hidden_size
    return [
        ExportSample(
            number=number,
            sample_id=f"../{number}/é\n",
            input_ids=rng.integers(0, 2**31, n),
            hidden_states=rng.standard_normal((n, *shape), np.float32).astype(NATIVE.get(header.dtype, header.dtype)),
            loss_mask=rng.integers(0, 2, n, np.uint8),
            metadata={},
            extras={},
        )
        for number, n in enumerate(lengths)
    ]


def made_job(folder: Path, samples: Sequence[ExportSample], header: Any = HEADER, **settings: Any) -> ExportJob:
    """The export of samples that lie in no dataset."""
    n_tokens = np.array([len(sample.input_ids) for sample in samples], np.int64)
    ids = [sample.sample_id for sample in samples]
    return ExportJob(folder, header, "no-dataset", "xxh3_128:00", n_tokens, ids, has_metadata=False, **settings)


def export(name: str, job: ExportJob, samples: Sequence[ExportSample]) -> Target:
    """Write all units and what goes with the whole, and hold the target to what it said it would write."""
    target = target_class(name)(job)
    assert target.problems() == []
    paths = []
    for unit in target.units():
        target.write(unit, handed_over(samples, unit.numbers))
        paths.extend(unit.paths)
    assert [number for unit in target.units() for number in unit.numbers] == list(range(len(samples)))
    finished = target.finish()
    assert sorted(finished) == sorted(target.final_paths())
    there = [path.relative_to(job.folder).as_posix() for path in job.folder.rglob("*") if path.is_file()]
    assert sorted(there) == sorted([*paths, *finished])
    return target


def handed_over(samples: Sequence[ExportSample], numbers: Sequence[int]) -> Iterator[ExportSample]:
    """Samples one at a time."""
    for number in numbers:
        yield samples[number]


def tree(folder: Path) -> dict[str, bytes]:
    """All files under a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
