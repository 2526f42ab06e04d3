"""How the reader says no."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 - what it is
    """The dataset breaks a rule."""

    def __init__(self, rule: str, what: str) -> None:
        self.rule = rule
        super().__init__(f"{rule}: {what}")


def need(ok: object, rule: str, what: str) -> None:
    """Refuse the dataset unless `ok`."""
    if not ok:
        raise Refused(rule, what)
