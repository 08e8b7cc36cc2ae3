"""Pure: what memory of ended runs a daemon keeps for their next start: how much, for how long, for whom."""

from dataclasses import dataclass, field

# A node with less of its memory available than this part of it gets back what is kept.
LEAST_AVAILABLE = 0.1
MAX_PIECES = 4096


class NotKeptError(Exception):
    """The memory cannot be kept; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Memory of one run of one user: `job` is the allocation that the run was in, `pieces` its memfds.

    `node` is this node's number in the run, `program` says what the run is of, `restarts` how often Slurm had
    started the allocation again by then.
    """

    number: int
    job: str
    uid: int
    node: int
    program: str
    run: str
    restarts: int
    nbytes: int
    pieces: int
    since_s: float

    @property
    def owner(self) -> tuple[str, int, str]:
        """The owner, who may have it; there is never more than one entry of the same."""
        return (self.job, self.uid, self.program)


@dataclass
class EntryTable:
    """The entries that are kept now: at most `limit_nbytes` together, each for `ttl_s` seconds at most.

    Who drops an entry is told which; whatever it stands for is to be given back then.
    """

    limit_nbytes: int
    ttl_s: float
    _entries: dict[int, Entry] = field(default_factory=dict)
    # Entries that are on their way in or out, which nobody else may have meanwhile, nor drop.
    _moving: set[int] = field(default_factory=set)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The oldest first."""
        return tuple(sorted(self._entries.values(), key=lambda entry: (entry.since_s, entry.number)))

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def resting(self) -> tuple[Entry, ...]:
        """Return the entries that may be dropped: all that are not on their way in or out."""
        return tuple(entry for entry in self.entries if entry.number not in self._moving)

    def put(self, new: Entry) -> tuple[Entry, ...]:
        """Make room for it; what had to go. Raises NotKeptError, and nothing has changed then.

        `settled` or `drop` is to follow.

        It takes the place of what the same owner left before, then, oldest first, of what the same user did;
        what is another user's stays.
        """
        if not self.limit_nbytes:
            raise NotKeptError("keep.memory is 0 on this node")
        if new.nbytes > self.limit_nbytes:
            raise NotKeptError(f"it is {new.nbytes} bytes, and keep.memory is {self.limit_nbytes}")
        same = [entry for entry in self.entries if entry.owner == new.owner]
        if any(entry.restarts > new.restarts or entry.number in self._moving for entry in same):
            raise NotKeptError("a later start of the same job has left its own, or is taking it")
        gone = same
        for entry in self.entries:
            if self._fits(new, gone):
                break
            if entry.uid == new.uid and entry not in gone and entry.number not in self._moving:
                gone = [*gone, entry]
        if not self._fits(new, gone):
            raise NotKeptError(
                f"keep.memory is {self.limit_nbytes} bytes, and others have {self.nbytes} of it"
            )
        for entry in gone:
            self.drop(entry)
        self._entries[new.number] = new
        self._moving.add(new.number)
        return tuple(gone)

    def _fits(self, new: Entry, gone: list[Entry]) -> bool:
        left = [entry for entry in self._entries.values() if entry not in gone]
        pieces = sum(entry.pieces for entry in left) + new.pieces
        return sum(entry.nbytes for entry in left) + new.nbytes <= self.limit_nbytes and pieces <= MAX_PIECES

    def lend(self, owner: tuple[str, int, str], restarts: int) -> Entry | None:
        """Return what an earlier start of its owner's job has left; `settled` or `drop` is to follow."""
        for entry in self.resting:
            if entry.owner == owner and entry.restarts < restarts:
                self._moving.add(entry.number)
                return entry
        return None

    def settled(self, entry: Entry) -> None:
        """Keep an entry that has come, or has not gone."""
        self._moving.discard(entry.number)

    def drop(self, entry: Entry) -> None:
        """Keep an entry no more."""
        self._moving.discard(entry.number)
        self._entries.pop(entry.number, None)

    def expired(self, now_s: float) -> tuple[Entry, ...]:
        """Return the entries whose time is over; they are still to be dropped."""
        return tuple(entry for entry in self.resting if now_s - entry.since_s >= self.ttl_s)


def is_short(available_nbytes: int, total_nbytes: int) -> bool:
    """Whether the node needs all its memory for what runs there now."""
    return available_nbytes < total_nbytes * LEAST_AVAILABLE


def allocation_of(run: str) -> str:
    """Return the Slurm job of a run: 4711, 4711.1 and 4711.s3r1 all are runs of 4711."""
    return run.partition(".")[0]
