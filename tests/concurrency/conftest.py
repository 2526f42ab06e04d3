"""No test here cuts the power: spare the disk."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Let fsync do nothing."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
