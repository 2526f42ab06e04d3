"""The command line and the environment of a user whose datasets lie in buckets and behind web servers."""

import os

import pytest
from flow_steps import Hsfmt, environment


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    """The local twins need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def hsfmt() -> Hsfmt:
    """Run a command of `hsfmt`."""
    return Hsfmt()


@pytest.fixture
def as_user(monkeypatch, s3_server, no_credentials):
    """Credentials and endpoint of the S3 server in the environment; call it to change them, None takes one away."""

    def change(**settings):
        for name, value in settings.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    change(**environment(s3_server))
    return change
