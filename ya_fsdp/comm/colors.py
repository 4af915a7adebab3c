"""Expressions that give every rank two colours, which tell who shares a node with whom.

The *intra* colour is equal for the ranks of one node, the *inter* colour for the ranks that sit at the same place of
their nodes. On two nodes of four ranks, ``rank // 4, rank % 4`` gives::

    rank     0  1  2  3  4  5  6  7
    intra    0  0  0  0  1  1  1  1
    inter    0  1  2  3  0  1  2  3

An expression is read by a parser of its own and never handed to Python: it knows integers, ``rank``, ``world_size``,
``+ - * // %``, comparisons, parentheses and a comma, bounds the length of the text, the depth of parentheses and the
size of numbers, and says where the fault is.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["ColorExpression", "ColorExpressionError"]

MAX_LENGTH = 1000
MAX_DEPTH = 20
MAX_NUMBER = 2**63 - 1

_TOKEN = re.compile(r"[ \t\n]*(?:([0-9]+)|([A-Za-z_][A-Za-z_0-9]*)|(//|\*\*|[=!<>]=|[-+*%<>(),])|(.)|$)", re.DOTALL)
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}
_WANTED = "a number, rank, world_size or '('"

Number = Callable[[int, int], int]
"""Computes one number from a rank and the number of ranks."""


class ColorExpressionError(ValueError):
    """An expression that is not understood, or cannot be computed.

    Attributes:
        position: Index of the first character at fault.
    """

    def __init__(self, text: str, position: int, reason: str) -> None:
        shown = repr(text if len(text) <= 80 else f"{text[:77]}...")
        super().__init__(
            f"colour expression {shown}: at position {position}: {reason}. Expected two numbers, as in "
            f"'rank // 8, rank % 8', made of integers, rank, world_size, + - * // % and comparisons"
        )
        self.position = position


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """``number``, ``name``, ``end``, or the operator itself."""
    text: str
    position: int


@dataclass(frozen=True, slots=True)
class _Pair:
    first: Number
    second: Number
    position: int


class ColorExpression:
    """An expression for the two colours of a rank, such as ``rank // 8, rank % 8``.

    Args:
        text: The expression.

    Raises:
        ColorExpressionError: With the position of the fault.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"a colour expression is a string such as 'rank // 8, rank % 8', got {text!r}")
        self.text = text
        self._pair = _Parser(text).parse()

    def colors(self, rank: int, world_size: int) -> tuple[int, int]:
        """The intra and the inter colour of a rank.

        Raises:
            ColorExpressionError: If a division by zero or a number beyond 64 bits comes up.
        """
        return self._pair.first(rank, world_size), self._pair.second(rank, world_size)


