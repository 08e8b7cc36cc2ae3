"""The mutations: from a module's source, every text that differs from it by one small mistake.

The kinds are the usual ones of mutation testing (Offutt's "sufficient" operators, and statement deletion):
relations, connectives, negations, constants, arithmetic, conditions forced, one condition of several left
out, statements left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

# How each relation is written, and the one that takes its place.
RELATIONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
# Two times are equal by chance only: with "<=" for "<" nothing would change.
REVERSED = {"<": ">", "<=": ">", ">": "<", ">=": "<"}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
    ast.BitOr: "&",
    ast.BitAnd: "|",
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Of a definition, what it is; not what it does.
NOT_RUN = ("annotation", "returns", "decorator_list", "bases", "type_params")
# What a statement says to a reader only.
TOLD = ("logger", "logging")


@dataclass(frozen=True)
class Mutant:
    """One mistake: in `line` (from 1), `before` became `after`; `source` is the whole module with it."""

    line: int
    before: str
    after: str
    source: str

    @property
    def words(self) -> tuple[str, str]:
        """`before` and `after`, each in one line."""
        return " ".join(self.before.split()), " ".join(self.after.split())

    def __str__(self) -> str:
        return f"{self.line}: {' -> '.join(self.words)}"


def mutants(source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its lines. All of them compile."""
    tree = ast.parse(source)
    text = _Text(source)
    found: dict[str, Mutant] = {}
    for node, replacement in _mistakes(tree, text):
        before = text.of(node)
        mutated = text.replaced(node, replacement)
        if before != replacement and _compiles(mutated):
            found.setdefault(mutated, Mutant(node.lineno, before, replacement, mutated))
    return sorted(found.values(), key=lambda m: (m.line, m.before, m.after))


Place = ast.expr | ast.stmt


class _Text:
    """A source whose parts are found by where a node begins and ends; the tree counts columns in bytes."""

    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: Place) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: Place) -> str:
        start, end = self._span(node)
        return self._bytes[start:end].decode()

    def replaced(self, node: Place, text: str) -> str:
        start, end = self._span(node)
        return (self._bytes[:start] + text.encode() + self._bytes[end:]).decode()


def _mistakes(tree: ast.AST, text: _Text) -> Iterator[tuple[Place, str]]:
    for node in _code(tree):
        match node:
            case ast.Compare():
                yield from _compare(node, text)
            case ast.BoolOp():
                yield from _connective(node, text)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, f"({text.of(operand)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                yield node, f"({text.of(left)} {ARITHMETIC[type(op)]} {text.of(right)})"
            case ast.Constant(value=bool(value)):
                yield node, str(not value)
            case ast.Constant(value=int(value)):
                yield node, str(value + 1)
            case ast.Call(func=ast.Name(id=name) as func) if name in FUNCTIONS:
                yield func, FUNCTIONS[name]
            case _:
                yield from _statement(node)
        for condition in _conditions(node):
            if not isinstance(condition, ast.Constant):
                yield condition, "True"
                yield condition, "False"


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs: no annotations, decorators, texts, and nothing that is only said to a reader."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in NOT_RUN or (name == "keywords" and isinstance(node, ast.ClassDef)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _said(child):
                yield from _code(child)


def _said(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Expr(value=ast.Constant()) | ast.Raise() | ast.Assert():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in TOLD
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
    return False


def _compare(node: ast.Compare, text: _Text) -> Iterator[tuple[Place, str]]:
    """One relation at a time, of a chain as well."""
    sides = [node.left, *node.comparators]
    parts = [text.of(side) for side in sides]
    for changed in range(len(node.ops)):
        words = [parts[0]]
        for at, (op, right) in enumerate(zip(node.ops, parts[1:], strict=True)):
            here, other = RELATIONS[type(op)]
            if here in REVERSED and any(_is_time(side) for side in sides[at : at + 2]):
                other = REVERSED[here]
            words += [other if at == changed else here, right]
        yield node, f"({' '.join(words)})"


def _is_time(node: ast.AST) -> bool:
    """Whether it has something in it that is in seconds, by its name."""
    names = (getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node))
    return any(name == "now" or name.endswith(("_s", "_S")) for name in names)


def _connective(node: ast.BoolOp, text: _Text) -> Iterator[tuple[Place, str]]:
    parts = [f"({text.of(value)})" for value in node.values]
    here, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    yield node, f"({f' {other} '.join(parts)})"
    for left_out in range(len(parts)):
        rest = parts[:left_out] + parts[left_out + 1 :]
        yield node, f"({f' {here} '.join(rest)})"


def _statement(node: ast.AST) -> Iterator[tuple[Place, str]]:
    """Yield what is done, left out; and what is given back, nothing."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Delete():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.Return(value=None):
            yield node, "pass"


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            yield test
        case ast.comprehension(ifs=ifs):
            yield from ifs


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True
