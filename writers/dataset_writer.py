"""DatasetWriter: the public way to write samples into a dataset.

Spec: rules SMP-6, SMP-7 and WRITE-6. Accepted (write() returned) and durable (commit() returned the id) are different
words.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

from hsfmt import layout
from hsfmt.catalog import committed_parts, ensure_dataset
from hsfmt.codecs import check_codec
from hsfmt.column_plan import GridOptions
from hsfmt.errors import DuplicateSampleError, NonFiniteError, SampleError, UsageError, WriterClosedError
from hsfmt.header import Header, Identity, make_header
from hsfmt.idset import CommittedIds, IdSet
from hsfmt.sealing import seal as seal_dataset
from hsfmt.storage import Store, open_store
from hsfmt.writers.extras import Extra, check_scale, extra_values, parse_extras, with_scale
from hsfmt.writers.part_sequence import PartSequence
from hsfmt.writers.part_writer import PartSettings
from hsfmt.writers.pipeline import Pipeline
from hsfmt.writers.producer import full_producer
from hsfmt.writers.samples import check_id, check_reason, check_source_index, is_positive, make_sample, scan

_log = logging.getLogger("hsfmt")
GIB = 1 << 30
MIB = 1 << 20


class DatasetWriter:
    """Appends samples to a dataset, creating it if need be.

    Any number of writers, processes and hosts may write to one dataset at once, without a lock: each makes parts of
    its own. One writer is used from one process; its methods may be called from several threads.

    As a context manager it closes (commits and seals) at the end of the block. When the block raises, nothing of the
    open part is committed and what is discarded is logged; what `commit()` returned before, and parts that ended by
    size or age, stay.

    Memory is bounded, whatever the size of shards and parts: `queue_nbytes`, a few chunk rows a column, and at S3 up to
    8 MiB a column of the open part and of each that is being committed (two at most), besides 64 MiB that are on their
    way (twice that on Python 3.11, whose event loop copies them).

    Parameters
    ----------
    url
        Folder or fsspec URL of the dataset, or a store.
    layers
        HF `hidden_states` indices of the layer axis, strictly ascending (0: embeddings, k: output of decoder
        layer k-1).
    hidden_size
        Elements of a state.
    final_norm
        "pre", "post" or "unknown": whether the state after the last layer is before or after the final norm.
    dtype
        "bfloat16", "float16", "float32" or "float8_e4m3fn".
    model, tokenizer
        Name, or an object of name, revision, weights_digest / name, digest, chat_template_digest.
    codec
        "zstd" (lossless, about two thirds of the size) or "none".
    part_nbytes
        A part ends when its states reach this many raw bytes.
    part_seconds
        A part ends at this age, so that a crash costs no more; None for never.
    producer
        What varies by run (engine, attention backend, command …): strings, integers, lists and objects.
    extras
        Further columns by name.
    scaling
        For float8_e4m3fn: {"column", "rule"}; defaults to the column `hidden_states_scale` (float32 a token).
    on_duplicate
        What write() does with an id that is there already: "error" or "skip".
    nonfinite
        What it does with NaN and Inf: "raise", "hole" (record the id as failed) or "keep".
    seal
        Whether close() seals the dataset.
    threads
        Encoding threads; by default one a core, at most 8.
    queue_nbytes
        Bound on the bytes between write() and the disk.
    chunk_tokens, shard_tokens
        Grid sizes instead of the preferred ones.
    part_names
        Makes a name for each part.
    storage_options
        For fsspec URLs.

    Raises
    ------
    HeaderMismatchError
        The dataset exists and means something else.
    FormatError, UsageError
        Settings that the format does not have.
    """

    def __init__(  # noqa: PLR0913  the public constructor: each is a setting of its own
        self,
        url: str | os.PathLike[str] | Store,
        *,
        layers: Sequence[int],
        hidden_size: int,
        final_norm: str,
        dtype: str = "bfloat16",
        model: str | Identity | None = None,
        codec: str = "zstd",
        part_nbytes: int = 32 * GIB,
        part_seconds: float | None = 600,
        tokenizer: str | Identity | None = None,
        producer: Mapping[str, Any] | None = None,
        extras: Mapping[str, Extra | Mapping[str, Any]] | None = None,
        scaling: Identity | None = None,
        on_duplicate: Literal["error", "skip"] = "error",
        nonfinite: Literal["raise", "hole", "keep"] = "raise",
        seal: bool = True,
        threads: int | None = None,
        queue_nbytes: int = 256 * MIB,
        chunk_tokens: int | None = None,
        shard_tokens: int | None = None,
        part_names: Callable[[], str] = layout.new_part_name,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        _choice("on_duplicate", on_duplicate, ("error", "skip"))
        _choice("nonfinite", nonfinite, ("raise", "hole", "keep"))
        _positive(threads=threads, queue_nbytes=queue_nbytes, part_nbytes=part_nbytes)
        if part_seconds is not None and not part_seconds > 0:
            raise UsageError.at("part_seconds", expected="seconds above 0, or None", got=repr(part_seconds)[:60])
        if str(dtype).removeprefix("torch.") == "float8_e4m3fn":
            scaling = scaling or {"column": "hidden_states_scale", "rule": "bfloat16_product"}
        wanted = make_header(
            layers=layers,
            hidden_size=hidden_size,
            final_norm=final_norm,
            dtype=dtype,
            model=model,
            tokenizer=tokenizer,
            scaling=scaling,
        )
        grid = GridOptions(chunk_tokens, shard_tokens)
        columns = with_scale(parse_extras(extras), wanted)
        settings = PartSettings(wanted, check_codec(codec, "codec"), columns, grid, full_producer(producer, codec))
        settings.plans()  # refused before anything is created
        self._store = url if isinstance(url, Store) else open_store(url, storage_options)
        self._header = ensure_dataset(self._store, wanted)
        self._settings = replace(settings, header=self._header)
        self._on_duplicate, self._nonfinite, self._seal = on_duplicate, nonfinite, seal
        self._pipeline = Pipeline(threads, queue_nbytes)
        self._lock = threading.RLock()
        self._committed: CommittedIds | None = None
        self._pending = IdSet()
        self._next_index: int | None = None
        self._parts = PartSequence(
            self._store, self._settings, self._pipeline, part_names, (part_nbytes, part_seconds), self._lock
        )
        self._pid = os.getpid()
        self._closed = False
        self._failure: BaseException | None = None

    @property
    def header(self) -> Header:
        """The dataset's header."""
        return self._header

    @property
    def url(self) -> str:
        """Where the dataset lies."""
        return self._store.url

    def write(
        self,
        sample_id: str,
        input_ids: Any,
        hidden_states: Any,
        loss_mask: Any = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        source_index: int | None = None,
        **extras: Any,
    ) -> bool:
        """Take a sample. Its arrays are copied, and may be changed afterwards; it is accepted, not yet durable.

        Parameters
        ----------
        sample_id
            Unique in the dataset.
        input_ids
            Integers [token].
        hidden_states
            [token, layer, hidden], or a list of [token, hidden] a layer, of exactly the dataset's dtype: torch or NumPy
            (ml_dtypes for bfloat16, or uint16 patterns).
        loss_mask
            0 or 1 [token]; None stores ones and records that no mask was given.
        metadata
            A JSON object about the sample.
        source_index
            Place in the default order; by default the order of writing.
        **extras
            Values of declared extra columns; one that is missing or None is null.

        Returns
        -------
        bool
            False when it was skipped as a duplicate or became a hole.

        Raises
        ------
        SampleError
            The sample does not fit; nothing of it was taken.
        DuplicateSampleError
            The id is there already (`on_duplicate="error"`).
        NonFiniteError
            It holds NaN or Inf (`nonfinite="raise"`).
        StorageError
            Writing failed, now or earlier; what was not committed is lost, and the writer is closed.
        """
        self._check_process()
        with self._lock:
            self._check_usable()
            check_id(sample_id)
            if sample_id in self._pending or sample_id in self._ids():
                if self._on_duplicate == "skip":
                    return False
                raise DuplicateSampleError.at(
                    f"sample {sample_id!r}", expected="a new id", got="one that is in the dataset or this writer",
                    remedy='skip it (on_duplicate="skip") or give it another id; one that was retracted stays taken',
                )  # fmt: skip
            sample = make_sample(self._header, sample_id, input_ids, hidden_states, loss_mask, metadata)
            given_index = check_source_index(source_index)
            values = extra_values(self._settings.extras, extras, sample.n_tokens, f"sample {sample_id!r}")
            content, bad = scan(sample, self._header, count_nonfinite=self._nonfinite != "keep")
            bad += check_scale(self._header, values, sample_id, count_nonfinite=self._nonfinite != "keep")
            if bad:
                return self._refuse_nonfinite(sample_id, bad, sample.n_tokens)
            part = self._parts.open()
            with self._failing():
                part.add(sample, content, self._take_index(given_index), values)
                part.holes.pop(sample_id, None)
                self._pending.add(sample_id)
                self._parts.end_if_full()
            return True

    def hole(self, sample_id: str, reason: str) -> None:
        """Record that a sample failed, and why; a later sample of that id, in any part, beats the hole.

        Raises
        ------
        SampleError
            The id or the reason is no text, or the id was written by this writer.
        """
        self._check_process()
        with self._lock:
            self._check_usable()
            check_id(sample_id)
            check_reason(sample_id, reason)
            if sample_id in self._pending:
                raise SampleError.at(
                    f"hole {sample_id!r}", expected="an id that was not written", got="a written sample"
                )
            self._parts.open().add_hole(sample_id, reason)
            with self._failing():
                self._parts.end_if_full()

    def commit(self) -> list[str]:
        """End the open part and wait until all parts are durable.

        Returns
        -------
        list[str]
            Ids that became durable since the last call, those of parts that ended by size or age included.

        Raises
        ------
        StorageError
            Something could not be made durable; the ids that were durable before stay so.
        """
        self._check_process()
        with self._lock:
            self._commit_all()
            return self._parts.take_ids()

    def take_durable(self) -> list[str]:
        """Return the ids that became durable since the last call or `commit()`, without ending the open part."""
        self._check_process()
        with self._lock:
            return self._parts.take_ids()

    def committed_ids(self) -> CommittedIds:
        """Return the set-like view of all ids that are durable in the dataset now, other writers' included."""
        self._check_process()
        with self._lock:
            ids = self._ids()
            ids.refresh()
            return ids

    def close(self, *, seal: bool | None = None) -> None:
        """Commit, and seal unless told not to. A second call does nothing.

        Raises
        ------
        StorageError
            As `commit`.
        WriterClosedError
            Writing failed before, so that samples that were accepted are not in the dataset.
        """
        self._check_process()
        with self._lock:
            if self._failure is not None:
                self._check_usable()
            if self._closed:
                return
            try:
                self._commit_all()
            finally:
                self._shutdown()
            if not committed_parts(self._store):
                _log.warning("%s: nothing was committed", self.url)
            elif self._seal if seal is None else seal:
                seal_dataset(self._store)
            else:
                _log.info("%s: committed but not sealed; readers see it after `hsfmt seal`", self.url)

    def abort(self) -> None:
        """Close without committing the open part; parts that ended by size or age before are waited for."""
        if os.getpid() != self._pid:
            return  # a forked child that unwinds must not remove its parent's files
        with self._lock:
            if self._closed:
                return
            self._parts.abort()
            self._shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _ids(self) -> CommittedIds:
        if self._committed is None:
            self._committed = CommittedIds(self._store, self._header)
            self._committed.refresh()
        return self._committed

    def _take_index(self, given: int | None) -> int:
        if self._next_index is None:
            self._next_index = self._ids().next_source_index
        index = self._next_index if given is None else given
        if index >= 2**63:
            raise SampleError.at("source_index", expected="below 2**63", got=f"{index}", remedy="give every sample one")
        self._next_index = max(self._next_index, index + 1)
        return index

    def _refuse_nonfinite(self, sample_id: str, bad: int, n_tokens: int) -> bool:
        got = f"{bad} NaN or Inf values in {n_tokens} tokens"
        if self._nonfinite == "hole":
            self.hole(sample_id, got)
            return False
        remedy = 'pass nonfinite="hole" to record it as failed, or "keep" to store it as it is'
        raise NonFiniteError.at(f"sample {sample_id!r}", expected="finite states", got=got, remedy=remedy)

    def _commit_all(self) -> None:
        self._check_usable()
        with self._failing():
            self._parts.end()
            self._parts.wait()

    def _check_process(self) -> None:
        # Before the lock is asked for: a thread that was left behind in the parent may have held it during the fork.
        if os.getpid() != self._pid:
            raise UsageError.at(self.url, expected="use in the process that opened it", got="another process (fork)")

    def _check_usable(self) -> None:
        if self._closed:
            remedy = "open another DatasetWriter: it goes on from what is committed"
            error = WriterClosedError.at(
                self.url, expected="an open writer", got="one that was closed or failed", remedy=remedy
            )
            raise error from self._failure
        with self._failing():
            self._parts.check()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Close after an error that leaves the open part incomplete."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self.abort()
            raise

    def _shutdown(self) -> None:
        self._closed = True
        self._parts.close()
        self._pipeline.close()


def _positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not is_positive(value):
            raise UsageError.at(name, expected="an integer from 1 on", got=repr(value)[:60])


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError.at(name, expected=f"one of {', '.join(choices)}", got=repr(value))
