"""How an elastic job is asked for, and which sizes come of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptless.daemon.launch.local import LocalRun
from ckptless.daemon.launch.options import local_run
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.limits import MOST_SIZES
from ckptless.daemon.protocol.model import JobSpec, Limits
from ckptless.daemon.settings import site as site_settings
from ckptless.daemon.settings.elastic import check_grows, sizes
from ckptless.daemon.settings.options import RunOptions, run_options

from .test_slurm_options import JOB, TASK, options, refused, run

WORDS = "min_nodes", "max_nodes", "step", "sizes"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site_settings, "DEFAULT_FILE", tmp_path / "no-such.yaml")
    Path("train.py").touch()
    return tmp_path


def local(*words: str) -> JobSpec:
    found = local_run(*options("--local", *words, "train.py"), {})
    assert isinstance(found, LocalRun)
    return found._config.spec


# --------------------------------------------------------------------------------------- the sizes


@pytest.mark.parametrize(
    ("asked", "nodes", "spares", "found"),
    [
        ({}, 4, 1, ()),
        ({"min_nodes": 2}, 4, 0, (2, 3, 4)),
        ({"min_nodes": 4}, 4, 0, (4,)),
        ({"max_nodes": 6}, 4, 2, (4, 5, 6)),
        ({"min_nodes": 2, "max_nodes": 6, "step": 2}, 4, 2, (2, 4, 6)),
        ({"min_nodes": 4, "step": 4}, 12, 0, (4, 8, 12)),
        ({"sizes": (4, 8, 12)}, 8, 4, (4, 8, 12)),
        ({"sizes": (1, 2, 3, 5)}, 5, 0, (1, 2, 3, 5)),
        ({"draw_in": 4}, 4, 1, ()),
        ({"draw_in": 4, "draw_in_patience_s": 9.0}, 4, 1, ()),
        ({"max_nodes": 6, "draw_in": 2}, 4, 0, (4, 5, 6)),
        ({"sizes": (4, 8), "draw_in": 3}, 4, 1, (4, 8)),
        ({"min_nodes": 2, "draw_in": 1024}, 4, 0, (2, 3, 4)),
        ({"min_nodes": 1}, MOST_SIZES, 0, tuple(range(1, MOST_SIZES + 1))),
    ],
)
def test_sizes(asked: dict[str, object], nodes: int, spares: int, found: tuple[int, ...]) -> None:
    assert sizes(RunOptions(**asked), nodes, spares) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "nodes", "spares", "says"),
    [
        ({"min_nodes": 5, "max_nodes": 4}, 4, 0, "min-nodes=5 is more than max-nodes=4"),
        ({"min_nodes": 5}, 4, 9, "min-nodes=5 is more than the 4 nodes that the job trains on, spares apart"),
        ({"max_nodes": 2}, 4, 0, "max-nodes=2 is less than the 4 nodes"),
        (
            {"max_nodes": 2},
            1,
            0,
            "to grow to 2 nodes, and has 1 to train on, 0 spares, and 0 to draw in; ask",
        ),
        ({"max_nodes": 6}, 4, 1, "to grow to 6 nodes, and has 4 to train on, 1 spare, and"),
        ({"sizes": (4, 6)}, 4, 1, "to grow to 6 nodes"),
        ({"max_nodes": 9, "draw_in": 4}, 4, 0, "has 4 to train on, 0 spares, and 4 to draw in; ask"),
        ({"sizes": (4, 6)}, 5, 1, "the job trains on 5 nodes, spares apart, which is none of sizes=4:6"),
        (
            {"min_nodes": 1, "step": 2},
            4,
            0,
            "from the 4 nodes that the job trains on, steps of 2 do not lead",
        ),
        ({"max_nodes": 6, "step": 4}, 4, 2, "do not lead to max-nodes=6: its sizes would not divide into"),
        ({"min_nodes": 1}, MOST_SIZES + 1, 0, "more than 4096 sizes; choose a larger step"),
        ({"step": 2}, 4, 0, "step is for an elastic job: say min-nodes or sizes too"),
        ({"scale_up_after_s": 0.0}, 4, 0, "scale-up-after is for an elastic job"),
        ({"scale_timeout_s": 9.0}, 4, 0, "scale-timeout is for an elastic job"),
        ({"graceful_s": 9.0}, 4, 0, "graceful is for an elastic job"),
        *(({"sizes": (4,), word: 4}, 4, 0, "say it in one of these ways") for word in WORDS[:3]),
    ],
)
def test_sizes_that_cannot_be(asked: dict[str, object], nodes: int, spares: int, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        sizes(RunOptions(**asked), nodes, spares)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert len(str(caught.value)) < 240


GROWS = {"SchedulerParameters": "permit_job_expansion"}
SMALL = st.none() | st.integers(1, 12)


@settings(max_examples=3000, deadline=None)
@given(SMALL, SMALL, SMALL, st.integers(1, 12), st.integers(0, 6), st.none() | st.integers(0, 6))
def test_any_range(
    least: int | None, most: int | None, step: int | None, nodes: int, spares: int, late: int | None
) -> None:
    """What is found is what was asked for; and is refused only where no such sizes are there."""
    low, high, by = least or nodes, most or nodes, step or 1
    wanted = [n for n in range(1, 20) if low <= n <= high and (n - nodes) % by == 0]
    possible = nodes in wanted and wanted[0] == low and wanted[-1] == high <= nodes + spares + (late or 0)
    said_alone = step is not None and least is None and most is None
    try:
        found = sizes(RunOptions(min_nodes=least, max_nodes=most, step=step, draw_in=late), nodes, spares)
    except UsageError:
        assert said_alone or not possible
        return
    if least is None and most is None:
        assert found == ()
        return
    assert possible
    assert list(found) == wanted
    rest = {"job": "j", "command": ("x",), "slots_per_node": 1, "limits": Limits.from_max_stall(300.0)}
    spec = JobSpec(nodes=nodes, spares=spares, sizes=found, **rest)  # type: ignore[arg-type]
    assert spec.elastic is (len(found) > 1)


# ------------------------------------------------------------------------------------ how it is said


def test_a_local_run() -> None:
    spec = local("--nodes", "4", "--min-nodes", "2")
    assert (spec.nodes, spec.sizes, spec.grow_after_s) == (4, (2, 3, 4), 30.0)
    spec = local("--nodes", "4", "--spares", "4", "--sizes", "2:4:8", "--scale-up-after", "0.5")
    assert (spec.sizes, spec.grow_after_s) == ((2, 4, 8), 0.5)
    spec = local("--nodes", "4")
    assert (spec.sizes, spec.grow_after_s) == ((), 0.0)
    spec = local("--nodes", "4", "--min-nodes", "2", "--scale-timeout", "20", "--graceful", "5")
    assert (spec.limits.join_s, spec.limits.leave_s, spec.limits.stall_s) == (20.0, 5.0, 300.0)


def test_fewer_nodes_than_before_a_requeue() -> None:
    """Slurm gave fewer than the largest size takes; the first time that is the user's mistake."""
    said = ("--max-nodes", "9", "--min-nodes", "2", "train.py")
    assert "to grow to 9 nodes" in refused(*said)
    assert run(*said, env={**JOB, "SLURM_RESTART_COUNT": "1"}).config.spec.sizes[-1] == 9


