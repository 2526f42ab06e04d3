"""Memory is used again when nothing refers to it any more, and never before."""

import gc
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfmt.readers.recycled_memory import RecycledMemory, _size

MIB = 1 << 20


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_that_is_gone_is_used_again():
    memory = RecycledMemory()
    first = memory.empty(3 * MIB)
    where = address(first)
    del first
    assert memory.nbytes_kept >= 3 * MIB
    again = memory.empty(3 * MIB - 5)
    assert address(again) == where
    assert memory.nbytes_kept == 0


@pytest.mark.parametrize(
    "derive",
    [
        lambda array: array,
        lambda array: array[7:],
        lambda array: array.view(np.uint16),
        lambda array: array.view(np.uint16).reshape(2, -1)[1, ::3],
        memoryview,
        lambda array: np.lib.stride_tricks.as_strided(array[:1], (5,), (64,)),
        lambda array: np.asarray(memoryview(array)),
        lambda array: np.flip(array.reshape(4, -1), 0).T,
    ],
)
def test_whatever_is_made_of_it_keeps_it(derive):
    memory = RecycledMemory()
    held = derive(memory.empty(2 * MIB))
    gc.collect()
    assert memory.nbytes_kept == 0
    others = [memory.empty(2 * MIB) for _ in range(3)]
    for other in others:
        other[:] = 1
        assert not np.shares_memory(other, np.asarray(held))
    del held, others, other
    gc.collect()
    assert memory.nbytes_kept >= 4 * 2 * MIB


def test_arrays_that_live_never_overlap():
    memory = RecycledMemory()
    arrays = [memory.empty(MIB + i) for i in range(8)]
    for number, array in enumerate(arrays):
        array[:] = number
    del arrays[::2]
    more = [memory.empty(MIB + i) for i in range(8)]
    for array in more:
        array[:] = 99
    assert [set(np.unique(array)) for array in arrays] == [{1}, {3}, {5}, {7}]


def test_no_more_is_kept_than_the_limit():
    memory = RecycledMemory(max_kept_nbytes=5 * MIB)
    arrays = [memory.empty(2 * MIB) for _ in range(10)]
    del arrays
    assert 0 < memory.nbytes_kept <= 5 * MIB
    big = memory.empty(8 * MIB)
    del big
    assert memory.nbytes_kept <= 5 * MIB


def test_small_ones_are_not_kept():
    memory = RecycledMemory()
    small = memory.empty(MIB - 1)
    assert len(small) == MIB - 1
    assert small.flags.writeable
    del small
    assert memory.nbytes_kept == 0
    assert len(memory.empty(0)) == 0


def test_many_threads():
    memory = RecycledMemory()
    wrong = []

    def work(number):
        for i in range(200):
            array = memory.empty(MIB + 4096 * (i % 3))
            array[::65536] = number
            if not (array[::65536] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.nbytes_kept <= 1 << 30


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_starts_anew():
    memory = RecycledMemory()
    memory.empty(MIB)
    assert memory.nbytes_kept
    child = os.fork()
    if child == 0:
        os._exit(0 if memory.nbytes_kept == 0 and len(memory.empty(MIB)) == MIB else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.nbytes_kept


@given(st.integers(1 << 20, 1 << 40))
def test_sizes(nbytes):
    assert nbytes <= _size(nbytes) <= nbytes * 9 / 8 + 1
    assert _size(_size(nbytes)) == _size(nbytes)


@given(st.integers(1, 1 << 22))
def test_alignment(nbytes):
    array = RecycledMemory().empty(nbytes)
    assert len(array) == nbytes
    assert address(array) % 64 == 0
