"""Feeding a trainer from threads of its own process: reading, checking and decoding need no Python, so no workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hsfmt.errors import UsageError
from hsfmt.readers.buffers import Spec, carve, empty_tensors, nbytes_of
from hsfmt.readers.device import as_device, make_lane, map_tensors, not_picklable, to_lane
from hsfmt.readers.order_position import OrderPosition, check_batch
from hsfmt.readers.read_ahead import Batches, ReadAhead
from hsfmt.readers.recycled_memory import RecycledMemory, allocated_nbytes
from hsfmt.readers.sample_requests import integer
from hsfmt.storage import Store

Batch = dict[str, torch.Tensor]

# Held beside the batches ahead: the one in use, and the one before it, which a `for` loop lets go of one batch later.
_N_IN_USE = 2
_DEPTH = 2
# Of a remote dataset: what is on its way at a time, for 600 MB/s at 100 ms a round trip; how many batches that are at
# most; and what all batches may take, where not even four of them take more.
_ON_THE_WAY_NBYTES = 64 << 20
_MAX_READERS = 32
_AHEAD_NBYTES = 512 << 20


class Prefetcher:
    """Reads the batches of an order ahead of the loop that trains on them, in threads, and hands them out in order.

    It takes the place of a DataLoader with workers: reads, digests and decompression run without Python's lock, so that
    no other process, no shared memory and no copy between processes is needed. With `device` a second thread copies
    each batch there on a stream of its own, one ahead of the loop.

    Batches belong to who gets them, for as long as a tensor over their memory lives; then the memory, not a tensor, is
    used for another batch, since touching fresh memory costs about as much as decoding. So nothing that is held is ever
    overwritten (but `share_memory_()` moves a tensor away from NumPy arrays that were made of it before), and a loop
    that keeps no batches needs `depth` + 2 buffers. The tensors of a batch share one of them: to `torch.save` one, or
    to keep it alone, `clone()` it first. Pinned buffers are recycled by torch, which knows of copies under way, in
    sizes of powers of two.

    An error while a batch is made is raised where that batch would have been handed out, after the ones before it.
    Leaving the loop ends the threads; `close()` also waits until they work on nothing any more. One iteration at a
    time: a new one closes the former. Several threads may take from it, and it ends for all of them; the position is
    then that of the batch that one of them took last.

    Parameters
    ----------
    collator
        Called with the list of indices of a batch, in another thread. If it has `allocate`, which as PackingCollator's
        returns the tensors of a batch by name, it is called with `out=` such tensors, to be filled and returned.
    order
        The batches, as lists of indices: a BatchOrder or any other that has `state_dict` and `load_state_dict`, or a
        list of lists, of which the batches are counted. Anything else that gives lists, once for each iteration, has no
        position that could be saved: those methods raise then.
    device
        Where batches are handed out; None: in the host's memory.
    pin_memory
        Read into page-locked memory, from which copies to a device are asynchronous. None: if `device` is CUDA.
    depth
        Batches that may be read, or in the making, before they are asked for. None: 2; where the collator's dataset is
        remote and it has `allocate`, twice `n_readers`, as long as all batches together take no more than `max_nbytes`,
        or 512 MiB.
    max_nbytes
        Bound on the memory of the `depth` + 2 batches; fewer are read ahead if need be. For collators with `allocate`.
        What is on its way from a remote dataset comes on top: at most 256 MiB a process, and 8 MiB for each reader.
    n_readers
        Batches read at a time, at most `depth` and together with the threads of their dataset: more than one where the
        storage answers late. None: 1; where the collator's dataset is remote, from 2 to 32, so many that 64 MiB are on
        their way.

    Raises
    ------
    UsageError
        No such device, a setting out of its range, `max_nbytes` too small for three batches, no order of batches, or
        that of another dataset.
    """

    def __init__(
        self,
        collator: Callable[..., Any],
        order: Iterable[Sequence[int]],
        *,
        device: str | int | torch.device | None = None,
        pin_memory: bool | None = None,
        depth: int | None = None,
        max_nbytes: int | None = None,
        n_readers: int | None = None,
    ) -> None:
        self.device = None if device is None else as_device(device)
        if pin_memory and not torch.cuda.is_available():
            raise UsageError.at("pin_memory", expected="CUDA, which locks the pages", got="torch without a CUDA device")
        pin = pin_memory if pin_memory is not None else self.device is not None and self.device.type == "cuda"
        depth = None if depth is None else integer(depth, "depth", "an integer from 1 on, or None", 1)
        if n_readers is not None:
            n_readers = integer(n_readers, "n_readers", "an integer from 1 on, or None", 1)
        self._order = OrderPosition(order)
        _check_same_dataset(collator, order)
        self._lane = None if self.device is None else make_lane(self.device)
        self._ahead: ReadAhead[Any, Any] | None = None
        template = _template(collator)
        memory = None if template is None else _Memory(template, pin_memory=pin)
        if _is_remote(collator):
            n_readers = n_readers or _remote_readers(None if memory is None else memory.nbytes)
            depth = depth or _remote_depth(n_readers, None if memory is None else memory.nbytes, max_nbytes)
        self._n_readers, self._depth = n_readers or 1, depth or _DEPTH
        if memory is not None:
            self._depth = _bounded(self._depth, max_nbytes, memory.nbytes)
            memory.keep(self._depth + _N_IN_USE)
            self._read: Callable[[Sequence[int]], Any] = lambda indices: collator(indices, out=memory.take())
        elif max_nbytes is not None:
            expected = "a collator whose batches have a fixed length, which `allocate` shows"
            raise UsageError.at("max_nbytes", expected=expected, got=type(collator).__name__)
        elif pin:
            self._read = lambda indices: map_tensors(collator(indices), torch.Tensor.pin_memory)
        else:
            self._read = collator

    def __len__(self) -> int:
        return len(self._order)

    def __reduce__(self) -> Any:
        raise not_picklable(self, "its collator and its order")

    def __iter__(self) -> Batches[Any]:
        """Begin, or after `load_state_dict` go on with, an epoch of the order.

        Raises
        ------
        BaseException
            While iterating: what making a batch raised, at its turn.
        """
        self.close()
        source, state = self._order.begin()
        readers, read = self._n_readers, self._read

        def make(indices: Any) -> Any:
            return read(check_batch(indices))

        self._ahead = ReadAhead(source, make, state=state, depth=self._depth, n_threads=readers)
        if self._lane is None:
            return Batches(self._ahead, self._order.seen)
        first = self._ahead
        self._ahead, receive = to_lane(first, self._lane, state=lambda: first.state, depth=1)
        return Batches(self._ahead, self._order.seen, receive)

    def close(self) -> None:
        """End the iteration under way; when this returns its threads work on nothing any more."""
        if self._ahead is not None:
            self._ahead.close()
        self._order.end()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the order, for the next iteration.

        Raises
        ------
        UsageError
            The order has no epochs.
        """
        self.close()
        self._order.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the order's state as of the batch that was handed out last, whatever was read ahead.

        It is the state of the order itself, which can load it without a Prefetcher too; of a list the number of batches
        handed out, with the list's length and digest.

        Raises
        ------
        UsageError
            The order has no state, and is no list.
        """
        if self._ahead is not None and self._ahead.ended:
            self.close()
        return self._order.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on after the batch that was handed out last when the state was taken.

        Raises
        ------
        UsageError
            It is no state of such an order, that of another list, or the order has none.
        """
        self.close()
        self._order.load(state)


