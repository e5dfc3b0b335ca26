"""A calculator: arithmetic of whole numbers, decimals and fractions, exact where they are."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from asyncrl.tools.base import ToolError, text_argument, texts

_MAX_CHARACTERS = 500
_MAX_BITS = 4096  # of a result, which otherwise takes time and memory without bound
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {"abs": abs, "sqrt": math.sqrt, "round": round, "floor": math.floor}


class Calculator:
    name = "calculator"
    description = "Computes an arithmetic expression, such as 12 * (3.5 + 2) ** 2. Knows sqrt, abs, round and floor."
    schema = texts(expression="the expression")

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        return compute(text_argument(arguments, "expression"))


def compute(expression: str) -> str:
    """Value of an expression. Raises ToolError."""
    if len(expression) > _MAX_CHARACTERS:
        raise ToolError(f"expected an expression of at most {_MAX_CHARACTERS} characters, found {len(expression)}")
    try:
        return _shown(_value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as e:
        raise ToolError(f"{expression!r} cannot be computed: {e}") from None


def _shown(value: Any) -> str:
    if isinstance(value, Fraction) and value.denominator == 1:
        value = value.numerator
    return str(value) if isinstance(value, int) else f"{float(value):.12g}"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(number) if isinstance(number, int) else Fraction(repr(number))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _small(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _small(_FUNCTIONS[name](_value(argument)))
    raise ValueError(f"expected numbers, + - * / // % **, parentheses and {', '.join(_FUNCTIONS)}")


def _power(base: Any, exponent: Any) -> Any:
    if _bits(base) * abs(exponent) > _MAX_BITS:
        raise ValueError("the result is too large")
    power = base**exponent
    if isinstance(power, complex):
        raise ValueError("a root of a negative number")
    return power


def _small(value: Any) -> Any:
    if _bits(value) > _MAX_BITS:
        raise ValueError("the result is too large")
    return value


def _bits(value: Any) -> int:
    """Of an exact number, such as what `round` gives; 0 of a float."""
    if not isinstance(value, int | Fraction):
        return 0
    return max(value.numerator.bit_length(), value.denominator.bit_length())
