"""Mistakes by name: who is elected, which votes count, who is taken for lost."""

from __future__ import annotations

from .rule import CONSENSUS, MEMBERSHIP, RECOVERY, Named, of

VOTES: tuple[Named, ...] = (
    *of(
        f"{RECOVERY}/election.py",
        "unit/control/test_orders.py",
        (
            "who hears its leader supports another",
            "(job.lease.held if job.leads else job.hears_leader)",
            "(job.lease.held if job.leads else False)",
            "test_who_hears_its_leader_supports_no_other_until_it_is_heard_no_more",
        ),
        (
            "a leader supports another",
            "(job.lease.held if job.leads else job.hears_leader)",
            "(False if job.leads else job.hears_leader)",
            "test_a_leader_that_holds_its_lease_supports_no_other",
        ),
        (
            "of two reigns the older one is followed",
            "(reign, theirs.leader == node) > (job.reign, False)",
            "True",
            "test_of_two_reigns_the_newer_one_is_followed",
        ),
        (
            "a leader that leads no more is followed",
            "elif node == job.leader and theirs.leader == NOBODY and theirs.term >= job.term:",
            "elif False:",
            "test_a_leader_that_says_that_it_leads_no_more_is_not_followed",
        ),
    ),
    *of(
        f"{RECOVERY}/job_state.py",
        "unit/control/test_orders.py",
        (
            "a leader is heard by a connection only",
            "heard = self.leader in self.reachable or self.leader in self.heartbeats",
            "heard = self.leader in self.reachable",
            "test_a_leader_that_is_only_heard_of_by_others_is_heard",
        ),
    ),
    *of(
        f"{RECOVERY}/fencing.py",
        "unit/control/test_lease.py",
        (
            "the cut off live on",
            "if away_s > limit_s:",
            "if False:",
            "test_it_ends_its_ranks_only_once_the_lease_is_over",
        ),
        (
            "every one of a half asks the witness",
            "job.lease.witness_due(now, living.index(job.me), later_s)",
            "job.lease.witness_due(now, 0, later_s)",
            "test_one_of_a_half_asks_and_before_the_other_half_that_of_the_lowest",
        ),
        (
            "an agent has a lease that its daemon cannot vouch for",
            " and not self._is_behind:",
            ":",
            "test_a_daemon_that_has_forgotten_its_generation_gives_no_lease",
        ),
    ),
    *of(
        f"{CONSENSUS}/agreement.py",
        "unit/control/test_votes.py",
        (
            "Accepted of another ballot counts",
            "case Accepted() if say.ballot == self.ballot and self._is_open(say.index):",
            "case Accepted() if self._is_open(say.index):",
            "test_the_vote_of_another_ballot_or_place_does_not_count",
        ),
        (
            "Accepted of another decree counts",
            "return self.proposal is not None and self.proposal.index == index",
            "return self.proposal is not None",
            "test_the_vote_of_another_ballot_or_place_does_not_count",
        ),
        (
            "a promise of another ballot counts",
            "case Promise() if say.ballot == self.ballot and say.index == self._index:",
            "case Promise() if say.index == self._index:",
            "test_the_promise_of_another_ballot_or_place_does_not_count",
        ),
        (
            "a promise for another decree counts",
            "case Promise() if say.ballot == self.ballot and say.index == self._index:",
            "case Promise() if say.ballot == self.ballot:",
            "test_the_promise_of_another_ballot_or_place_does_not_count",
        ),
        (
            "support of another ballot counts",
            "case Support() if say.ballot == self.sought and say.index == self._index:",
            "case Support() if say.index == self._index:",
            "test_the_support_of_another_ballot_or_place_does_not_count",
        ),
        (
            "a leader that learned from another leads on",
            "            self._learn(decree)\n            self.resign()\n",
            "            self._learn(decree)\n",
            "test_a_leader_that_learns_from_another_leads_no_more",
        ),
        (
            "the word of a node that does not vote deposes",
            "if node in self.known.voters and self.ballot is not None and promised > self.ballot:",
            "if self.ballot is not None and promised > self.ballot:",
            "test_only_the_higher_promise_of_a_voter_deposes",
        ),
        (
            "a leader that is refused leads on",
            "elif self.ballot is not None and say.promised > self.ballot:",
            "elif False:",
            "test_a_leader_that_is_refused_for_a_higher_promise_stands_down",
        ),
        (
            "a leader that promises more to another leads on",
            "if mine is not None and say.ballot > mine:",
            "if False:",
            "test_a_leader_that_promises_more_to_another_stands_down",
        ),
        (
            "promises are not kept",
            "say.ballot < promised",
            "False",
            "test_a_lower_ballot_is_refused_and_the_same_one_is_not",
        ),
        (
            "who lacks a decree votes on the one after it",
            "if base > self.known.index or ",
            "if ",
            "test_who_lacks_a_decree_does_not_vote_on_the_one_after_it",
        ),
        (
            "what was voted for is not proposed",
            "if newest is not None:",
            "if False:",
            "test_what_another_has_voted_for_is_proposed_by_whoever_is_elected",
        ),
        (
            "new voters are not asked",
            "if decree.voters != voters:",
            "if False:",
            "test_voters_that_a_decree_names_are_asked_by_the_leader_that_stays",
        ),
        (
            "a ballot is used twice",
            "self.sought = self.highest = Ballot(number=highest.number + 1, node=self.me)",
            "self.sought = Ballot(number=1, node=self.me)",
            "test_a_new_try_is_above_every_ballot_that_was_heard_of",
        ),
        (
            "who cannot write votes",
            "return self.may_vote and self.trouble is None",
            "return self.may_vote",
            "test_who_cannot_write_refuses_everything",
        ),
    ),
    *of(
        f"{MEMBERSHIP}/watch.py",
        "unit/membership/test_verdicts.py",
        (
            "a refusal beats a living link",
            'if answer == "refused" and not one.linked:',
            'if answer == "refused":',
            "test_a_refusal_does_not_beat_a_living_link",
        ),
        (
            "a question of before is an answer",
            "if one is None or one.suspicion is None or sender not in one.suspicion.asked:",
            "if one is None or one.suspicion is None:",
            "test_a_stranger_s_word_neither_condemns_nor_saves",
        ),
        (
            "confirmations of others are forgotten with the next question",
            "old.confirmed & asked if old is not None else set()",
            "set()",
            "test_who_has_confirmed_is_not_asked_again_and_counts_on",
        ),
        (
            "a node whose fate is decided is judged again",
            "        if one is None or one.gone:\n            return\n",
            "        if one is None:\n            return\n",
            "test_what_comes_of_a_look_after_the_verdict_is_nothing",
        ),
        (
            "who was late accuses for what it has missed",
            "            one.heard, one.lived = min(now, one.heard + late_s), min(now, one.lived + late_s)\n",
            "            pass\n",
            "test_silence_while_this_daemon_was_late_is_its_own",
        ),
        (
            "who was cut off judges by what it saw then",
            "            one.dark, one.suspicion = False, None\n            return\n",
            "            pass\n",
            "test_after_a_cut_it_is_looked_and_asked_again",
        ),
    ),
    *of(
        f"{MEMBERSHIP}/suspicion.py",
        "unit/membership/test_verdicts.py",
        (
            "one confirmation is enough",
            "if confirmed >= asked:",
            "if confirmed:",
            "test_one_who_says_the_same_is_not_enough",
        ),
    ),
    *of(
        f"{MEMBERSHIP}/pulses.py",
        "unit/membership/test_spreading.py",
        (
            "an old sign of life passes for a new one",
            'self._seen[node] = max(now - max(0, age_ms) / 1000, self._seen.get(node, float("-inf")))',
            "self._seen[node] = now",
            "test_an_old_pulse_that_comes_late_is_old",
        ),
        (
            "signs of life of one whose clock went back creep",
            "self._ahead_ms = max(self._ahead_ms, pulse - int(now * 1000))",
            "pass",
            "test_a_daemon_whose_clock_went_back_is_sure_as_soon_as_any_other",
        ),
    ),
    *of(
        "daemon/ckptlessd/peering.py",
        "property/test_peering.py",
        (
            "voters are unconnected",
            "mine = set(self._voters) if asks else set()",
            "mine: set[int] = set()",
            "test_voters_are_connected_to_each_other_wherever_they_are",
        ),
    ),
)