def _template(collator: Any) -> Batch | None:
    """Return what a batch looks like, if they all look the same."""
    try:
        template: Batch | None = collator.allocate() if hasattr(collator, "allocate") else None
    except UsageError:  # as long as its samples are
        return None
    return template


class _Memory:
    """Memory of batches; that of one is used again when no tensor over it is left, wherever in the program.

    Pinned memory comes from torch, whose own allocator keeps it: copies out of it may be under way when the last tensor
    goes, which only that allocator knows.
    """

    def __init__(self, template: Batch, *, pin_memory: bool) -> None:
        self._names = list(template)
        self._specs: list[Spec] = [(tuple(tensor.shape), tensor.dtype) for tensor in template.values()]
        self._pin_memory = pin_memory
        self._recycled = RecycledMemory(0)

    @property
    def nbytes(self) -> int:
        """Bytes that a batch takes."""
        nbytes = nbytes_of(self._specs)
        return 1 << (nbytes - 1).bit_length() if self._pin_memory else nbytes

    def keep(self, n_batches: int) -> None:
        """Keep the memory of so many batches."""
        self._recycled = RecycledMemory(n_batches * allocated_nbytes(self.nbytes), min_nbytes=1)

    def take(self) -> Batch:
        """Return uninitialised tensors for a batch."""
        if self._pin_memory:
            return dict(zip(self._names, empty_tensors(self._specs, pin_memory=True), strict=True))
        memory = torch.from_numpy(self._recycled.empty(self.nbytes))
        return dict(zip(self._names, carve(memory, self._specs), strict=True))


def _check_same_dataset(collator: Any, order: Any) -> None:
    expected = getattr(getattr(collator, "dataset", None), "fingerprint", None)
    got = getattr(order, "fingerprint", None)
    if isinstance(expected, str) and isinstance(got, str) and expected != got:
        remedy = "make both of the same dataset"
        raise UsageError.at("order", expected=f"that of the collator's dataset, {expected}", got=got, remedy=remedy)


def _is_remote(collator: Any) -> bool:
    store = getattr(getattr(getattr(collator, "dataset", None), "reader", None), "store", None)
    return isinstance(store, Store) and not store.is_local


def _remote_readers(batch_nbytes: int | None) -> int:
    wanted = 1 if batch_nbytes is None else -(-_ON_THE_WAY_NBYTES // max(1, batch_nbytes))
    return min(max(wanted, _DEPTH), _MAX_READERS)


def _remote_depth(n_readers: int, batch_nbytes: int | None, max_nbytes: int | None) -> int:
    if batch_nbytes is None:
        return n_readers
    limit = max_nbytes if isinstance(max_nbytes, int) else _AHEAD_NBYTES
    return min(2 * n_readers, max(limit // max(1, batch_nbytes) - _N_IN_USE, _DEPTH))


def _bounded(depth: int, max_nbytes: int | None, batch_nbytes: int) -> int:
    if max_nbytes is None:
        return depth
    max_nbytes = integer(max_nbytes, "max_nbytes", "an integer number of bytes, or None", 0)
    fitting = max_nbytes // max(1, batch_nbytes) - _N_IN_USE
    if fitting < 1:
        expected = f"at least {(1 + _N_IN_USE) * batch_nbytes} bytes, for 3 batches of {batch_nbytes}"
        raise UsageError.at("max_nbytes", expected=expected, got=str(max_nbytes), remedy="use a smaller token budget")
    return min(depth, fitting)
