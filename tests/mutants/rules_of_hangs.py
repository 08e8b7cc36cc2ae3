"""Mistakes against the rules of ranks that hang or are slow, see docs/design/recovery.md."""

from __future__ import annotations

from .rule import RECOVERY, Named, of

PLANNING = "daemon/ckptlessd/planning"

HANGS: tuple[Named, ...] = (
    *of(
        f"{PLANNING}/hangs.py",
        "unit/control/test_hangs.py",
        (
            "one that is stopped counts as one that waits",
            'if one.how in ("stopped", "deaf") or (',
            "if (",
            "test_one_that_cannot_note_what_is_done_is_not_taken_to_wait",
        ),
        (
            "one that runs is sure to hang",
            "sure=all(_is_sure(still[rank]) for rank in free)",
            "sure=True",
            "test_only_of_one_that_does_not_run_it_is_sure",
        ),
        (
            "where all have come it is the rarest call",
            "if len(alike) < 2 or not apart:",
            "if not apart:",
            "test_one_call_of_all_is_nobody_s_whatever_its_size",
        ),
        (
            "a group that has come as a whole is apart",
            "if len(ranks) < calls[ranks[0]].size),",
            "if True),",
            "test_a_group_that_has_come_as_a_whole_is_not_the_odd_one",
        ),
        (
            "of as many against as many one is taken",
            "if len(apart) > 1 and len(apart[0]) == len(apart[1]):",
            "if False:",
            "test_of_two_that_do_not_fit_nobody_knows_which_is_wrong_and_both_are_told",
        ),
        (
            "what a device was given is not looked at",
            "return any(queued > least[group] for group, queued in one.queued)",
            "return False",
            "test_on_a_device_the_numbers_tell_who_has_not_come",
        ),
        (
            "a question to the agent is a collective",
            "if any(not call.group for call in calls.values()):",
            "if False:",
            "test_a_question_to_the_agent_is_no_collective",
        ),
        (
            "a call that those who are left can make alone counts as one too many",
            " or any(call.size <= len(still) for call in calls.values())",
            "",
            "test_who_may_wait_for_another_one_or_for_itself_is_not_left_alone",
        ),
    ),
    *of(
        f"{RECOVERY}/stalls.py",
        "unit/control/test_deadlines.py",
        (
            "one is late that is not by its own rhythm",
            "slot.still is not None and slot.still.late",
            "slot.still is not None",
            "test_as_long_as_it_may_be_something_else_nothing_is_done",
        ),
        (
            "most of the ranks are replaced",
            "many = 2 * len(verdict.suspects) > len(still)",
            "many = False",
            "test_as_long_as_it_may_be_something_else_nothing_is_done",
        ),
        (
            "a rank is replaced again though that has not helped",
            "self._replaced = step\n",
            "pass\n",
            "test_where_a_new_process_brings_no_step_it_was_no_reason",
        ),
        (
            "a line is told again and again",
            "self._named = step\n",
            "pass\n",
            "test_who_may_have_its_reasons_is_named_once",
        ),
        (
            "what the script has said counts only before the longest stall",
            "return min(still_s, now - self._excused_s) > stall_s",
            "return still_s > stall_s",
            "test_what_the_script_has_said_counts_beyond_the_longest_stall_too",
        ),
    ),
    *of(
        f"{RECOVERY}/stalls.py",
        "unit/control/test_deadlines.py",
        (
            "the step after an evaluation has the rest of its time",
            "self._excused_s = now if excused else -math.inf",
            "self._excused_s = math.inf if excused else -math.inf",
            "test_the_step_after_what_the_script_has_said_has_all_its_time",
        ),
        (
            "what lasts longer than the script has said is a stall only later",
            "if excused is not None:",
            "if excused:",
            "test_what_the_script_has_said_counts_beyond_the_longest_stall_too",
        ),
    ),
    *of(
        f"{RECOVERY}/leading.py",
        "unit/control/test_deadlines.py",
        (
            "one that hangs is waited for",
            'if one.kind == "hung" and one.source == "leader" and one.slot is not None',
            "if False",
            "test_who_hangs_by_the_job_s_own_rhythm_is_replaced_at_once",
        ),
    ),
    *of(
        "daemon/agent/ranks/standing.py",
        "unit/agent/test_stillness.py",
        (
            "what the script has said is told of ranks alone that stand still",
            "return None, until",
            "return None, None",
            "test_what_its_script_has_said_is_told_of_one_that_gets_on_too",
        ),
    ),
    *of(
        "daemon/agent/core/stillness.py",
        "unit/agent/test_stillness.py",
        (
            "an evaluation is forgotten",
            "return max(FLOOR_S, TIMES * self.longest_s, TIMES_EVER * self._ever_s)",
            "return max(FLOOR_S, TIMES * self.longest_s)",
            "test_the_longest_of_recent_steps_counts_and_an_older_one_less",
        ),
        (
            "what did not help is not learned",
            "self._ever_s = max(self._ever_s, still_s)",
            "pass",
            "test_of_what_did_not_help_it_is_learned",
        ),
        (
            "one that wants to run and may not is asleep",
            "return self.ran_s - before.ran_s + wanted",
            "return self.ran_s - before.ran_s",
            "test_what_a_process_is_at",
        ),
        (
            "one that waits for a disk is asleep",
            "still = idle and not (activity.blocked or before.blocked)",
            "still = idle",
            "test_what_a_process_is_at",
        ),
    ),
    *of(
        "daemon/agent/core/stillness.py",
        "unit/agent/test_stacks.py",
        (
            "one that leaves its place spins",
            "stays = place == self._placed and not before.blocked",
            "stays = not before.blocked",
            "test_one_that_is_elsewhere_once_or_waits_for_a_disk_does_not_spin",
        ),
        (
            "one that reads and writes spins",
            'return "spinning" if spins and asked <= SPINS_ASKED * there_s else "working"',
            'return "spinning" if spins else "working"',
            "test_one_that_reads_or_is_given_memory_does_not_spin",
        ),
        (
            "one that had no time to run spins",
            "spins = there_s >= max(SPINS_S, late_after_s) and ran_s >= SPINS_RAN_S",
            "spins = there_s >= max(SPINS_S, late_after_s)",
            "test_one_that_had_no_time_to_run_does_not_spin",
        ),
        (
            "one spins before as long again as made it late",
            "spins = there_s >= max(SPINS_S, late_after_s) and ran_s >= SPINS_RAN_S",
            "spins = there_s >= SPINS_S and ran_s >= SPINS_RAN_S",
            "test_one_that_runs_in_one_place_and_asks_for_nothing_spins",
        ),
    ),
    *of(
        "daemon/agent/ranks/standing.py",
        "unit/agent/test_stillness.py",
        (
            "what ended with its generation is learned",
            "one.stood_s = 0.0\n            page.newest",
            "page.newest",
            "test_what_ended_with_its_generation_is_no_rhythm",
        ),
    ),
    *of(
        f"{RECOVERY}/stragglers.py",
        "unit/control/test_stragglers.py",
        (
            "a rank is named that is slow now and then",
            "self._strikes.pop(rank, None)",
            "pass",
            "test_one_that_is_slow_now_and_then_is_not_named",
        ),
        (
            "a straggler is named before all have told",
            "if len(self._fresh) < len(assignment.places):",
            "if False:",
            "test_nothing_is_said_before_every_rank_has_told_anew",
        ),
        (
            "what was told of another generation counts",
            "kept.clear()",
            "pass",
            "test_another_generation_begins_anew",
        ),
    ),
    *of(
        f"{PLANNING}/pace.py",
        "unit/control/test_stragglers.py",
        (
            "a small difference among ranks that differ much counts",
            "SCALE * deviation_s, LEAST * median_s",
            "LEAST * median_s, LEAST * median_s",
            "test_of_ranks_that_differ_much_a_small_difference_is_none",
        ),
    ),
)
