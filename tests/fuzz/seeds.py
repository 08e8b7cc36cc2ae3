"""Valid values of any message type, made from the types themselves: a new message has a seed by existing."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
from msgspec import inspect as mi

DEEP = 6
# For texts that must match a pattern: the first that does.
WORDS = ("node-1", "a", "4711", "0" * 32, "ab" * 16, "0" * 64, "/a/b", "127.0.0.1", "x.y", "")
NUMBERS = (0, 1, -1, 2, 7, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 53) + 1, 1 << 62, (1 << 64) - 1)


class NoSeedError(Exception):
    """A type that the generator cannot make a value of: teach it."""


@functools.cache
def info_of(kind: Any) -> mi.Type:
    """Return what msgspec knows of a type."""
    return mi.type_info(kind)


def members(kind: Any) -> tuple[Any, ...]:
    """The messages of an edge: of a union each, of a single type that."""
    found = info_of(kind)
    types = found.types if isinstance(found, mi.UnionType) else (found,)
    return tuple(one.cls for one in types if isinstance(one, mi.StructType))


def structs_in(kind: Any) -> set[type]:
    """Every struct that a value of this type may hold, however deep."""
    found: set[type] = set()
    waiting = [info_of(kind)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, mi.StructType | mi.DataclassType | mi.NamedTupleType):
            if one.cls in found:
                continue
            found.add(one.cls)
            waiting += [field.type for field in one.fields]
        waiting += _inside(one)
    return found


def _inside(one: mi.Type) -> Iterator[mi.Type]:
    match one:
        case mi.UnionType():
            yield from one.types
        case mi.TupleType():
            yield from one.item_types
        case mi.VarTupleType() | mi.ListType() | mi.SetType() | mi.FrozenSetType():
            yield one.item_type
        case mi.DictType():
            yield from (one.key_type, one.value_type)
        case mi.Metadata():
            yield one.type


def build(kind: Any, chance: Random) -> Any:
    """A value of this type that its decoder takes."""
    for _ in range(50):
        try:
            return _make(info_of(kind), chance, 0)
        except (ValueError, TypeError):  # a struct's own checks, of fields that must fit each other
            continue
    raise NoSeedError(f"{kind}: no value found that its own checks take")


def _make(one: mi.Type, chance: Random, depth: int) -> Any:
    match one:
        case mi.StructType() | mi.DataclassType() | mi.NamedTupleType():
            return one.cls(**{field.name: _make(field.type, chance, depth + 1) for field in one.fields})
        case mi.UnionType():
            return _make(_some(one, chance, depth), chance, depth)
        case mi.Metadata():
            return _make(one.type, chance, depth)
        case mi.TupleType():
            return tuple(_make(item, chance, depth + 1) for item in one.item_types)
        case mi.DictType():
            pairs = range(_length(one, chance, depth))
            keys = [_make(one.key_type, chance, depth + 1) for _ in pairs]
            return {key: _make(one.value_type, chance, depth + 1) for key in keys}
        case mi.VarTupleType() | mi.ListType() | mi.SetType() | mi.FrozenSetType():
            made = [_make(one.item_type, chance, depth + 1) for _ in range(_length(one, chance, depth))]
            sorts = {mi.VarTupleType: tuple, mi.ListType: list, mi.SetType: set}
            return sorts.get(type(one), frozenset)(made)
        case _:
            return _plain(one, chance)


def _some(one: mi.UnionType, chance: Random, depth: int) -> mi.Type:
    """Deep down, nothing where that is allowed."""
    nothing = [t for t in one.types if isinstance(t, mi.NoneType)]
    return nothing[0] if nothing and depth > DEEP else chance.choice(one.types)


def _length(one: Any, chance: Random, depth: int) -> int:
    least = one.min_length or 0
    most = least + (0 if depth > DEEP else chance.choice((0, 1, 1, 2, 3)))
    return most if one.max_length is None else min(most, one.max_length)


def _plain(one: mi.Type, chance: Random) -> Any:
    match one:
        case mi.NoneType():
            return None
        case mi.BoolType():
            return chance.random() < 0.5
        case mi.IntType():
            return _int(one, chance)
        case mi.FloatType():
            return _float(one, chance)
        case mi.StrType():
            return _text(one, chance)
        case mi.BytesType():
            least = one.min_length or 0
            most = min(least + chance.choice((0, 1, 32)), one.max_length or 1 << 20)
            return chance.randbytes(max(least, most))
        case mi.LiteralType():
            return chance.choice(one.values)
        case mi.EnumType():
            return chance.choice(list(one.cls))
        case mi.AnyType():
            return chance.choice((None, 1, "x", [1, "y"], {"z": 1.5}))
        case mi.RawType():
            return msgspec.Raw(msgspec.msgpack.encode({"a": 1}))
    raise NoSeedError(f"{one}: teach seeds.py to make one")


def _int(one: mi.IntType, chance: Random) -> int:
    least = one.ge if one.ge is not None else (one.gt + 1 if one.gt is not None else -(1 << 63))
    most = one.le if one.le is not None else (one.lt - 1 if one.lt is not None else (1 << 64) - 1)
    fit = [number for number in (*NUMBERS[: chance.choice((5, len(NUMBERS)))], least, most)]
    return chance.choice([number for number in fit if least <= number <= most])


def _float(one: mi.FloatType, chance: Random) -> float:
    least = one.ge if one.ge is not None else one.gt
    most = one.le if one.le is not None else one.lt
    low, high = (-1e9 if least is None else least), (1e9 if most is None else most)
    if least is None and most is None and chance.random() < 0.2:
        return chance.choice((float("nan"), float("inf"), -0.0))
    return low + (high - low) * chance.uniform(0.1, 0.9)


def _text(one: mi.StrType, chance: Random) -> str:
    def fits(text: str) -> bool:
        long_enough = (one.min_length or 0) <= len(text) <= (one.max_length or 1 << 20)
        return long_enough and (one.pattern is None or re.search(one.pattern, text) is not None)

    words = [word for word in (*WORDS, "x" * (one.min_length or 0)) if fits(word)]
    if not words:
        raise NoSeedError(f"{one}: add a word that matches to seeds.WORDS")
    if one.pattern is None and chance.random() < 0.1 and fits("\n\x1b[31m\u2028ü"):
        return "\n\x1b[31m\u2028ü"
    return chance.choice(words)
