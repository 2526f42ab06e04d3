"""Datasets with known content, written by DatasetWriter; with `--store`, opened in a bucket or on a web server."""

import itertools
from collections.abc import Callable

import fsspec
import places
import pytest
from written import Written, write_dataset

# Those that read in most ways for the least time run everywhere in each run of the tests.
_EVERYWHERE = frozenset({"test_arrays"})
_REMOTE = ("s3", "http")
_used: dict[str, set[str]] = {"remote": set(), "local": set()}


def pytest_generate_tests(metafunc):
    """Let the representative ones run in each place, where none was chosen."""
    chosen, module = metafunc.config.getoption("--store"), metafunc.module.__name__
    if chosen is None and module in _EVERYWHERE:
        kinds = ["local", *(kind for kind in _REMOTE if not _impossible(metafunc.definition, kind))]
        metafunc.parametrize("_place", kinds, indirect=True)


def _impossible(item, kind):
    """Whether a test can't have its datasets there."""
    if kind in (None, "local"):
        return False
    return item.get_closest_marker("local") or (kind == "http" and item.get_closest_marker("lists"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what can only be done in a folder."""
    left_out = [item for item in items if _impossible(item, config.getoption("--store"))]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def _place(request, monkeypatch):
    """Where datasets are opened: as the test is parametrised, else as `--store` says."""
    kind = getattr(request, "param", request.config.getoption("--store") or "local")
    if kind == "local":
        yield
        return
    if kind == "s3":
        place = _in_s3(request, monkeypatch)
    elif kind == "http":
        place = places.Web(request.getfixturevalue("web_server"))
    else:
        place = places.Copies("memory", fsspec.filesystem("memory"), "")
    places.CURRENT.append(place)
    yield
    places.CURRENT.remove(place)
    place.end()
    _used["remote" if place.n_used else "local"].add(request.node.nodeid)


def _in_s3(request, monkeypatch):
    server = request.getfixturevalue("s3_server")
    request.getfixturevalue("no_credentials")
    options = server.options()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    return places.Copies("s3", server.file_system(), request.getfixturevalue("make_bucket")())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take over what the tests of a worker of xdist used."""
    for kind, used in getattr(node, "workeroutput", {}).get("used", {}).items():
        _used[kind].update(used)


def pytest_sessionfinish(session):
    """In a worker: hand over what its tests used."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["used"] = {kind: sorted(used) for kind, used in _used.items()}


def pytest_terminal_summary(terminalreporter, config):
    """Say how many tests a chosen place took part in."""
    if config.getoption("--store") not in (None, "local"):
        terminalreporter.write_line(
            f"{len(_used['remote'])} tests opened a dataset in {config.getoption('--store')}, "
            f"{len(_used['local'])} opened none by its URL"
        )


@pytest.fixture
def write(tmp_path) -> Callable[..., Written]:
    """`write_dataset` with a path of its own for each call."""
    numbers = itertools.count()
    return lambda *args, **options: write_dataset(tmp_path / f"dataset{next(numbers)}", *args, **options)
