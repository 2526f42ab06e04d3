"""Reading a committed part again, from the disk, before the files that it was made of are deleted.

The part is decoded by the verifier, which shares no code with the writer; what it holds is then compared with the
digests of what was read from the source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from hsfmt.catalog import load_index, load_manifest
from hsfmt.errors import CorruptionError, Problem
from hsfmt.header import Header
from hsfmt.layout import MANIFESTS, index_path
from hsfmt.readers.sources import SourceSample
from hsfmt.readers.verification.parts import PartTask, check_part
from hsfmt.storage import Store
from hsfmt.writers.extras import Extra, digest_extras, extra_values
from hsfmt.writers.samples import make_sample, scan

Digests = tuple[bytes, bytes]
_REMEDY = "the source's files were kept; check the disk and the memory, and move the part's manifest away"


def digests_of(
    header: Header, declared: Mapping[str, Extra], sample: SourceSample, metadata: Mapping[str, object]
) -> Digests:
    """Return the digests of a source's sample: its content, and its metadata with all extra columns.

    Raises
    ------
    SampleError
        The sample does not fit the dataset.
    """
    key = sample.sample_id
    checked = make_sample(header, key, sample.input_ids, sample.hidden_states, sample.loss_mask, metadata)
    values = extra_values(declared, sample.extras, checked.n_tokens, f"sample {key!r}")
    content, _ = scan(checked, header, count_nonfinite=False)
    return content, digest_extras(checked.meta, declared, values)


def reread(store: Store, part: str, header: Header, expected: Mapping[str, Digests]) -> set[str]:
    """Decode a committed part and compare samples with what they should be.

    Parameters
    ----------
    store, part, header
        Which part; the header is the dataset's.
    expected
        Sample id to the digests of what was converted. Other samples of the part are decoded too.

    Returns
    -------
    set[str]
        Ids of those samples that this part holds.

    Raises
    ------
    CorruptionError
        It is damaged, or holds something else; all problems at once.
    NotFoundError, StorageError
        It can't be read.
    """
    manifest = load_manifest(store, part, header)
    if not manifest.counts.samples:
        return set()
    # Another writer may have been killed before it had made its manifest's name durable; what is deleted may well be.
    store.sync([MANIFESTS, *sorted({entry.path.rpartition("/")[0] for entry in manifest.files})])
    _forget_cached(store, [entry.path for entry in manifest.files])
    problems = [
        Problem(finding.where, finding.expected, finding.got, _REMEDY, finding.samples)
        for finding in check_part(PartTask(store, part, "full", {})).findings.items
        if finding.severity == "error"
    ]
    if problems:
        raise CorruptionError(problems)
    index = load_index(store, manifest)
    found = set()
    for row in range(index.n_samples):
        sample_id = index.sample_id(row)
        wanted = expected.get(sample_id)
        if wanted is None:
            continue
        found.add(sample_id)
        if (index.content_digest[row].tobytes(), index.extra_digest[row].tobytes()) != wanted:
            where, got = index_path(part), f"content {index.content_digest[row].tobytes().hex()}"
            problems.append(Problem(where, f"content {wanted[0].hex()}, as converted", got, _REMEDY, (sample_id,)))
    if problems:
        raise CorruptionError(problems)
    return found


def _forget_cached(store: Store, paths: list[str]) -> None:
    """Make the system forget what it holds of files in memory, so that they are read from the disk; they are synced."""
    if not store.is_local or not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        file = store.local_path(path)
        with suppress(OSError):  # reading the file says it
            fd = os.open(file or path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
