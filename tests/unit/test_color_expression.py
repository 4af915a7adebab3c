"""Colour expressions: what Python would compute, and nothing but numbers, whatever the string."""

import ast
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ya_fsdp.comm.colors import MAX_DEPTH, MAX_LENGTH, ColorExpression, ColorExpressionError
from ya_fsdp.comm.topology import NodeGrid, parse_colors

#: CPU seconds that one string may take; a run away power or a backtracking pattern takes far longer.
MAX_SECONDS = 5.0
#: Interpreter events that tell of code being compiled, run or fetched.
CODE_EVENTS = {"compile", "exec", "import", "open", "os.system", "subprocess.Popen", "code.__new__", "marshal.loads"}

_seen: list[str] = []
_watching = False


def _audit(event: str, _: object) -> None:
    if _watching and event in CODE_EVENTS:
        _seen.append(event)


sys.addaudithook(_audit)  # cannot be taken back, hence the switch


@contextmanager
def no_code_runs() -> Iterator[None]:
    global _watching
    _seen.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
    assert not _seen, f"the interpreter was asked to {_seen}"


def colors_of(text: str, rank: int = 5, world_size: int = 16) -> tuple[int, int] | ColorExpressionError:
    """Compute an expression, or return why it was refused; check that no code ran and that it was quick."""
    start = time.process_time()
    with no_code_runs():
        try:
            result: tuple[int, int] | ColorExpressionError = ColorExpression(text).colors(rank, world_size)
        except ColorExpressionError as error:
            result = error
    assert time.process_time() - start < MAX_SECONDS
    return result


_NODES = (
    *(ast.Expression, ast.Tuple, ast.Load, ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.Compare),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.UAdd, ast.USub),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


