"""What is done to valid bytes: as chance does it, and as somebody does who knows where lengths lie."""

from __future__ import annotations

import struct
from random import Random

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
# msgpack's heads of what is long: str, bin, array and map with lengths of 32 bits, and ext.
HEADS = (b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9")


def mutate(data: bytes, other: bytes, chance: Random) -> bytes:
    """Some changes; `other` is another valid one, to be spliced with."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(10):
            case 0 | 1 if found:
                found[at % len(found)] ^= 1 << chance.randrange(8)
            case 2 if found:
                found[at % len(found)] = chance.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xFF))
            case 3:
                del found[at:]
            case 4:
                del found[at : at + chance.choice((1, 2, 4, 8, 64))]
            case 5:
                found[at:at] = chance.randbytes(chance.choice((1, 2, 4, 32)))
            case 6:
                found[at:at] = found[at : at + chance.choice((1, 8, 64))]
            case 7:
                found[at:] = other[chance.randrange(len(other) + 1) :]
            case 8:
                size, order = chance.choice("BHIQ"), chance.choice("<>")
                number = chance.choice(EDGES) % (1 << 8 * struct.calcsize(size))
                piece = struct.pack(order + size, number)
                found[at : at + len(piece)] = piece
            case 9:
                found[at : at + 5] = chance.choice(HEADS) + struct.pack(
                    ">I", chance.choice(EDGES) & 0xFFFFFFFF
                )
    return bytes(found)
