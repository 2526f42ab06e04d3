"""PackingCollator: samples packed into batches of fixed length, read straight into the batch's memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from hsfmt.errors import UsageError
from hsfmt.readers.batches_ahead import Batch, BatchesAhead
from hsfmt.readers.buffers import empty_tensors, nbytes_of
from hsfmt.readers.open_snapshot import sample_number
from hsfmt.readers.packed_batch import Document, fill
from hsfmt.readers.packed_views import packed_layout
from hsfmt.readers.sample_requests import integer
from hsfmt.readers.views import check_trainable

if TYPE_CHECKING:
    from hsfmt.readers.dataset import HiddenStateDataset

Index = int | tuple[int, int | None, int | None]


class PackingCollator:
    """Makes a batch of a list of sample numbers: the samples one behind the other, and zeros behind the last.

    All samples of a batch are read by one plan, straight into the memory that the trainer gets, without tensors of
    samples on the way. Keys, shapes, data types and values are those of the collator of speculators 0.9 over the same
    samples:

    ===============================  ============================================================================
    `hidden_states`                  [1, n_tokens, (layer - 1) * hidden]
    `verifier_last_hidden_states`    [1, n_tokens, hidden]
    `input_ids`, `position_ids`      int64 [1, n_tokens]; a window's positions are those of its tokens in the sample
    `loss_mask`                      int64 [1, n_tokens]
    `document_ids`                   int64 [1, n_tokens]: which sample of the batch, -1 for padding
    `error_records`                  the int 0: a sample that can't be read raises
    ===============================  ============================================================================

    It goes into any DataLoader whose dataset is the list of all numbers, `range(len(dataset))`, or of windows. Or it is
    itself the DataLoader's dataset, with a BatchOrder as `sampler=` and `batch_size=None`: then the batches of a remote
    dataset are read ahead, as its `ahead_nbytes` says. It is picklable and may be called from several threads at a
    time. Extra columns are not packed. The tensors of a batch share one allocation, in the main process as in workers:
    to `torch.save` one of them, or to keep it alone, `clone()` it first.

    Parameters
    ----------
    dataset
        Its layers and `max_length` hold here too; its view matters only for float8 (below).
    n_tokens
        Length of every batch in tokens; None: as many as the samples have.
    view
        The speculator type of speculators. "eagle3", "peagle": each token with the states before it, so that a sample
        loses one token: `input_ids`, `verifier_last_hidden_states`, `loss_mask` and `position_ids` from the second
        token on, `hidden_states` up to the last but one. "dflash", "dflash2", "dspark", "xpress": no shift. "mtp": no
        shift, `hidden_states` is the final state alone. "raw": the samples as they are, `hidden_states` [1, n_tokens,
        layer, hidden] and `loss_mask` bool. Float8 states with scales come as bfloat16, in view "raw" only if the
        dataset dequantises; else `hidden_states_scale` float32 [1, n_tokens] comes along.
    overflow
        What to do with samples that are more than `n_tokens` together. "error" by default: an order that respects the
        budget never gets there, and any other would lose tokens without a word. "cut" drops what does not fit, as
        speculators does, whose sampler counts on that for samples longer than a batch.
    hidden_states_dtype
        Data type of the states, converted if they are stored in another one (through as much memory again as they take
        as stored); None: as stored.
    pad_to_multiple_of
        With `n_tokens=None`: the batch's length is rounded up to a multiple of this.
    allow_final_norm
        As in HiddenStateDataset; one of view "speculators" was asked already.
    with_samples
        Two more keys: `lengths` int64 [sample], tokens of each sample in the batch, and `sample_ids`, a list of str.
        Off by default, as the trainer of speculators passes every key on to the model, down to its attention.
    pin_memory
        Read into page-locked memory, where there is CUDA. Not in workers: there it is for the DataLoader to do.

    Raises
    ------
    UsageError
        A setting that does not exist, or states that the view's trainer would take for something else.
    """

    def __init__(  # noqa: PLR0913  the public constructor: each is a setting of its own
        self,
        dataset: HiddenStateDataset,
        n_tokens: int | None,
        *,
        view: str,
        overflow: Literal["error", "cut"] = "error",
        hidden_states_dtype: torch.dtype | None = None,
        pad_to_multiple_of: int = 1,
        allow_final_norm: Literal["post", "unknown"] | None = None,
        with_samples: bool = False,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.n_tokens = None if n_tokens is None else integer(n_tokens, "n_tokens", "an integer from 1 on, or None", 1)
        if overflow not in ("error", "cut"):
            raise UsageError.at("overflow", expected='"error" or "cut"', got=repr(overflow)[:60])
        self.overflow = overflow
        self._multiple = integer(pad_to_multiple_of, "pad_to_multiple_of", "an integer from 1 on", 1)
        if n_tokens is not None and self._multiple != 1:
            got = f"n_tokens {n_tokens}"
            raise UsageError.at("pad_to_multiple_of", expected="n_tokens=None, for batches of any length", got=got)
        self._layout = packed_layout(
            view,
            dataset.header,
            dataset.layers,
            hidden_states_dtype,
            dequantize=view != "raw" or dataset.hidden_states_dtype == torch.bfloat16,
        )
        if view != "raw":
            allowed = dataset.header.final_norm if dataset.view == "speculators" else allow_final_norm
            check_trainable(dataset.header, dataset.layers, allowed, view)
        self._with_samples = with_samples
        self._pin_memory = pin_memory
        self._ahead: BatchesAhead[dict[str, Any]] = BatchesAhead(dataset.ahead_nbytes)

    def __repr__(self) -> str:
        return f"PackingCollator({self.dataset!r}, {self.n_tokens}, view={self.view!r})"

    @property
    def view(self) -> str:
        """The view's name."""
        return self._layout.view

    @property
    def shift(self) -> int:
        """Tokens that each sample loses on its way into a batch, for those who plan batches."""
        return self._layout.shift

    def allocate(self) -> dict[str, torch.Tensor]:
        """Return memory for a batch, not initialised, to be given as `out` as often as one likes.

        Raises
        ------
        UsageError
            Batches have no fixed length.
        """
        if self.n_tokens is None:
            raise UsageError.at("n_tokens", expected="a number, to allocate that many", got="None")
        return self._allocate(self.n_tokens)

    def __getitem__(self, indices: Sequence[Index]) -> dict[str, Any]:
        """Return a batch, as when called with it; what a BatchOrder says to follow is read ahead."""
        if isinstance(indices, Batch) and self._ahead.max_nbytes:
            reader = self.dataset.reader
            return self._ahead.take(indices, self, self._nbytes, reader.load_parts, reader.count_fetched)
        return self(indices)

    def _nbytes(self, indices: Iterable[Index]) -> int:
        n_tokens = self.n_tokens
        if n_tokens is None:
            n_tokens = self._place([self._window(index) for index in indices])[1]
        return nbytes_of(list(self._layout.specs(n_tokens).values()))

    def __call__(self, indices: Iterable[Index], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a batch.

        Parameters
        ----------
        indices
            Numbers of samples, or windows of their tokens as (number, start, stop); the same one may come twice.
        out
            What `allocate` or an earlier call returned: takes this batch, and is overwritten all over. After an error
            its content is undefined.

        Raises
        ------
        IndexError
            There is no such sample.
        UsageError
            No list, a window outside of its sample, more tokens than `n_tokens`, or an `out` that does not fit.
        CorruptionError, NotFoundError, StorageError
            A sample can't be read as it was committed; no other one takes its place.
        """
        if isinstance(indices, str | bytes | Mapping) or not isinstance(indices, Iterable):
            expected = "a batch: a list of numbers of samples or of windows (number, start, stop)"
            raise UsageError.at("indices", expected=expected, got=repr(indices)[:60])
        documents, n_tokens = self._place([self._window(index) for index in indices])
        tensors = self._allocate(n_tokens) if out is None else self._checked(out, n_tokens)
        samples = fill(self.dataset.reader, self._layout, documents, tensors)
        batch: dict[str, Any] = {**tensors, "error_records": 0}
        if self._with_samples:
            batch["lengths"] = torch.tensor([document.n_tokens for document in documents], dtype=torch.int64)
            batch["sample_ids"] = [sample.sample_id for sample in samples]
        return batch

    def _window(self, index: Index) -> tuple[int, int, int]:
        """Return (number, start, stop) of an index."""
        is_window = isinstance(index, tuple | list) or getattr(index, "ndim", 0) == 1  # a row of an array, too
        window: Sequence[Any] = index if is_window else (index, None, None)  # type: ignore[assignment]
        if len(window) != 3:
            raise UsageError.at("indices", expected="numbers or (number, start, stop)", got=repr(index)[:60])
        number = sample_number(window[0], len(self.dataset))
        length = int(self.dataset.reader.lengths[number])
        if self.dataset.max_length is not None:
            length = min(length, self.dataset.max_length)
        where, expected = f"tokens of sample {number}", f"a window within [0, {length})"
        start = 0 if window[1] is None else integer(window[1], where, expected)
        stop = length if window[2] is None else integer(window[2], where, expected)
        if not 0 <= start <= stop <= length:
            raise UsageError.at(where, expected=expected, got=f"[{start}, {stop})")
        return number, start, stop

    def _place(self, windows: Sequence[tuple[int, int, int]]) -> tuple[list[Document], int]:
        """Return the samples of the batch with their places, and the batch's length."""
        lengths = [max(stop - start - self.shift, 0) for _, start, stop in windows]
        total = sum(lengths)
        if self.n_tokens is None:
            n_tokens = -(-total // self._multiple) * self._multiple
        else:
            n_tokens = self.n_tokens
            if total > n_tokens and self.overflow == "error":
                longest = max(range(len(lengths)), key=lengths.__getitem__)
                got = f"{total}, of which sample {windows[longest][0]} has {lengths[longest]}"
                remedy = 'pack fewer, give windows (number, start, stop), or drop what does not fit: overflow="cut"'
                raise UsageError.at("batch", expected=f"at most {n_tokens} tokens", got=got, remedy=remedy)
        documents: list[Document] = []
        at = 0
        for (number, start, _), length in zip(windows, lengths, strict=True):
            n = min(length, n_tokens - at)
            documents.append(Document(number, start, n, at))
            at += n
            if at == self.n_tokens:  # samples without tokens behind the last row have no place either
                break
        return documents, n_tokens

    def _allocate(self, n_tokens: int) -> dict[str, torch.Tensor]:
        specs = self._layout.specs(n_tokens)
        return dict(zip(specs, empty_tensors(list(specs.values()), pin_memory=self._pin_memory), strict=True))

    def _checked(self, out: Mapping[str, Any], n_tokens: int) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for key, (shape, dtype) in self._layout.specs(n_tokens).items():
            tensor = out.get(key)
            expected = f"a contiguous CPU tensor {shape} of {dtype}"
            if not isinstance(tensor, torch.Tensor):
                raise UsageError.at(f"out[{key!r}]", expected=expected, got=type(tensor).__name__)
            fits = (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (shape, dtype, "cpu")
            if not fits or not tensor.is_contiguous():
                layout = "" if tensor.is_contiguous() else ", not contiguous"
                got = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}{layout}"
                raise UsageError.at(f"out[{key!r}]", expected=expected, got=got)
            tensors[key] = tensor
        spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors.values() if tensor.nbytes)
        if any(start + nbytes > following for (start, nbytes), (following, _) in itertools.pairwise(spans)):
            raise UsageError.at("out", expected="tensors that do not overlap in memory", got="some that do")
        return tensors
