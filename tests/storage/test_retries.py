"""How long to try, and how far apart near ranges may be."""

from types import SimpleNamespace

import pytest

from hsfmt.errors import StorageError, UsageError
from hsfmt.storage import open_store, retries
from hsfmt.storage.pace import Pace
from hsfmt.storage.retries import RetryBudget, StatusError


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to, and pauses without chance."""
    now = [100.0]
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(retries, "random", SimpleNamespace(random=lambda: 1.0))
    return now


def test_pauses_grow_up_to_ten_seconds(clock):
    assert [retries.pause_seconds(n, 0.0) for n in (1, 2, 3, 20)] == [0.1, 0.2, 0.4, 10.0]
    assert retries.pause_seconds(1, 5.0) == 5.1


def test_time_without_trouble_costs_nothing(clock):
    budget, error = RetryBudget(), StatusError(503, "busy")
    budget.failed(1)
    clock[0] += 30
    budget.failed(2)  # together with the first: the time counts once
    clock[0] += 10
    budget.recovered(1)
    budget.recovered(2)
    clock[0] += 1000
    budget.failed(3)
    assert budget.pause(error, 1, answered=True) == 0.1
    clock[0] += 19.8
    assert budget.pause(error, 1, answered=True) == 0.1
    clock[0] += 0.2
    assert budget.pause(error, 1, answered=True) is None


def test_a_wait_beyond_the_budget_is_not_begun(clock):
    budget = RetryBudget()
    budget.failed(1)
    assert budget.pause(StatusError(429, "", 59.0), 1, answered=True) == 59.1
    assert budget.pause(StatusError(429, "", 61.0), 1, answered=True) is None


def test_a_server_that_never_answered_is_given_up_soon(clock):
    budget = RetryBudget()
    budget.failed(1)
    clock[0] += 4
    assert budget.pause(ConnectionRefusedError(), 1, answered=False) is None
    assert budget.pause(ConnectionRefusedError(), 1, answered=True) == 0.1
    assert budget.pause(ConnectionResetError(), 1, answered=False) == 0.1


@pytest.mark.parametrize("name", ["HSFMT_RETRY_SECONDS", "HSFMT_TIMEOUT_SECONDS"])
@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_settings_are_numbers(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name}: expected a number of seconds"):
        retries.retry_seconds() if "RETRY" in name else retries.timeout_seconds()


@pytest.mark.parametrize(("text", "seconds"), [("7", 7), (None, 0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0), ("-1", 0)])
def test_retry_after(text, seconds):
    assert retries.parse_retry_after(text) == seconds


def test_gap_follows_latency_and_throughput():
    pace = Pace()
    assert pace.gap_nbytes == 1 << 20
    pace.note(10, 0.02, 0.021)
    assert pace.gap_nbytes == 1 << 20
    pace.note(1 << 20, 0.02, 0.02 + 1 / 50)  # 50 MiB/s
    assert pace.gap_nbytes == pytest.approx(1 << 20, rel=0.01)
    pace.note(1 << 20, 0.5, 0.5 + 1 / 50)  # a busy moment is no latency
    assert pace.gap_nbytes < 1.1 * (1 << 20)
    for _ in range(1000):
        pace.note(1 << 20, 0.5, 0.5 + 1 / 500)
    assert pace.gap_nbytes == 8 << 20
    pace.note(10, 1e-6, 1e-6)
    assert pace.gap_nbytes == 128 << 10
    pace.note(1 << 20, None, 1e-9)
    assert pace.gap_nbytes == 128 << 10


def test_a_certificate_is_not_tried_again_and_an_answer_that_is_none_is():
    from aiohttp import ClientResponseError
    from aiohttp.http_exceptions import BadStatusLine
    from botocore.exceptions import SSLError

    untrusted = SSLError(endpoint_url="https://host", error="[SSL] certificate verify failed: unknown (_ssl.c:1)")
    assert retries.is_untrusted(untrusted)
    assert not retries.is_transient(untrusted)
    dropped = SSLError(endpoint_url="https://host", error="EOF occurred in violation of protocol")
    assert not retries.is_untrusted(dropped)
    assert retries.is_transient(dropped)
    refused = ClientResponseError(None, (), status=400, message="bad")
    assert not retries.is_transient(refused)
    refused.__cause__ = BadStatusLine("no answer")
    assert retries.is_transient(refused)


@pytest.mark.parametrize(
    ("inner", "is_setting"),
    [
        (FileNotFoundError(2, "no such file"), True),
        (TypeError("no number"), True),
        (ValueError("no port"), True),
        (ConnectionResetError("reset"), False),
        (OSError(5, "input/output error"), False),
        (RuntimeError("closed"), False),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "an answer that is none"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_botocore_has_no_name_for_is_tried_again_unless_no_request_was_made(inner, is_setting):
    botocore = pytest.importorskip("botocore.exceptions")
    error = botocore.HTTPClientError(error=inner)
    assert retries.unusable_setting(error) is (inner if is_setting else None)
    assert retries.is_transient(error) is not is_setting
    assert retries.unusable_setting(inner) is None


@pytest.mark.parametrize(
    ("url", "options", "proxy", "words"),
    [
        ("http://10.255.255.1/ds", {}, "a b", "expected the URL of a proxy"),
        ("gs://bucket/ds", {"token": "anon", "endpoint_url": "http://"}, "", "expected the URL of an endpoint"),
    ],
)
def test_addresses_that_are_none_are_refused_at_once(monkeypatch, url, options, proxy, words):
    pytest.importorskip("gcsfs" if url.startswith("gs") else "aiohttp")
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "2")
    with pytest.raises(StorageError, match=words) as caught:
        open_store(url, options).read("x", 1)
    assert url in str(caught.value)
    assert "attempts)" not in str(caught.value)
