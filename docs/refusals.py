"""Writes what docs/troubleshooting.md has of refusals, from the sentences in the code; a test compares.

`make refusals` runs it. The sources are only read, never imported. docs/refusals.toml has the groups, by the
files that sentences come from, and what there is to do where a sentence does not say it.
"""

import ast
import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
MARK = "<!-- `make refusals` writes what follows. -->\n"
TABLE = tomllib.loads((ROOT / "docs" / "refusals.toml").read_text())
# What stands for a part that is another each time; the most ways to say one sentence that are spelt out.
GAP, MOST_WAYS, DEPTH = "…", 16, 9
# A sentence says what to do where a clause begins with such a verb, or where it says what must be.
SAYS = re.compile(
    rf"(?:^|[:;,.?] |\(|\b(?:or|and) )(?:{'|'.join(TABLE['verbs'])})(?=[ ,;:)]|$)|\b(?:must|needs?|at most)\b"
)
# What the plugins say: the literals of a call, which the compiler joins.
OF_PLUGINS = re.compile(
    r"(slurm_error|slurm_spank_log|slurm_info|fprintf|snprintf)"
    r'\((?:stderr,|why, why_size,)?\s*((?:"(?:[^"\\]|\\.)*"\s*)+)'
)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Refusal(NamedTuple):
    """A sentence, the file that it is in, and who says it there."""

    place: str
    by: str
    sentence: str

    @property
    def passed_on(self) -> bool:
        """Whether all of it is another's words, which are found where they are said first."""
        return len(re.findall(r"[A-Za-z]{2,}", self.sentence)) < 2


class Group(NamedTuple):
    """Refusals of some files: what stands behind them, and what to do where they do not say it."""

    title: str
    places: tuple[str, ...]
    about: str
    by: tuple[str, ...] = ()
    to_do: str = ""
    hints: Mapping[str, str] = MappingProxyType({})

    def has(self, one: Refusal) -> bool:
        """Whether it is of this group, if of none before it."""
        return one.place.startswith(tuple(self.places)) and (not self.by or one.by in self.by)

    def hint(self, one: Refusal) -> str | None:
        """Return what to do, "" where the sentence or the group says it, None where nobody does."""
        found = [hint for words, hint in self.hints.items() if words in one.sentence]
        return found[0] if found else "" if self.to_do or SAYS.search(one.sentence) else None


GROUPS = [Group(**one) for one in TABLE["group"]]


class Source:
    """A module's tree, and which texts an expression in it may be."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        nodes = [*ast.walk(self.tree)]
        self.functions = [one for one in nodes if isinstance(one, Function)]
        self.inside = {node: one for one in self.functions for node in ast.walk(one)}
        self.raised = {node.exc for node in nodes if isinstance(node, ast.Raise)}

    def refusals(self) -> Iterator[tuple[str, str]]:
        """Yield who says what: the errors that users see, and the answers and reasons of daemons."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (said := self._said(node)):
                yield from ((name_of(node), way) for way in self.ways(said))
        for one in self.functions:
            if one.name in TABLE["reasons"]:
                yield from ((one.name, way) for way in self._returned(one.name, 0))

    def _said(self, call: ast.Call) -> ast.expr | None:
        """Return the argument that has the words of a refusal, if this is one."""
        name, named = name_of(call), {one.arg: one.value for one in call.keywords}
        if ast.unparse(named.get("verdict", call.func)) == "'refused'":
            return named["text"]
        if name == "Outcome" and ast.unparse(named.get("state", call.func)) != "'failed'":
            return None
        place = TABLE["says"].get(name)
        if place is None or (name in TABLE["raised"] and call not in self.raised):
            return None
        return named.get("reason") or (call.args[place] if place < len(call.args) else None)

    def ways(self, node: ast.expr, depth: int = 0) -> list[str]:
        """Return the texts that an expression may be."""
        parts: list[ast.expr] = []
        match node:
            case ast.Constant(value=str(text) | int(text)):
                return [str(text)]
            case ast.JoinedStr(values=parts):
                return self._joined(parts, depth)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self._joined([left, right], depth)
            case ast.FormattedValue(value=value):
                found = self.ways(value, depth + 1)
                # A name of the module's, or phrases, are spelt out.
                constant = ast.unparse(value).strip("_").isupper()
                return found if constant or all(" " in one for one in found) else [GAP]
            case ast.IfExp(body=left, orelse=right):
                parts = [left, right]
            case ast.BoolOp(values=parts) | ast.Dict(values=parts):
                pass
            case ast.Name():
                return self._named(node, depth + 1)
            case ast.Call(func=ast.Attribute(value=value, attr="format" | "items")):
                return [re.sub(r"\{[^}]*\}", GAP, way) for way in self.ways(value, depth + 1)]
            case ast.Call(func=ast.Name(id=name)):
                return self._returned(name, depth + 1) or [GAP]
        return [way for part in parts for way in self.ways(part, depth + 1)] or [GAP]

    def _joined(self, parts: Iterable[ast.expr], depth: int) -> list[str]:
        each = [self.ways(part, depth + 1) for part in parts]
        if math.prod(map(len, each)) > MOST_WAYS:
            each = [found if len(found) == 1 else [GAP] for found in each]
        return ["".join(way) for way in itertools.product(*each)]

    def _named(self, name: ast.Name, depth: int) -> list[str]:
        """Return what a name has in its function, else in its module or the one that it is imported from."""
        values = [*_assigned(self.inside.get(name), name.id)] or [*_assigned(self.tree, name.id)]
        if depth > DEPTH:
            return [GAP]
        if values:
            return [way for one in values for way in self.ways(one, depth)]
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and name.id in [one.name for one in node.names]:
                path = ROOT / "src" / Path(*(node.module or "").split(".")).with_suffix(".py")
                return source(path)._named(name, depth + 1) if path.exists() else [GAP]
        return [GAP]

    def _returned(self, name: str, depth: int) -> list[str]:
        """Return the phrases that a function here gives back."""
        body = [node for one in self.functions if one.name == name for node in ast.walk(one)]
        given = [node.value for node in body if isinstance(node, ast.Return) and node.value]
        return [way for one in given if depth <= DEPTH for way in self.ways(one, depth) if " " in way]


