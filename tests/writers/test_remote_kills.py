"""kill -9 of programs that write into a bucket: nothing is committed or whole parts, and the next run completes."""

import json
from functools import partial

import numpy as np
import pytest
from killed_on_s3 import WRITTEN, Rounds, command, kill_spread, write_samples

from hsfmt.writers.sample_files import FileTensor, write_sample_file

FILES = 18
CONVERTED = [f"r{number:02}" for number in range(FILES)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What two workers convert: each has objects of several requests to write."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(FILES):
        states = np.random.default_rng(number).integers(0, 0x7F00, (150, 2, 2048), np.uint16)
        tensors = {
            "hidden_states": FileTensor("bfloat16", states),
            "token_ids": FileTensor("int64", np.arange(len(states))),
        }
        write_sample_file(folder / f"r{number:02}.safetensors", tensors, {})
    return folder


def convert(source, url, options):
    words = ["convert", source, url, "--from", "vllm", "--layer-ids", "1,2", "--workers", 2, "--codec", "none"]
    command([*words, "--quiet"], options)


@pytest.fixture
def writer_rounds(s3_server, s3_faults, make_bucket, tmp_path):
    return Rounds(s3_server, s3_faults, make_bucket, write_samples, WRITTEN, tmp_path / "out")


@pytest.fixture
def convert_rounds(s3_server, s3_faults, make_bucket, source, tmp_path):
    work = partial(convert, source)
    return Rounds(s3_server, s3_faults, make_bucket, work, CONVERTED, tmp_path / "out")


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_parts(writer_rounds):
    assert kill_spread(writer_rounds, 3).killed == 3


@pytest.mark.slow
def test_a_killed_conversion_leaves_whole_parts(convert_rounds):
    convert_rounds.kill(convert_rounds.n_requests // 2)
    assert convert_rounds.killed == 1


def seen(rounds):
    return {what: getattr(rounds, what) for what in ("killed", "uploads", "with_parts", "durable")}


@pytest.mark.deep
def test_writers_killed_at_many_requests(writer_rounds, record_property):
    kill_spread(writer_rounds, 100)
    record_property("counts", json.dumps(seen(writer_rounds)))
    assert writer_rounds.killed >= 90
    assert writer_rounds.uploads >= 10
    assert writer_rounds.with_parts >= 30
    assert writer_rounds.durable >= 30


@pytest.mark.deep
def test_conversions_killed_at_many_requests(convert_rounds, record_property):
    kill_spread(convert_rounds, 40)
    record_property("counts", json.dumps(seen(convert_rounds)))
    assert convert_rounds.killed >= 30
    assert convert_rounds.uploads >= 1
    assert convert_rounds.with_parts >= 5
