"""No secret in what people see."""

import pytest

from hsfmt.storage import open_store
from hsfmt.storage.redaction import redacted, secrets_in, shows_nothing


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("https://user:pass@host/a", "https://…@host/a"),
        ("https://user@host", "https://…@host"),
        ("https://us:p@ss@host/a", "https://…@host/a"),
        ("s3://KEY:se/cr+et/x@bucket/a", "s3://…@bucket/a"),
        ("Custom endpoint `http://u:se/cret@host:9000` was", "Custom endpoint `http://…@host:9000` was"),
        ("http://host:9000/a@b", "http://host:9000/a@b"),
        ("http://[::1]:9000/a@b", "http://[::1]:9000/a@b"),
        ("hf://datasets/owner/name@main/x", "hf://datasets/owner/name@main/x"),
        ("see https://host/a?X-Amz-Signature=abc&b=c, then", "see https://host/a?… then"),
        ("'https://host/a?sig=abc' and http://other/b#c", "'https://host/a?…' and http://other/b?…"),
        ("simplecache::https://u:p@host/a?t=1", "simplecache::https://…@host/a?…"),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer …"),
        ("authorization basic dXNlcjpodW50ZXIy", "authorization basic …"),
        ("token hf_abcdefghijkl refused", "token hf_… refused"),
        ("mail@host is no URL", "mail@host is no URL"),
    ],
)
def test_texts(text, shown):
    assert redacted(text) == shown


def test_secrets_of_options_and_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "from-the-environment")
    options = {
        "key": "AKIAKEY",
        "endpoint_url": "https://minio.example.org",
        "anon": False,
        "client_kwargs": {"aws_secret_access_key": "deep-secret", "region_name": "eu-central-1"},
        "headers": {"X-Token": "header-secret"},
        "many": ["listed-secret"],
    }
    found = set(secrets_in(options))
    assert {"AKIAKEY", "deep-secret", "header-secret", "listed-secret", "from-the-environment"} <= found
    assert not found & {"https://minio.example.org", "eu-central-1"}
    assert redacted("is deep-secret here", found) == "is … here"


def test_errors_that_lead_to_a_secret_are_not_shown():
    inner, outer = ValueError("https://host/?sig=1"), KeyError("x")
    assert shows_nothing(outer, ())
    outer.__cause__ = inner
    assert not shows_nothing(outer, ())
    assert not shows_nothing(ValueError("my-secret"), ["my-secret"])


@pytest.mark.parametrize("scheme", ["memory", "https", "hf"])
def test_stores_show_no_secrets(scheme):
    place = {"hf": "datasets/a/b", "https": "user:hunter2@host/a?sig=hunter2", "memory": "a"}[scheme]
    store = open_store(f"{scheme}://{place}", {"token": "hunter2"})
    assert "hunter2" in store._place.secrets
    for text in (repr(store), store.url, repr(store._place)):
        assert "hunter2" not in text


def test_where_a_token_is_to_be_found_is_no_secret():
    assert "anon" not in secrets_in({"token": "anon"})
    assert "ya29.a-real-one" in secrets_in({"token": "ya29.a-real-one"})
