"""A dataset's life in a container of Azure, by the command line and from Python: what a folder gives, bit by bit."""

import json
import os
import random
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from flow_steps import (
    ROOT,
    check_copies_and_merges,
    check_damage_is_repaired,
    converting,
    held,
    in_a_process,
    objects,
    shards,
    source_folder,
    write_part,
)
from servers.azurite import ACCOUNT
from servers.fault_proxy import Fault

from hsfmt import layout, seal
from hsfmt.errors import HeaderMismatchError, StorageError
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.storage import open_store, retries

CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"


@pytest.fixture(autouse=True)
def environment(monkeypatch, azure_server, no_credentials):
    """What is said to programs about Azure."""
    said = {CONNECTION: azure_server.connection_string()}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    return said


@pytest.fixture
def url(azure_container):
    return f"az://{azure_container}/some/d"


@pytest.fixture
def through_proxy(azure_server, azure_faults, monkeypatch):
    """The proxy, which all that follows goes through."""
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.01)
    monkeypatch.setenv(CONNECTION, azure_server.connection_string(host=azure_faults.host))
    return azure_faults


def test_a_life(hsfmt, url, tmp_path):
    """Converted, joined by a writer, sealed, verified, exported, retracted, compacted, collected, as in a folder."""
    source, folder = source_folder(tmp_path / "source", range(5)), tmp_path / "d"
    for place in (url, folder):
        hsfmt(*converting(source, place))
        write_part(place, "p-by-a-writer", range(20, 24), holes=["h1"])
        hsfmt("seal", place, "--expect", "9")
    assert held(url) == held(folder)
    assert shards(url) == shards(folder)
    for level in ("quick", "complete", "full"):
        hsfmt("verify", url, "--level", level, "-q")
    assert hsfmt.json("info", url)["samples"] == 9
    for place, out in ((url, "there"), (folder, "here")):
        hsfmt("export", place, tmp_path / out, "--to", "safetensors", "-q")
        hsfmt("retract", place, "s3", "s21")
        hsfmt("compact", place, "-q")
        hsfmt("gc", place, "--older-than", "0s", "--force", "--keep-snapshots", "1")
    exported = [{path.name for path in (tmp_path / out).glob("*.safetensors")} for out in ("there", "here")]
    assert len(exported[0]) == 9
    assert exported[0] == exported[1]
    assert held(url) == held(folder)
    assert len(objects(url)) == len(objects(folder))
    hsfmt("verify", url, "--level", "full", "-q")
    assert list(open_store(url).unfinished_uploads()) == []


def test_exported_into_a_container(hsfmt, url, tmp_path):
    write_part(url, "p-one", range(4), seal=True)
    for out in (f"{url}-exported", tmp_path / "out"):
        hsfmt("export", url, out, "--to", "safetensors", "-q")
    assert any(name.endswith(".safetensors") for name in objects(tmp_path / "out"))
    there, here = (
        {name: data for name, data in objects(place).items() if name.endswith(".safetensors")}
        for place in (f"{url}-exported", tmp_path / "out")
    )
    assert there == here


def test_a_flipped_byte_is_found_and_repaired(hsfmt, url):
    check_damage_is_repaired(hsfmt, url)


def test_copies(hsfmt, url, make_azure_container, tmp_path):
    check_copies_and_merges(hsfmt, url, f"abfs://{make_azure_container()}/d", tmp_path)


def test_random_samples(azure_server, url, tmp_path, azure_faults, monkeypatch):
    """Equal to those of a folder, with no permission but to read; and how many requests they are."""
    for place in (url, tmp_path / "d"):
        write_part(place, "p-one", range(12))
        write_part(place, "p-two", range(12, 30), seal=True)
    here = SampleReader(tmp_path / "d")
    token = azure_server.token(read=True)
    monkeypatch.setenv(CONNECTION, azure_server.connection_string(host=azure_faults.host, sas=token))
    there = SampleReader(url)
    assert len(azure_faults.requests) == 2
    assert len(there) == len(here) == 30
    azure_faults.requests.clear()
    azure_faults.expect_groups(2, 6)  # manifest and index, then the two ends of a sample in each column
    assert there.read(3).hidden_states.tobytes() == here.read(3).hidden_states.tobytes()
    assert azure_faults.groups_left == 0
    assert [request.method for request in azure_faults.requests] == ["GET"] * 8
    order = random.Random(1)
    for _ in range(20):
        rows = order.sample(range(30), 5)
        for one, other in zip(there.read_many(rows), here.read_many(rows), strict=True):
            assert one.hidden_states.tobytes() == other.hidden_states.tobytes()
            assert one.input_ids.tobytes() == other.input_ids.tobytes()
            assert one.loss_mask.tobytes() == other.loss_mask.tobytes()
    there.close()
    here.close()


