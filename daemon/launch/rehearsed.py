"""Pure: what a rehearsal has found, from what ranks have written in runs without faults and in one with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptless.rehearsal import OTHER, Fault, Line

# By rank, in the order in which they were written.
Run = Mapping[int, Sequence[Line]]

# So many places are named.
NAMED = 20
LOSS = "the loss"


@dataclass(frozen=True)
class Difference:
    """Something that is not the same after a fault: first in `step`, on `ranks`; `was` is what it is without.

    `processes`: whether any of these is new, and whether any has lived through the fault.
    """

    name: str
    step: int
    ranks: tuple[int, ...]
    processes: tuple[bool, bool]
    was: str
    now: str
    # Of what a list, a dict or an object has, the first one stands for all.
    more: int = 0

    @property
    def sentence(self) -> str:
        """Say it on one line."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        new, lived = self.processes
        kinds = [*(["a new process"] if new else []), *(["one that lived"] if lived else [])]
        values = f"{self.now or 'not there'} instead of {self.was or 'nothing'}"
        if self.now and self.was and OTHER in self.now + self.was:
            values = "another value"
        more = f", and {self.more} more places in it" if self.more else ""
        where = f"from step {self.step} on, on {ranks} ({' and '.join(kinds)})"
        return f"{self.name}: {values}, {where}{more}"


@dataclass(frozen=True)
class Found:
    """All of it.

    `compared`: how many tensors and values of the State, and how many of the script, at each step.
    `unsteady`: losses and tensors that differ between the two runs without faults, by name with the first
    step. `missing`: why steps cannot be compared.
    """

    steps: int
    ranks: int
    compared: tuple[int, int]
    unsteady: Mapping[str, int]
    missing: str = ""
    wrong: tuple[Difference, ...] = ()
    forgotten: tuple[Difference, ...] = ()

    @property
    def good(self) -> bool:
        """Whether all that there is at each step is the same with faults and without."""
        return not (self.unsteady or self.wrong or self.forgotten or self.missing)


def compare(first: Run, second: Run, faulty: Run, spared: Sequence[Fault] = ()) -> Found:
    """Compare the run with faults with the two without, which say what is never the same (a time, say).

    `spared`: faults that have not come, as the script had ended before.
    """
    clean, again, struck = _by_step(first), _by_step(second), _by_step(faulty)
    steps = max((step for _, step in clean), default=0)
    compared = max((_size(line) for line in clean.values()), default=(0, 0))
    unsteady: dict[str, int] = {}
    noise: set[str] = set()
    for at in sorted(clean.keys() & again.keys(), key=lambda at: at[1]):
        one, other = clean[at], again[at]
        for name in _differs(_bits(one), _bits(other)):
            unsteady.setdefault(name, at[1])
        noise |= {*_differs(one.values, other.values), *_differs(one.beside, other.beside)}
    missing = ""
    if not clean:
        missing = "no rank has committed a step: the script calls run.commit after each one"
    elif clean.keys() != again.keys():
        missing = "the two runs without faults have not made the same steps"
    elif spared:
        missing = (
            f"the script has made {steps} steps, and a fault was to come in step {spared[0].step}: have it "
            "make more, or ask for fewer (--rehearse-steps)"
        )
    elif clean.keys() != struck.keys():
        missing = "the run with faults has not made the same steps as the one without"
    if missing or unsteady:
        return Found(steps, len(first), compared, unsteady, missing)
    pairs = [(rank, line, clean[rank, line.step]) for rank, lines in faulty.items() for line in lines]
    of_state = [(rank, line, _state(was), _state(line)) for rank, line, was in pairs]
    beside = [(rank, line, was.beside, line.beside) for rank, line, was in pairs]
    wrong, forgotten = _differences(of_state, noise), _differences(beside, noise)
    return Found(steps, len(first), compared, {}, "", wrong, forgotten)


def _by_step(run: Run) -> dict[tuple[int, int], Line]:
    return {(rank, line.step): line for rank, lines in run.items() for line in lines}


def _size(line: Line) -> tuple[int, int]:
    return len(line.tensors) + len(line.values), len(line.beside)


def _bits(line: Line) -> dict[str, str]:
    return line.tensors if line.loss is None else {LOSS: line.loss, **line.tensors}


def _state(line: Line) -> dict[str, str]:
    return {**_bits(line), **line.values}


def _differs(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    return (name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name))


def _differences(
    lines: Sequence[tuple[int, Line, Mapping[str, str], Mapping[str, str]]], noise: set[str]
) -> tuple[Difference, ...]:
    """Return by name what differs in these lines of ranks: what it is without a fault, and what it is."""
    begun = {rank: line.pid for rank, line, _, _ in reversed(lines)}
    first: dict[str, list[tuple[int, int, bool, str, str]]] = {}
    for rank, line, was, now in lines:
        for name in (name for name in _differs(was, now) if name not in noise):
            place = line.step, rank, line.pid == begun[rank], was.get(name, ""), now.get(name, "")
            first.setdefault(name, []).append(place)
    found = []
    for name, places in first.items():
        step = min(places)[0]
        there = [place for place in places if place[0] == step]
        lived = [place[2] for place in there]
        ranks = tuple(sorted({place[1] for place in there}))
        found.append(Difference(name, step, ranks, (not all(lived), any(lived)), *there[0][3:]))
    return _grouped(sorted(found, key=lambda one: (one.step, one.name != LOSS)))


def _grouped(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """Give one for each thing that has several places, as "the global cache of train.py['a']" has."""
    groups: dict[str, list[Difference]] = {}
    for one in found:
        groups.setdefault(one.name.partition("[")[0], []).append(one)
    return tuple(replace(group[0], more=len(group) - 1) for group in groups.values())


def sentences(found: Found, faults: Sequence[Fault]) -> Iterator[str]:
    """Say what was found, for the person who submits the job."""
    struck = ", ".join(f"rank {one.rank}'s {one.kind} was killed in step {one.step}" for one in faults)
    state, beside = found.compared
    yield (
        f"{found.steps} steps on {found.ranks} ranks, twice without a fault and once with ({struck}); at each"
        f" step {state} tensors and values of the State were compared, and {beside} of the script beside it"
    )
    if found.missing:
        yield found.missing
    if found.unsteady:
        name, step = next(iter(found.unsteady.items()))
        yield (
            f"two runs without a fault differ already, first in {name}, in step {step}: seed everything at "
            "the beginning of the training function, and take deterministic algorithms "
            "(torch.use_deterministic_algorithms); what a fault changes cannot be told before"
        )
    if found.wrong:
        yield "NOT the same after a fault:"
        yield from _some([one.sentence for one in found.wrong])
    if found.forgotten:
        yield "beside the State, other than without a fault; put into it what the next step needs of this:"
        yield from _some([one.sentence for one in found.forgotten])
    if found.good:
        yield "all of it is the same, bit for bit"


def _some(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"  {line}" for line in lines[:NAMED])
    if len(lines) > NAMED:
        yield f"  and {len(lines) - NAMED} more"
