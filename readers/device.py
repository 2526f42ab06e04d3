"""Batches on their way to a device: copied by a thread and on a stream of their own, one ahead of the loop."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch

from hsfmt.errors import UsageError
from hsfmt.readers.read_ahead import Batches, ReadAhead
from hsfmt.readers.sample_requests import integer

_T = TypeVar("_T")


def map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with `function` applied to the tensors in its dicts, lists and tuples; the rest as it is.

    Subclasses of dict and UserDict stay what they are, if a copy of them takes the values; other mappings become dicts.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: map_tensors(value, function) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    # A copy of any other mapping, or of one that is its own __dict__, may share its values with the original.
    if type(batch) is dict or not isinstance(batch, dict | UserDict) or getattr(batch, "__dict__", None) is batch:
        return values
    try:
        like = copy.copy(batch)
        for key, value in values.items():
            like[key] = value
    except Exception:  # noqa: BLE001  it is made or filled in a way of its own
        return values
    return like


class Lane(Protocol):
    """How batches get to a device; one thread calls `copy` and `settle` in turn, another `receive`."""

    def copy(self, batch: Any) -> Any:
        """Begin to copy; what comes back goes to `receive`. The batch must stay as it is until `settle`."""

    def settle(self) -> None:
        """Return once the last copy has ended: its source may be overwritten."""

    def receive(self, copied: Any) -> Any:
        """Return the batch on the device, such that what the caller does with it comes after the copy."""


class PlainLane:
    """A copy that has ended when the call returns; on the CPU there is nothing to copy.

    Parameters
    ----------
    device
        Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, batch: Any) -> Any:
        """Copy to the device."""
        return map_tensors(batch, lambda tensor: tensor.to(self._device))

    def settle(self) -> None:
        """Nothing is under way."""

    def receive(self, copied: Any) -> Any:
        """Return what was copied."""
        return copied


class CudaLane:
    """Copies on a stream beside the one that computes.

    Parameters
    ----------
    device
        With an index.
    cuda
        torch.cuda, or what stands in for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._under_way: tuple[Any, Any] | None = None

    def copy(self, batch: Any) -> Any:
        """Begin to copy."""
        # Also makes the device the current one of this thread.
        with self._cuda.stream(self._stream):
            copied = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            ended = self._cuda.Event(blocking=True)
            ended.record(self._stream)
        # torch may know nothing of the copy where the memory is not its own: the batch is kept until it has ended.
        self._under_way = batch, ended
        return copied, ended

    def settle(self) -> None:
        """Wait for the copy, without Python's lock."""
        if self._under_way is not None:
            self._under_way[1].synchronize()
            self._under_way = None

    def receive(self, copied: Any) -> Any:
        """Let the current stream wait for the copy."""
        batch, ended = copied
        stream = self._cuda.current_stream(self._device)
        stream.wait_event(ended)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            # It was allocated on the other stream, which must not get its memory back before this one is done with it.
            tensor.record_stream(stream)
            return tensor

        return map_tensors(batch, used)


def make_lane(device: torch.device) -> Lane:
    """Return what suits a device."""
    return CudaLane(device) if device.type == "cuda" else PlainLane(device)


def as_device(device: str | int | torch.device) -> torch.device:
    """Return the device with its index: "cuda" is another one in another thread.

    Raises
    ------
    UsageError
        torch has no such device here.
    """
    try:
        found = torch.device(device)
        if found.type == "cuda":
            usable = torch.cuda.is_available() and (found.index or 0) < torch.cuda.device_count()
        else:
            usable = torch.empty(0, device=found).device.type != "meta"  # which keeps no values
    except Exception as error:  # a device that torch was built without raises any of several types
        raise _no_device(device) from error
    if not usable:
        raise _no_device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


def _no_device(device: object) -> UsageError:
    return UsageError.at("device", expected="a device that torch can use here", got=repr(device)[:60])


def not_picklable(prefetcher: object, instead: str) -> TypeError:
    """Return the error of pickling or copying something whose threads belong to this process."""
    name = type(prefetcher).__name__
    return TypeError(f"a {name} can't be pickled or copied: its threads belong to this process; send {instead}")


def to_lane(
    source: Iterator[Any], lane: Lane, *, state: Callable[[], Any] | None, depth: int
) -> tuple[ReadAhead[Any, Any], Callable[[Any], Any]]:
    """Return the stage that copies what `source` gives, not started, and the function that receives."""
    return ReadAhead(source, lane.copy, state=state, depth=depth, settle=lane.settle), lane.receive


class DevicePrefetcher(Generic[_T]):
    """Hands out the batches of a DataLoader on a device, the next one being copied meanwhile.

    A thread takes batches from the loader and copies them on a stream of its own; batches handed out are ordinary
    tensors in fresh device memory, and the stream that is current then waits for their copy, not the host. `depth`
    batches beside those in use are on the device. Copies are asynchronous only from pinned memory: give the DataLoader
    `pin_memory=True`. Its worker processes are started before the thread is.

    Leaving the loop ends the thread; `close()` also waits for it. One iteration at a time: a new one closes the former.

    Parameters
    ----------
    loader
        A DataLoader or any other iterable; tensors in dicts, lists and tuples are moved, all else is left as it is.
        Subclasses of dict and UserDict stay what they are where a copy takes the values; other mappings become dicts.
    device
        Where to. On the CPU batches are only taken ahead.
    depth
        Batches that may be on the device, or on the way, before they are asked for.

    Raises
    ------
    UsageError
        No such device, or a `depth` below 1.
    """

    def __init__(self, loader: Iterable[_T], device: str | int | torch.device, *, depth: int = 1) -> None:
        self.loader = loader
        self.device = as_device(device)
        self._depth = integer(depth, "depth", "an integer from 1 on", 1)
        self._lane = make_lane(self.device)
        self._ahead: ReadAhead[Any, Any] | None = None
        self._state: Any = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        raise not_picklable(self, "its loader")

    def __iter__(self) -> Batches[_T]:
        """Begin an iteration of the loader.

        Raises
        ------
        BaseException
            While iterating: what the loader raises, at the turn of that batch.
        """
        self.close()
        state = getattr(self.loader, "state_dict", None)
        source = iter(self.loader)
        self._state = None if state is None else state()
        self._ahead, receive = to_lane(source, self._lane, state=state, depth=self._depth)
        return Batches(self._ahead, self._seen, receive)

    def close(self) -> None:
        """End the iteration under way; when this returns its thread works on nothing any more."""
        if self._ahead is not None:
            self._ahead.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as of the batch that was handed out last, whatever was taken ahead.

        Raises
        ------
        UsageError
            The loader has none; torchdata's StatefulDataLoader does.
        """
        self._check_stateful()
        state: dict[str, Any] = self.loader.state_dict() if self._state is None else self._state  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where the state was taken.

        Raises
        ------
        UsageError
            The loader has no state.
        """
        self._check_stateful()
        self.close()
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._state = state

    def _check_stateful(self) -> None:
        if not hasattr(self.loader, "state_dict") or not hasattr(self.loader, "load_state_dict"):
            expected, got = "a loader with a state, such as StatefulDataLoader", type(self.loader).__name__
            raise UsageError.at("loader", expected=expected, got=got)

    def _seen(self, state: Any) -> None:
        self._state = state
