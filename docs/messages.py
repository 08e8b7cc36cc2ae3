"""Writes docs/messages.md from the types of all messages; a test compares. `make messages` runs it."""

import importlib
import inspect
from functools import singledispatch
from pathlib import Path
from types import ModuleType

import msgspec
from msgspec import inspect as types

PAGE = Path(__file__).with_name("messages.md")
EDGES = {
    "Between agent, rank and daemon": ("messages", "saving", "ring"),
    "Between daemons": ("peers.messages", "peers.agreement", "peers.membership"),
    "Between ckptctl and a daemon": ("requests", "health", "keeping"),
    "Between a launcher and hosts without Slurm": ("launch.wire",),
    "Between the nodes that `ckptless-doctor --pairs` tries": ("doctor.pairs", "doctor.pairing"),
    "In the ledger": ("records",),
    "In a saved step": ("saved",),
    "Of which they consist": ("model",),
}
# That stand with those who say them.
BESIDE = {
    "launch.wire": "daemon.launch.wire",
    **{name: name for name in ("doctor.pairs", "doctor.pairing")},
}
HEAD = """# Messages and records

Every message between our processes and every record that is kept, as the code has them. A message on a
socket is a frame: its length in four bytes, little endian, and then [MessagePack](https://msgpack.org) of an
object that has `type`, the name here, beside its fields (records of the ledger and files have JSON, or
columns). What does not fit is refused as a whole: another type, a field that is not here, a number or a
length out of its bounds. Who speaks another *protocol* is refused in the first message
([which versions fit](packages.md#which-versions-fit)). Who must prove what before it may say any of these:
[security](../SECURITY.md).

A field with `?` may be left out. Bounds are in brackets: of a number, of the length of a text or list.
"""


def page() -> str:
    """Return all of the page."""
    parts = [HEAD]
    for edge, names in EDGES.items():
        parts.append(f"## {edge}\n")
        for name in names:
            module = module_of(name)
            head = inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            rows = map(_row, structs(module))
            parts.append("\n".join((f"{head}\n", "| name | | fields |", "| --- | --- | --- |", *rows, "")))
    return "\n".join(parts)


def module_of(name: str) -> ModuleType:
    """Return the module of an entry of EDGES."""
    return importlib.import_module(f"ckptless.{BESIDE.get(name, f'daemon.protocol.{name}')}")


def structs(module: ModuleType) -> list[type[msgspec.Struct]]:
    """Return the messages and records that a module defines."""
    own = [one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__]
    return [
        one
        for one in own
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and not one.__name__.startswith("_")
    ]


def _row(one: type[msgspec.Struct]) -> str:
    info = types.type_info(one)
    assert isinstance(info, types.StructType)
    about = " ".join(inspect.cleandoc(one.__doc__ or "").split())
    fields = (f"`{field.name}{'' if field.required else '?'}` {said(field.type)}" for field in info.fields)
    return f"| `{info.tag or one.__name__}` | {_plain(about)} | {'; '.join(fields)} |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# ------------------------------------------------------------------------------------- types, in words


@singledispatch
def said(kind: types.Type) -> str:
    """Return a type with its bounds."""
    return type(kind).__name__.removesuffix("Type").lower()


def _bounds(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    return f" [{'' if low is None else f'{low:g}'}..{'' if high is None else f'{high:,}'}]"


@said.register(types.IntType)
def _int(kind: types.IntType) -> str:
    low = kind.gt + 1 if kind.gt is not None else kind.ge
    return "int" + _bounds(low, kind.lt - 1 if kind.lt is not None else kind.le)


@said.register(types.FloatType)
def _float(kind: types.FloatType) -> str:
    return "float" + _bounds(
        kind.ge if kind.ge is not None else kind.gt, kind.le if kind.le is not None else kind.lt
    )


@said.register(types.StrType)
@said.register(types.BytesType)
def _text(kind: types.StrType | types.BytesType) -> str:
    return said.dispatch(types.Type)(kind) + _bounds(kind.min_length, kind.max_length)


@said.register(types.VarTupleType)
@said.register(types.ListType)
@said.register(types.SetType)
@said.register(types.FrozenSetType)
def _several(kind: types.VarTupleType | types.ListType) -> str:
    return f"list of {said(kind.item_type)}" + _bounds(kind.min_length, kind.max_length)


@said.register(types.TupleType)
def _tuple(kind: types.TupleType) -> str:
    return f"({', '.join(map(said, kind.item_types))})"


@said.register(types.DictType)
def _dict(kind: types.DictType) -> str:
    return f"{said(kind.key_type)} to {said(kind.value_type)}" + _bounds(kind.min_length, kind.max_length)


@said.register(types.UnionType)
def _union(kind: types.UnionType) -> str:
    return " or ".join(map(said, kind.types))


@said.register(types.LiteralType)
def _literal(kind: types.LiteralType) -> str:
    return ", ".join(f"`{value}`" for value in kind.values)


@said.register(types.StructType)
def _struct(kind: types.StructType) -> str:
    return f"{kind.cls.__name__}"


if __name__ == "__main__":
    PAGE.write_text(page())
