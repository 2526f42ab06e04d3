"""Every flow on bad days of the network: the same data, or a typed error; after it, the same command goes on."""

import itertools
import json

import pytest
from flow_steps import CommandFailedError, converting, digests, held, objects, source_folder, write_part
from servers.fault_proxy import Fault

from hsfmt import seal
from hsfmt.errors import HsfmtError
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store, retries

# What passes when it is tried again.
PASSING = {
    "503": {"kind": "status", "status": 503},
    "429": {"kind": "status", "status": 429, "retry_after": 0},
    "500": {"kind": "status", "status": 500},
    "reset": {"kind": "reset"},
    "reset in the body": {"kind": "reset", "after": 20},
    "short body": {"kind": "short", "after": 20},
    "nearly whole": {"kind": "short", "after": 140},
    "wrong range": {"kind": "wrong range"},
    "garbled": {"kind": "garbled"},
    "stall": {"kind": "stall", "after": 20},
}
# What may be an error at once.
WRONG = {
    "flipped byte": {"kind": "flip", "after": 20},
    "flipped later": {"kind": "flip", "after": 250},
    "new etag": {"kind": "new etag"},
    "no range": {"kind": "no range"},
    "403": {"kind": "status", "status": 403},
}
FAULTS = PASSING | WRONG
IDS = range(4)


class Flow:
    """What is done in a bucket: `prepare`, once, then `run`, which may fail, until it ends; `found` is what matters."""

    needs_sealed = True

    def __init__(self, hsfmt, folder, url, served):
        self.hsfmt, self.folder, self.url, self.served = hsfmt, folder, url, served

    def prepare(self):
        """Put two parts there."""
        for number in (0, 1):
            write_part(self.url, f"p-{number}", IDS[2 * number : 2 * number + 2], seal=bool(number), codec="none")

    def run(self):
        raise NotImplementedError

    def found(self):
        """What is there, once the command has ended well."""
        report = verify(self.url, level="full", workers=1)
        assert report.ok, [str(each) for each in report.errors]
        return held(self.url)


class Reads(Flow):
    """One that leaves the bucket alone, so that all runs can have the same."""

    def found(self):
        return self.read


class Read(Reads):
    def run(self):
        self.read = held(self.url)


class ReadWeb(Reads):
    def run(self):
        self.read = held(self.served)


class Verify(Reads):
    def run(self):
        state = self.folder / "state"
        self.hsfmt("verify", self.url, "--level", "full", "--state", state, "-q")
        self.read = state.exists()
        state.unlink(missing_ok=True)


class Export(Reads):
    place = "url"

    def run(self):
        out = self.folder / "out"
        self.hsfmt("export", getattr(self, self.place), out, "--to", "safetensors", "-q")
        self.read = {path.name: path.read_bytes() for path in out.glob("*")}


class ExportWeb(Export):
    place = "served"


class Pull(Reads):
    place = "url"

    def run(self):
        self.hsfmt("pull", getattr(self, self.place), self.folder / "pulled", "-q")
        self.read = objects(self.folder / "pulled")


class PullWeb(Pull):
    place = "served"


class Convert(Flow):
    def prepare(self):
        source_folder(self.folder / "source", range(3))

    def run(self):
        self.hsfmt(*converting(self.folder / "source", self.url))


class Write(Flow):
    def run(self):
        write_part(self.url, "p-new", [5, 6], seal=True, on_duplicate="skip")


class Seal(Flow):
    def prepare(self):
        super().prepare()
        write_part(self.url, "p-2", [7])

    def run(self):
        self.hsfmt("seal", self.url, "--expect", "5")


class Retract(Flow):
    def run(self):
        self.hsfmt("retract", self.url, "s1")


class Compact(Flow):
    def run(self):
        self.hsfmt("compact", self.url, "-q")


class Collect(Flow):
    def prepare(self):
        super().prepare()
        self.hsfmt("compact", self.url, "-q")

    def run(self):
        self.hsfmt("gc", self.url, "--older-than", "0s", "--force", "--keep-snapshots", "1")

    def found(self):
        return super().found(), len(objects(self.url))


