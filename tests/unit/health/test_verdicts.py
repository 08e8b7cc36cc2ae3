"""From findings to verdicts: strikes, windows, and which of them is the worst."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.health.meanings import (
    ACTIONS,
    TABLE,
    XIDS,
    concerns_jobs,
    is_code,
    meaning,
    xid_of,
)
from ckptless.daemon.ckptlessd.health.probe import Finding
from ckptless.daemon.ckptlessd.health.verdicts import MOST_PER_PROBE, Key, Verdict, Verdicts
from ckptless.daemon.protocol.health import VerdictRecord

FULL = Finding(code="disk-full", where="/scratch", evidence="3 MiB of 900 GiB are free")
XID = Finding(code="xid-79", where="GPU 0000:4e:00", evidence="NVRM: Xid (PCI:0000:4e:00): 79, ...")
FLAP = Finding(code="link-flap", where="ib0", evidence="down")


def codes(found: list[Verdict]) -> list[str]:
    return [one.key.code for one in found]


def test_a_state_has_to_last_and_is_over_when_it_was_not_seen_for_a_while() -> None:
    verdicts = Verdicts()
    assert verdicts.hear("disk", [FULL], 0.0) == []
    assert codes(verdicts.hear("disk", [FULL], 60.0)) == ["disk-full"]
    assert verdicts.hear("disk", [FULL], 120.0) == []
    assert verdicts.standing[0].count == 3
    assert verdicts.expire(120.0 + 300.0) == []
    assert codes(verdicts.expire(120.0 + 300.1)) == ["disk-full"]
    assert verdicts.standing == []


def test_a_state_that_was_there_once_is_nothing() -> None:
    verdicts = Verdicts()
    verdicts.hear("disk", [FULL], 0.0)
    assert verdicts.expire(301.0) == []
    assert verdicts.hear("disk", [FULL], 400.0) == []


def test_an_event_counts_by_its_strikes_in_a_window() -> None:
    verdicts = Verdicts()
    for at_s in (0.0, 1800.0, 3700.0):
        assert verdicts.hear("link", [FLAP], at_s) == []
    assert codes(verdicts.hear("link", [FLAP], 5500.0)) == []
    assert codes(verdicts.hear("link", [FLAP], 5600.0)) == ["link-flap"]


def test_what_only_a_boot_mends_stands_for_good() -> None:
    verdicts = Verdicts()
    assert codes(verdicts.hear("kernel-log", [XID], 0.0)) == ["xid-79"]
    assert verdicts.expire(1e9) == []


def test_the_same_thing_elsewhere_is_another() -> None:
    verdicts = Verdicts()
    other = Finding(code="disk-full", where="/local")
    for at_s in (0.0, 60.0):
        verdicts.hear("disk", [FULL, other], at_s)
    assert [one.key.where for one in verdicts.standing] == ["/scratch", "/local"]


def test_the_strongest_action_comes_first() -> None:
    verdicts = Verdicts()
    for at_s in (0.0, 60.0):
        verdicts.hear("disk", [FULL, Finding(code="clock")], at_s)
    verdicts.hear("kernel-log", [XID], 61.0)
    assert codes(verdicts.standing) == ["xid-79", "disk-full", "clock"]


def test_the_site_s_own_actions_count_more() -> None:
    verdicts = Verdicts({"xid-79": "note", "of-our-own": "move"})
    verdicts.hear("kernel-log", [XID, Finding(code="of-our-own")], 0.0)
    assert [one.meaning.action for one in verdicts.standing] == ["move", "note"]


def test_a_probe_that_makes_places_up_takes_no_more_than_its_share() -> None:
    verdicts = Verdicts()
    made_up = [Finding(code="xid-79", where=f"GPU {number}") for number in range(10 * MOST_PER_PROBE)]
    assert len(verdicts.hear("mad", made_up, 0.0)) == MOST_PER_PROBE
    assert verdicts.dropped == {"mad"}
    assert codes(verdicts.hear("kernel-log", [XID], 0.0)) == ["xid-79"]


def test_what_stood_before_the_daemon_ended_goes_on() -> None:
    verdicts = Verdicts()
    record = VerdictRecord(
        probe="disk",
        code="disk-full",
        where="/scratch",
        action="drain",
        text="x",
        count=7,
        first_s=1.0,
        last_s=100.0,
        begun_s=2.0,
    )
    known = verdicts.recall(record)
    assert (known.key, known.stands, known.count) == (Key("disk", "disk-full", "/scratch"), True, 7)
    assert verdicts.hear("disk", [FULL], 160.0) == []
    assert codes(verdicts.expire(461.0)) == ["disk-full"]


@given(
    st.lists(st.tuples(st.sampled_from([*TABLE, "xid-13", "xid-79", "new"]), st.floats(0, 5000)), max_size=60)
)
def test_a_verdict_begins_and_ends_as_its_row_says(seen: list[tuple[str, float]]) -> None:
    """Against a plain reading of the rule: so many times within its window, the last of them now."""
    verdicts, times, stood = Verdicts(), dict[str, list[float]](), set[str]()
    for code, at_s in sorted(seen, key=lambda one: one[1]):
        stood -= {one.key.code for one in verdicts.expire(at_s)}
        row = meaning(code, {})
        past = times.setdefault(code, [])
        if past and at_s - past[-1] > row.window_s:
            past.clear()
        past.append(at_s)
        begun = verdicts.hear("p", [Finding(code=code)], at_s)
        due = sum(at_s - one <= row.window_s for one in past) >= row.strikes
        assert bool(begun) == (due and code not in stood)
        stood |= {one.key.code for one in begun}
    assert {one.key.code for one in verdicts.standing} == stood


def test_what_jobs_hear_of() -> None:
    heard = {code for code, row in TABLE.items() if concerns_jobs(code, row.action)}
    assert {"out-of-memory", "cgroup-out-of-memory", "gpu-hot", "disk-full", "link-down", "memfd"} <= heard
    assert not heard & {
        "gpu-ecc-aggregate",
        "clock",
        "probe-failed",
        "probe-hangs",
        "memory-corrected",
        "memory-pressure",
    }


def test_every_row_can_be_acted_upon() -> None:
    for row in (*TABLE.values(), *XIDS.values()):
        assert row.action in ACTIONS
        assert row.strikes >= 1
        assert row.window_s >= 300.0
        assert row.text[0].islower() or row.text.startswith("NVML")
        assert not row.text.endswith(".")
    # What a boot alone mends is known at once.
    assert all(row.strikes == 1 for row in XIDS.values() if row.window_s == math.inf)


def test_xids_of_every_kind() -> None:
    assert {code: meaning(code, {}).action for code in ("xid-13", "xid-31", "xid-43", "xid-9999")} == {
        "xid-13": "note",
        "xid-31": "note",
        "xid-43": "note",
        "xid-9999": "note",
    }
    assert [meaning(f"xid-{n}", {}).action for n in (48, 79, 95, 119, 74, 145, 154, 78)] == [
        *["evict"] * 4,
        *["move"] * 3,
        "drain",
    ]
    for code in ("xid-", "xid-x", "xid-12345", "xid-¹", "79"):
        assert xid_of(code) is None
        assert not is_code(code)
