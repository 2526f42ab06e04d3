"""Rules have permanent ids, each is held by a vector or a test, and code cites only rules that exist."""

import ast
import json
import re

from vector_cases import INVALID, PROSE, SPEC, about

CITED = re.compile(r"\b([A-Z]{2,6})-(\d+)(?:,? (?:to|and) ([A-Z]{2,6})-(\d+))?\b")
# Names of other things that look like rules.
OTHERS = {"EAGLE", "UTF", "CRC", "CVE", "ISO", "SHA", "PEP", "PART"}


def coverage() -> dict[str, list[str]]:
    return json.loads((SPEC / "vectors" / "coverage.json").read_text())


def test_rules_are_numbered_without_gaps(rules):
    by_area: dict[str, list[int]] = {}
    for rule in rules:
        area, _, number = rule.partition("-")
        by_area.setdefault(area, []).append(int(number))
    for area, numbers in by_area.items():
        assert numbers == list(range(1, len(numbers) + 1)), area


def test_each_bold_id_is_a_rule(rules):
    assert set(re.findall(r"\*\*([A-Z]+-\d+)\*\*", PROSE)) == set(rules)


def test_each_rule_has_one_requirement(rules):
    assert {rule: text.count("MUST") for rule, text in rules.items() if text.count("MUST") != 1} == {}


def test_no_requirement_outside_rules(rules):
    introduction = PROSE.split("## 1. Terms")[0].count("MUST")
    assert PROSE.count("MUST") - introduction == len(rules)


def test_prose_cites_rules_that_exist(rules):
    assert {f"{area}-{number}" for area, number, *_ in CITED.findall(PROSE) if area not in OTHERS} <= set(rules)


def test_code_cites_rules_that_exist(rules, repo_root):
    wrong = []
    for folder in ("hsfmt", "writers", "readers", "maintenance", "cli", "spec", "tests", "bench", "demo"):
        for path in sorted((repo_root / folder).rglob("*.py")):
            for first, number, last, end in CITED.findall(path.read_text(encoding="utf-8")):
                ids = [f"{first}-{number}", *([f"{last}-{end}"] if last else [])]
                wrong += [f"{path.relative_to(repo_root)}: {i}" for i in ids if first not in OTHERS and i not in rules]
    assert wrong == []


def test_every_rule_has_a_vector_or_a_test(rules):
    vectors = {about(case)["rule"] for case in INVALID}
    assert vectors <= set(rules)
    assert set(coverage()) <= set(rules)
    assert set(rules) - vectors - set(coverage()) == set()


def test_tests_that_cover_rules_exist(repo_root):
    missing = []
    for rule, names in coverage().items():
        for name in names:
            path, _, function = name.partition("::")
            file = repo_root / path
            if path.startswith("1.0/"):
                found = (SPEC / "vectors" / path).is_dir()
            else:
                found = file.is_file() and function in _functions(file.read_text(encoding="utf-8"))
            missing += [] if found else [f"{rule}: {name}"]
    assert missing == []


def _functions(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