class Repair(Flow):
    def prepare(self):
        super().prepare()
        store = open_store(self.url)
        path = next(path for path, _ in store.walk("parts/p-0/hidden_states/c"))
        data = bytearray(store.read(path, 1 << 20))
        data[5] ^= 0x10
        store.write(path, bytes(data))

    def run(self):
        self.hsfmt("repair", self.url, "-q", codes=(0, 1))


class Merge(Flow):
    def prepare(self):
        super().prepare()
        write_part(f"{self.url}-other", "p-other", [11, 12], seal=True)

    def run(self):
        self.hsfmt("merge", self.url, f"{self.url}-other")


class Push(Flow):
    def prepare(self):
        self.url, source = self.folder / "source", self.url
        super().prepare()
        self.url = source

    def run(self):
        self.hsfmt("push", self.folder / "source", self.url, "-q")


READING = (Read, ReadWeb, Verify, Export, ExportWeb, Pull, PullWeb)
WRITING = (Convert, Write, Seal, Retract, Compact, Collect, Repair, Merge, Push)


class Rig:
    """Runs one flow again and again, from the same state, through a proxy.

    Attributes
    ----------
    n_injected
        Answers that were disturbed, by fault.
    n_errors
        Runs that ended in a typed error, and were run again.
    """

    def __init__(self, kind, folder, fixture):
        self.kind, self.folder, self.numbers = kind, folder, itertools.count()
        self.hsfmt, self.as_user, self.s3 = fixture("hsfmt"), fixture("as_user"), fixture("s3_server")
        self.over_http = kind.__name__.endswith("Web")
        self.proxy = fixture("web_faults" if self.over_http else "s3_faults")
        self.bucket = fixture("make_bucket")()
        self.n_injected, self.n_errors = dict.fromkeys(FAULTS, 0), 0
        self.before, self.local = {}, {}
        flow = self.flow()
        if not self.over_http:
            flow.prepare()
            self.before = self.stored(flow)
        self.served = None
        if self.over_http:
            write_served(folder / "served")
            self.served = f"{self.proxy.url}/{fixture('serve')(folder / 'served')}"
        flow = self.flow()
        self.proxy.reset()
        error = self.attempt(flow)
        assert error is None, error
        self.n_requests = len(self.proxy.requests)
        assert self.n_requests >= 4
        self.wanted = flow.found()

    def flow(self):
        """The flow in a place of its own, in the state that was prepared."""
        number = next(self.numbers)
        folder = self.folder / str(number)
        url = f"s3://{self.bucket}/{number}/d"
        flow = self.kind(self.hsfmt, folder, url, getattr(self, "served", None))
        if issubclass(self.kind, Reads) and number:
            flow.url = f"s3://{self.bucket}/0/d"
        folder.mkdir()
        if self.before and not isinstance(flow, Reads):
            self.s3.file_system().pipe({f"{self.bucket}/{number}{name}": data for name, data in self.before.items()})
        source = self.folder / "0/source"
        if source.is_dir():
            (folder / "source").symlink_to(source)
        return flow

    def stored(self, flow):
        fs, root = self.s3.file_system(), flow.url.removeprefix("s3://").removesuffix("/d")
        return {name.removeprefix(root): fs.cat_file(name) for name in fs.find(root)}

    def attempt(self, flow):
        """Run it through the proxy; return the error it ended in."""
        self.as_user(AWS_ENDPOINT_URL=self.s3.endpoint if self.over_http else self.proxy.url)
        try:
            flow.run()
        except (HsfmtError, CommandFailedError) as error:
            return error
        finally:
            self.as_user(AWS_ENDPOINT_URL=self.s3.endpoint)
        return None

    def disturbed(self, faults, *, passing):
        """Run it with these faults, and once more without if it ended in an error, which has to be typed."""
        flow = self.flow()
        self.proxy.reset()
        self.proxy.faults += [Fault(method="", **FAULTS[name], **when) for name, when in faults]
        error = self.attempt(flow)
        struck = [fault.struck for fault in self.proxy.faults]
        for (name, _), n in zip(faults, struck, strict=True):
            self.n_injected[name] += n
        self.proxy.reset()
        if error is not None:
            self.n_errors += 1
            assert_typed(error, flow)
            assert not passing, error
            self.committed_is_whole(flow)
            again = self.attempt(flow)
            assert again is None, again
        assert flow.found() == self.wanted, faults
        return error

    def committed_is_whole(self, flow):
        """What a failed command left is no lie."""
        if not isinstance(flow, Reads | Repair):
            assert digests(flow.url).keys() >= (digests_of(self.before) if self.kind is not Convert else set())