def test_torchruns_two_numbers() -> None:
    spec = local("--nnodes", "2:4")
    assert (spec.nodes, spec.sizes) == (4, (2, 3, 4))
    assert local("--nnodes", "2:4", "--step", "2").sizes == (2, 4)
    assert local("--nnodes", "2:2").sizes == ()
    with pytest.raises(UsageError, match="--nnodes 2:4 says --min-nodes, too"):
        local("--nnodes", "2:4", "--min-nodes", "3")
    with pytest.raises(UsageError, match="--nnodes MIN:MAX is min-nodes"):
        local("--nnodes", "2:4", "--sizes", "2:4")
    spec = run("--nnodes", "2:9", "train.py").config.spec
    assert (spec.nodes, spec.spares, spec.sizes) == (4, 1, (2, 3, 4))
    spec = run("--nnodes", "2:3", "train.py").config.spec
    assert (spec.nodes, spec.spares, spec.sizes, len(spec.names)) == (3, 1, (2, 3), 4)
    assert "min-nodes=6 is more than the 4 nodes" in refused("--nnodes", "6:9", "train.py")
    assert "ask sbatch for --nodes=10" in refused("--nnodes", "9:9", "train.py")
    # What sbatch said counts less.
    for name, value in (("MIN_NODES", "3"), ("SIZES", "4:5")):
        spec = run("--nnodes", "2:4", "train.py", env={**JOB, f"CKPTLESS_{name}": value}).config.spec
        assert spec.sizes == (2, 3, 4)


def test_what_sbatch_said_is_taken_where_nothing_else_is_said() -> None:
    env = {**JOB, "CKPTLESS_MIN_NODES": "2", "CKPTLESS_STEP": "2", "CKPTLESS_SCALE_UP_AFTER": "90"}
    spec = run("train.py", env=env).config.spec
    assert (spec.sizes, spec.grow_after_s) == ((2, 4), 90.0)
    assert run("--step", "1", "train.py", env=env).config.spec.sizes == (2, 3, 4)
    # The command line counts more, in its own way to say it.
    assert run("--sizes", "3:4", "train.py", env=env).config.spec.sizes == (3, 4)
    by_sizes = {**JOB, "CKPTLESS_SIZES": "2:4:5"}
    assert run("train.py", env=by_sizes).config.spec.sizes == (2, 4, 5)
    assert run("--min-nodes", "3", "train.py", env=by_sizes).config.spec.sizes == (3, 4)
    assert run_options({"min_nodes": 3}, by_sizes).sizes == ()