@cache
def source(path: Path) -> Source:
    """Return a module, read once."""
    return Source(path)


def name_of(call: ast.Call) -> str:
    """Return what is called, without the object that has it."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def _assigned(inside: Function | ast.Module | None, name: str) -> Iterator[ast.expr]:
    """Yield what a name is set to: anywhere in a function, of a module at its top."""
    for node in inside.body if isinstance(inside, ast.Module) else ast.walk(inside) if inside else ():
        if isinstance(node, ast.Assign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from [node.value] * (name in map(ast.unparse, targets))
        elif isinstance(node, ast.For) and ast.unparse(node.target).endswith(f", {name})"):
            yield node.iter


def modules() -> Iterator[Path]:
    """Yield every module of the product."""
    for room in ("daemon", "pytorch_hooks"):
        yield from sorted((ROOT / room).rglob("*.py"))
    for room in ("src/ckptless", "src/ckptless/doctor"):
        yield from sorted((ROOT / room).glob("*.py"))


def refusals() -> list[Refusal]:
    """Return every refusal, as it stands in the source, its parts that vary as gaps."""
    found = []
    for path in modules():
        found += [
            Refusal(str(path.relative_to(ROOT)), by, _clean(way)) for by, way in source(path).refusals()
        ]
    for path in sorted((ROOT / "slurm_ext").rglob("*.c")):
        for by, literals in OF_PLUGINS.findall(path.read_text()):
            text = re.sub(r'"\s*"|\\n', "", literals.strip()[1:-1]).replace('\\"', '"')
            found.append(
                Refusal(str(path.relative_to(ROOT)), by, _clean(re.sub(r"%[.*\d]*l*[sdu]", GAP, text)))
            )
    return [*dict.fromkeys(one for one in found if not one.passed_on)]


def _clean(text: str) -> str:
    return re.sub(rf"{GAP}({GAP}|\s+(?={GAP}))*{GAP}", GAP, " ".join(text.split()))


def group_of(one: Refusal) -> Group:
    """Return the first group that it is of. Raises LookupError."""
    for group in GROUPS:
        if group.has(one):
            return group
    raise LookupError(f"{one.place} is of no group in docs/refusals.toml")


def page() -> str:
    """Return the page: what is written by hand stays as it is."""
    rows: dict[str, dict[str, str]] = {group.title: {} for group in GROUPS}
    for one in refusals():
        group = group_of(one)
        rows[group.title].setdefault(one.sentence, group.hint(one) or "")
    parts = [PAGE.read_text().partition(MARK)[0] + MARK]
    for group in GROUPS:
        rest = f"\n{group.to_do}\n" if group.to_do else ""
        parts.append(f"### {group.title}\n\n{group.about}\n{rest}\n| sentence | what to do |\n| --- | --- |")
        parts += [f"| {_code(sentence)} | {hint} |" for sentence, hint in rows[group.title].items()]
        parts.append("")
    return "\n".join(parts)


def _code(sentence: str) -> str:
    fence = "``" if "`" in sentence else "`"
    return f"{fence}{sentence}{fence}".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
