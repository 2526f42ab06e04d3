"""Programs that write into a bucket and are killed at a chosen request, again and again."""

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import ml_dtypes
import numpy as np
from killing import hold_from, kill_held
from servers.seaweed import KEY, SECRET

from hsfmt import DatasetWriter, HiddenStateDataset, seal
from hsfmt.catalog import committed_parts
from hsfmt.cli.main import main
from hsfmt.maintenance.collect import collect
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

HERE = Path(__file__).parent
# What a program needs, imported once by the process that they are forked from, which has no threads.
PRELOADED = ["killed_on_s3", "s3fs", "aiobotocore.session", "hsfmt.writers.dataset_writer", "hsfmt.cli.convert"]
WRITTEN = [f"id-{i}" for i in range(6)]


def write_samples(url, options):
    """Write WRITTEN: columns whose objects take several requests, and parts that end by size and by commit."""
    extras = {"logits": {"kind": "token", "dtype": "float32", "shape": [1500]}}
    with DatasetWriter(
        url, layers=[1, 2], hidden_size=2048, final_norm="pre", codec="none", part_nbytes=20 << 20, extras=extras,
        on_duplicate="skip", storage_options=options,
    ) as writer:  # fmt: skip
        for i, name in enumerate(WRITTEN):
            states = np.full((1500, 2, 2048), i, ml_dtypes.bfloat16)
            writer.write(name, np.arange(1500), states, logits=np.full((1500, 1500), i, np.float32))
            if i % 2:
                writer.commit()
                print(i + 1, flush=True)  # noqa: T201  for who kills it


def command(words, options, passing=None):
    """Run a command of `hsfmt` that finds S3 by the environment; what is on its way may have a folder of its own."""
    if passing is not None:
        passing.mkdir()
        tempfile.tempdir = str(passing)
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    os.environ["AWS_ENDPOINT_URL"] = options["endpoint_url"]
    assert main([str(word) for word in words], standalone_mode=False) == 0


def _alone(work, arguments, out):
    os.setsid()
    sys.stdout = Path(out).open("w")  # noqa: SIM115  until the end
    work(*arguments)


class Program:
    """A function that runs in a process group of its own; what it prints goes to the file `out`."""

    def __init__(self, work, *arguments, out):
        self.out = Path(out)
        python_path = os.pathsep.join(map(str, [HERE.parents[1], HERE.parent, HERE]))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = python_path
        try:
            self._process = context.Process(target=_alone, args=(work, arguments, out))
            self._process.start()
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self):
        self._process.join()
        return self._process.exitcode


class Rounds:
    """Kills of a program that writes a dataset, and what is true after each of them.

    Parameters
    ----------
    server, proxy
        S3, and what is before it.
    make_bucket
        Makes an empty one.
    work
        The program: a function of URL and storage options.
    ids
        What is in the dataset at the end.
    out
        Where it prints to.
    """

    def __init__(self, server, proxy, make_bucket, work, ids, out):
        self.options, self.through = server.options(), server.options(endpoint=proxy.url)
        self.proxy, self.make_bucket, self.work, self.ids, self.out = proxy, make_bucket, work, ids, out
        self.killed = self.uploads = self.with_parts = self.durable = 0
        url = self._url()
        proxy.reset()
        assert Program(work, url, self.through, out=out).wait() == 0
        self.n_requests = len(proxy.requests)
        self.digest = self._settled(url)

    def kill(self, k):
        """Kill it at its k-th request, look at what it left, and run it again to its end."""
        url = self._url()
        store = open_store(url, self.options)
        hold_from(self.proxy, k)
        self.killed += kill_held(Program(self.work, url, self.through, out=self.out), self.proxy, k)
        said = self.out.read_text().split()
        self._look(store, int(said[-1]) if said and said[-1].isdigit() else 0)
        if store.size("zarr.json") is not None:
            collect(store, older_than=timedelta(0), force=True)
        assert store.unfinished_uploads() == []
        assert Program(self.work, url, self.options, out=self.out).wait() == 0
        assert self._settled(url) == self.digest

    def _url(self):
        return f"s3://{self.make_bucket()}/d"

    def _look(self, store, durable):
        self.uploads += len(store.unfinished_uploads())
        self.durable += durable
        if committed_parts(store):
            self.with_parts += 1
            seal(store)
            found = list(self._dataset(store).sample_ids)
            assert set(found) <= set(self.ids)
            assert set(self.ids[:durable]) <= set(found), "what was called durable is"
            assert verify(store, level="full").ok
        else:
            assert not durable

    def _settled(self, url):
        store = open_store(url, self.options)
        assert verify(store, level="full").ok
        assert store.unfinished_uploads() == []
        dataset = self._dataset(store)
        assert sorted(dataset.sample_ids) == sorted(self.ids)
        return dataset.content_digest

    def _dataset(self, store):
        return HiddenStateDataset(store.url, storage_options=self.options)


def kill_spread(rounds, n):
    """Kill at `n` requests, from the first to one of the seal, whose number differs a little from run to run."""
    for number in range(n):
        rounds.kill(1 + number * (rounds.n_requests - 6) // max(1, n - 1))
    return rounds