def test_in_a_step_as_in_a_batch_script() -> None:
    spec = run("train.py", env={**TASK, "CKPTLESS_MAX_NODES": "2"}).config.spec
    assert (spec.nodes, spec.spares, spec.sizes) == (1, 1, (1, 2))


def test_the_output_of_every_rank_that_there_may_be() -> None:
    words = ("--redirects", "0:3", "--nproc-per-node", "2", "train.py")
    config = run(*words, env={**JOB, "CKPTLESS_MAX_NODES": "5"}).config
    assert config.tee == (1, 3, 5, 7, 9)


@pytest.mark.parametrize("text", ["4:2", "4:4", "0:4", "4:", ":4", "4,8", "x", "65537", ":".join("9" * 17)])
def test_sizes_that_are_none(text: str) -> None:
    wanted = "it must be up to 16 numbers from 1 to 65536 that ascend, such as 4:8:12"
    with pytest.raises(UsageError, match=f"^--sizes is '{text}': {wanted}$"):
        local("--nodes", "4", "--sizes", text)
    assert f"CKPTLESS_SIZES is '{text}': {wanted}" in refused("train.py", env={**JOB, "CKPTLESS_SIZES": text})


@pytest.mark.parametrize(
    "words", [("--min-nodes", "2"), ("--max-nodes", "5"), ("--sizes", "2:4"), ("--step", "2")]
)
def test_a_job_without_recovery_keeps_its_nodes(words: tuple[str, ...]) -> None:
    env = {**JOB, "CKPTLESS_ROOTLESS": "1", "CKPTLESS_SPARES": "0"}
    assert f"{words[0]} is for runs that recover" in refused(*words, "train.py", env=env)


def test_nor_is_it_elastic_by_other_words() -> None:
    env = {**JOB, "CKPTLESS_ROOTLESS": "1", "CKPTLESS_SPARES": "0"}
    text = "with --tier 1 (CKPTLESS_ROOTLESS=1) a job has the same nodes to its end"
    assert text in refused("--nnodes", "2:4", "train.py", env=env)
    assert text in refused("train.py", env={**env, "CKPTLESS_MIN_NODES": "2"})


# ---------------------------------------------------------------------------------- nodes to draw in


def drawn(spec: JobSpec) -> tuple[int, float]:
    return spec.late, spec.draw_s


def test_nodes_to_draw_in() -> None:
    assert drawn(local("--nodes", "4")) == (0, 0.0)
    assert drawn(local("--nodes", "4", "--draw-in", "0")) == (0, 0.0)
    spec = local("--nodes", "4", "--draw-in", "2")
    assert (drawn(spec), spec.sizes) == ((2, 60.0), ())
    assert drawn(local("--nodes", "4", "--draw-in", "2", "--draw-in-patience", "0")) == (2, 0.0)
    assert local("--nodes", "4", "--draw-in", "2", "--max-nodes", "6").sizes == (4, 5, 6)
    spec = run("--draw-in", "1024", "--draw-in-patience", "9", "train.py").config.spec
    assert (drawn(spec), spec.nodes, spec.spares, len(spec.names)) == ((1024, 9.0), 4, 1, 5)


def test_draw_in_as_sbatch_said() -> None:
    env = {**JOB, "CKPTLESS_DRAW_IN": "2", "CKPTLESS_DRAW_IN_PATIENCE": "90"}
    assert drawn(run("train.py", env=env).config.spec) == (2, 90.0)
    assert drawn(run("--draw-in", "3", "train.py", env=env).config.spec) == (3, 90.0)
    assert drawn(run("--draw-in", "0", "train.py", env=env).config.spec) == (0, 0.0)
    assert drawn(run("train.py", env={**env, "CKPTLESS_DRAW_IN": "0"}).config.spec) == (0, 0.0)
    assert "CKPTLESS_DRAW_IN is 1025: it must be from 0 to 1024" in refused(
        "train.py", env={**JOB, "CKPTLESS_DRAW_IN": "1025"}
    )


def test_patience_is_for_a_job_that_may_draw_in() -> None:
    says = "draw-in-patience is for a job that may draw nodes in: say draw-in too, or leave it out"
    with pytest.raises(UsageError, match=f"^{says}$"):
        local("--nodes", "4", "--draw-in-patience", "9")
    assert refused("train.py", env={**JOB, "CKPTLESS_DRAW_IN_PATIENCE": "9"}) == says


