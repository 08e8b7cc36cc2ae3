"""Slurm's way to write many node names as one: `node[01-03,07],gpu5`, expanded and compressed.

A list comes from another program or from a user: a few characters can stand for any number of names
(`n[1-999999999]`, or brackets beside brackets, which multiply). So there is a limit, and it is checked before
a name is made.
"""

import itertools
import re
from collections.abc import Iterable, Iterator

from ckptless.daemon.protocol.errors import ProtocolError

MAX_NAMES = 100_000
MAX_TEXT = 1_000_000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,253}", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9._-]*", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.ASCII | re.DOTALL)


def is_node_name(text: str) -> bool:
    """Whether `text` is one node's name: no list, no option, nothing that a shell would expand."""
    return _NAME.fullmatch(text) is not None


def expand(text: str, most: int = MAX_NAMES) -> tuple[str, ...]:
    """The names that `text` stands for, in its order, repeated ones included; nothing for an empty text.

    Raises ProtocolError for a text that is no hostlist, and for one of more than `most` names.
    """
    if len(text) > MAX_TEXT:
        raise ProtocolError(f"a hostlist of {len(text)} characters; at most {MAX_TEXT} are read")
    names: list[str] = []
    for part in _split(text) if text else ():
        names.extend(_expand_part(part, most - len(names)))
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """The list of these names, each once: sorted, and runs of their last number in brackets.

    Raises ProtocolError for what is no node name.
    """
    runs: dict[tuple[str, str], list[str]] = {}
    plain: list[str] = []
    for name in sorted(set(names)):
        if not is_node_name(name):
            raise ProtocolError(f"{name[:80]!r} is not a node's name")
        match = _LAST_NUMBER.fullmatch(name)
        if match is None:
            plain.append(name)
        else:
            runs.setdefault((match[1], match[3]), []).append(match[2])
    parts = [f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in runs.items()]
    return ",".join(sorted(parts + plain))


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand outside of brackets."""
    start = depth = 0
    for at, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
        if not 0 <= depth <= 1:
            break
    if depth != 0:
        raise ProtocolError(f"brackets do not match in the hostlist {text[:80]!r}")
    yield text[start:]


def _expand_part(part: str, most: int) -> Iterator[str]:
    """One part: plain text and any number of brackets, in turn."""
    choices: list[Iterable[str]] = []
    total = 1
    # re.split with one group: plain, inside of brackets, plain, ...
    for index, piece in enumerate(re.split(r"\[([^]]*)\]", part)):
        if index % 2 == 0:
            if _PLAIN.fullmatch(piece) is None:
                raise ProtocolError(f"{part[:80]!r} is not a node's name or a list of them")
            choices.append((piece,))
        else:
            count, values = _expand_brackets(piece)
            total *= count
            choices.append(values)
        if total > most:
            raise ProtocolError(
                f"the hostlist {part[:80]!r} stands for more names than the {most} that may be left"
            )
    for pieces in itertools.product(*choices):
        name = "".join(pieces)
        if not is_node_name(name):
            raise ProtocolError(f"{part[:80]!r} is not a node's name or a list of them")
        yield name


def _expand_brackets(inside: str) -> tuple[int, Iterable[str]]:
    """Return how many values, and the values, which are made only when they are asked for."""
    count = 0
    ranges: list[Iterable[str]] = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ProtocolError(f"[{inside[:80]}] is not a range of node numbers")
        low, high, width = int(match[1]), int(match[2] or match[1]), len(match[1])
        if high < low:
            raise ProtocolError(f"[{inside[:80]}] counts backwards")
        count += high - low + 1
        ranges.append(map(f"{{:0{width}d}}".format, range(low, high + 1)))
    return count, itertools.chain.from_iterable(ranges)


def _ranges(numbers: list[str]) -> str:
    """The numbers of one prefix as `07` or `[01-03,07]`: a run goes on while the next text is as expected."""
    runs: list[tuple[str, str]] = []
    for text in sorted(numbers, key=lambda text: (len(text), text)):
        if runs and text == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])):
            runs[-1] = (runs[-1][0], text)
        else:
            runs.append((text, text))
    texts = [low if low == high else f"{low}-{high}" for low, high in runs]
    return texts[0] if len(numbers) == 1 else f"[{','.join(texts)}]"
