"""Copies to a device. There is none here: an imitation of torch.cuda, as late as a real one may be, shows the order."""

import _thread
import ctypes
import itertools
import pickle
import threading
import time
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import MutableMapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from hsfmt.errors import UsageError
from hsfmt.readers.device import CudaLane, DevicePrefetcher, map_tensors
from hsfmt.readers.prefetch import Prefetcher

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """Streams whose work is done only when someone waits for it: every missing wait shows.

    What torch.cuda promises and this imitates: work of a stream is done in order; a stream that waits for an event does
    nothing before the work recorded by it is done; an event that is synchronized has happened.
    """

    def __init__(self):
        self.main = FakeStream("main")
        self.local = threading.local()
        self.lock = threading.RLock()

    def Stream(self, device):  # noqa: N802
        assert device == DEVICE
        return FakeStream("side")

    def Event(self, *, blocking):  # noqa: N802
        assert blocking, "the host does not spin"
        return FakeEvent(self)

    def current_stream(self, device=DEVICE):
        assert device == DEVICE
        return getattr(self.local, "stream", self.main)

    @contextmanager
    def stream(self, stream):
        self.local.stream = stream
        yield
        del self.local.stream


class FakeStream:
    def __init__(self, name):
        self.name = name
        self.todo = []
        self.n_done = 0

    def do(self, work):
        self.todo.append(work)

    def run_to(self, n_done):
        while self.n_done < n_done:
            work, self.todo[self.n_done] = self.todo[self.n_done], None
            self.n_done += 1
            work()

    def wait_event(self, event):
        self.do(event.synchronize)


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self, stream):
        self.stream, self.place = stream, len(stream.todo)

    def synchronize(self):
        with self.cuda.lock:
            self.stream.run_to(self.place)


class Pinned(torch.Tensor):
    """Host memory; its copy is done by the stream that is current, when that gets to it."""

    cuda = None

    def to(self, device, *, non_blocking):
        assert device == DEVICE
        assert non_blocking
        # As a device has it: an address, which keeps no memory alive.
        place = (ctypes.c_byte * self.nbytes).from_address(self.data_ptr())
        source = torch.frombuffer(place, dtype=self.dtype)
        target = torch.full(self.shape, -1, dtype=self.dtype)
        stream = self.cuda.current_stream()
        assert stream is not self.cuda.main, "the copy does not wait for what computes"
        stream.do(lambda: target.copy_(source))
        return target.as_subclass(OnDevice)


class OnDevice(torch.Tensor):
    used_by = ()

    def record_stream(self, stream):
        self.used_by = (*self.used_by, stream)


class Collator:
    def __init__(self):
        self.places = []

    def allocate(self):
        return {"a": torch.empty(100), "b": torch.empty(3, dtype=torch.int64)}

    def __call__(self, indices, out=None):
        self.places.append(out["a"].data_ptr())
        return {name: tensor.fill_(indices[0]).as_subclass(Pinned) for name, tensor in out.items()}


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(Pinned, "cuda", fake)
    return fake


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = _thread._count()
    yield
    deadline = time.monotonic() + 300
    while _thread._count() > before and time.monotonic() < deadline:
        time.sleep(0.002)
    assert _thread._count() <= before


ORDER = [[number] for number in range(40)]


@pytest.mark.parametrize("depth", [1, 3])
def test_each_batch_arrives_whole_before_it_is_computed_on(cuda, depth):
    """Neither is its buffer filled anew before the copy, nor does the computing stream come before it."""
    collator = Collator()
    prefetcher = Prefetcher(collator, ORDER, device="cpu", depth=depth)
    prefetcher._lane = CudaLane(DEVICE, cuda)
    sums = []
    for batch in prefetcher:
        assert [tensor.used_by for tensor in batch.values()] == [(cuda.main,)] * 2
        cuda.main.do(lambda batch=batch: sums.append([float(batch["a"].min()), int(batch["b"].max())]))
        if len(cuda.main.todo) % 7 == 0:  # the host is ahead of the device by some steps
            with cuda.lock:
                cuda.main.run_to(len(cuda.main.todo))
    with cuda.lock:
        cuda.main.run_to(len(cuda.main.todo))
    assert sums == [[number, number] for number in range(40)]
    assert len(set(collator.places)) < 40, "the buffers were used again"


@pytest.mark.parametrize("missing", ["settle", "receive"])
def test_the_imitation_notices_what_is_missing(cuda, missing, monkeypatch):
    if missing == "settle":
        monkeypatch.setattr(CudaLane, "settle", lambda self: setattr(self, "_under_way", None))
    else:
        monkeypatch.setattr(CudaLane, "receive", lambda self, copied: copied[0])
        monkeypatch.setattr(CudaLane, "settle", lambda self: None)
    prefetcher = Prefetcher(Collator(), ORDER, device="cpu")
    prefetcher._lane = CudaLane(DEVICE, cuda)
    seen = []
    for batch in prefetcher:
        cuda.main.do(lambda batch=batch: seen.append(float(batch["a"].min())))
        if missing == "receive":
            cuda.main.run_to(len(cuda.main.todo))
        batch = None  # noqa: PLW2901  nothing of it is held
    cuda.main.run_to(len(cuda.main.todo))
    assert seen != [float(number) for number in range(40)]


