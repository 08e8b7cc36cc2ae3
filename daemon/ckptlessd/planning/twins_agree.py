"""Pure: whether twins have the same at a step, and who of them has not.

A step at which twins differ is not restored as long as there is one at which they agree: what one of them
computed wrongly may be in everybody's gradients since. Where most of at least three agree, the others are
odd ones out; else nobody can say who is wrong.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptless.daemon.ckptlessd.planning.faults import Finding, NodeView
from ckptless.daemon.protocol.messages import Assignment, Holdings
from ckptless.daemon.protocol.twins import shape_of

Key: TypeAlias = tuple[int, int]
"""Shard, step."""

# So long another rank may take to commit the step that two differ at.
SAY_S = 2.0


@dataclass(frozen=True)
class Dispute:
    """Twins that differ: `sides` are the ranks that have the same, the most first.

    `digest` is what most of at least three have, None where nobody can say who is wrong.
    """

    sides: tuple[tuple[int, ...], ...]
    digest: str | None

    @property
    def suspects(self) -> tuple[int, ...]:
        """The odd ones out; all where nobody can say."""
        sides = self.sides[1:] if self.digest is not None else self.sides
        return tuple(sorted(rank for side in sides for rank in side))


def disputes(holdings: Iterable[Holdings]) -> dict[Key, Dispute]:
    """Every (shard, step) at which twins differ. A rank has one voice, however many have a copy of its."""
    voices: dict[Key, dict[int, str]] = {}
    for held in holdings:
        for shard, step, rank, digest in held.digests:
            voices.setdefault((shard, step), {})[rank] = digest
    found = {}
    for key, said in sorted(voices.items()):
        different = set(said.values())
        # What is laid out in another way cannot be compared.
        if len(different) > len({shape_of(digest) for digest in different}):
            found[key] = _dispute(said)
    return found


def _dispute(said: Mapping[int, str]) -> Dispute:
    by_digest: dict[str, list[int]] = {}
    for rank, digest in sorted(said.items()):
        by_digest.setdefault(digest, []).append(rank)
    ordered = sorted(by_digest.items(), key=lambda item: (-len(item[1]), item[1]))
    most, ranks = ordered[0]
    decided = 2 * len(ranks) > len(said)
    return Dispute(tuple(tuple(side) for _, side in ordered), most if decided else None)


class Comparison:
    """The versions that may be restored, by what these nodes hold."""

    def __init__(self, told: Sequence[Holdings]) -> None:
        self._disputes = disputes(told)
        self._compared = {(shard, step) for held in told for shard, step, _, _ in held.digests}

    def sound(self, held: Holdings, *, disputed: bool) -> Sequence[tuple[int, Sequence[int]]]:
        """Return what a node could give: no disputed step; or, with `disputed`, the side that most have.

        Where some say by which digest theirs is compared, only theirs is.
        """
        if not self._compared:
            return held.tensors
        digests = {(shard, step): digest for shard, step, _, digest in held.digests}

        def is_sound(key: Key) -> bool:
            dispute = self._disputes.get(key)
            if dispute is None:
                return key in digests or key not in self._compared
            return disputed and dispute.digest is not None and digests.get(key) == dispute.digest

        return [(shard, tuple(s for s in steps if is_sound((shard, s)))) for shard, steps in held.tensors]


def ripe(
    found: list[Finding], assignment: Assignment, nodes: Mapping[int, NodeView], now: float
) -> list[Finding]:
    """The same without the doubts of agents, as long as another rank may still have its say.

    Of two that differ nobody can say who is wrong; a third one's version, which is just being written, tells.
    A rank that does not come to it is not waited for long: nobody trains on meanwhile.
    """
    steps: list[int] = []
    told_s = now
    for one in found:
        if one.kind == "twins-differ":
            state = nodes[one.node].state
            assert state is not None  # its agent has told of it
            steps += [doubt.step for doubt in state.doubts]
            told_s = min(told_s, nodes[one.node].told_s)
    if not steps or now - told_s >= SAY_S:
        return found
    slots = [nodes[place.node].slot(place.slot) for place in assignment.places]
    if all(slot is not None and (slot.step or 0) >= min(steps) for slot in slots):
        return found
    return [one for one in found if one.kind != "twins-differ"]


def findings(assignment: Assignment, nodes: Mapping[int, NodeView]) -> list[Finding]:
    """The suspects, from what frozen agents hold: of each shard by the oldest step that is disputed."""
    told = [v.state.holdings for v in nodes.values() if v.usable and v.state and v.state.holdings]
    found: list[Finding] = []
    seen: set[int] = set()
    for (shard, step), dispute in disputes(told).items():
        if shard not in seen:
            seen.add(shard)
            found += [_finding(assignment, shard, step, dispute, rank) for rank in dispute.suspects]
    return [one for one in found if nodes[one.node].usable]


def _finding(assignment: Assignment, shard: int, step: int, dispute: Dispute, rank: int) -> Finding:
    place = assignment.places[rank]
    sides = " and ".join("rank " + ", ".join(map(str, side)) for side in dispute.sides)
    odd = dispute.digest is not None
    text = f"rank {rank} is the odd one out" if odd else "nobody can say which is wrong"
    return Finding(
        kind="silent-corruption",
        node=place.node,
        slot=place.slot,
        rank=rank,
        detail=f"shard {shard}, step {step}: {sides} differ; {text}",
        odd=odd,
        source="twins",
    )
