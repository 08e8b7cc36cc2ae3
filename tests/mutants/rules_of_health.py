"""Mistakes against the rules of a node's health, see docs/admin.md and docs/design/recovery.md."""

from __future__ import annotations

from .rule import RECOVERY, Named, of

HEALTH: tuple[Named, ...] = (
    *of(
        "daemon/ckptlessd/health/acting.py",
        "unit/health/test_acting.py",
        (
            "a node acts without having looked at the others",
            "if mine.reason.startswith(mark) and mark not in self._confirmed:",
            "if False:",
            "test_a_probe_that_is_wrong_everywhere_takes_out_few",
        ),
        (
            "a node acts at once after its mark",
            "if now_s - self._marked.get(mark, 0.0) < SETTLED_S:",
            "if False:",
            "test_a_second_finding_of_the_probe_waits_as_well",
        ),
        (
            "somebody else's drain is taken for our own",
            "if not mine.reason.startswith(OURS):",
            "if False:",
            "test_what_somebody_else_has_drained_is_left_as_it_is",
        ),
        (
            "somebody else's drain is taken back",
            "and not mine.down and mine.reason.startswith(OURS):",
            "and not mine.down:",
            "test_what_somebody_else_has_drained_is_left_as_it_is",
        ),
    ),
    *of(
        "daemon/ckptlessd/health/verdicts.py",
        "unit/health/test_verdicts.py",
        (
            "strikes are counted for ever",
            "self._strikes[0] < now_s - self.meaning.window_s or",
            "",
            "test_an_event_counts_by_its_strikes_in_a_window",
        ),
    ),
    *of(
        f"{RECOVERY}/leaving.py",
        "unit/control/test_leaving.py",
        (
            "ranks leave before the spare has built",
            'phases == {"prepared"}',
            '"preparing" in phases',
            "test_what_a_spare_builds_for_is_what_comes",
        ),
        (
            "a spare that is dead is waited for",
            "if not phases <= WARM:",
            "if False:",
            "test_a_spare_that_dies_while_it_builds_is_not_waited_for",
        ),
        (
            "ranks leave before their state has come",
            "            if self._ready():\n",
            "            if ahead.state:\n",
            "test_ranks_move_first_and_their_node_is_out_once_it_has_none",
        ),
        (
            "who gives state ahead is told once",
            "if (ahead.state or ",
            "if (",
            "test_who_gives_state_ahead_is_told_again_and_not_waited_for_for_ever",
        ),
        (
            "a node is left in the middle of a recovery",
            'job.stage != "running" or ',
            "",
            "test_nobody_leaves_in_the_middle_of_a_recovery",
        ),
        (
            "the job ends where the spare is lost meanwhile",
            "            except plan.NoPlanError:\n",
            "            except ZeroDivisionError:\n",
            "test_where_the_spare_is_lost_meanwhile_its_ranks_stay",
        ),
    ),
)
