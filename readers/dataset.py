"""HiddenStateDataset: samples as torch items, for DataLoaders of any kind. torch is imported on first use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from hsfmt.columns import CORE_COLUMNS
from hsfmt.dtypes import dtype
from hsfmt.errors import UsageError
from hsfmt.header import Header
from hsfmt.readers.batches_ahead import AHEAD_NBYTES, Batch, BatchesAhead
from hsfmt.readers.open_snapshot import SampleIds, sample_number
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.readers.sample_requests import SampleRequest, integer, layer_ids, layer_planes, refuse_overlap
from hsfmt.storage import Store

if TYPE_CHECKING:
    import torch

    from hsfmt.readers.views import View

VIEWS = ("raw", "speculators")
Item = dict[str, Any]

# Of a token: id, loss mask and position int64, scale float32.
_NARROW_NBYTES = 28


class HiddenStateDataset:
    """Map-style dataset over the samples of a snapshot.

    Opening reads two files. It is picklable, and works after fork, spawn and forkserver whether or not it was used
    before: each process opens files, caches and threads for itself on first use.

    Parameters
    ----------
    url
        The dataset: a path or any fsspec URL.
    view
        "raw": `hidden_states` [token, layer, hidden] in the stored dtype, `input_ids` int64 [token], `loss_mask` bool
        [token], `sample_id` str; and `hidden_states_scale` float32 [token] with float8. "speculators": the items of
        speculators' own datasets: `hidden_states` [token, (layer - 1) * hidden], `input_ids` int64 [token],
        `verifier_last_hidden_states` [token, hidden], `loss_mask` int64 [token], `lengths` int64 [1], `position_ids`
        int64 [token].
    layers
        HF ids of the layers wanted, in ascending order; None: all. Only their bytes are read.
    max_length
        Longer samples are cut to their first `max_length` tokens.
    snapshot
        None: the sealed one; "live": all that is committed at this moment; or a fingerprint.
    unsafe_skip_checks
        Do not compare what is read with its digests. For benchmarks only.
    dequantize
        Give float8 states with scales as bfloat16 (the product in bfloat16, as hs_connectors forms it). None: in view
        "speculators".
    allow_final_norm
        View "speculators" refuses a dataset whose final state is not known to be before the final norm, since trainers
        apply the norm themselves from speculators 0.4 on. "post" or "unknown" takes a dataset whose header says so.
    extras
        Names of extra columns that raw items carry too. One that neither the first nor the last part has is refused at
        once, for which their indexes are read; a part between that lacks it is found when a sample of it is read.
    n_threads
        Threads that fetch and decode; None: up to 4, and 1 in a worker of a DataLoader that reads a
        local dataset.
    storage_options
        For fsspec URLs.
    cache_dir, cache_size
        A folder on a local disk that keeps what was read of a remote dataset, and the most that it may hold, as bytes
        or a text like 200GiB; many processes may share it. None: what HSFMT_CACHE_DIR and HSFMT_CACHE_SIZE say, else
        no cache, and 32 GiB; "" as folder: none.
    ahead_nbytes
        Bytes of the batches that are read before they are asked for, where a BatchOrder made of this dataset says what
        comes next: by a DataLoader, whose workers share it, or without one. 0: none are. None: 512 MiB of a remote
        dataset, 0 of a local one. What is on its way comes on top: up to 256 MiB a process, and 8 MiB for each batch.

    Raises
    ------
    NotFoundError
        No dataset, or never sealed, or no such snapshot.
    UsageError
        An unknown view or layer, or states that the view's trainer would take for something else.
    CorruptionError
        The snapshot's bytes are not those that were written.
    """

    def __init__(  # noqa: PLR0913  the public constructor: each is a setting of its own
        self,
        url: str | os.PathLike[str] | Store,
        *,
        view: Literal["raw", "speculators"] = "raw",
        layers: Sequence[int] | None = None,
        max_length: int | None = None,
        snapshot: str | None = None,
        unsafe_skip_checks: bool = False,
        dequantize: bool | None = None,
        allow_final_norm: Literal["post", "unknown"] | None = None,
        extras: Sequence[str] = (),
        n_threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: int | str | None = None,
        ahead_nbytes: int | None = None,
    ) -> None:
        if view not in VIEWS:
            raise UsageError.at("view", expected=f"one of {', '.join(VIEWS)}", got=repr(view)[:60])
        if max_length is not None:
            max_length = integer(max_length, "max_length", "an integer from 1 on, or None", 1)
        if isinstance(extras, str):
            raise UsageError.at("extras", expected="a list of names", got=repr(extras)[:60], remedy=f"say [{extras!r}]")
        self.view = view
        self.max_length = max_length
        self._layers = None if layers is None else layer_ids(layers)
        self._dequantize = view == "speculators" if dequantize is None else dequantize
        self._extras = tuple(extras)
        read_options = ReadOptions(
            unsafe_skip_checks=unsafe_skip_checks, n_threads=n_threads, cache_dir=cache_dir, cache_size=cache_size
        )
        self.reader = SampleReader(url, snapshot=snapshot, options=read_options, storage_options=storage_options)
        layer_planes(self.header, self._layers)
        if view == "speculators":
            from hsfmt.readers.views import check_trainable

            check_trainable(self.header, self._layers, allow_final_norm)
        if ahead_nbytes is None:
            ahead_nbytes = 0 if self.reader.store.is_local else AHEAD_NBYTES
        expected = "an integer number of bytes from 0 on, or None"
        self._ahead: BatchesAhead[list[Item]] = BatchesAhead(integer(ahead_nbytes, "ahead_nbytes", expected, 0))
        if self._extras and len(self):
            self._check_extras()

    def __repr__(self) -> str:
        return f"HiddenStateDataset({self.reader.store.url!r}, view={self.view!r}, snapshot={self.fingerprint!r})"

    def __len__(self) -> int:
        return len(self.reader)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of a batch, read by one plan; DataLoaders call it.

        A batch of a BatchOrder may bring along what follows, which is read ahead then.

        Raises
        ------
        IndexError
            There is no such sample.
        CorruptionError, NotFoundError, StorageError
            A sample can't be read as it was committed; no other one takes its place.
        """
        if isinstance(indices, Batch) and self._ahead.max_nbytes:
            reader = self.reader
            return self._ahead.take(indices, self._items, self._nbytes, reader.load_parts, reader.count_fetched)
        return self._items(indices)

    def _items(self, indices: Sequence[int]) -> list[Item]:
        from hsfmt.readers import buffers
        from hsfmt.readers.views import as_array

        view = self._view()
        lengths = [self._length(index) for index in indices]
        states: list[torch.Tensor | None] = [None] * len(lengths)
        outs: list[npt.NDArray[Any] | None] = [None] * len(lengths)
        if buffers.in_worker():
            # What a worker reads is sent by one descriptor a batch. Elsewhere each item has memory of its own, or one
            # that is kept or saved would bring the whole batch along.
            tail = len(self.layers), self.header.hidden_size
            shared = buffers.empty_tensors([((length, *tail), view.hidden_states_dtype) for length in lengths])
            states = [*shared]
            if not view.dequantizes:
                outs = [as_array(tensor, self.header.dtype) for tensor in shared]
        asked = zip(indices, lengths, outs, strict=True)
        requests = [SampleRequest(index, None, length, out) for index, length, out in asked]
        samples = self.reader.read_requests(requests, layers=self._layers, extras=view.columns)
        make = view.maker(self.view)
        return buffers.share([make(sample, out) for sample, out in zip(samples, states, strict=True)])

    def read(
        self,
        index: int,
        start: int | None = None,
        stop: int | None = None,
        *,
        layers: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> Item:
        """Return tokens [start, stop) of a sample as an item of view "raw", whatever the dataset's view.

        Parameters
        ----------
        index
            Number of the sample; negative ones count from the end.
        start, stop
            0 <= start <= stop <= length; None: from the first token, to the last. Only the chunks they touch are read.
        layers
            HF ids in ascending order; None: the dataset's.
        out
            CPU tensor [token, layer, hidden] of any strides that takes the states and is returned with them. After an
            error it holds anything.

        Raises
        ------
        IndexError, UsageError, CorruptionError, NotFoundError, StorageError
            As `SampleReader.read`.
        """
        from hsfmt.readers.views import as_array

        view = self._view()
        wanted = self._layers if layers is None else layer_ids(layers)
        direct = None
        if out is not None:
            if not hasattr(out, "stride"):
                raise UsageError.at("out", expected="a CPU tensor", got=type(out).__name__)
            refuse_overlap(out.shape, out.stride(), 1)
        if out is not None and view.hidden_states_dtype == out.dtype and not view.dequantizes:
            direct = as_array(out, self.header.dtype)
        length = self._length(index)
        if stop is not None:
            where, expected = f"tokens of sample {index}", f"stop of at most {length}"
            if integer(stop, where, expected) > length:
                raise UsageError.at(where, expected=expected, got=str(stop))
        request = SampleRequest(index, start, length if stop is None else stop, direct)
        item = view.raw(self.reader.read_requests([request], layers=wanted, extras=view.columns)[0])
        if out is not None:
            states = item["hidden_states"]
            if direct is None:
                if (out.shape, out.dtype) != (states.shape, states.dtype):
                    expected = f"a tensor {tuple(states.shape)} of {states.dtype}"
                    raise UsageError.at("out", expected=expected, got=f"{tuple(out.shape)} of {out.dtype}")
                out.copy_(states)
            item["hidden_states"] = out
        return item

    def index_of(self, sample_id: str) -> int:
        """Return the number of the sample with that id.

        Raises
        ------
        SampleNotFoundError
            There is none in this snapshot.
        """
        return self.reader.index_of(sample_id)

    def attachments(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that belong to the dataset as a whole, by name, as a drafter's `d2t` and `t2d`.

        Each call reads and checks their files; the arrays are read-only.

        Raises
        ------
        CorruptionError, NotFoundError
            One is missing or damaged.
        """
        return self.reader.attachments()

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each item, int64 [sample], `max_length` applied; no tensor is touched."""
        lengths = self.reader.lengths
        return lengths if self.max_length is None else np.minimum(lengths, self.max_length)

    @property
    def sample_ids(self) -> SampleIds:
        """The ids in order: a sequence over flat buffers; the first use reads one file."""
        return self.reader.sample_ids

    @property
    def header(self) -> Header:
        """What the data means."""
        return self.reader.header

    @property
    def layers(self) -> tuple[int, ...]:
        """HF ids of the layers in items."""
        return self.header.layers if self._layers is None else self._layers

    @property
    def fingerprint(self) -> str:
        """The snapshot's name and digest: the same one, the same samples in the same order."""
        return self.reader.fingerprint

    @property
    def content_digest(self) -> str:
        """Digest of the samples served, whatever their order, parts and codecs."""
        return self.reader.content_digest

    @property
    def approx_lengths(self) -> list[int]:
        """Tokens of each item, for the samplers of speculators."""
        return [int(length) for length in self.lengths]

    @property
    def hidden_states_dtype(self) -> torch.dtype:
        """Data type of the states in items, for the collator of speculators."""
        return self._view().hidden_states_dtype

    @property
    def max_len(self) -> int | None:
        """`max_length`, by the name that speculators has for it."""
        return self.max_length

    @property
    def ahead_nbytes(self) -> int:
        """Bytes of the batches that may be read ahead."""
        return self._ahead.max_nbytes

    @property
    def n_tokens_ahead(self) -> int:
        """Tokens that may be read ahead, for those who plan batches; 0 where nothing is."""
        return self._ahead.max_nbytes // self._token_nbytes

    def close(self) -> None:
        """Close the files that are open, and give up what was read ahead; reading goes on to work."""
        self._ahead.close()
        self.reader.close()

    @property
    def _token_nbytes(self) -> int:
        """Bytes of a token in an item, those of its narrow columns at most."""
        states = len(self.layers) * self.header.hidden_size * dtype(self.header.dtype).storage.itemsize
        return states * (2 if self._dequantize and self.header.scaling else 1) + _NARROW_NBYTES

    def _nbytes(self, indices: Sequence[int]) -> int:
        return sum(map(self._length, indices)) * self._token_nbytes

    def _length(self, index: int) -> int:
        length = int(self.reader.lengths[sample_number(index, len(self))])
        return length if self.max_length is None else min(length, self.max_length)

    def _check_extras(self) -> None:
        ends = {int(self.reader.snapshot.part[number]) for number in (0, -1)}
        self.reader.parts.load(ends)
        known = set().union(*(self.reader.parts.get(number).columns for number in ends)) - set(CORE_COLUMNS)
        missing = [str(name) for name in self._extras if name not in known]
        if missing:
            expected = f"extra columns of this dataset: {', '.join(sorted(known)) or 'it has none'}"
            raise UsageError.at("extras", expected=expected, got=", ".join(missing))

    def _view(self) -> View:
        from hsfmt.readers.views import View

        return View(self.header, self._dequantize, self._extras)
