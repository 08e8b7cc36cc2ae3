"""Pure: which nodes try each other in which round, and what the measurements say of nodes and links."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Annotated, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.limits import Text
from ckptless.daemon.protocol.messages import Message
from ckptless.doctor.findings import Finding, Grade

Pair: TypeAlias = tuple[int, int]
Measure: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]

# A pair is slow where one of its directions has less than this share of the median.
SLOW_SHARE = 0.5
# One bad pair may be a bad link: a node is named for two or more.
FEWEST = 2


class Way(Message, frozen=True, kw_only=True):
    """One direction of a pair: a node dialled the other and sent, so fast; `error`: why it could not.

    `cut`: it had not sent all when its time was over, and is no faster than `mib_s`.
    """

    mib_s: Measure = 0.0
    rtt_ms: Measure = 0.0
    cut: bool = False
    error: Text = ""


Tried: TypeAlias = tuple[Way, Way]
"""A pair's both ways: that of its lower node, and back."""


def schedule(nodes: int, *, every: bool = False) -> list[list[Pair]]:
    """Return rounds of pairs; in a round a node has one partner at most.

    The circle method: one seat stays, the others move on by one from round to round, and all rounds have
    `every` pair once. The first log2 of them give each node as many partners, however many nodes there are;
    of an odd number one is left over in each round, and there is a round more.
    """
    seats = [*range(nodes), *([-1] * (nodes % 2))]
    half, most = len(seats) // 2, len(seats) - 1
    count = most if every else min(most, (nodes - 1).bit_length() + nodes % 2)
    rounds = []
    for _ in range(count):
        facing = zip(seats[:half], reversed(seats), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in facing if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def usual(tried: Mapping[Pair, Tried]) -> float:
    """Return the median of MiB/s; 0 where there is none."""
    return median([way.mib_s for way in _sound(tried)] or [0.0])


def _sound(tried: Mapping[Pair, Tried]) -> list[Way]:
    return [way for both in tried.values() for way in both if not way.error]


def slow(tried: Mapping[Pair, Tried]) -> set[Pair]:
    """Return the pairs that work both ways, and are slow."""
    least = SLOW_SHARE * usual(tried)
    sound = {pair: both for pair, both in tried.items() if not _fails(both)}
    return {pair for pair, both in sound.items() if min(way.mib_s for way in both) < least}


def _fails(both: Tried) -> bool:
    return any(way.error for way in both)


def verdict(
    names: Sequence[str], tried: Mapping[Pair, Tried], missing: Mapping[int, str], planned: int
) -> list[Finding]:
    """Return what `planned` pairs say, without those of nodes that are `missing`, each for its reason."""
    slow_ones = slow(tried)
    bad = {pair: both for pair, both in tried.items() if _fails(both) or pair in slow_ones}
    trips_ms = [way.rtt_ms for way in _sound(tried)]
    # As far as they came they are as fast as others, which were cut as well.
    cut = [pair for pair, both in tried.items() if pair not in bad and any(way.cut for way in both)]
    ended = len(tried) - len(cut)
    text = f"{ended - len(bad)} of {planned} are in order"
    if trips_ms:
        text += f"; medians {usual(tried):.0f} MiB/s, round trip {median(trips_ms):.2f} ms"
    found = [Finding("pairs", "fine" if trips_ms else "broken", text)]
    if ended < planned:
        text = f"{ended} of {planned} pairs were tried to their end in the time that there was"
        found.append(Finding("time", "limited", text, "raise --time-limit, or make --mib smaller"))
    found += [Finding(names[node], "broken", why, _out(names[node])) for node, why in sorted(missing.items())]
    return [*found, *_blamed(names, tried, bad)]


def _blamed(names: Sequence[str], tried: Mapping[Pair, Tried], bad: dict[Pair, Tried]) -> Iterator[Finding]:
    """Name the node with the most bad pairs, take its pairs away, and go on; what is left are links."""
    others = f"(the median is {usual(tried):.0f} MiB/s)"
    while (node := _worst(tried, bad)) is not None:
        its = {pair: bad.pop(pair) for pair in [*bad] if node in pair}
        told = "; ".join(_told(names, *one) for one in [*its.items()][:FEWEST])
        count = sum(node in pair for pair in tried)
        text = f"{len(its)} of its {count} pairs are slow or fail {others}: {told}"
        yield Finding(names[node], _grade(its), text, _out(names[node]))
        tried = {pair: one for pair, one in tried.items() if node not in pair}
    for pair, one in bad.items():
        link = " - ".join(names[node] for node in pair)
        text, advice = (
            f"{_told(names, pair, one)} {others}",
            "look at the cables and switches between the two",
        )
        yield Finding(f"link {link}", _grade({pair: one}), text, advice)


def _worst(tried: Mapping[Pair, Tried], bad: Mapping[Pair, Tried]) -> int | None:
    """The node with most bad pairs, if they are most of its pairs."""
    counts = {node: sum(node in pair for pair in bad) for node in sorted({n for pair in bad for n in pair})}
    of_most = [
        node
        for node, count in counts.items()
        if count >= FEWEST and 2 * count > sum(node in pair for pair in tried)
    ]
    return max(of_most, key=counts.__getitem__, default=None)


def _grade(bad: Mapping[Pair, Tried]) -> Grade:
    return "broken" if any(map(_fails, bad.values())) else "limited"


def _told(names: Sequence[str], pair: Pair, both: Tried) -> str:
    there, back = (way.error or f"{_rate(way)}, {way.rtt_ms:.2f} ms" for way in both)
    return f"{names[pair[0]]} to {names[pair[1]]} {there}; back {back}"


def _rate(way: Way) -> str:
    return f"{'under ' if way.cut else ''}{way.mib_s:.0f} MiB/s"


def _out(name: str) -> str:
    return f"leave it out (--exclude={name}) until somebody has looked at its network"