def test_a_layer_alone(url, tmp_path):
    for place in (url, tmp_path / "d"):
        write_part(place, "p-one", range(12), seal=True)
    there, here = SampleReader(url).read_many(range(12), layers=[3]), SampleReader(tmp_path / "d").read_many(range(12))
    for one, both in zip(there, here, strict=True):
        assert one.hidden_states.tobytes() == both.hidden_states[:, 1:].tobytes()


def test_the_second_time_comes_from_the_cache(through_proxy, url, tmp_path):
    for place in (url, tmp_path / "d"):
        write_part(place, "p-one", range(8), seal=True)
    here = [sample.hidden_states.tobytes() for sample in SampleReader(tmp_path / "d").read_many(range(8))]
    counts = []
    for _ in range(2):
        through_proxy.reset()
        reader = SampleReader(url, options=ReadOptions(cache_dir=tmp_path / "cache", cache_size="64MiB"))
        assert [sample.hidden_states.tobytes() for sample in reader.read_many(range(8))] == here
        reader.cache.drain()
        counts.append((through_proxy.count(), through_proxy.count("/parts/")))
    assert counts[0][1] > 0
    assert counts[1] == (1, 0)


# No line begins as in a file that imports torch itself, which all tests of this one would be left out for.
LOADER = """
import sys, torch, torch.utils.data
from hsfmt import HiddenStateDataset

if __name__ == "__main__":
    url, folder, method = sys.argv[1:]
    there, here = HiddenStateDataset(url), HiddenStateDataset(folder)
    for used in (False, True)[method == "spawn":]:
        if used:
            assert torch.equal(there[3]["hidden_states"], here[3]["hidden_states"])
        how = {"num_workers": 1, "collate_fn": list, "multiprocessing_context": method}
        loader = torch.utils.data.DataLoader(there, batch_size=2, **how)
        found = [item["hidden_states"] for batch in loader for item in batch]
        assert len(found) == 8
        assert all(torch.equal(item, here[i]["hidden_states"]) for i, item in enumerate(found))
    assert torch.equal(there[5]["hidden_states"], here[5]["hidden_states"])
"""


@pytest.mark.torch
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(url, tmp_path, method):
    """Before and after the parent read; no process says anything but what it should, nor hangs at its end."""
    for place in (url, tmp_path / "d"):
        write_part(place, "p-one", range(8), seal=True)
    (tmp_path / "loader.py").write_text(LOADER)
    argv = [sys.executable, "-W", "error", tmp_path / "loader.py", url, tmp_path / "d", method]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


FORKED = """
import os, sys
from hsfmt.readers.sample_reader import SampleReader

reader = SampleReader(sys.argv[1])
wanted = reader.read(3).hidden_states.tobytes()
if not (child := os.fork()):
    assert SampleReader(sys.argv[1]).read(3).hidden_states.tobytes() == wanted
    assert reader.read(3).hidden_states.tobytes() == wanted
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert reader.read(3).hidden_states.tobytes() == wanted
"""


def test_a_forked_child_reads_and_ends(url, environment):
    """One that ends by running what was registered for that."""
    write_part(url, "p-one", range(4), seal=True)
    argv = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORKED, url]  # of fork by itself
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_writers_that_begin_a_dataset_together(url):
    """One of them makes the root document, and all of them commit."""
    barrier = threading.Barrier(4)

    def write(number):
        barrier.wait()
        write_part(url, f"p-{number}", range(3 * number, 3 * number + 3))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    write_part(url, "p-last", [99], seal=True)
    assert {each[0] for each in held(url)[2]} == {f"s{number}" for number in (*range(12), 99)}


def test_a_writer_of_other_states_is_refused(url):
    write_part(url, "p-one", range(2))
    before = objects(url)
    with pytest.raises(HeaderMismatchError):
        write_part(url, "p-two", range(2, 4), layers=(0, 2))
    assert objects(url) == before


def test_what_others_write_is_seen_at_once(url):
    """Stores that have listed before, in the same process, list it again."""
    write_part(url, "p-one", range(2))
    stores = [open_store(url), open_store(url)]
    for number in range(3):
        for store in stores:
            assert len(store.list(layout.MANIFESTS)) == number + 1
        write_part(url, f"p-more-{number}", [10 + number])
    seal(url)
    assert len(SampleReader(url)) == 5


@pytest.mark.slow
def test_programs(environment, url, tmp_path):
    source = source_folder(tmp_path / "source", range(3))
    for argv in (
        (*converting(source, url), "--workers", "2"),
        ("verify", url, "--level", "full", "--workers", "2", "-q", "--storage-option", f"account_name={ACCOUNT}"),
    ):
        done = in_a_process(*argv, **environment)
        assert done.returncode == (3 if "--storage-option" in argv else 0), done.stderr
    done = in_a_process("pull", f"simplecache::{url}", tmp_path / "copy", "-q", **environment)
    assert done.returncode == 0, done.stderr
    assert objects(tmp_path / "copy")[layout.POINTER]
    done = in_a_process("retract", f"simplecache::{url}", "s1", **environment)
    assert done.returncode == 2
    assert "leave out simplecache::" in done.stderr
    assert len(done.stderr.splitlines()) == 1


