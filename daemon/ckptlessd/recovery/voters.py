"""Pure: who is to vote on the decree after the next one, as the leader proposes it."""

from dataclasses import dataclass, field

from ckptless.daemon.ckptlessd.consensus.quorum import choose_voters
from ckptless.daemon.ckptlessd.recovery.job_state import JobState

# So long a voter's daemon may be away while its node lives; restarts and upgrades are shorter.
VOTER_AWAY_S = 30.0
# A voter that cannot vote is left out, also where there is nobody else, while so many others can.
LEAST_ABLE = 2


@dataclass
class Voters:
    """The leader's choice of voters: who votes now and lives, and others for those that are lost or away."""

    job: JobState
    # Since when the leader has not reached a voter's daemon, whose node lives.
    _away: dict[int, float] = field(default_factory=dict)
    _seen: tuple[object, ...] = ()

    def look(self, now: float) -> None:
        """Note which voters are away. Only what a leader sees counts: others may be away themselves."""
        job = self.job
        away = set(job.known.voters) - job.reachable - job.heartbeats - job.losses.keys()
        self._away = {node: self._away.get(node, now) for node in away}

    def following(self, now: float) -> tuple[int, ...]:
        """The voters that the next decree is to name."""
        job = self.job
        # Who reaches others, but not this leader, is no help to it.
        sound = job.reachable - job.losses.keys() - job.unable
        living = sound | (set(job.known.voters) - job.losses.keys())
        if len(living - job.unable) >= LEAST_ABLE:
            # Fewer votes are easier to come by than those of all others beside one that never comes.
            living -= job.unable
        assert job.spec is not None  # a daemon that knows no job does not lead
        return choose_voters(job.known.voters, living, sound, job.spec.domains, self._away_long(now))

    def may_change(self, now: float) -> bool:
        """Whether anything that voters are chosen by has changed since this was asked last."""
        job, seen = self.job, self._seen
        there, unable = frozenset(job.reachable), frozenset(job.unable)
        self._seen = job.known.index, len(job.losses), there, unable, self._away_long(now)
        return self._seen != seen

    def _away_long(self, now: float) -> frozenset[int]:
        return frozenset(node for node, since in self._away.items() if now - since >= VOTER_AWAY_S)
