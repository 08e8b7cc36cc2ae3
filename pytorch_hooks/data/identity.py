"""The facts that a loader's batches depend on, as a manifest: nothing of another one is ever used.

Two levels. The *order* (data, seed, batch size and so on) says which samples are in which batch: a position
means something only where it is the same. The *whole* manifest also says what is made of them: functions,
tokenizers, the replica, versions; batches that were made ahead are used only where all of it is the same.
"""

from __future__ import annotations

import sys
import types
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import xxhash

FORMAT = 1
DEPTH = 8
MANY = 1000
PACKAGES = ("ckptless", "torch", "numpy", "pyarrow", "msgspec", "tokenizers", "transformers", "tiktoken")


class DataIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Names to digests, each of one thing that the batches depend on; `order` are those of the order."""

    format: int
    order: dict[str, str]
    made: dict[str, str]

    @cached_property
    def order_digest(self) -> str:
        """The digest of the order, as hex."""
        return digest(sorted(self.order.items()))

    def digest_of_all(self, replicas: int, virtual: int = 0) -> str:
        """The digest of all of it but which of the `replicas` it is, as hex; they share `virtual` ones."""
        made = sorted(item for item in self.made.items() if item[0] != "replica")
        shared = [virtual] if virtual else []
        return digest([self.format, sorted(self.order.items()), made, replicas, *shared])


def digest(value: object) -> str:
    """Return the digest of plain data, as hex."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value, order="deterministic"))


def versions() -> str:
    """Python's and those of the libraries that make batches."""
    found = [f"python {sys.version_info.major}.{sys.version_info.minor}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} -")
    return ", ".join(found)


def identify(value: object) -> str:
    """A digest of a function or callable object: its code, what it closes over, what it calls, its tokenizer.

    An object may say itself what it is, by an attribute `data_version`. What comes with an installed library
    counts by its name (the library's version by `versions`), and of data that is neither plain nor a
    container only the type: where that is not enough, give the loader another `version`.
    """
    return digest(_Walk().of(value, DEPTH))


class _Walk:
    """One look at a value and what it refers to, as plain data."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}

    def of(self, value: Any, depth: int) -> object:
        known = _plain(value)
        if known is None:
            known = _library(value) or _word(value)
        if known is not None:
            return known
        if depth == 0 or id(value) in self._seen:
            return ["again", type(value).__qualname__]
        # Kept, so that no other object gets its number.
        self._seen[id(value)] = value
        return self._inside(value, depth - 1)

    def _inside(self, value: Any, depth: int) -> object:
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__self__, depth), self.of(value.__func__, depth)]
        if isinstance(value, partial):
            return ["partial", *(self.of(part, depth) for part in (value.func, value.args, value.keywords))]
        if isinstance(value, (list, tuple)):
            return [type(value).__qualname__, len(value), *(self.of(item, depth) for item in value[:MANY])]
        if isinstance(value, dict):
            pairs = list(value.items())[:MANY]
            return ["dict", len(value), *([self.of(k, depth), self.of(v, depth)] for k, v in pairs)]
        if isinstance(value, type):
            return ["type", value.__module__, value.__qualname__, self._methods(value)]
        return self._object(value, depth)

    def _function(self, function: types.FunctionType, depth: int) -> object:
        known = function.__globals__
        used = [[n, self.of(known[n], depth)] for n in _names(function.__code__) if n in known]
        cells = [self._cell(cell, depth) for cell in function.__closure__ or ()]
        rest = [self.of(function.__defaults__, depth), self.of(function.__kwdefaults__, depth)]
        return ["function", function.__qualname__, _code(function.__code__), used, cells, rest]

    def _cell(self, cell: types.CellType, depth: int) -> object:
        try:
            return self.of(cell.cell_contents, depth)
        except ValueError:
            # A name that is not bound yet.
            return ["empty"]

    def _methods(self, kind: type) -> list[object]:
        found = [(n, f) for n, f in vars(kind).items() if isinstance(f, types.FunctionType)]
        return [[name, _code(function.__code__)] for name, function in sorted(found)]

    def _object(self, value: Any, depth: int) -> object:
        kind = self.of(type(value), depth)
        state = getattr(value, "__dict__", {})
        return ["object", kind, [[name, self.of(item, depth)] for name, item in sorted(state.items())]]


def _plain(value: Any) -> object:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return [type(value).__name__, repr(value)]
    return None


def _word(value: Any) -> object:
    """Return what the object says itself: a version, a tokenizer's whole content, a dataset's fingerprint."""
    if isinstance(value, type):
        return None
    for name in ("data_version", "to_str", "_fingerprint"):
        said = getattr(value, name, None)
        text = said() if callable(said) else said
        if isinstance(text, str):
            return ["said", type(value).__qualname__, xxhash.xxh3_128_hexdigest(text.encode())]
    # Hugging Face's wrapper around a tokenizer of PyPI's tokenizers.
    backend = getattr(value, "backend_tokenizer", None)
    return None if backend is None else _word(backend)


def _library(value: Any) -> object:
    """Return the name of the installed package, or of Python, that it came with."""
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, types.BuiltinFunctionType):
        return ["builtin", value.__module__, value.__qualname__]
    if not isinstance(value, (types.FunctionType, type)):
        return None
    root = (value.__module__ or "").partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    if (root in sys.stdlib_module_names and root != "__main__") or "site-packages" in file:
        return ["library", value.__module__, value.__qualname__]
    return None


def _names(code: types.CodeType) -> list[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return sorted(set(code.co_names).union(*(_names(c) for c in inner)))


def _code(code: types.CodeType) -> object:
    consts = [_code(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    return [code.co_code, list(code.co_names), list(code.co_varnames), list(code.co_freevars), consts]


def _constant(value: object) -> str:
    # The order of a set is another one in each process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
