"""Pure: who votes on a job's decrees, and how many of them speak for all."""

from collections import Counter
from collections.abc import Collection, Sequence

from ckptless.daemon.protocol.peers.agreement import Decree
from ckptless.daemon.replication.failure_domains import domain_of

MAX_VOTERS = 7
# Down to so many, fewer voters are taken where no failure domain has half of them then.
LEAST_VOTERS = 5


def first_decree(nodes: Sequence[int], domains: Sequence[str] = ()) -> Decree:
    """Return the decree that a job begins with: nothing is assigned. `domains`: as in JobSpec.

    Voters are spread over the failure domains, and far apart beside that: neighbours share a rack.
    """
    ordered = sorted(nodes)
    count = min(MAX_VOTERS, len(ordered))
    apart = [ordered[number * len(ordered) // count] for number in range(count)]
    rest = [node for node in ordered if node not in apart]
    return Decree(index=0, voters=_spread([], [*apart, *rest], [], domains))


def choose_voters(
    current: tuple[int, ...],
    living: set[int],
    sound: set[int],
    domains: Sequence[str] = (),
    away_long: Collection[int] = (),
) -> tuple[int, ...]:
    """The voters of the next decree: of those who vote now whoever lives, and others who can be reached.

    `sound` are the living whose daemon can be reached; of those in `away_long` the daemon has been away for
    long. These give their vote to a node that can be reached, where there is one: a majority of voters that
    is lost is lost for good, so it must not be half lost beforehand. Others are taken from the failure
    domains that have the fewest voters.

    But the same as now, where most of those could not be reached: the daemon of a lost node may still vote.

    Why it is safe to take a vote from a daemon that lives: what is returned here is only proposed. It holds
    for the decree *after* the one that names it, which a quorum of the present voters has on its disks; so
    any two quorums for one decree still meet. A voter that is replaced and comes back may have voted for that
    decree; it then learns it, and votes for none after it. And the quorum never becomes harder to reach: for
    each vote that is taken away one is given to a daemon that answers, and there are never fewer voters
    because one is away.
    """
    weak = [node for node in current if node in living and node in away_long and node not in sound]
    firm = [node for node in current if node in living and node not in weak]
    others = sorted(sound.difference(firm))
    voters = tuple(sorted(_spread(firm, others, weak, domains)))
    return voters if 2 * len(sound.intersection(voters)) > len(voters) else current


def _spread(firm: list[int], others: list[int], weak: list[int], domains: Sequence[str]) -> tuple[int, ...]:
    """All of `firm`, and of `others` the first of those domains that have the fewest; `weak` only after them.

    As many as may vote; but where there are three domains or more and one of them would have half of the
    votes, fewer, if that helps: then no domain takes a majority with it. Never fewer than `firm` and `weak`.
    """
    chosen, left = list(firm), list(others)
    count = Counter(domain_of(domains, node) for node in chosen)
    while left and len(chosen) < MAX_VOTERS:
        node = min(left, key=lambda node: count[domain_of(domains, node)])  # of equals the first
        left.remove(node)
        chosen.append(node)
        count[domain_of(domains, node)] += 1
    chosen = [*chosen, *weak]
    least = max(len(firm) + len(weak), min(LEAST_VOTERS, len(chosen)))
    sizes = range(min(MAX_VOTERS, len(chosen)), least - 1, -1)
    size = next((size for size in sizes if _survives_any(chosen[:size], domains)), MAX_VOTERS)
    return tuple(sorted(chosen[:size]))


def _survives_any(voters: list[int], domains: Sequence[str]) -> bool:
    """Whether the loss of any one failure domain leaves more than half, as far as three or more can do it."""
    count = Counter(domain_of(domains, node) for node in voters)
    return len(count) < 3 or 2 * max(count.values()) < len(voters)


def is_quorum(voters: tuple[int, ...], have: set[int], dead: set[int]) -> bool:
    """Whether `have` may speak for `voters`: more than half, or half and the rest is `dead` for good.

    Any two of these have a voter in common, as long as nobody holds both halves for dead.
    """
    yes = have.intersection(voters)
    rest = set(voters) - yes
    return 2 * len(yes) > len(voters) or (2 * len(yes) == len(voters) and rest <= dead)
