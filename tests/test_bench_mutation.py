"""Mutants: each changes one thing of what runs, and nothing of what is only said; a fate is told once a mutant."""

import ast
import json

import pytest

SOURCE = '''
"""A module."""
LIMIT = 3


def taken(values: list[int], most: int = 2) -> int:
    """Return some."""
    if not values or len(values) > LIMIT:
        raise ValueError(f"{len(values)} values")
    for value in values:
        if value is None:
            continue
        most += value * 2
    return most
'''


@pytest.fixture
def bench(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "bench"))
    import mutants
    import mutation

    return mutants, mutation


def test_each_mutant_is_another_program(bench):
    found = list(bench[0].mutants(SOURCE))
    texts = {mutant.text for mutant in found}
    assert len(texts) == len(found) > 10
    assert ast.unparse(ast.parse(SOURCE)) not in texts
    for mutant in found:
        ast.parse(mutant.text)
        assert 1 <= mutant.first <= mutant.last <= SOURCE.count("\n")


def test_every_kind_of_thing_is_changed_and_prose_is_not(bench):
    found = list(bench[0].mutants(SOURCE))
    labels = {mutant.label for mutant in found}
    for wanted in ("3  ->  4", "2  ->  3", "len(values) > LIMIT  ->  len(values) >= LIMIT", "continue  ->  break",
                   "not values  ->  values", "most += value * 2  ->  most -= value * 2", "return most  ->  return None",
                   "value is None  ->  value is not None", "value * 2  ->  value // 2"):  # fmt: skip
        assert wanted in labels, labels
    assert all('"""A module."""' in mutant.text and "Return some" in mutant.text for mutant in found)
    assert all("{len(values)} values" in mutant.text or mutant.label.startswith("raise") for mutant in found)
    assert [mutant.label for mutant in found if mutant.at_import] == ["3  ->  4", "2  ->  3"]


def test_a_later_fate_takes_the_place_of_an_earlier_one(bench, tmp_path):
    module = "hsfmt/pointer.py"
    fates = [(0, "passed"), (1, "failed"), (2, "hung"), (3, "no test"), (0, "failed")]
    lines = [{"module": module, "number": number, "line": 1, "label": "", "fate": fate} for number, fate in fates]
    results = tmp_path / "results"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = bench[1].as_table(bench[1].recorded(results)).splitlines()
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[3:-1]] for row in rows}
    assert cells[f"`{module}`"] == cells["**all**"] == ["4", "3", "1", "1", "75"]
    assert cells["`hsfmt/manifest.py`"] == ["0", "0", "0", "0", "–"]
