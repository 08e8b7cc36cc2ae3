"""Types of messages' fields, with their bounds: what a job and a node can have, and not a digit more.

A number that a message brings is counted to, allocated for and written down; so each has a limit of which
even the largest value does no harm. None of them is NaN, which no database and no comparison takes well.
"""

from collections.abc import Iterable
from functools import cache
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import fields, force_setattr

from ckptless.daemon.protocol.codec import RANK_LIMIT

MOST_NODES = 1 << 16
MOST_SLOTS = 256
MOST_RANKS = 1 << 18
MOST_STEPS = 4096
MOST_VOTERS = 64
# Process groups of a rank whose collectives its agent sees.
MOST_GROUPS = 16
# Of a node, that copies of the state go over.
MOST_INTERFACES = 8
# Of one text, in characters, and of a job's command.
TEXT_LIMIT, COMMAND_LIMIT = 4096, 4096

NodeNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_NODES)]
# -1 is nobody's.
NodeOrNone: TypeAlias = Annotated[int, Meta(ge=-1, lt=MOST_NODES)]
SlotNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_SLOTS)]
# Of a rank, or of the shard that is named after its lowest rank.
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
NodeCount: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_NODES)]
SlotCount: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_SLOTS)]
RankCount: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
Generation: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Step: TypeAlias = Annotated[int, Meta(ge=-1, lt=1 << 62)]
# What only grows: sequence numbers, ballots, clocks.
Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
TryCount: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 20)]
Pid: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
Uid: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
JobId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
Port: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 16)]
# Wide: which one it is, is looked at afterwards, so that the answer can say it.
Protocol: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
ExitCode: TypeAlias = Annotated[int, Meta(ge=-256, lt=1 << 16)]
Nbytes: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 50)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e10)]
# Of two clocks, or two readings of one.
Age: TypeAlias = Annotated[float, Meta(ge=-1e10, le=1e10)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]

JobName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
# Of a job and a run.
LinkName: TypeAlias = Annotated[str, Meta(max_length=300)]
Word: TypeAlias = Annotated[str, Meta(max_length=64)]
Digest: TypeAlias = Annotated[str, Meta(max_length=64)]
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_LIMIT)]
FilePath: TypeAlias = Annotated[str, Meta(max_length=4096)]
# Addresses of an agent beside its first one.
Addresses: TypeAlias = Annotated[tuple[tuple[Name, Port], ...], Meta(max_length=MOST_INTERFACES - 1)]
Key: TypeAlias = Annotated[bytes, Meta(max_length=64)]
RecordBytes: TypeAlias = Annotated[bytes, Meta(max_length=RANK_LIMIT)]
# (start, nbytes) of parts of a version's payload, that are asked for at once.
MOST_SPANS = 4096
Spans: TypeAlias = Annotated[tuple[tuple[Nbytes, Nbytes], ...], Meta(max_length=MOST_SPANS)]
# Numbers of nodes that an elastic job may have.
MOST_SIZES = 4096
Sizes: TypeAlias = Annotated[tuple[NodeCount, ...], Meta(max_length=MOST_SIZES)]

Command: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=COMMAND_LIMIT)]
Names: TypeAlias = Annotated[tuple[Name, ...], Meta(max_length=MOST_NODES)]
Voters: TypeAlias = Annotated[tuple[NodeNumber, ...], Meta(max_length=MOST_VOTERS)]
Nodes: TypeAlias = Annotated[tuple[NodeNumber, ...], Meta(max_length=MOST_NODES)]
Ranks: TypeAlias = Annotated[tuple[Rank, ...], Meta(max_length=MOST_RANKS)]
Steps: TypeAlias = Annotated[tuple[Step, ...], Meta(max_length=MOST_STEPS)]
# So many of a field's values, one for each rank, or shard, or slot of the job.
OF_RANKS = Meta(max_length=MOST_RANKS)
OF_NODES = Meta(max_length=MOST_NODES)


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """A text of at most `limit` characters, which says where it has been cut."""
    if len(text) <= limit:
        return text
    mark = f" [... {len(text) - limit} characters and more left out ...] "
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head) :]


class Clipped:
    """Base of a Struct whose fields of type Text are cut when it is made: whatever is put in also arrives."""

    __slots__ = ()

    def __post_init__(self) -> None:
        assert isinstance(self, Struct)
        for name in _texts(type(self)):
            text = getattr(self, name)
            if text is not None and len(text) > TEXT_LIMIT:
                force_setattr(self, name, clip(text))


@cache
def _texts(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.type in (Text, Text | None))


def clip_command(words: tuple[str, ...]) -> tuple[str, ...]:
    """The first words of a command, for people; the last one says how many more there are."""
    if len(words) <= COMMAND_LIMIT and sum(map(len, words)) <= COMMAND_LIMIT:
        return words
    kept: list[str] = []
    left = COMMAND_LIMIT - 64
    for word in words:
        if len(word) + 1 > left:
            break
        kept.append(word)
        left -= len(word) + 1
    return (*kept, f"[... {len(words) - len(kept)} more]")


def one_line(text: str) -> str:
    """A text for a log or a terminal: a newline, an escape and the like are spelt out."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def runs(numbers: Iterable[int]) -> str:
    """Ascending numbers, with runs of three and more as a range: "0-3, 7"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts = [f"{s[0]}-{s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in spans]
    return ", ".join(parts)


def size_text(nbytes: float) -> str:
    """Bytes as people say them: "12 B", "3.4 MB", "1.2 GB"; powers of 1000."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1000
        del units[0]
    whole = units[0] == "B" or nbytes >= 99.95
    return f"{nbytes:.{0 if whole else 1}f} {units[0]}"
