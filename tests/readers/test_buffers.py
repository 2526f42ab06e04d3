"""Memory for items: one allocation, shared where torch would have to copy, used again when nobody has it any more."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hsfmt.errors import StorageError
from hsfmt.readers import buffers, shared_memory
from hsfmt.readers.buffers import empty_tensors, share

# Python 3.12 and later warn of any fork in a process with threads; that it works all the same is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

MIB = 1 << 20
SPECS = [
    ((3, 5), torch.bfloat16),
    ((0, 4), torch.int64),
    ((), torch.float32),
    ((7,), torch.bool),
    ((2, 2), torch.float8_e4m3fn),
    ((1,), torch.int64),
]


@pytest.fixture
def in_worker(monkeypatch):
    """Allocate as in a DataLoader's worker, with nothing kept from before."""
    memory = shared_memory.SharedMemory()
    monkeypatch.setattr(buffers, "in_worker", lambda: True)
    monkeypatch.setattr(buffers, "SHARED_MEMORY", memory)
    yield memory
    memory.after_fork()


def bytes_tensor(nbytes):
    return empty_tensors([((nbytes,), torch.uint8)])[0]


def mapping(tensor):
    """The name of what is mapped where the tensor lies, "" for ordinary memory."""
    return mapped(tensor)[5] if len(mapped(tensor)) > 5 else ""


