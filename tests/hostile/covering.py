"""Which consumers a case meets in CI: all of them would be 47,000 runs."""

import math
from collections.abc import Iterable, Mapping

from cases import Case


def by_kind(cases: Mapping[str, Case], names: Iterable[str]) -> dict[str, list[str]]:
    """Return kind (who must refuse it) to the names of its cases, in the order of the table."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(cases[name].kind, []).append(name)
    return found


def covering(
    cases: Mapping[str, Case], names: Iterable[str], consumers: list[str], *, least: int = 1, every: int = 1
) -> dict[str, list[str]]:
    """Return the consumers of each case, in turn within each kind, so that each consumer meets each kind.

    Parameters
    ----------
    cases
        The table.
    names
        Those of its cases to choose from.
    consumers
        Names of consumers.
    least
        Consumers of a case. It is more for kinds that have fewer cases than there are consumers to meet.
    every
        Take only one of so many cases of a kind, as far as that leaves one for each consumer.
    """
    found: dict[str, list[str]] = {}
    for of_kind in by_kind(cases, names).values():
        step = max(1, min(every, len(of_kind) // len(consumers)))
        taken = of_kind[::step]
        n = max(least, math.ceil(len(consumers) / len(taken)))
        for at, name in enumerate(taken):
            found[name] = [consumers[(at * n + i) % len(consumers)] for i in range(min(n, len(consumers)))]
    return found
