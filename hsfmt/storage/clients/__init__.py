"""Clients of remote storages, each behind the same small interface; which one is used is chosen in `choice`."""