class _Parser:
    """Recursive descent; recursion only through parentheses, whose depth is bounded."""

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > MAX_LENGTH:
            self._fail(MAX_LENGTH, f"longer than {MAX_LENGTH} characters")
        self._tokens = self._split()
        self._place = 0
        self._depth = 0

    def parse(self) -> _Pair:
        """Reads the whole text."""
        value = self._pair_or_number()
        token = self._token
        if token.kind != "end":
            self._unexpected(token, "an operator, a comma or the end")
        if not isinstance(value, _Pair):
            self._fail(token.position, "there is only one number, the second colour is missing")
        return value

    def _split(self) -> list[_Token]:
        tokens, position = [], 0
        while True:
            match = _TOKEN.match(self._text, position)
            assert match is not None  # the pattern takes any character
            kind = ("end", "number", "name", "operator", "other")[match.lastindex or 0]
            start = match.start(match.lastindex) if match.lastindex else len(self._text)
            token = match.group(match.lastindex) if match.lastindex else ""
            if kind == "other":
                self._fail(start, f"{token!r} is not part of the language{' (use //)' if token == '/' else ''}")
            tokens.append(_Token(token if kind == "operator" else kind, token, start))
            if kind == "end":
                return tokens
            position = match.end()

    @property
    def _token(self) -> _Token:
        return self._tokens[self._place]

    def _take(self, *kinds: str) -> _Token | None:
        token = self._token
        if token.kind not in kinds:
            return None
        self._place += 1
        return token

    def _pair_or_number(self) -> _Pair | Number:
        start = self._token.position
        first = self._comparison()
        if self._take(",") is None:
            return first
        second_at = self._token
        second = self._comparison()
        if self._take(",") and self._token.kind not in (")", "end"):  # as in Python, a comma may close a tuple
            self._fail(self._token.position, "there is a third value")
        return _Pair(self._number(first, start), self._number(second, second_at.position), start)

    def _comparison(self) -> _Pair | Number:
        """A sum, or a chain of comparisons, which holds if each of its links does."""
        start = self._token.position
        first = self._sum()
        rest: list[tuple[Callable[[int, int], bool], Number]] = []
        while (operator := self._take(*_COMPARISONS)) is not None:
            at = self._token.position
            rest.append((_COMPARISONS[operator.kind], self._number(self._sum(), at)))
        if not rest:
            return first
        head = self._number(first, start)

        def holds(rank: int, world_size: int) -> int:
            left = head(rank, world_size)
            for compare, operand in rest:
                right = operand(rank, world_size)
                if not compare(left, right):
                    return 0
                left = right
            return 1

        return holds

    def _sum(self) -> _Pair | Number:
        return self._chain(self._product, "+", "-")

    def _product(self) -> _Pair | Number:
        return self._chain(self._signed, "*", "//", "%")

    def _chain(self, operand: Callable[[], _Pair | Number], *operators: str) -> _Pair | Number:
        """Operands joined by operators of one precedence, computed from the left."""
        start = self._token.position
        first = operand()
        rest: list[tuple[_Token, Number]] = []
        while (operator := self._take(*operators)) is not None:
            at = self._token.position
            rest.append((operator, self._number(operand(), at)))
        if not rest:
            return first
        head = self._number(first, start)

        def compute(rank: int, world_size: int) -> int:
            value = head(rank, world_size)
            for operator, number in rest:
                right = number(rank, world_size)
                if right == 0 and operator.kind in ("//", "%"):
                    self._fail(operator.position, f"division by zero for rank {rank} of {world_size}")
                value = _ARITHMETIC[operator.kind](value, right)
                if abs(value) > MAX_NUMBER:
                    self._fail(operator.position, f"a number beyond 64 bits for rank {rank} of {world_size}")
            return value

        return compute

    def _signed(self) -> _Pair | Number:
        signs = []
        while (sign := self._take("+", "-")) is not None:
            signs.append(sign)
        start = self._token.position
        value = self._primary()
        if not signs:
            return value
        number = self._number(value, start)
        factor = -1 if sum(sign.kind == "-" for sign in signs) % 2 else 1
        return lambda rank, world_size: factor * number(rank, world_size)

    def _primary(self) -> _Pair | Number:
        token = self._token
        if self._take("number"):
            return self._literal(token)
        if self._take("name"):
            if token.text not in ("rank", "world_size"):
                self._fail(token.position, f"unknown name {token.text[:40]!r}")
            is_rank = token.text == "rank"
            return lambda rank, world_size: rank if is_rank else world_size
        if self._take("("):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                self._fail(token.position, f"more than {MAX_DEPTH} parentheses inside one another")
            value = self._pair_or_number()
            if self._take(")") is None:
                self._unexpected(self._token, "an operator, a comma or ')'")
            self._depth -= 1
            return value
        self._unexpected(token, _WANTED)

    def _literal(self, token: _Token) -> Number:
        if len(token.text) > 1 and token.text[0] == "0":
            self._fail(token.position, "a number must not start with 0")
        if len(token.text) > len(str(MAX_NUMBER)) or int(token.text) > MAX_NUMBER:
            self._fail(token.position, "a number beyond 64 bits")
        value = int(token.text)
        return lambda rank, world_size: value

    def _number(self, value: _Pair | Number, position: int) -> Number:
        if isinstance(value, _Pair):
            self._fail(position, "expected a number, got a pair")
        return value

    def _unexpected(self, token: _Token, wanted: str) -> NoReturn:
        got = "the end" if token.kind == "end" else repr(token.text[:40])
        self._fail(token.position, f"expected {wanted}, got {got}")

    def _fail(self, position: int, reason: str) -> NoReturn:
        raise ColorExpressionError(self._text, position, reason)
