"""The ways to read that are compared, one module for each library; `base.Peer` says what a peer is."""

from __future__ import annotations

import importlib
import pkgutil

from peers.base import Peer


def all_peers() -> dict[str, type[Peer]]:
    """Return the peers by name, in order of their modules and of their definition there."""
    found: dict[str, type[Peer]] = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for value in vars(loaded).values():
            if (
                isinstance(value, type)
                and issubclass(value, Peer)
                and value.__module__ == loaded.__name__
                and value.name
            ):
                found[value.name] = value
    return dict(sorted(found.items(), key=lambda item: item[1].place))
