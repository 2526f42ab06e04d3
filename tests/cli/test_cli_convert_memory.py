"""`hsfmt convert --memory`: the samples that all processes hold at once stay below it; a larger one runs alone."""

import threading
import time
from multiprocessing import get_context
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hsfmt.cli.boards import ABANDON, N_SHARED, ORDER, TICKETS, USED, SharedBoard
from hsfmt.cli.converting.work import _LEAST_QUEUE_NBYTES, _QUEUE_NBYTES, _queue_nbytes
from hsfmt.writers.sample_files import FileTensor, write_sample_file


@pytest.fixture
def shared():
    return get_context("spawn").Array("q", N_SHARED)


def run_threads(shared, sizes, limit):
    """Hold room for items of these sizes, one thread each; return the sets of sizes that were held at once.

    Each begins once the one before it has asked, and nobody gives room back before all have.
    """
    held, seen, lock, all_asked = [], [], threading.Lock(), threading.Event()

    def hold(nbytes):
        with SharedBoard(shared, limit).room(nbytes):
            with lock:
                held.append(nbytes)
                seen.append(sorted(held))
            all_asked.wait(300)
            time.sleep(0.02)
            with lock:
                held.remove(nbytes)

    threads = [threading.Thread(target=hold, args=[nbytes]) for nbytes in sizes]
    for number, thread in enumerate(threads, 1):
        thread.start()
        while (len(seen) if limit is None else shared[TICKETS]) < number:
            assert thread.is_alive()
            time.sleep(0.001)
    all_asked.set()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return seen


def test_no_more_than_the_budget_is_held(shared):
    seen = run_threads(shared, [30, 40, 50, 20, 60, 10, 40, 30], 100)
    assert all(sum(sizes) <= 100 for sizes in seen)
    assert any(len(sizes) > 1 for sizes in seen)
    assert shared[USED] == 0


def test_a_larger_one_runs_alone_and_does_not_wait_for_ever(shared):
    seen = run_threads(shared, [30, 30, 500, 30, 30, 30], 100)
    assert [500] in seen
    assert all(len(sizes) == 1 for sizes in seen if 500 in sizes)
    # Those that asked later come later: small ones can't keep it waiting.
    assert seen.index([500]) == 2


def test_without_a_budget_nobody_waits(shared):
    seen = run_threads(shared, [500, 500, 500], None)
    assert max(map(len, seen)) > 1


def test_an_interruption_ends_the_waiting(shared):
    with SharedBoard(shared, 10).room(10):
        shared[ORDER] = ABANDON
        with pytest.raises(KeyboardInterrupt), SharedBoard(shared, 10).room(10):
            pytest.fail("there was no room")


def test_room_is_given_back_after_an_error(shared):
    board = SharedBoard(shared, 10)
    with pytest.raises(ValueError, match="bad"), board.room(10):
        raise ValueError("bad")
    with board.room(10):
        assert shared[USED] == 10


def test_the_queue_to_the_disk_is_a_part_of_it():
    assert _queue_nbytes(None, 4) == _QUEUE_NBYTES
    assert _queue_nbytes(1 << 30, 4) == 64 << 20
    assert _queue_nbytes(1 << 20, 4) == _LEAST_QUEUE_NBYTES
    assert _queue_nbytes(1 << 50, 1) == _QUEUE_NBYTES


@pytest.mark.parametrize("memory", ["1KiB", "10KiB", "1GiB"])
def test_the_content_does_not_depend_on_it(hsfmt, tmp_path, memory):
    source: Path = tmp_path / "source"
    source.mkdir()
    for n in range(1, 21):
        states = (np.arange(n * 2 * 64) % 97).reshape(n, 2, 64).astype(np.float32).astype(ml_dtypes.bfloat16)
        tensors = {
            "hidden_states": FileTensor("bfloat16", states.view(np.uint16)),
            "token_ids": FileTensor("int64", np.arange(n)),
        }
        write_sample_file(source / f"r{n}.safetensors", tensors, {})
    flags = ("--from", "vllm", "--layer-ids", "1,2")
    whole = hsfmt.json("convert", source, tmp_path / "whole", *flags)
    report = hsfmt.json("convert", source, tmp_path / "d", *flags, "--workers", 2, "--memory", memory)
    assert report["workers"] == 2
    assert report["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