COMMANDS = {
    "info": ("URL",),
    "verify": ("URL", "-q"),
    "gc": ("URL", "--older-than", "7d"),
    "pull": ("URL", "OUT"),
    "push": ("HERE", "URL", "-q"),
    "merge": ("URL", "HERE"),
}


@pytest.fixture
def refused(hsfmt, azure_server, tmp_path):
    """Run the commands about a URL; return the one line that each says."""
    write_part(tmp_path / "d", "p-one", range(2), seal=True)
    places = {"HERE": tmp_path / "d", "OUT": tmp_path / "out"}

    def run(url, *names, secret=azure_server.key):
        lines = []
        for name in names or COMMANDS:
            result = hsfmt(name, *({**places, "URL": url}.get(word, word) for word in COMMANDS[name]), codes=(3,))
            assert secret not in result.output
            assert azure_server.key not in result.output
            assert "sig=" not in result.output.replace("sig=…", "")
            (line,) = result.stderr.splitlines()
            lines.append(line)
        return lines

    return run


@pytest.mark.parametrize("scheme", ["az", "abfs"])
def test_a_container_that_is_not_there(refused, scheme):
    for line in refused(f"{scheme}://no-such-container/d"):
        assert re.search(r"expected a container 'no-such-container'.*check the container's name", line), line


def test_a_container_that_is_not_there_is_none_to_write_to():
    with pytest.raises(StorageError, match="a container 'no-such-container'"):
        write_part("az://no-such-container/d", "p-one", range(2))


def test_a_wrong_key(refused, azure_server, url, monkeypatch):
    wrong = "d3Jvbmcta2V5LXdyb25nLWtleS13cm9uZy1rZXktd3Jvbmcta2V5"
    monkeypatch.setenv(CONNECTION, azure_server.connection_string(key=wrong))
    for line in refused(url, secret=wrong):
        assert "expected to be let in" in line
        assert "AZURE_STORAGE_ACCOUNT_KEY" in line


@pytest.mark.parametrize("key", ["hunter2hunter2", "no key at all"])
def test_what_is_no_key(refused, azure_server, url, monkeypatch, key):
    monkeypatch.setenv(CONNECTION, azure_server.connection_string(key=key))
    for line in refused(url, "info", "push", secret=key):
        assert "expected credentials" in line
        assert CONNECTION in line


def test_a_token_that_may_only_list(refused, azure_server, url, monkeypatch):
    write_part(url, "p-one", range(2), seal=True)
    token = azure_server.token(list=True)
    monkeypatch.setenv(CONNECTION, azure_server.connection_string(sas=token))
    names = (name for name in COMMANDS if name != "verify")  # which takes each object by itself
    for line in refused(url, *names, secret=token.rpartition("sig=")[2]):
        assert "expected to be let in" in line
        assert "AuthorizationPermissionMismatch: This request is not authorized" in line


def test_a_token_that_may_only_read_writes_nothing(refused, azure_server, url, monkeypatch):
    write_part(url, "p-one", range(2), seal=True)
    before = objects(url)
    token = azure_server.token(read=True, list=True)
    with monkeypatch.context() as patched:
        patched.setenv(CONNECTION, azure_server.connection_string(sas=token))
        for line in refused(f"{url}-other", "push", "merge", secret=token.rpartition("sig=")[2]):
            assert "expected to be let in" in line
        with pytest.raises(StorageError, match="to be let in"):
            write_part(url, "p-two", [5])
    assert objects(url) == before
    assert list(open_store(f"{url}-other").walk("")) == []


def test_no_dataset(refused, url):
    for line in refused(url, "info", "pull"):
        assert "expected an hsfmt dataset" in line
        assert url in line


def test_an_account_that_is_not_there(refused, monkeypatch):
    monkeypatch.delenv(CONNECTION)
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0c2VjcmV0")
    for line in refused("abfss://states@hsfmt-no-such-account.dfs.core.invalid/d", secret="c2VjcmV0c2VjcmV0"):
        assert "abfss://states@hsfmt-no-such-account.dfs.core.invalid/d" in line
        assert "expected a server that can be reached" in line
        assert "check the account's name" in line


def test_nobody_is_logged_in(url):
    """It takes a login where there is no key; azure-identity says in many lines that there is none, hsfmt in one."""
    said = {"AZURE_STORAGE_ACCOUNT_NAME": "nobody", "AZURE_TOKEN_CREDENTIALS": "EnvironmentCredential"}
    done = in_a_process("info", url, **said, **{CONNECTION: ""})
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.splitlines()
    assert "expected credentials" in line
    assert "az login" in line