def python_computes(text: str, rank: int, world_size: int) -> object:
    """What Python makes of an accepted expression, after its tree has been seen to hold numbers only."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        assert isinstance(node, _NODES), f"{text!r} was accepted with a {type(node).__name__}"
        assert not isinstance(node, ast.Constant) or type(node.value) is int
        assert not isinstance(node, ast.Name) or node.id in ("rank", "world_size")
    return eval(compile(tree, "", "eval"), {"__builtins__": {}}, {"rank": rank, "world_size": world_size})


def check(text: str, rank: int, world_size: int) -> None:
    result = colors_of(text, rank, world_size)
    if isinstance(result, ColorExpressionError):
        assert 0 <= result.position <= len(text)
        assert f"at position {result.position}: " in str(result)
    else:
        assert result == python_computes(text, rank, world_size)
        assert all(type(color) is int for color in result)


_PIECES = [
    *("rank", "world_size", "0", "1", "2", "7", "8", "007", "9" * 18, "9" * 30, "1.5", "1e9", "0x10", "1_0", "True"),
    *("+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "<<", "&", "|", "^", "~", "@", ":=", "="),
    *("(", ")", ",", " ", "\t", "\n", "[", "]", "{", "}", ".", ":", ";", "'", '"', "\\", "#", "`", "$", "\0", "٣", "é"),
    *(
        "and",
        "or",
        "not",
        "if",
        "else",
        "for",
        "in",
        "is",
        "lambda",
        "await",
        "yield",
        "import",
        "exec",
        "eval",
        "open",
    ),
    *("__import__('os').system('true')", "__class__", "().__class__.__bases__", "ranks", "Rank", "f'{rank}'", "10**10"),
]
_SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
_ranks = st.integers(0, 63)


def _numbers(operand: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    arithmetic = st.sampled_from(["+", "-", "*", "//", "%", " + ", " % ", "==", "<", " >= ", "!="])
    return st.one_of(
        st.tuples(operand, arithmetic, operand).map("".join),
        operand.map("({})".format),
        operand.map("-{}".format),
        operand.map(" + {}".format),
    )


_number = st.recursive(
    st.sampled_from(["rank", "world_size", "0", "1", "3", "8", "64", "1000"]), _numbers, max_leaves=12
)


@settings(_SETTINGS, max_examples=2500)
@given(st.lists(st.sampled_from(_PIECES), max_size=25).map("".join), _ranks)
@example("__import__('os').system('true'), 0", 0)
@example("9**9**9**9, 1", 0)
def test_strings_of_code_are_refused_with_a_position_or_are_the_numbers_of_python(text: str, rank: int) -> None:
    check(text, rank, 64)


@settings(_SETTINGS, max_examples=1000)
@given(st.text(max_size=40), _ranks)
def test_any_text_is_refused_with_a_position(text: str, rank: int) -> None:
    check(text, rank, 64)


@settings(_SETTINGS, max_examples=1000)
@given(_number, _number, st.sampled_from(["{}, {}", "({},{})", " {} , {} ,"]), _ranks)
def test_well_formed_expressions_give_what_python_gives(first: str, second: str, form: str, rank: int) -> None:
    text = form.format(first, second)
    result = colors_of(text, rank, 64)
    if isinstance(result, ColorExpressionError):
        reasons = (
            "division by zero",
            "beyond 64 bits",
            f"more than {MAX_DEPTH} parentheses",
            f"{MAX_LENGTH} characters",
        )
        assert any(reason in str(result) for reason in reasons), f"{text!r}: {result}"
    else:
        assert result == python_computes(text, rank, 64)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank // 8, rank % 8", (1, 5)),
        ("(rank // 8, rank % 8)", (1, 5)),
        ("2 * (rank // 8) + rank % 2, rank % 8", (3, 5)),
        ("rank >= world_size // 2, rank % (world_size // 2)", (1, 5)),
        ("(0 <= rank < 8) * 5, -rank", (0, -13)),
        ("((rank)), +-+1", (13, -1)),
    ],
)
def test_colours_of_rank_13_of_16(text: str, expected: tuple[int, int]) -> None:
    assert colors_of(text, 13, 16) == expected


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 0, "got the end"),
        ("rank // 8", 9, "only one number"),
        ("rank // 8,", 10, "got the end"),
        ("rank, 1, 2", 9, "a third value"),
        ("rank / 8, 1", 5, "use //"),
        ("rank ** 2, 1", 5, "got '**'"),
        ("ranks, 1", 0, "unknown name 'ranks'"),
        ("rank, __import__('os')", 17, "not part of the language"),
        ("rank, os", 6, "unknown name 'os'"),
        ("rank, (1, 2)", 6, "expected a number, got a pair"),
        ("(rank, 1", 8, "expected an operator, a comma or ')', got the end"),
        ("rank, 010", 6, "must not start with 0"),
        ("rank, 99999999999999999999", 6, "beyond 64 bits"),
        ("rank, 4294967296 * 4294967296", 17, "beyond 64 bits for rank 5 of 16"),
        ("rank % (world_size - 16), 0", 5, "division by zero for rank 5 of 16"),
        ("1, " + "(" * 21, 3 + MAX_DEPTH, "parentheses inside one another"),
        ("1, " + "-" * 2000 + "1", MAX_LENGTH, "longer than"),
    ],
)
def test_a_refusal_says_where_and_why(text: str, position: int, reason: str) -> None:
    result = colors_of(text)
    assert isinstance(result, ColorExpressionError), result
    assert result.position == position, result
    assert reason in str(result)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9" * 100_000, None),
        ("(" * 100_000, None),
        ("-" * 100_000 + "1, 1", None),
        (" " * 100_000, None),
        ("rank, " + "9*" * 490 + "9", None),
        ("-" * 990 + "1, 1", (1, 1)),  # Python's own parser gives up on this one
        ("1" + "+1" * 490 + ", 1", (491, 1)),
        ("1" + "<1" * 490 + ", 1", (0, 1)),
    ],
    ids=lambda value: str(value)[:12],
)
def test_long_strings_take_no_time_and_no_stack(text: str, expected: tuple[int, int] | None) -> None:
    result = colors_of(text)
    if expected is None:
        assert isinstance(result, ColorExpressionError)
    else:
        assert result == expected


@pytest.mark.parametrize("colors", [5, 1.0, (1,), (1, 2, 3), (1.0, 2), (True, 1), ["rank", "rank"], b"1, 2"])
def test_colours_of_another_type_are_refused(colors: object) -> None:
    with pytest.raises(TypeError, match="two integers"):
        parse_colors(colors)  # type: ignore[arg-type]


def test_a_grid_has_a_row_per_node_and_a_column_per_inter_colour() -> None:
    grid = NodeGrid.from_colors([(0, 0), (0, 1), (1, 1), (1, 0), (7, 0), (7, 1)])
    assert grid.rows == ((0, 1), (3, 2), (4, 5))
    assert [grid.place(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("colors", "reason"),
    [
        ([(0, 0), (0, 0)], "ranks 0 and 1 have the same colours"),
        ([(0, 0), (0, 1), (1, 0)], r"intra colour 1 has \[0\] \(ranks \[2\]\) and the first has \[0, 1\]"),
        ([(0, 0), (0, 1), (1, 2), (1, 3)], r"intra colour 1 has \[2, 3\]"),
    ],
)
def test_colours_that_make_no_grid_are_refused_by_rank(colors: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        NodeGrid.from_colors(colors)
