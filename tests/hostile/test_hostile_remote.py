"""Documents that name other places, on a web server and in a bucket: nothing outside of the dataset is asked for."""

import shutil
from urllib.parse import unquote, urlsplit

import pytest
from cases import PATHS
from dataset_forge import build
from hostile_cases import CASES
from hostile_table import plant

from hsfmt import open_zarr, transfer
from hsfmt.errors import HsfmtError
from hsfmt.readers.sample_reader import SampleReader

_WHERE = (
    "attachment digest", "attachment name", "file path", "fingerprint", "fingerprint with algorithm", "part name",
    "replaces", "snapshot path",
)  # fmt: skip
NAMES = [f"{where}: {label}" for where in _WHERE for label in PATHS if f"{where}: {label}" in CASES]
LEADING_OUT = ("..", ".. within", "absolute", "chain", "escaped", "https", "s3", "UNC", "url")
WORST = [name for name in NAMES if name.partition(": ")[2] in LEADING_OUT]
N_LOTS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build(tmp_path_factory.mktemp("hostile") / "base")


def read_all(url, options):
    """Everything that a reader and a copy ask for; return the errors that ended it."""
    errors = []
    for work in (
        lambda: [SampleReader(url, storage_options=options).read(number) for number in range(6)],
        lambda: open_zarr(url, storage_options=options).hidden_states[:],
        lambda: SampleReader(url, storage_options=options).attachments,
    ):
        try:
            work()
        except HsfmtError as error:
            errors.append(error)
    return errors


def copy(url, folder, options):
    try:
        transfer(url, folder, source_options=options)
    except HsfmtError as error:
        return [error]
    return []


def assert_inside(proxy, prefix):
    """All that was asked for lies below the dataset, and whoever decodes it once more comes to no other place."""
    for request in proxy.requests:
        path = urlsplit(request.path).path
        assert request.method in {"GET", "HEAD"}
        assert path.startswith(f"{prefix}/"), path
        for _ in range(2):
            path = unquote(path)
            assert not {"..", "."} & set(path.split("/")), path
            assert "//" not in path


def test_these_are_cases():
    assert len(NAMES) > 150
    assert len(WORST) > 40


@pytest.mark.parametrize("number", range(N_LOTS))
def test_nothing_else_is_asked_for_over_http(base, web_server, web_faults, tmp_path, number):
    refused = 0
    for case, name in enumerate(WORST[number::N_LOTS]):
        place = web_server.root / f"hostile-{number}-{case}"
        plant(CASES[name], base, place)
        web_faults.reset()
        url = f"{web_faults.url}/{place.name}/dataset"
        errors = read_all(url, {}) + copy(url, tmp_path / str(case), {})
        assert_inside(web_faults, f"/{place.name}/dataset")
        assert web_faults.requests
        refused += bool(errors)
        assert {path.name for path in tmp_path.iterdir()} <= {str(n) for n in range(case + 1)}
        shutil.rmtree(place)
    assert refused > len(WORST[number::N_LOTS]) // 2


@pytest.mark.deep
def test_nothing_else_is_asked_for_of_a_bucket(base, s3_server, make_bucket, s3_faults, tmp_path):
    check_in_s3(base, s3_server, make_bucket(), s3_faults, tmp_path, NAMES)


def test_nothing_else_is_asked_for_of_a_bucket_by_some(base, s3_server, bucket, s3_faults, tmp_path):
    check_in_s3(base, s3_server, bucket, s3_faults, tmp_path, WORST[::8])


def check_in_s3(base, s3_server, bucket, proxy, tmp_path, names):
    options = s3_server.options(endpoint=proxy.url)
    refused = 0
    for case, name in enumerate(names):
        root, _ = plant(CASES[name], base, tmp_path / f"case-{case}")
        s3_server.upload(root, f"s3://{bucket}/{case}/dataset")
        proxy.reset()
        refused += bool(read_all(f"s3://{bucket}/{case}/dataset", options))
        assert_inside(proxy, f"/{bucket}/{case}/dataset")
        assert proxy.requests
    assert refused > len(names) // 2