def test_a_job_without_recovery_draws_nothing_in() -> None:
    env = {**JOB, "CKPTLESS_ROOTLESS": "1", "CKPTLESS_SPARES": "0"}
    assert "--draw-in is for runs that recover" in refused("--draw-in", "1", "train.py", env=env)
    env["CKPTLESS_DRAW_IN"] = "1"
    assert "to its end: add --draw-in 0, or leave draw-in out of sbatch" in refused("train.py", env=env)
    assert drawn(run("--draw-in", "0", "train.py", env=env).config.spec) == (0, 0.0)


@pytest.mark.parametrize(
    ("around", "says"),
    [
        (TASK, "a task of srun has nobody who could ask Slurm for nodes; start ckptless-run without srun"),
        ({**JOB, "SLURM_ARRAY_TASK_ID": "0"}, "Slurm adds no node to a task of a job array; leave out"),
    ],
)
def test_where_no_node_can_be_added(folder: Path, around: dict[str, str], says: str) -> None:
    assert says in refused("--draw-in", "1", "train.py", env=around)
    assert says in refused("train.py", env={**around, "CKPTLESS_DRAW_IN": "1"})
    assert not list(folder.glob("ckptless-*"))  # no folder is made for a run that is refused
    assert not run("--draw-in", "0", "train.py", env={**around, "CKPTLESS_DRAW_IN": "1"}).config.spec.late


def test_a_site_may_have_nothing_drawn_in(folder: Path) -> None:
    (folder / "no-such.yaml").write_text("version: 1\nelastic: {draw_in: false}\n")
    says = "no job of this site may draw nodes in; leave out draw-in, in sbatch --ckptless too"
    assert refused("--draw-in", "1", "train.py") == says
    assert run("--min-nodes", "2", "train.py").config.spec.elastic
    # It is not the same as being elastic.
    (folder / "no-such.yaml").write_text("version: 1\nelastic: {allow: false}\n")
    assert run("--draw-in", "1", "train.py").config.spec.late == 1


# ------------------------------------------------------------------------------------------- the site


@pytest.mark.parametrize(
    ("site", "partition", "says"),
    [
        ("allow: false", "gpu", "this site has no elastic jobs; leave out min-nodes"),
        ("allow: false", "", "this site has no elastic jobs"),
        ("partitions: [big, gpus]", "gpu", "partition gpu has no elastic jobs, as have big,gpus; choose"),
        ("partitions: [big, gpu]", "gpu", ""),
        ("partitions: [big, gpu]", "", ""),
        ("partitions: []", "gpu", ""),
        ("qos: [high]", "gpu", "jobs of QOS low are not elastic here, as are those of high; choose"),
        ("qos: [high, low]", "gpu", ""),
    ],
)
def test_where_jobs_may_be_elastic(folder: Path, site: str, partition: str, says: str) -> None:
    (folder / "no-such.yaml").write_text(f"version: 1\nelastic: {{{site}}}\n")
    env = {**JOB, "SLURM_JOB_QOS": "low", **({"SLURM_JOB_PARTITION": partition} if partition else {})}
    assert run("train.py", env=env).config.spec.sizes == ()
    if says:
        assert says in refused("--min-nodes", "2", "train.py", env=env)
    else:
        assert run("--min-nodes", "2", "train.py", env=env).config.spec.elastic


@pytest.mark.parametrize(
    ("slurm", "says"),
    [
        ({}, ""),
        ({"SchedulerParameters": "bf_interval=1,permit_job_expansion", "SLURM_VERSION": "26.05.0"}, ""),
        ({"SchedulerParameters": "(null)", "SLURM_VERSION": "22.05.8"}, "permit_job_expansion is not among"),
        ({"SLURM_VERSION": "22.05.8"}, "permit_job_expansion is not among SchedulerParameters; leave out"),
        ({**GROWS, "SLURM_VERSION": "22.05.8", "PrologFlags": "Alloc,Contain"}, ""),
        ({**GROWS, "SLURM_VERSION": "24.05.1", "PrologFlags": "Alloc"}, ""),
        ({**GROWS, "SLURM_VERSION": "24.11.5", "PrologFlags": "Alloc"}, "PrologFlags has Alloc"),
        ({**GROWS, "SLURM_VERSION": "?", "PrologFlags": "Alloc"}, ""),
    ],
)
def test_a_slurm_that_adds_no_node_to_a_job(slurm: dict[str, str], says: str) -> None:
    if not says:
        check_grows(slurm)
        return
    with pytest.raises(UsageError, match=says):
        check_grows(slurm)
