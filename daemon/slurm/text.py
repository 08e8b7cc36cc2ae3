"""Slurm's text into values. Pure: text in, values out, ProtocolError for what cannot be read.

Three shapes are read, all the same on 22.05, 24.11 and 26.05:

- `squeue --Format` with a separator of our own after every field. A job's name and comment are its user's and
  may hold anything, a newline or `UserId=root(0)` too, and `scontrol show job` prints them before and between
  the fields that matter. So jobs are asked for with separators that nobody can guess (`JobFormat`).
- `scontrol -o show node`: `Key=value Key=value`, where values may hold spaces and `=`. Of a key that
  comes twice the first counts: what people write freely (Reason, Comment, Extra) comes last.
- `scontrol show topology`: one line of `Key=value` for each switch, block or ring, without spaces in values.

Times are read as UTC; the commands are run with TZ=UTC.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.slurm.adapter import Job, Node, node_of
from ckptless.daemon.slurm.ending import Ending
from ckptless.daemon.slurm.giving_way import Queued
from ckptless.daemon.slurm.hostlist import expand, is_node_name

# What stands for "nothing", in one field or another.
_NOTHING = frozenset(
    ("", "(null)", "N/A", "n/a", "NONE", "None", "Unknown", "UNKNOWN", "NOT_SET", "Invalid", "INVALID")
)
_FOREVER = frozenset(("UNLIMITED", "INFINITE"))

_JOB_FIELDS = (
    "JobID",
    "JobArrayID",
    "UserID",
    "State",
    "RestartCnt",
    "NodeList",
    "BatchFlag",
    "BatchHost",
    "Partition",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "Reason",
    "Name",
    "Comment",
)
_QUEUE_FIELDS = ("JobID", "State", "Partition", "PriorityLong", "NumNodes", "Reason", "Name", "QOS", "Nice")
_ENDING_FIELDS = ("JobID", "State", "Reason", "RestartCnt", "PreemptTime", "EndTime")
_NODE_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z_]*)=")
# `Not responding [slurm@2026-11-21T15:09:06] Comment=...`: after its first line Slurm says who gave the
# reason.
_REASON = re.compile(r"(.*?)\s*(?:\[[^\s\[\]]+@([0-9T:-]+|Unknown)\].*|\s(?:Comment|Extra)=.*|$)", re.DOTALL)

_ARRAY = re.compile(r"[0-9]{1,10}_(?:[0-9]{1,10}|\[.*\])", re.ASCII)
_NICE = re.compile(r"-?[0-9]{1,12}", re.ASCII)
_STATE = re.compile(r"[A-Z][A-Z_]{1,40}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)
_DURATION = re.compile(r"(?:([0-9]{1,9})-)?(?:([0-9]{1,9}):)?([0-9]{1,9}):([0-9]{1,2})", re.ASCII)
_WORDS = re.compile(r"([A-Za-z]+)=(\S*)", re.ASCII)
_GROUPS = ("SwitchName", "BlockName", "RingName")

# What sinfo appends to a state, in the words of scontrol.
_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}


@dataclass(frozen=True, slots=True)
class JobFormat:
    """The format of one squeue query, and the reader of its answer. `secret` is a new random word each time.

    It must not begin with a digit or a dot (squeue would take that for a width), nor hold a comma, a colon,
    or white space.
    """

    secret: str
    fields: tuple[str, ...] = _JOB_FIELDS

    def __post_init__(self) -> None:
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{7,63}", self.secret, re.ASCII) is None:
            raise ValueError("a separator is a word of 8 to 64 letters and digits")

    @property
    def text(self) -> str:
        """Return it for SQUEUE_FORMAT2, not for --Format: everybody on the machine can see arguments."""
        return ",".join(f"{name}:{self._end(name)}" for name in self.fields)

    @classmethod
    def of_ending(cls, secret: str) -> "JobFormat":
        """The format of the query for `read_endings`."""
        return cls(secret, _ENDING_FIELDS)

    @classmethod
    def of_queue(cls, secret: str) -> "JobFormat":
        """The format of the query for `read_queue`."""
        return cls(secret, _QUEUE_FIELDS)

    def _end(self, name: str) -> str:
        return self.secret + ("." if name == self.fields[-1] else ";")

    def _records(self, text: str) -> Iterator[dict[str, str]]:
        *records, rest = text.split(self._end(self.fields[-1]))
        if rest.strip():
            raise ProtocolError(f"squeue's answer ends in the middle of a job: {rest[:80]!r}")
        for record in records:
            values = record.lstrip("\n").split(self._end(""))
            if len(values) != len(self.fields):
                raise ProtocolError(f"squeue gave {len(values)} fields of a job, not {len(self.fields)}")
            yield dict(zip(self.fields, values, strict=True))

    def read(self, text: str) -> tuple[Job, ...]:
        """The jobs of an answer. Raises ProtocolError."""
        return tuple(map(_job, self._records(text)))

    def read_queue(self, text: str) -> tuple[Queued, ...]:
        """Return the jobs of an answer as they stand in the queue. Raises ProtocolError."""
        return tuple(map(_queued, self._records(text)))

    def read_endings(self, text: str) -> dict[int, Ending]:
        """Return what may end the jobs of an answer, by their numbers. Raises ProtocolError."""
        return {number(got["JobID"], "job id"): _ending(got) for got in self._records(text)}


def _queued(got: Mapping[str, str]) -> Queued:
    return Queued(
        job_id=number(got["JobID"], "job id"),
        state=job_state(got["State"]),
        partition=something(got["Partition"]),
        priority=number(got["PriorityLong"], "priority"),
        # `4-8` of one that would take from four to eight.
        nodes=number(got["NumNodes"].strip().partition("-")[0], "number of nodes"),
        reason=something(got["Reason"]),
        name=something(got["Name"]),
        qos=something(got["QOS"]),
        nice=int(nice) if _NICE.fullmatch(nice := got["Nice"].strip()) else 0,
    )


def _job(got: Mapping[str, str]) -> Job:
    # `2_[1-9%4]`: four at a time, of no interest here.
    array = re.sub(r"%[0-9]+\]$", "]", got["JobArrayID"].strip())
    return Job(
        job_id=number(got["JobID"], "job id"),
        user_id=number(got["UserID"], "user id"),
        state=job_state(got["State"]),
        nodes=expand(something(got["NodeList"])),
        restarts=number(got["RestartCnt"], "restart count"),
        # An allocation without a batch script has the host of its salloc in this field.
        batch_host=something(got["BatchHost"]) if got["BatchFlag"].strip() == "1" else "",
        partition=something(got["Partition"]),
        start_s=time(got["StartTime"]),
        end_s=time(got["EndTime"]),
        time_limit_s=duration(got["TimeLimit"]),
        reason=something(got["Reason"]),
        name=something(got["Name"]),
        comment=something(got["Comment"]),
        array=array if _ARRAY.fullmatch(array) else "",
    )


def _ending(got: Mapping[str, str]) -> Ending:
    return Ending(
        state=job_state(got["State"]),
        reason=something(got["Reason"]),
        restarts=number(got["RestartCnt"], "restart count"),
        preempt_s=time(got["PreemptTime"]),
        end_s=time(got["EndTime"]),
    )


def read_nodes(text: str) -> tuple[Node, ...]:
    """The nodes in the answer of `scontrol -o show node`. Raises ProtocolError."""
    return tuple(_node(_pairs(line)) for line in _node_lines(text))


def _node_lines(text: str) -> Iterator[str]:
    """One line per node: a reason of several lines makes several, and all but the first are indented."""
    record: list[str] = []
    for line in text.splitlines():
        if line.startswith("NodeName=") and record:
            yield " ".join(record)
            record = []
        if line.strip():
            record.append(line)
    if record:
        yield " ".join(record)


def _pairs(line: str) -> dict[str, str]:
    """The values of one line by their keys; of a key that comes again, the first."""
    pairs: dict[str, str] = {}
    keys = list(_NODE_KEY.finditer(line))
    for index, key in enumerate(keys):
        if key[1] == "Reason":
            # Free text to the end of the line: whatever looks like a key in there is not one.
            pairs[key[1]] = line[key.end() :]
            break
        end = keys[index + 1].start() if index + 1 < len(keys) else len(line)
        pairs.setdefault(key[1], line[key.end() : end].strip())
    return pairs


def _node(pairs: Mapping[str, str]) -> Node:
    name = pairs.get("NodeName", "")
    if not is_node_name(name):
        raise ProtocolError(f"scontrol gave a node without a name, or with one that is none: {name[:80]!r}")
    state, flags = node_state(pairs.get("State", ""))
    reason, reason_s = _reason(pairs.get("Reason", ""))
    return node_of(
        name=name,
        address=something(pairs.get("NodeAddr", "")) or name,
        state=state,
        flags=flags,
        reason=reason,
        reason_s=reason_s,
        boot_s=time(pairs.get("BootTime", "")),
        slurmd_start_s=time(pairs.get("SlurmdStartTime", "")),
        cpus=number(pairs.get("CPUTot") or "0", "number of CPUs"),
        partitions=tuple(part for part in something(pairs.get("Partitions", "")).split(",") if part),
        version=something(pairs.get("Version", "")),
    )


def _reason(text: str) -> tuple[str, float | None]:
    """Return the reason, and when it was given."""
    match = _REASON.fullmatch(text.strip())
    if match is None:
        return something(text.strip()), None
    return something(match[1]), time(match[2] or "")


def read_topology(text: str) -> dict[str, tuple[str, ...]]:
    """The nodes of every leaf switch, block or ring in the answer of `scontrol show topology`.

    Higher switches and aggregated blocks are left out: they have the same nodes once more. Empty for a flat
    topology, for which Slurm has one sentence or nothing. Raises ProtocolError.
    """
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        kind, equals, name = line.strip().partition(" ")[0].partition("=")
        if kind not in _GROUPS or not equals:
            continue
        pairs = dict(_WORDS.findall(line))
        if not name:
            raise ProtocolError(f"scontrol gave a part of the topology without a name: {line[:80]!r}")
        if kind == "SwitchName" and number(pairs.get("Level", ""), "level of a switch") > 0:
            continue
        found[name] = expand(something(pairs.get("Nodes", "")))
    return found


def node_state(text: str) -> tuple[str, frozenset[str]]:
    """`DOWN*+DRAIN` as ("DOWN", {"DRAIN", "NOT_RESPONDING"}). Raises ProtocolError."""
    flags: set[str] = set()
    names: list[str] = []
    for part in text.strip().upper().split("+"):
        name = part.rstrip("".join(_SUFFIXES))
        flags.update(_SUFFIXES[mark] for mark in part[len(name) :])
        if _STATE.fullmatch(name) is None:
            raise ProtocolError(f"{text[:80]!r} is not the state of a node")
        names.append(name)
    return names[0], frozenset(flags.union(names[1:]))


def job_state(text: str) -> str:
    """The state's name. Raises ProtocolError."""
    state = text.strip()
    if _STATE.fullmatch(state) is None:
        raise ProtocolError(f"{text[:80]!r} is not the state of a job")
    return state


def duration(text: str) -> float | None:
    """Seconds of `[DAYS-][HOURS:]MINUTES:SECONDS`; None for unlimited or not set. Raises ProtocolError."""
    text = text.strip()
    if text in _FOREVER or text in _NOTHING:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ProtocolError(f"{text[:80]!r} is not a duration of Slurm's")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def time(text: str) -> float | None:
    """Unix time in seconds of `2026-11-21T15:08:47`, taken as UTC; None for none. Raises ProtocolError."""
    text = text.strip()
    if text in _NOTHING:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise ProtocolError(f"{text[:80]!r} is not a time of Slurm's") from error


def number(text: str, what: str) -> int:
    """A number that is not negative. Raises ProtocolError that names `what` it should have been."""
    text = text.strip()
    if _NUMBER.fullmatch(text) is None:
        raise ProtocolError(f"{text[:80]!r} is not a {what}")
    return int(text)


def something(text: str) -> str:
    """The text, or "" where Slurm writes that there is none."""
    return "" if text.strip() in _NOTHING else text
