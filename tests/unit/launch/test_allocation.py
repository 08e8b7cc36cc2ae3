"""What Slurm's variables say of the allocation, and how a run uses it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.launch.allocation import (
    Allocation,
    Shape,
    StepTask,
    inside_slurm,
    read_allocation,
    shape,
)
from ckptless.daemon.protocol.errors import CkptlessError, UsageError
from ckptless.daemon.settings.options import run_options

Env = Mapping[str, str]

# As recorded on a cluster, without what nobody reads.
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "node[01-03,05]",
    "SLURM_NODELIST": "node[01-03,05]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASK_PID": "999",
}
SALLOC = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node01",
    "SLURM_NODELIST": "node01",
    "SLURM_TASKS_PER_NODE": "8",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_STEPID": "3",
    "SLURM_STEP_NODELIST": "node[02-03]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}
INTERACTIVE = {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)}
FOUR = ("node01", "node02", "node03", "node05")


@pytest.mark.parametrize(
    ("env", "found"),
    [
        pytest.param(BATCH, Allocation(4711, FOUR, 2, None), id="batch script"),
        pytest.param(SALLOC, Allocation(12, ("node01",), None, None), id="salloc"),
        pytest.param(
            STEP, Allocation(4711, ("node02", "node03"), 4, None, StepTask("s3", 1, 2)), id="task of a step"
        ),
        pytest.param(INTERACTIVE, Allocation(4711, FOUR, 2, None), id="interactive step"),
        pytest.param(
            {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFB)}, Allocation(4711, FOUR, 2, None), id="batch step"
        ),
        pytest.param(
            {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
            Allocation(4711, ("node02", "node03"), 2, None, StepTask("s3", 1, 2)),
            id="heterogeneous",
        ),
        pytest.param(
            {**STEP, "SLURM_RESTART_COUNT": "2"},
            Allocation(4711, ("node02", "node03"), 4, None, StepTask("s3r2", 1, 2)),
            id="requeued twice",
        ),
        pytest.param(
            {**STEP, "SLURM_RESTART_COUNT": "0"},
            Allocation(4711, ("node02", "node03"), 4, None, StepTask("s3", 1, 2)),
            id="not requeued",
        ),
        pytest.param(
            {**BATCH, "SLURM_GPUS_ON_NODE": "8"}, Allocation(4711, FOUR, 2, 8), id="eight GPUs on a node"
        ),
        pytest.param({**BATCH, "SLURM_GPUS_ON_NODE": "0"}, Allocation(4711, FOUR, 2, None), id="no GPUs"),
        pytest.param(
            {**BATCH, "SLURM_NTASKS_PER_NODE": "?"}, Allocation(4711, FOUR, None, None), id="no number"
        ),
        pytest.param({**BATCH, "SLURM_STEP_ID": "x"}, Allocation(4711, FOUR, 2, None), id="no step"),
        pytest.param(
            {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "a,b"}, Allocation(7, ("a", "b"), None, None), id="prolog"
        ),
    ],
)
def test_what_the_variables_say(env: Env, found: Allocation) -> None:
    assert inside_slurm(env)
    assert read_allocation(env) == found


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": "1"}, {"SLURM_JOB_NODELIST": "a"}, {"HOME": "/"}])
def test_no_allocation(env: Env) -> None:
    assert not inside_slurm(env)


@pytest.mark.parametrize(
    "env", [{"SLURM_JOB_ID": text} for text in ("", "x", "-1", "4711.0", "4711 ", "0x10")] + [{}]
)
def test_a_damaged_job_is_one_sentence(env: Env) -> None:
    env = {**BATCH, **env} if env else {**BATCH, "SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""}
    with pytest.raises(UsageError, match="is damaged") as caught:
        read_allocation(env)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["node[01", "node[3-1]", "node]", "no de", "a,,b", "$(x)"])
def test_a_damaged_list_of_nodes_is_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="is damaged"):
        read_allocation({**BATCH, "SLURM_JOB_NODELIST": text})


NAMES = (
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_GPUS_ON_NODE", "SLURM_STEP_ID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_RESTART_COUNT"),
    *("SLURM_STEP_NODELIST", "SLURM_NODELIST"),
)
values = st.one_of(
    st.text(max_size=12),
    st.integers(-(2**33), 2**33).map(str),
    st.from_regex(r"[0-9]{1,3}(\(x[0-9]{1,3}\))?(,[0-9]{1,3}(\(x[0-9]\))?){0,3}", fullmatch=True),
    st.from_regex(r"n\[[0-9]{1,2}-[0-9]{1,2}\](,m[0-9])?", fullmatch=True),
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), values))
def test_damaged_values_are_refused_or_read(env: dict[str, str]) -> None:
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", **env}
    try:
        found = read_allocation(env)
    except CkptlessError:
        return
    assert found.names
    assert found.job_id >= 0
    assert found.tasks is None or found.tasks >= 0
    assert found.gpus is None or found.gpus > 0


# ------------------------------------------------------------------------------------------- the shape


@pytest.mark.parametrize(
    ("nodes", "spares", "slots", "found"),
    [
        (None, 0, None, (4, 0, 2)),
        (None, 1, None, (3, 1, 2)),
        (None, 2, None, (2, 2, 2)),
        (2, 1, None, (2, 1, 2)),
        (2, 0, 5, (2, 0, 5)),
        (None, 3, 1, (1, 3, 1)),
        (1, 1, None, (1, 1, 2)),
    ],
)
def test_defaults(nodes: int | None, spares: int, slots: int | None, found: tuple[int, int, int]) -> None:
    assert shape(read_allocation(BATCH), nodes, spares, slots) == Shape(*found)


@pytest.mark.parametrize(
    ("tasks", "gpus", "slots", "wants"),
    [
        (None, None, None, 1),
        (None, 8, None, 8),
        (2, 8, None, 2),
        (2, 8, 3, 3),
        (None, None, 3, 3),
        (0, None, None, 1),
    ],
)
def test_ranks_on_a_node(tasks: int | None, gpus: int | None, slots: int | None, wants: int) -> None:
    found = Allocation(1, ("a",), tasks, gpus)
    assert shape(found, None, 0, slots).slots == wants


@pytest.mark.parametrize(
    ("nodes", "spares", "says"),
    [
        (None, 4, "with 4 spares, a job of 4 nodes has none left to train on"),
        (None, 9, "with 9 spares, a job of 4 nodes has none left to train on"),
        (4, 1, "ask sbatch for --nodes=5"),
        (3, 2, "ask sbatch for --nodes=5"),
    ],
)
def test_what_does_not_fit_is_one_sentence(nodes: int | None, spares: int, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        shape(read_allocation(BATCH), nodes, spares, None)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=2000, deadline=None)
@given(total=st.integers(1, 40), nodes=st.integers(1, 40) | st.none(), spares=st.integers(0, 40))
def test_a_run_fits_its_allocation_or_is_refused(total: int, nodes: int | None, spares: int) -> None:
    found = Allocation(1, tuple(f"n{n}" for n in range(total)), None, None)
    try:
        run = shape(found, nodes, spares, None)
    except UsageError:
        assert (nodes or 1) + spares > total
        return
    assert run.spares == spares
    assert run.nodes >= 1
    assert run.nodes + run.spares == total if nodes is None else run.nodes == nodes
    assert run.nodes + run.spares <= total


# ---------------------------------------------------------------------------- what the plugin has set

SPARES, STALL = "CKPTLESS_SPARES", "CKPTLESS_MAX_STALL"


@pytest.mark.parametrize(("text", "value"), [("", 0), ("0", 0), ("7", 7), ("1024", 1024)])
def test_spares_of_sbatch(text: str, value: int) -> None:
    assert run_options({}, {SPARES: text}).spares == value
    assert run_options({"spares": 2}, {SPARES: text}).spares == 2
    # With --local the variables are another run's.
    assert run_options({}).spares == 0


@pytest.mark.parametrize(("text", "value"), [("", None), ("5", 5.0), ("90", 90.0), ("62.5", 62.5)])
def test_numbers_of_the_plugin(text: str, value: float | None) -> None:
    assert run_options({}, {STALL: text}).max_stall_s == value


@pytest.mark.parametrize("text", ["inf", "nan", "1e3", "-1", " 1", "1\n", "1.", ".5", "0x1", "1_0", "(null)"])
def test_what_is_no_number(text: str) -> None:
    for name in (SPARES, STALL):
        with pytest.raises(UsageError, match=f"{name} is .*: it must be a number"):
            run_options({}, {name: text})


@pytest.mark.parametrize("text", ["9" * 400, "1.5", "1025"])
def test_no_number_of_spares(text: str) -> None:
    with pytest.raises(UsageError, match=SPARES):
        run_options({}, {SPARES: text})
