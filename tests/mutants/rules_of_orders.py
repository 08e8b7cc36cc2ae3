"""Mistakes by name: whose word counts, what is counted, how the leader goes from fault to first step."""

from __future__ import annotations

from .rule import RECOVERY, Named, of

ORDERS: tuple[Named, ...] = (
    *of(
        f"{RECOVERY}/following.py",
        "unit/control/test_orders.py",
        (
            "an older report replaces a newer one",
            "if view.state is not None and state.seq <= view.state.seq:",
            "if False:",
            "test_a_report_that_is_no_newer_changes_nothing",
        ),
        (
            "orders are not fenced by ballot",
            "if reign < job.reign or job.outcome is not None:",
            "if job.outcome is not None:",
            "test_an_order_of_an_older_ballot_is_refused",
        ),
        (
            "orders are not fenced by generation",
            "if order.generation < job.generation:",
            "if False:",
            "test_an_order_of_another_generation_is_not_obeyed",
        ),
        (
            "orders are obeyed after the end",
            "if reign < job.reign or job.outcome is not None:",
            "if reign < job.reign:",
            "test_no_order_is_obeyed_once_the_job_is_over",
        ),
        (
            "an order that comes again is not answered",
            "if kind is self._obeyed and job.follows:",
            "if False:",
            "test_an_order_that_is_said_again_is_answered_by_how_far_it_is",
        ),
        (
            "the leader is not told what the own agent says",
            "            self._pass_on(message, now)\n",
            "            pass\n",
            "test_the_leader_is_passed_every_report_of_the_own_agent_and_no_other",
        ),
    ),
    *of(
        f"{RECOVERY}/controller.py",
        "unit/control/test_orders.py",
        (
            "who is cut off drives the job",
            "        if job.lease.held:\n            self._election.campaign_if_due(now)\n",
            "        if True:\n            self._election.campaign_if_due(now)\n",
            "test_a_leader_without_its_lease_gives_no_orders",
        ),
        (
            "the word of whoever is out counts",
            "if job.has_a_say(node):",
            "if True:",
            "test_the_word_of_a_lost_node_does_not_count",
        ),
        (
            "a lost node's answer counts",
            "answers = event.answers and job.nodes[event.node].lost is None",
            "answers = event.answers",
            "test_an_answer_of_a_lost_node_is_none",
        ),
        (
            "the word for the dead is not taken",
            "        self._fencing.hear_of_dead(node, set(theirs.dead))\n",
            "",
            "test_who_hears_of_the_dead_passes_it_on_and_counts_on_it",
        ),
        (
            "a voter change re-enters joining",
            "elif assignment is not None and assignment.generation > job.generation:",
            "elif assignment is not None:",
            "test_a_change_of_voters_begins_nothing_again",
        ),
    ),
    *of(
        f"{RECOVERY}/following.py",
        "unit/control/test_missed.py",
        (
            "an agent is not told of what it has missed",
            "elif assigned is not None and (state.assigned is None or state.assigned < assigned.generation):",
            "elif False:",
            "test_it_is_told_what_it_has_missed",
        ),
    ),
    *of(
        f"{RECOVERY}/job_state.py",
        "unit/control/test_orders.py",
        (
            "the word of a lost node counts",
            "        if self.nodes[node].lost is not None:\n            return False\n",
            "",
            "test_the_word_of_a_lost_node_does_not_count",
        ),
        (
            "the word of a node of before counts",
            "return self.assignment is None or node in self.assignment.members",
            "return True",
            "test_the_word_of_a_node_that_is_out_of_the_generation_does_not_count",
        ),
        (
            "the last who says that a node is lost is believed",
            "if view.lost is not None or self.known.outcome is not None:",
            "if self.known.outcome is not None:",
            "test_the_first_who_says_that_a_node_is_lost_is_believed",
        ),
        (
            "nodes are lost by the end of the job",
            "if view.lost is not None or self.known.outcome is not None:",
            "if view.lost is not None:",
            "test_nothing_is_lost_by_the_end_of_the_job",
        ),
    ),
    *of(
        f"{RECOVERY}/generation_progress.py",
        "unit/control/test_generation_progress.py",
        (
            "frozen in an older generation counts: who is waited for",
            "frozen = state is not None and state.frozen == self.assignment.generation",
            "frozen = state is not None and state.frozen is not None",
            "test_who_has_stopped_an_older_generation_has_not_stopped_this_one",
        ),
        (
            "frozen in an older generation counts: what is disputed",
            "(self._frozen.add if frozen and",
            "(self._frozen.add if state is not None and state.frozen is not None and",
            "test_who_has_stopped_an_older_generation_has_not_stopped_this_one",
        ),
        (
            "old phases are counted",
            "if slot.generation == generation:",
            "if True:",
            "test_a_phase_of_an_older_generation_does_not_count",
        ),
        (
            "the restored step is counted as a new one",
            'more = ("stepped",) if stepped and phase != "finished" else ()',
            'more = ("stepped",) if phase != "finished" else ()',
            "test_a_step_that_was_restored_is_not_a_new_one",
        ),
        (
            "a lost node is waited for",
            "moves = part and not frozen and view.lost is None",
            "moves = part and not frozen",
            "test_a_lost_node_is_not_waited_for_and_disputes_nothing",
        ),
        (
            "what a node said before is counted twice",
            "            self.counts[reached] -= count\n",
            "            pass\n",
            "test_a_node_that_is_looked_at_again_counts_once",
        ),
    ),
    *of(
        f"{RECOVERY}/leading.py",
        "unit/control/test_stopping.py",
        (
            "a new leader does not begin half a recovery again",
            'if job.assignment is not None and job.stage not in ("running", "releasing", "ended"):',
            "if False:",
            "test_a_new_leader_begins_half_a_recovery_again",
        ),
        (
            "a rival's Stop is unnoticed",
            "elif progress.disputed:",
            "elif False:",
            "test_what_another_leader_has_stopped_stops_here",
        ),
        (
            "no grace at kill",
            "        self.job.since = now\n        self._killed.update(places)\n",
            "        self._killed.update(places)\n",
            "test_a_rank_that_stays_inside_is_ended_after_a_while_and_has_time_to_end",
        ),
        (
            "no grace at release",
            'if self.job.stage == "releasing" and now - self.job.since < ENDING_S:',
            "if False:",
            "test_a_node_that_goes_with_the_release_fails_nothing_for_a_while",
        ),
        (
            "an agent that does not stop is waited for",
            "if late:\n            self._give_up(sorted(moving)",
            "if False:\n            self._give_up(sorted(moving)",
            "test_an_agent_that_does_not_stop_is_given_up_after_a_while",
        ),
        (
            "frozen agents are not waited for",
            "        if moving:\n            return\n",
            "",
            "test_every_agent_is_waited_for_also_a_spare_s",
        ),
        (
            "orders are not repeated",
            "if self.job.stage in orders:",
            "if False:",
            "test_orders_are_said_again_to_whoever_missed_them",
        ),
        (
            "a recovery is over before every rank has made a step",
            'if progress.all_have("stepped"):',
            "if True:",
            "test_the_next_generation_needs_the_next_fault",
        ),
    ),
)
