"""Every code block of the pages, in order, and which test runs it: whoever adds a block adds its row here.

A row begins with the block's own first words. `Typed` blocks are typed by a test as they stand
(`tests/reading.py`), with `values` in the place of the page's; a test fails where it has left one out.
`By` names the test, or the line of the gate, that runs the same; `Not` says why nothing can be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Typed:
    """Typed by this test."""

    test: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class By:
    """Run, or held to the code, by this test, or by this command of `.ci/run`; but for `without`."""

    test: str
    without: str = ""


@dataclass(frozen=True)
class Not:
    """Nothing that runs."""

    reason: str


How = Typed | By | Not

TUTORIALS = "tests/local/test_tutorials.py::"
FIRST = TUTORIALS + "test_the_first_job_outlives_a_rank"
SAME = TUTORIALS + "test_a_script_prints_the_same_before_the_change_and_after"
LIGHTNING = TUTORIALS + "test_a_lightning_script_outlives_a_rank_and_prints_the_same"
SHARDED = TUTORIALS + "test_a_sharded_job_outlives_a_node"
ELASTIC = TUTORIALS + "test_an_elastic_job_shrinks_and_grows"
QUICKSTART = TUTORIALS + "test_the_quickstart"
ON_SLURM = "tests/slurm/test_pages.py::"
ADMIN = ON_SLURM + "test_a_job_that_its_administrators_take_nodes_from"
BATCH = ON_SLURM + "test_batch_scripts"
LOGGERS = "tests/local/test_loggers.py::"
SETTINGS = ON_SLURM + "test_settings_of_a_site"
SLURM_JOB = ON_SLURM + "test_the_first_job_on_slurm"
HOSTS = "tests/local/test_hosts.py::test_a_process_and_a_host_are_lost"
MEETING = "tests/local/test_meeting.py::test_a_node_is_lost_and_comes_back_in_vain"
MPIRUN = "tests/local/test_meeting.py::test_mpirun_starts_it_and_a_node_is_lost"
DEMO = "tests/slurm/test_demos.py::test_a_demo"
PYTHON = By("tests/local/test_pages.py::test_it_runs")
EXTRAS = By("tests/unit/repository/test_code_blocks.py::test_what_pages_install_is_installed_by_setup")
PLAN = By("tests/unit/daemon/test_plan_command.py::test_what_the_page_shows_is_what_it_says")
INSTALLED = "tests/slurm/test_packages.py::test_install_upgrade_remove_install_and_purge"
SCRAPED = "tests/unit/metrics/test_documents.py::test_promtool_finds_no_fault_with_the_page"
POLICY = "tests/unit/launch/test_policy.py::test_the_policy_of_the_page"
SAVING = "tests/local/test_saving.py::test_plain_dcp_reads_it_without_ckptless"
PACKAGES = "tests/unit/packages/test_packages.py::"
# The job of these drills is a small one, and in no hurry.
DRILLS = {
    "--kill-rank 3": "--kill-rank 1",
    "step=2000": "step=50",
    "--for 60": "--for 1",
    "--for 30": "--for 8",
}
# Where the tests of loggers kill.
COMMITS = "run.commit(loss=loss)"
LOGGED = {
    "update(state, batch)": "update(state, batch); kill(run, run.step + 1, 0)",
    COMMITS: f"kill(run, run.step + 1, 1); {COMMITS}; kill(run, run.step, 2)",
}
DIAGRAM = Not("a drawing")
SIGNATURES = Not("signatures, which docs/api.py makes of the code")
# Names in them are looked up: test_code_blocks.py.
PARTS = Not("parts of the reader's own script; scripts so changed run in tests/local")
# `systemd-analyze verify` reads the units instead: tests/unit/sysd/test_units.py.
NO_SYSTEMD = "systemctl: the machines of the tests have no systemd"
REHEARSED = "tests/local/test_rehearsal.py::test_what_is_forgotten_is_named"

TABLE: dict[str, tuple[tuple[str, How], ...]] = {
    "CONTRIBUTING.md": (
        ("$ make setup", By(".ci/run: make setup")),
        ("# apt-get install", By(".ci/run: apt-get install")),
    ),
    "README.md": (
        ("$ make demo", By(DEMO, "make test: the gate's own")),
        ("$ make slurm-demo", By(DEMO, "make slurm-shell: test_the_prompt_on_a_cluster")),
        ("import ckptless", PYTHON),
        ("$ ckptless-run --local", By(QUICKSTART)),
        ("#!/bin/bash", Typed(BATCH, {"--nodes=5": "--nodes=2"})),
    ),
    "docs/accelerate.md": (
        ("pip install", EXTRAS),
        ("+import ckptless", PARTS),
        ("+import ckptless", PARTS),
        ("-    accelerator", PARTS),
    ),
    "docs/admin.md": (
        ("# python3.11 -m venv", By(PACKAGES + "test_content_of_a_deb", NO_SYSTEMD)),
        ("replication:", Typed(SETTINGS, {"10.2.0.0/16": "10.99.0.0/24"})),
        ("$ ckptctl plan", PLAN),
        ("$ ckptctl plan", PLAN),
        ("# ckptctl evict", Typed(ADMIN)),
        ("# scontrol update", Typed(ADMIN)),
        ("#!/bin/bash", Typed(ADMIN)),
        ("# ckptctl health", Typed(ADMIN)),
        ("ckptless-doctor --node", Typed(ADMIN, {"/local/scratch": "/tmp", "limit 10": "limit 60"})),
        ("elastic:", Typed(SETTINGS)),
        ("elastic:", Typed(SETTINGS)),
    ),
    "docs/architecture.md": (("node 0", DIAGRAM), ("", DIAGRAM)),
    "docs/api.md": (("", SIGNATURES),) * 31,
    "docs/data.md": (("", PYTHON),),
    "docs/design/batches.md": (("producer", DIAGRAM),),
    "docs/design/recovery.md": (("", DIAGRAM),),
    "docs/design/requeue-memory.md": (("agent, job 4711", DIAGRAM),),
    "docs/design/restoring.md": (("host memory", Not("a formula: `ckptctl plan` has it")),),
    "docs/design/saving.md": (
        ("DIR/step-", By(SAVING)),
        ("", By(SAVING)),
    ),
    "docs/design/slurm-job.md": (("", DIAGRAM),),
    "docs/drills.md": (
        ("ckptctl drill", Typed(ADMIN, DRILLS)),
    ),
    "docs/elastic.md": (
        ("", PYTHON),
        ("", PYTHON),
        ("# policy.yaml", By(POLICY)),
    ),
    "docs/goodput.md": (("ckptctl goodput", Typed(ADMIN)), ("class ", Typed(ADMIN))),
    "docs/hosts.md": (
        ("# hostfile", By(HOSTS, "its names and addresses")),
        ("$ ckptless-run --hosts", By(HOSTS)),
        ("$ export CKPTLESS_JOB_KEY_FILE", By(MEETING)),
        ("$ mpirun", By(MPIRUN)),
        ("restartPolicy:", By(MEETING, "Kubernetes: its variables are set by the test")),
    ),
    "docs/lightning.md": (
        ("pip install", EXTRAS),
        ("import lightning", PARTS),
    ),
    "docs/loggers.md": (
        ("import os", Typed(LOGGERS + "test_mlflow", LOGGED)),
        ("import os", Typed(LOGGERS + "test_tensorboard", LOGGED)),
        ("import os", Typed(LOGGERS + "test_wandb", LOGGED)),
    ),
    "docs/metrics.md": (
        ("metrics:", Typed(SETTINGS, {"10.1.0.7": "0.0.0.0", "10.1.255.0/28": "10.99.0.0/24"})),
        ("metrics:", Typed(SETTINGS, {"/var/lib/prometheus/node-exporter/": "/var/"})),
        ("scrape_configs:", By(SCRAPED)),
    ),
    "docs/packages.md": (
        ("# apt-get install", By(PACKAGES + "test_content_of_a_deb", "apt-get: .ci/run has what it takes")),
        ("$ sha256sum", Typed(PACKAGES + "test_checksums")),
        ("$ gpg", Typed(PACKAGES + "test_checksums_that_are_signed")),
        ("# apt install", By(INSTALLED, NO_SYSTEMD)),
        ("the agent speaks", By("tests/unit/edges/test_service.py::test_an_agent_of_another_version")),
    ),
    "docs/porting.md": (
        ("+import ckptless", PARTS),
        ("import torch", PARTS),
        ("+import ckptless", PARTS),
        ("+import ckptless", PARTS),
    ),
    "docs/quickstart.md": (
        ("$ make demo", By(DEMO)),
        ("import time", Typed(QUICKSTART, {"range(run.epoch, 10)": "range(run.epoch, 6)"})),
        ("$ ckptless-run --local", Typed(QUICKSTART)),
        ("$ export", Typed(QUICKSTART)),
        ("$ export", Typed(QUICKSTART)),
        ("2026-11-27 12:30", Typed(QUICKSTART)),
        ("$ kill", Typed(QUICKSTART)),
        ("generation  rung", Typed(QUICKSTART)),
        ("$ ckptless-run --local --tier 1", Typed(BATCH, {"--nodes 4": "--nodes 2"})),
        ("$ python -m ckptless.doctor", Typed(TUTORIALS + "test_the_doctor_of_the_quickstart")),
        ("try/", Typed(QUICKSTART)),
    ),
    "docs/recipes/index.md": (
        ("$ ckptless-run --rehearse", By("tests/local/test_recipes.py::test_a_recipe_is_rehearsed")),
    ),
    "docs/rehearsal.md": (("ckptless-run --rehearse", By(REHEARSED)), ("rehearsal: 8 steps", By(REHEARSED))),
    "docs/slurm.md": (
        ("#!/bin/bash", Typed(BATCH, {"--nodes=5": "--nodes=2"})),
        ("#SBATCH --nodes=12", Typed(BATCH, {"=12": "=2", "min-nodes=4,step=4": "min-nodes=1,step=1"})),
        ("#SBATCH --nodes=8", Typed(BATCH, {"--nodes=8": "--nodes=1"})),
        ("ckptless-4711/", Typed(BATCH)),
    ),
    "docs/torchtitan.md": (
        ("pip install", EXTRAS),
        ("-torchrun", By("tests/local/test_recipes.py::test_torchtitans_recipe_is_rehearsed", "torchrun")),
        ("+import ckptless", PARTS),
    ),
    "docs/transformers.md": (("pip install", EXTRAS), ("+import ckptless", PARTS)),
    "docs/tutorials/elastic.md": (
        ("import sys", Typed(ELASTIC)),
        ("$ ckptless-run", Typed(ELASTIC, {"train.py 40": "train.py 25"})),
        ("$ ckptctl", Typed(ELASTIC)),
        ("[rank 0]", Typed(ELASTIC)),
        ("$ ckptctl", Typed(ELASTIC)),
        ("$ ckptctl", Typed(ELASTIC)),
        ("[ckptless]", Typed(ELASTIC)),
    ),
    "docs/tutorials/first-job.md": (
        ("import sys", Typed(FIRST, {"step % 50": "step % 5"})),
        ("$ ckptless-run", Typed(FIRST, {"train.py 600": "train.py 400"})),
        ("$ ckptctl", Typed(FIRST)),
        ("$ kill", Typed(FIRST)),
        ("[rank 0]", Typed(FIRST)),
        ("#!/bin/bash", Typed(SLURM_JOB)),
        ("$ sbatch", Typed(SLURM_JOB)),
    ),
    "docs/tutorials/fsdp2.md": (
        ("import sys", Typed(SHARDED, {"step % 50": "step % 5"})),
        ("$ ckptless-run", Typed(SHARDED, {"train.py 600": "train.py 400"})),
        ("$ ckptctl", Typed(SHARDED)),
        ("$ ckptctl", Typed(SHARDED)),
        ("[rank 0]", Typed(SHARDED)),
        ("$ ckptctl", Typed(SHARDED)),
    ),
    "docs/tutorials/lightning.md": (
        ("import sys", Typed(LIGHTNING)),
        ("$ python plain.py", Typed(LIGHTNING)),
        ("@@", Typed(LIGHTNING)),
        ("$ ckptless-run", Typed(LIGHTNING, {"train.py 40": "train.py 6"})),
        ("$ ckptctl", Typed(LIGHTNING)),
        ("[rank 0]", Typed(LIGHTNING)),
        ("$ ckptctl", Typed(LIGHTNING)),
    ),
    "docs/tutorials/your-script.md": (
        ("import sys", Typed(SAME)),
        ("$ torchrun", Typed(SAME)),
        ("@@", Typed(SAME)),
        ("$ ckptless-run", Typed(SAME)),
        ("$ ckptless-run --rehearse", Typed(TUTORIALS + "test_the_changed_script_is_rehearsed")),
    ),
}  # fmt: skip