def test_no_account(refused, monkeypatch, url):
    monkeypatch.delenv(CONNECTION)
    for line in refused(url):
        assert "expected credentials" in line
        assert CONNECTION in line


LOUD = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
from hsfmt.cli.main import main
main()
"""


@pytest.mark.parametrize("kind", ["key", "sas"])
def test_logs_and_tracebacks_hold_no_secret(azure_server, url, tmp_path, kind):
    write_part(tmp_path / "d", "p-one", range(2), seal=True)
    secret = {"key": "d3Jvbmcta2V5LXdyb25nLWtleQ==", "sas": azure_server.token(list=True)}[kind]
    env = {
        CONNECTION: azure_server.connection_string(**{kind: secret}),
        "HSFMT_TRACEBACK": "1",
        "HSFMT_RETRY_SECONDS": "0",
        "PYTHONPATH": str(ROOT),
    }
    for argv in (("info", url), ("push", str(tmp_path / "d"), url, "--json")):
        command = [sys.executable, "-c", LOUD, *argv]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ | env)
        assert done.returncode == 3, done.stderr
        assert "Traceback" in done.stderr
        assert "DEBUG" in done.stderr
        assert secret.rpartition("sig=")[2] not in done.stdout + done.stderr


PASSING = {
    "503": {"kind": "status", "status": 503},
    "429": {"kind": "status", "status": 429, "retry_after": 0},
    "500": {"kind": "status", "status": 500},
    "reset": {"kind": "reset"},
    "reset in the body": {"kind": "reset", "after": 20},
    "short body": {"kind": "short", "after": 20},
    "wrong range": {"kind": "wrong range"},
    "garbled": {"kind": "garbled"},
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_costs_requests_and_no_data(through_proxy, url, tmp_path, name):
    """Every third request of a writer, a seal, a verification and a reader fails once."""
    faults = [Fault(method="", skip=skip, count=1, **PASSING[name]) for skip in range(1, 60, 3)]
    through_proxy.faults += faults
    write_part(url, "p-one", range(4), seal=True)
    found = held(url)
    assert sum(fault.struck for fault in faults) >= (2 if name in {"wrong range", "short body"} else 8)
    through_proxy.reset()
    write_part(tmp_path / "d", "p-one", range(4), seal=True)
    assert found == held(tmp_path / "d")


@pytest.mark.deep
@pytest.mark.parametrize("name", PASSING)
def test_each_fault_at_each_request(hsfmt, through_proxy, url, tmp_path, monkeypatch, record_property, name):
    """Once: the same data; for good: a typed error, after which the same command goes on."""
    write_part(tmp_path / "d", "p-one", range(4), seal=True)
    hsfmt("push", tmp_path / "d", f"{url}-whole", "-q")
    n_requests, struck = len(through_proxy.requests), 0
    monkeypatch.setattr(retries, "ATTEMPTS", 3)
    for k in range(n_requests):
        for count in (1, None):
            through_proxy.reset()
            fault = Fault(method="", skip=k, count=count, **PASSING[name])
            through_proxy.faults.append(fault)
            hsfmt("push", tmp_path / "d", f"{url}-{k}-{count}", "-q", codes=(0,) if count else (0, 3))
            struck += fault.struck
            through_proxy.reset()
            hsfmt("push", tmp_path / "d", f"{url}-{k}-{count}", "-q")
            assert held(f"{url}-{k}-{count}") == held(tmp_path / "d")
    record_property("counts", json.dumps({"runs": 2 * n_requests, "injected": struck}))
    assert struck >= n_requests or name in {"wrong range", "short body", "reset in the body"}


@pytest.mark.parametrize(("name", "share"), [("503", 0.2), ("reset", 0.5), ("short body", 0.3), ("503", 0.9)])
def test_what_stays_is_a_typed_error(hsfmt, through_proxy, url, tmp_path, monkeypatch, name, share):
    """And what was there before is; once it is over, the same command goes on."""
    write_part(tmp_path / "d", "p-one", range(4), seal=True)
    hsfmt("push", tmp_path / "d", f"{url}-whole", "-q")
    n_requests = len(through_proxy.requests)
    monkeypatch.setattr(retries, "ATTEMPTS", 2)
    through_proxy.reset()
    through_proxy.faults.append(Fault(method="", skip=int(share * n_requests), count=None, **PASSING[name]))
    result = hsfmt("push", tmp_path / "d", url, "-q", "--json", codes=(0, 3))
    assert json.loads(result.stdout)["exit_code"] == (3 if through_proxy.faults[0].struck else 0)
    through_proxy.reset()
    hsfmt("push", tmp_path / "d", url, "-q")
    assert held(url) == held(tmp_path / "d")
