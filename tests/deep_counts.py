"""Sum up what deep tests counted: of junit files that `make test-deep` wrote with `--junitxml`, a line for each test.

    python tests/deep_counts.py RESULTS.xml [MORE.xml ...]

A case that ran more than once counts once, as it went the last time (files in the order given).
"""

import json
import sys
from collections import Counter
from xml.etree import ElementTree as ET


def cases(paths):
    """Return {(file, test, case): (outcome, seconds, counts)}."""
    found = {}
    for path in paths:
        for case in ET.parse(path).iter("testcase"):
            test, _, parameters = case.get("name").partition("[")
            said = case.find("properties/property[@name='counts']")
            outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            counts = json.loads(said.get("value")) if said is not None else {}
            found[case.get("classname"), test, parameters] = outcome, float(case.get("time")), counts
    return found


def table(found):
    """Yield a line for each test."""
    for file, test in dict.fromkeys((file, test) for file, test, _ in found):
        runs = [run for key, run in found.items() if key[:2] == (file, test)]
        outcomes = Counter(outcome for outcome, _, _ in runs)
        sums = sum((Counter(counts) for _, _, counts in runs), Counter())
        told = ", ".join(f"{n:,} {what}" for what, n in (outcomes + sums).items())
        yield f"{file.rpartition('.')[2]}::{test}: {told}; {sum(seconds for _, seconds, _ in runs):,.0f} s"


if __name__ == "__main__":
    print("\n".join(table(cases(sys.argv[1:]))))  # noqa: T201
