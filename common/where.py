"""`--where`: a condition on samples, such as `source == "code" and length < 2000`.

A subset of Python's expressions over the columns of the plan, evaluated on whole columns; nothing
is executed.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_offline.common.errors import BadInput
from dflash_offline.common.store import Plan

FIELDS = ("id", "source", "licence", "length", "supervised", "held_out", "pack")
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: np.isin(a, list(b)),
    ast.NotIn: lambda a, b: ~np.isin(a, list(b)),
}


def select(plan: Plan, condition: str) -> np.ndarray:
    """Return which samples of a plan meet a condition, bool [samples].

    Comparisons of the `FIELDS` with numbers, strings, or lists of them (`in`), joined by `and`,
    `or`, `not` and parentheses.

    Raises:
        BadInput: not such an expression; names the part.
    """
    try:
        tree = ast.parse(condition, mode="eval").body
    except SyntaxError as problem:
        raise _bad(condition, str(problem.msg)) from None
    return _condition(tree, plan, condition)


def _condition(node: ast.expr, plan: Plan, condition: str) -> np.ndarray:
    if isinstance(node, ast.BoolOp):
        parts = [_condition(each, plan, condition) for each in node.values]
        return (np.logical_and if isinstance(node.op, ast.And) else np.logical_or).reduce(parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_condition(node.operand, plan, condition)
    if isinstance(node, ast.Compare):
        return _compare(node, plan, condition)
    result = _value(node, plan, condition)
    if not (isinstance(result, np.ndarray) and result.dtype == bool):
        raise _bad(condition, f"{ast.unparse(node)!r} is no condition")
    return result


def _value(node: ast.expr, plan: Plan, condition: str) -> Any:
    if isinstance(node, ast.Name):
        if node.id not in FIELDS:
            raise _bad(condition, f"there is no field {node.id}")
        return plan.column(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        values = [_value(each, plan, condition) for each in node.elts]
        if all(isinstance(each, int | float | str) for each in values):
            return values
    raise _bad(condition, f"{ast.unparse(node)!r} is not understood")


def _compare(node: ast.Compare, plan: Plan, condition: str) -> Any:
    sides = [_value(each, plan, condition) for each in (node.left, *node.comparators)]
    result = np.ones(len(plan.samples), bool)
    for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
        if type(op) not in _COMPARE:
            raise _bad(condition, "comparisons are == != < <= > >= in, not in")
        is_in = isinstance(op, ast.In | ast.NotIn)
        # numpy compares anything, and finds a text in no number and a field in every list.
        if isinstance(left, list) or is_in != isinstance(right, list):
            raise _bad(condition, f"{ast.unparse(node)!r}: a list stands behind in or not in")
        if not any(isinstance(side, np.ndarray) for side in (left, right)):
            raise _bad(condition, f"{ast.unparse(node)!r} has no field")
        if len({_is_text(each) for each in (left, *(right if is_in else [right]))}) > 1:
            raise _bad(condition, f"{ast.unparse(node)!r} compares a text with a number")
        result = result & _COMPARE[type(op)](left, right)
    return result


def _is_text(value: Any) -> bool:
    return value.dtype.kind in "OU" if isinstance(value, np.ndarray) else isinstance(value, str)


def _bad(condition: str, problem: str) -> BadInput:
    return BadInput(
        f"--where {condition!r}: {problem}; compare {', '.join(FIELDS)} with numbers and texts, "
        "for example 'source == \"code\" and length < 2000'"
    )
