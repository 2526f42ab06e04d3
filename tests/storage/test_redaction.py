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
        ("s3://bucket/why?/run #7, and gs://bucket/a#1?", "s3://bucket/why?/run #7, and gs://bucket/a#1?"),
        ("az://c/a?b=1 abfss://c@account/d#e", "az://c/a?b=1 abfss://…@account/d#e"),
        ("simplecache::s3://bucket/a?b", "simplecache::s3://bucket/a?b"),
        ("abfss://c@acc.dfs.core.windows.net/d of acc", "abfss://c@acc.dfs.core.windows.net/d of acc"),
        ("abfss://c:hunter2@acc.dfs.core.windows.net/d", "abfss://…@acc.dfs.core.windows.net/d"),
        ("https://c@acc.dfs.core.windows.net/d", "https://…@acc.dfs.core.windows.net/d"),
        ("AccountName=a;AccountKey=ab+c/d==;BlobEndpoint=b", "AccountName=a;AccountKey=…;BlobEndpoint=b"),
        ("SharedAccessSignature=sv=1&sig=ab;BlobEndpoint=b", "SharedAccessSignature=…;BlobEndpoint=b"),
        (
            "The MAC signature found in the HTTP request 'ab+c=' is",
            "The MAC signature found in the HTTP request '…' is",
        ),
        ("az://c/a?se=1&sig=abc/d%2B&b=2", "az://c/a?se=1&sig=…&b=2"),
        (
            "s3://bucket/a?X-Amz-Signature=abc&X-Amz-Security-Token=d",
            "s3://bucket/a?X-Amz-Signature=…&X-Amz-Security-Token=…",
        ),
        ("s3://b/a?b https://host/c?d=1 s3://b/e#f", "s3://b/a?b https://host/c?… s3://b/e#f"),
        ("s3://b/a?from=https://host/c?sig=1", "s3://b/a?from=https://host/c?…"),
        ("http+s3://host/a?b=1 webhdfs://host/a?token=1", "http+s3://host/a?… webhdfs://host/a?…"),
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


def test_pieces_of_what_azure_is_told_are_secret_too(monkeypatch):
    """In all spellings, wherever they came from."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=public;AccountKey=the+key/==;BlobEndpoint=b")
    found = secrets_in({"sas_token": "sv=2024&sig=the%2Fsignature%3D&sp=r"})
    assert {"the+key/==", "the%2Fsignature%3D", "the/signature="} <= set(found)
    assert redacted("the+key/== the/signature= the%2Fsignature%3D public", found) == "… … … public"


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
