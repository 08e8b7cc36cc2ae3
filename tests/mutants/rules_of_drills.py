"""Mistakes by name: who may cut a node off, what is told as a drill, which step is saved at a job's end."""

from __future__ import annotations

from .rule import RECOVERY, Named, of

DRILLS: tuple[Named, ...] = (
    *of(
        "daemon/ckptlessd/requests.py",
        "unit/control/test_drills.py",
        (
            "a job's owner cuts a node off",
            'if uid != 0:\n        return "only root',
            'if False:\n        return "only root',
            "test_root_alone_cuts_a_node_off_and_only_from_a_network",
        ),
        (
            "a machine is cut off from itself",
            "if where is not None and ip_address(where[0]).is_loopback:",
            "if False:",
            "test_root_alone_cuts_a_node_off_and_only_from_a_network",
        ),
    ),
    *of(
        "daemon/ckptlessd/planning/drills.py",
        "unit/control/test_drills.py",
        (
            "a node that is lost long after a cut counts as one that a drill has lost",
            " and now <= self._over_s + self._marks_s",
            "",
            "test_which_node_is_silent_by_it",
        ),
        (
            "whenever the agent of a node ends that was cut off, it is by the drill",
            'self._is_of("kill-agent", node, generation)',
            'self._is_of(self.struck.drill.kind if self.struck else "kill-agent", node, generation)',
            "test_which_agent_ends_by_it",
        ),
    ),
    *of(
        f"{RECOVERY}/controller.py",
        "unit/control/test_drills.py",
        (
            "Slurm sets a node down that a drill has cut off",
            'replace(event, source="drill", dark=False)',
            'replace(event, source="drill")',
            "test_a_node_that_is_cut_off_is_told_as_a_drill_and_is_not_dark",
        ),
    ),
    *of(
        f"{RECOVERY}/following.py",
        "unit/control/test_drills.py",
        (
            "every node is cut off",
            "elif order.place.node == job.me:",
            "else:",
            "test_its_own_daemon_cuts_a_node_off",
        ),
    ),
    *of(
        "daemon/agent/saving/last.py",
        "unit/daemon/test_last_save.py",
        (
            "an older step is saved where the newest is there in part",
            "if partly and len(there)",
            "if False and len(there)",
            "test_an_older_step_is_not_decided_where_one_who_comes_late_makes_the_newest_whole",
        ),
    ),
    *of(
        "daemon/agent/saving/service.py",
        "unit/daemon/test_saver.py",
        (
            "an older save is waited for before others hear what there is",
            "            holdings, world = ",
            "            await self.saver.settle(SETTLE_S)\n            holdings, world = ",
            "test_what_is_still_being_written_keeps_no_node_from_saying_what_it_holds",
        ),
    ),
)
