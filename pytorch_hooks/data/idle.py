"""Which replicas a producer still makes batches for, by who was asked for when.

Pure. A guest's replica, which another node has, is asked for a few times and then never again; what makes its
batches (a generator, worker processes) must not stay for that.
"""

# A replica that was not asked for while each of the others could have been so often.
IDLE_ROUNDS = 16


class Replicas:
    """Those that batches are made of. Each job is of one replica."""

    def __init__(self, rounds: int = IDLE_ROUNDS) -> None:
        self._rounds = rounds
        self._jobs = 0
        # Replica to its newest job, the oldest first.
        self._asked: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, replica: int) -> list[int]:
        """The next job is of this replica; those that nobody asks for any more, which are forgotten here.

        Of k replicas that have been asked for since one was, itself among them, that one may miss
        `rounds` x k jobs. How many others are idle, too, does not matter.
        """
        self._jobs += 1
        self._asked.pop(replica, None)
        self._asked[replica] = self._jobs
        count = len(self._asked)
        idle = [
            other
            for place, (other, asked) in enumerate(self._asked.items())
            if self._jobs - asked > self._rounds * (count - place)
        ]
        for other in idle:
            del self._asked[other]
        return idle