def mapped(tensor):
    """The line of /proc/self/maps, in fields: the fifth is the number of the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.split(maxsplit=5)
    raise AssertionError("not mapped")


def n_open():
    """How many descriptors are open, but for connections, which servers of other tests end whenever they like."""
    return sum(not path.resolve().name.startswith("socket:") for path in Path("/proc/self/fd").iterdir())


def inode(tensor):
    """The file that torch sends when it sends the tensor."""
    fd, _ = tensor.untyped_storage()._share_fd_cpu_()
    return os.fstat(fd).st_ino


def check_layout():
    tensors = empty_tensors(SPECS)
    assert [(tuple(t.shape), t.dtype) for t in tensors] == SPECS
    assert all(t.is_contiguous() and t.data_ptr() % 64 == 0 for t in tensors)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
    for number, tensor in enumerate(tensors):
        tensor.reshape(-1).view(torch.uint8).fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor.reshape(-1).view(torch.uint8) == number).all(), "none lies over another"
    return tensors


def test_layout_in_ordinary_memory():
    assert not any(t.is_shared() for t in check_layout())
    assert empty_tensors([]) == []
    assert empty_tensors([((0,), torch.int64)])[0].numel() == 0


def test_layout_in_a_worker(in_worker):
    assert all(t.is_shared() for t in check_layout())
    assert empty_tensors([]) == []
    assert empty_tensors([((0,), torch.int64)])[0].numel() == 0


def test_what_a_worker_allocates_is_sent_as_it_is(in_worker):
    tensor = bytes_tensor(3 * MIB)
    start = tensor.data_ptr()
    assert "memfd:hsfmt-batch" in mapping(tensor)
    inode(tensor)
    assert "memfd:hsfmt-batch" in mapping(tensor), "no copy in /dev/shm"
    assert tensor.data_ptr() == start
    ordinary = torch.ones(MIB)
    inode(ordinary)
    assert "/dev/shm/" in mapping(ordinary), "which is what torch does otherwise"


def test_memory_that_came_back_is_used_again(in_worker):
    first, second = bytes_tensor(2 * MIB), bytes_tensor(2 * MIB)
    files = [inode(first), inode(second)]
    assert files[0] != files[1]
    view = first[100:200]
    del first
    third = bytes_tensor(2 * MIB)
    assert inode(third) not in files, "a view keeps it"
    del view
    assert inode(bytes_tensor(2 * MIB - 5)) == files[0]


def test_memory_that_another_process_has_is_not_used_again(in_worker):
    tensor = bytes_tensor(2 * MIB)
    tensor.fill_(7)
    file = inode(tensor)
    end, signal = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(signal)
            os.read(end, 1)
            code = int(not (tensor.numpy() == 7).all())
        finally:
            os._exit(code)
    os.close(end)
    del tensor
    others = [bytes_tensor(2 * MIB).fill_(9) for _ in range(3)]
    assert file not in map(inode, others)
    os.close(signal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file in [inode(t) for t in [bytes_tensor(2 * MIB) for _ in range(3)]]


def test_few_files_and_little_memory_is_kept(in_worker):
    before = n_open()
    tensors = [bytes_tensor(size) for size in [2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB] * 5]
    assert len(in_worker._files) == 8
    del tensors
    assert n_open() == before + 8
    for size in (700 * MIB, 300 * MIB, 3000 * MIB, 1000):  # nothing of it is touched
        bytes_tensor(size)
        assert sum(file.nbytes for file in in_worker._files) <= 1 << 30
    in_worker.after_fork()
    assert n_open() == before


def without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")


def without_the_function(monkeypatch):
    another_torch = SimpleNamespace(UntypedStorage=object, multiprocessing=torch.multiprocessing)
    monkeypatch.setattr(shared_memory, "torch", another_torch)


def with_another_signature(monkeypatch):
    def another(fd, nbytes):
        raise TypeError("takes 3 arguments")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_fd_cpu", another)


def without_memory(monkeypatch):
    def full(fd, nbytes):
        raise RuntimeError("unable to mmap: Cannot allocate memory")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_fd_cpu", full)


def with_small_files_only(monkeypatch):
    def refuse(fd, nbytes):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)


def by_file_name(monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")


@pytest.mark.parametrize(
    "lack",
    [
        without_memfd,
        without_the_function,
        with_another_signature,
        without_memory,
        with_small_files_only,
        by_file_name,
    ],
)
def test_ordinary_memory_where_none_can_be_shared(in_worker, monkeypatch, lack):
    before = n_open()
    lack(monkeypatch)
    assert not any(t.is_shared() for t in check_layout())
    item = {"a": torch.ones(3)}
    assert share([item])[0]["a"].tolist() == [1, 1, 1]
    in_worker.after_fork()
    assert n_open() == before


def test_no_descriptor_left_is_an_error_at_once(in_worker, monkeypatch):
    def none_left(name, flags):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(StorageError, match="ulimit -n"):
        bytes_tensor(10)


def test_share_moves_what_is_not_shared_yet(in_worker):
    states = empty_tensors([((4, 3, 2), torch.bfloat16)])[0].fill_(3)
    product = torch.arange(24, dtype=torch.float32).reshape(4, 3, 2)
    item = {
        "states": states,
        "first": product[:, :-1].flatten(1),
        "last": product[:, -1],
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "every_other": torch.arange(10)[1::2],
        "none": torch.empty(0, 3),
        "id": "a name",
        "null": None,
    }
    wanted = dict(item)
    shared = share([item, {"ids": torch.arange(3)}])[0]
    assert shared["states"] is states
    assert (shared["id"], shared["null"]) == ("a name", None)
    for key in ("first", "last", "ids", "mask", "every_other", "none"):
        assert torch.equal(shared[key], wanted[key])
        assert (shared[key].dtype, shared[key].stride()) == (wanted[key].dtype, wanted[key].stride())
        assert shared[key].is_shared() or key == "none"
    assert shared["last"].data_ptr() - shared["first"].data_ptr() == 16, "still views of one buffer"
    assert len({inode(shared[key]) for key in ("first", "last", "ids", "mask", "every_other")}) == 1


def test_share_leaves_items_of_the_main_process_alone():
    item = {"ids": torch.arange(5)}
    ids = item["ids"]
    assert share([item])[0]["ids"] is ids
    assert not ids.is_shared()


class Numbers(Dataset):
    """Item i: 1 MiB filled with i, and the number of descriptors that the worker has open."""

    def __len__(self):
        return 120

    def __getitems__(self, numbers):
        tensors = empty_tensors([((MIB,), torch.uint8)] * len(numbers))
        count = torch.tensor(n_open())
        return share([{"data": t.fill_(n), "open": count} for n, t in zip(numbers, tensors, strict=True)])


def as_is(items):
    return items


def memfd_inodes():
    """The memory files that this process has mapped."""
    mapped = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:hsfmt-batch" in line)
    return {fields[4] for fields in mapped}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_descriptors_stay_few_over_many_batches(strategy, pin_memory):
    def use_strategy(_):
        torch.multiprocessing.set_sharing_strategy(strategy)

    before = n_open()
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=2,
        collate_fn=as_is,
        worker_init_fn=use_strategy,
        multiprocessing_context="fork",
        timeout=300,
        pin_memory=pin_memory,
    )
    kept = None
    in_workers, here, files = [], [], set()
    for number, batch in enumerate(loader):
        for item, value in zip(batch, range(4 * number, 4 * number + 4), strict=True):
            assert (item["data"] == value).all()
            in_workers.append(int(item["open"]))
        here.append(n_open())
        files.add(mapped(batch[0]["data"])[4])
        if number == 3:
            kept = batch[0]["data"]
    assert (kept == 12).all(), "no later batch was written over it"
    assert max(in_workers) <= min(in_workers) + 24
    assert max(here) <= before + 40
    if strategy == "file_descriptor" and not pin_memory:
        # A worker is two batches ahead, here two are in hand at most and one is kept, and one may just be leaving.
        assert len(files) <= 2 * 6 < len(here), "they are used again"
    del batch, item, loader, kept
    assert memfd_inodes() == set()
