"""What one thing changed at a time in a module: the mutants that bench/mutation.py runs the tests on.

Not mutated: docstrings, annotations, decorators, and prose (texts with a space, what is raised).
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.BitXor: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A changed module: which of its mutants this is, what was changed at which lines, and the whole text."""

    number: int
    first: int
    last: int
    at_import: bool
    label: str
    text: str


def mutants(source: str, wanted: Callable[[int], bool] = lambda _: True) -> Iterator[Mutant]:
    """Yield the mutants of a module, those of the numbers that are wanted."""
    tree = ast.parse(source)
    numbers = itertools.count()
    for parent, name, i, node, inside in _places(tree, inside=False):
        for changed in _changes(node):
            number = next(numbers)
            if not wanted(number):
                continue
            old = getattr(parent, name) if i is None else getattr(parent, name)[i]
            _put(parent, name, i, changed)
            text = ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, name, i, old)
            label = f"{_short(node)}  ->  {_short(changed)}"
            yield Mutant(number, node.lineno, node.end_lineno or node.lineno, not inside, label, text)


def n_mutants(source: str) -> int:
    """Return how many mutants a module has."""
    return sum(1 for *_, node, _ in _places(ast.parse(source), inside=False) for _ in _changes(node))


def _put(parent: ast.AST, name: str, i: int | None, node: ast.AST) -> None:
    if i is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[i] = node


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:90]


def _places(parent: ast.AST, *, inside: bool) -> Iterator[tuple[ast.AST, str, int | None, Any, bool]]:
    """Yield each node that may be changed with where it hangs, and whether it runs inside of a function."""
    is_function = isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for name, value in ast.iter_fields(parent):
        if name in ("annotation", "returns", "decorator_list") or isinstance(parent, ast.Import | ast.ImportFrom):
            continue
        within = inside or (is_function and name != "args")  # defaults are evaluated where the function is made
        for i, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _is_left_alone(node):
                continue
            if isinstance(node, ast.expr | ast.stmt):
                yield parent, name, i, node, within
            if not isinstance(node, ast.Raise | ast.JoinedStr):  # prose
                yield from _places(node, inside=within)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.If) and _short(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Call) and _short(node.func).split(".")[-1] in ("Problem", "at", "field"):
        return True
    if isinstance(node, ast.keyword) and node.arg in ("expected", "got", "remedy"):
        return True
    return isinstance(node, ast.Assign) and _short(node.targets[0]) in ("__all__", "__slots__")


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                changed = copy.deepcopy(node)
                changed.ops[i] = _SWAPS[type(op)]()
                yield changed
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() if type(node.op) in _SWAPS:
            changed = copy.deepcopy(node)
            changed.op = _SWAPS[type(node.op)]()
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield copy.deepcopy(node.operand)
        case ast.IfExp():
            yield copy.deepcopy(node.body)
            yield copy.deepcopy(node.orelse)
        case ast.If() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            changed = copy.deepcopy(node)
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield changed
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=str() as value) if " " not in value:
            yield ast.Constant(f"{value}X")
        case ast.Constant(value=bytes() as value):
            yield ast.Constant(value + b"X")
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