def digests_of(before):
    return {f"s{number}" for number in IDS} if any("manifests/p-0" in name for name in before) else set()


def write_served(folder):
    for number in (0, 1):
        write_part(folder, f"p-{number}", IDS[2 * number : 2 * number + 2], codec="none")
    seal(folder)


def assert_typed(error, flow):
    """One that says where, and what was expected there."""
    if isinstance(error, CommandFailedError):
        assert error.code in (1, 2, 3), error
        assert "error" in error.text, error
        assert "Traceback" not in error.text
        return
    assert error.problems
    assert all(problem.where and problem.expected for problem in error.problems), error


@pytest.fixture
def rig(request, tmp_path, monkeypatch):
    """`rig(Flow)`."""
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.01)
    return lambda kind: Rig(kind, tmp_path, request.getfixturevalue)


def spread(names, n_requests, every, phase):
    """Each of these faults in turn, at every so many-th request."""
    names = itertools.cycle(names)
    return [(next(names), {"skip": k}) for k in range(phase, n_requests, every)]


IN_CI = (Read, ReadWeb, Export, PullWeb, Convert, Write, Compact, Push)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in IN_CI else pytest.mark.deep) for kind in (*READING, *WRITING)],
)
def test_what_passes_costs_requests_and_no_data(rig, kind):
    """Many faults in one run, none so often that it would have to be given up."""
    rig = rig(kind)
    names = [name for name in PASSING if name != "stall"]
    rig.disturbed(spread(names, rig.n_requests, 3, 1), passing=True)
    assert sum(rig.n_injected.values()) >= rig.n_requests // 10


@pytest.mark.parametrize(
    "kind", [Read, ReadWeb, Push, *(pytest.param(kind, marks=pytest.mark.deep) for kind in (Merge, Verify, Seal))]
)
def test_what_is_wrong_is_noticed(rig, kind, monkeypatch):
    """One a run, at requests of all kinds."""
    rig = rig(kind)
    for number, name in enumerate(WRONG):
        rig.disturbed([(name, {"skip": (number * rig.n_requests) // len(WRONG), "count": 1})], passing=False)
    assert sum(n > 0 for n in rig.n_injected.values()) >= 4


@pytest.mark.parametrize(
    "kind", [Export, Write, *(pytest.param(kind, marks=pytest.mark.deep) for kind in (PullWeb, Seal, Collect))]
)
def test_what_stays_is_a_typed_error(rig, kind, monkeypatch):
    """From a request on, for good; once it is over, the same command comes to the same end."""
    rig = rig(kind)
    monkeypatch.setattr(retries, "ATTEMPTS", 2)
    for name, share in (("503", 0.1), ("reset", 0.5), ("short body", 0.3), ("403", 0.8)):
        rig.disturbed([(name, {"skip": int(share * rig.n_requests), "count": None})], passing=False)
    assert rig.n_errors >= 2


@pytest.mark.deep
@pytest.mark.parametrize("kind", [*READING, *WRITING])
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_at_each_request(rig, kind, name, monkeypatch, record_property):
    if name == "stall":  # nothing else is to be given up for the machine's slowness
        monkeypatch.setenv("HSFMT_TIMEOUT_SECONDS", "2")
    rig = rig(kind)
    monkeypatch.setattr(retries, "ATTEMPTS", 3)
    for k in range(rig.n_requests):
        rig.disturbed([(name, {"skip": k, "count": 1})], passing=name in PASSING)
        rig.disturbed([(name, {"skip": k, "count": None})], passing=False)
    record_property("counts", json.dumps({"runs": 2 * rig.n_requests, "injected": rig.n_injected[name]}))
    assert rig.n_injected[name] >= rig.n_requests
