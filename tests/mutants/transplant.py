"""A mistake put into a module: into its living functions, or else by loading everything anew."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

ROOT = Path(__file__).parents[2]
# Whose modules know each other's objects, and so are loaded anew together; but for this package.
OURS = tuple(str(ROOT / folder) + "/" for folder in ("daemon", "src", "tests"))
THIS = str(Path(__file__).parent) + "/"


def module_of(path: str) -> str:
    """The name that the file at `path`, from the root of the repository, is imported by."""
    return ".".join(("ckptless", *Path(path).with_suffix("").parts))


def is_in_function(source: str, line: int) -> bool:
    """Whether the line is of a function's body, which runs when it is called and not at the import."""
    tree = ast.parse(source)
    called = {node.id for node in _at_import(tree) if isinstance(node, ast.Name)}
    return any(
        function.body[0].lineno <= line <= (function.end_lineno or 0) and function.name not in called
        for function in _at_import(tree)
        if isinstance(function, ast.FunctionDef)
    )


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs when a module is imported, and the functions that it makes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef):
            yield from _at_import(child)


def into_living(path: str, source: str) -> None:
    """Give each function of a loaded module the code that it has in `source`.

    Raises LookupError where the module has no such function.
    """
    module = importlib.import_module(module_of(path))
    old = _codes(compile(Path(str(module.__file__)).read_text(), str(module.__file__), "exec"))
    for name, code in _codes(compile(source, str(module.__file__), "exec")).items():
        if code != old.get(name):
            _living(module, name).__code__ = code
    for value in vars(module).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


def keeps_cells(path: str, source: str) -> bool:
    """Whether each function has the same closure in `source`: super() needs one, which is lost with it."""
    old = _codes(compile((ROOT / path).read_text(), path, "exec"))
    new = _codes(compile(source, path, "exec"))
    return all(code.co_freevars == old[name].co_freevars for name, code in new.items() if name in old)


def _codes(code: CodeType) -> dict[str, CodeType]:
    """Those of the functions and methods, by qualified name."""
    found: dict[str, CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & inspect.CO_OPTIMIZED:
                found[inner.co_qualname] = inner
            else:
                found |= _codes(inner)
    return found


def _living(module: ModuleType, name: str) -> FunctionType:
    value: object = module
    for part in name.split("."):
        if part not in vars(value):
            raise LookupError(f"{module.__name__} has no {name}")
        value = vars(value)[part]
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    value = inspect.unwrap(value)  # type: ignore[arg-type]  # whatever else it is, the next line says
    if not isinstance(value, FunctionType):
        raise LookupError(f"{module.__name__}.{name} is no function")  # noqa: TRY004  # as one that is not there
    return value


def at_next_import(path: str, source: str) -> None:
    """Forget all of our modules, and let this one be imported with another source."""
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        if name.split(".")[0] == "ckptless" or (file.startswith(OURS) and not file.startswith(THIS)):
            del sys.modules[name]
    sys.meta_path.insert(0, _Finder(module_of(path), source))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Gives out one module with another source."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=f"mutant of {fullname}")

    def get_source(self, fullname: str) -> str:
        return self._source