def test_a_copy_that_fails_is_an_error_of_its_batch(cuda, monkeypatch):
    copy = CudaLane.copy
    calls = itertools.count()

    def failing(self, batch):
        if next(calls) == 3:
            raise torch.OutOfMemoryError("device")
        return copy(self, batch)

    monkeypatch.setattr(CudaLane, "copy", failing)
    prefetcher = Prefetcher(Collator(), ORDER, device="cpu")
    prefetcher._lane = CudaLane(DEVICE, cuda)
    batches = iter(prefetcher)
    for _ in range(3):
        next(batches)
    with pytest.raises(torch.OutOfMemoryError):
        next(batches)
    assert prefetcher.state_dict()["n_batches"] == 3


class Pair(NamedTuple):
    left: Any
    right: Any


def test_tensors_in_dicts_lists_and_tuples():
    batch = {"a": torch.ones(1), "b": [torch.ones(2), "text"], "c": (torch.ones(3), None), "d": Pair(torch.ones(4), 5)}
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert doubled["a"].tolist() == [2]
    assert doubled["b"][0].tolist() == [2, 2]
    assert doubled["b"][1] == "text"
    assert doubled["c"][0].tolist() == [2] * 3
    assert doubled["c"][1] is None
    assert isinstance(doubled["d"], Pair)
    assert doubled["d"].left.tolist() == [2] * 4
    assert doubled["d"].right == 5
    assert batch["a"].tolist() == [1]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        if index == 17 and getattr(self, "broken", False):
            raise ValueError("sample 17")
        return {"x": torch.full((4,), index), "name": f"n{index}"}


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_data_loader(n_workers, persistent):
    options = {"num_workers": n_workers, "persistent_workers": persistent and n_workers > 0}
    loader = DataLoader(Numbers(), batch_size=4, **options)
    prefetcher = DevicePrefetcher(loader, "cpu")
    assert len(prefetcher) == 6
    for _epoch in range(2):
        for expected, batch in zip(loader if n_workers == 0 else DataLoader(Numbers(), 4), prefetcher, strict=True):
            assert torch.equal(batch["x"], expected["x"])
            assert batch["name"] == expected["name"]
    for _ in prefetcher:
        break
    assert len(list(prefetcher)) == 6
    with pytest.raises(UsageError, match="StatefulDataLoader"):
        prefetcher.state_dict()


def test_a_loader_s_error_comes_at_its_turn():
    broken = Numbers()
    broken.broken = True
    batches = iter(DevicePrefetcher(DataLoader(broken, batch_size=4), "cpu", depth=3))
    assert [next(batches)["name"][0] for _ in range(4)] == ["n0", "n4", "n8", "n12"]
    with pytest.raises(ValueError, match="sample 17"):
        next(batches)


class Stateful:
    """A loader with a state, like torchdata's."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        while self.n < 10:
            self.n += 1
            yield torch.tensor(self.n)
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


@pytest.mark.parametrize("n_taken", [0, 1, 6, 10])
def test_the_state_of_a_loader_is_that_of_what_was_handed_out(n_taken):
    prefetcher = DevicePrefetcher(Stateful(), "cpu", depth=4)
    batches = iter(prefetcher)
    for _ in range(n_taken):
        next(batches)
    time.sleep(0.01)
    state = prefetcher.state_dict()
    assert state == {"n": n_taken}
    again = DevicePrefetcher(Stateful(), "cpu")
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert [int(batch) for batch in again] == list(range(n_taken + 1, 11))
    prefetcher.close()


@pytest.mark.parametrize("depth", [0, -1, 1.5, "1", None])
def test_settings_that_cannot_be(depth):
    with pytest.raises(UsageError, match="depth"):
        DevicePrefetcher([], "cpu", depth=depth)


@pytest.mark.parametrize("device", [None, "meta", "nowhere", 1.5, "cuda:99", "xla"])
def test_devices_that_cannot_be(device):
    with pytest.raises(UsageError, match="device"):
        DevicePrefetcher([], device)


def test_it_is_not_picklable():
    with pytest.raises(TypeError, match=r"DevicePrefetcher can't be pickled.* threads"):
        pickle.dumps(DevicePrefetcher([], "cpu"))


class Own(dict):
    """Has a constructor of its own, and something beside the items."""

    def __init__(self, note):
        self.note = note


class Attributes(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


class ReadOnly(dict):
    def __setitem__(self, key, value):
        raise NotImplementedError


class Shared(MutableMapping):
    """A shallow copy of it shares its items."""

    def __init__(self, items):
        self.items_ = items

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


def own():
    made = Own("note")
    made["x"] = torch.ones(2)
    return made


@pytest.mark.parametrize(
    ("batch", "kept"),
    [
        (OrderedDict(x=torch.ones(2)), OrderedDict),
        (defaultdict(list, x=torch.ones(2)), defaultdict),
        (UserDict(x=torch.ones(2)), UserDict),
        (own(), Own),
        (Attributes(x=torch.ones(2)), dict),
        (ReadOnly(x=torch.ones(2)), dict),
        (Shared({"x": torch.ones(2)}), dict),
        (MappingProxyType({"x": torch.ones(2)}), dict),
    ],
)
def test_mappings_stay_what_they_are_where_they_can(batch, kept):
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(doubled) is kept
    assert list(doubled) == ["x"]
    assert doubled["x"].tolist() == [2, 2]
    assert batch["x"].tolist() == [1, 1], "what is copied stays as it is"
    if kept is Own:
        assert doubled.note == "note"
    if kept is defaultdict:
        assert doubled["other"] == []
