"""--elastic-policy: values of the user's own for each size, checked before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.launch.local import LocalRun
from ckptless.daemon.launch.options import local_run
from ckptless.daemon.launch.slurm import SlurmRun
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings import site as site_settings
from ckptless.daemon.settings.agent_config import SharedConfig
from ckptless.daemon.settings.policy import LIMIT, read_policy
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.elastic.policy import of_size
from ckptless.pytorch_hooks.running.standalone import StandaloneRun
from tests.reading import blocks

from .test_slurm_options import options, run

GOOD = """
nodes:
  1: {lr: 0.0003}
  2: {lr: 0.0006, micro_batch: 8, warm: true, name: two, layers: [1, {a: 2.5}]}
  4: {}
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site_settings, "DEFAULT_FILE", tmp_path / "no-such.yaml")
    Path("train.py").touch()
    return tmp_path


def policy(text: str) -> Path:
    path = Path("policy.yaml")
    path.write_text(text)
    path.chmod(0o644)
    return path


def local(*words: str) -> SharedConfig:
    found = local_run(*options("--local", "--elastic-policy", "policy.yaml", *words, "train.py"), {})
    assert isinstance(found, LocalRun)
    return found._config


def test_the_policy_of_the_page() -> None:
    (text,) = (text for text in blocks("docs/elastic.md") if text.startswith("# policy.yaml"))
    policy(text)
    found = local("--nodes", "4", "--sizes", "2:4").policy
    assert json.loads(found)["2"] == {"lr": 0.0006, "micro_batch": 8}


def test_entries_of_the_jobs_sizes_alone() -> None:
    policy(GOOD)
    assert sorted(json.loads(local("--nodes", "4", "--sizes", "2:4").policy)) == ["2", "4"]
    assert json.loads(local("--nodes", "1").policy) == {"1": {"lr": 0.0003}}
    found = run("--elastic-policy", "policy.yaml", "train.py")
    assert isinstance(found, SlurmRun)
    assert json.loads(found.config.policy) == {"4": {}}


def test_a_size_without_an_entry_is_named() -> None:
    policy(GOOD)
    with pytest.raises(
        UsageError, match=r"policy.yaml, line 2: it has no entry for 3 nodes, on which .*add 3:"
    ):
        local("--nodes", "4", "--min-nodes", "2")


def test_not_without_recovery() -> None:
    policy(GOOD)
    with pytest.raises(UsageError, match="--elastic-policy is for runs that recover"):
        local("--nodes", "1", "--tier", "1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it must have nodes:"),
        ("nodes: 3", "line 1: it must have nodes:"),
        ("node:\n  1: {}", "line 1: there is no key node: a policy has nodes alone"),
        (GOOD + "sizes: 4", "there is no key sizes"),
        ("nodes:\n  0: {}", "line 2: 0 is no number of nodes"),
        ("nodes:\n  yes: {}", "True is no number of nodes"),
        ("nodes:\n  '1': {}", "line 2: 1 is no number of nodes"),
        ("nodes:\n  1: 0.1", "line 2: the entry for 1 must be names with values"),
        (
            "nodes:\n  1:\n    lr: 3e-4",
            "line 3: nodes.1.lr is the text '3e-4' for YAML: write .* as in 3.0e-4",
        ),
        ("nodes:\n  1:\n    lr: 1.0e6", "write a number with a dot and a sign"),
        ("nodes:\n  1:\n    lr:", "line 3: nodes.1.lr must be a number, a string"),
        ("nodes:\n  1:\n    lr: .nan", "nodes.1.lr must be a number"),
        ("nodes:\n  1:\n    lr: 2026-01-01", "nodes.1.lr must be a number"),
        ("nodes:\n  1:\n    n: 9999999999999999999", "nodes.1.n must be a number"),
        ("nodes:\n  1:\n    lr: [1, [null]]", "nodes.1.lr must be a number"),
        ("nodes:\n  1:\n    3: 4", "nodes.1 has the name 3, which is no text"),
        ("nodes:\n  1: {}\n  1: {}", "line 3: nodes.1 stands here again"),
        ("nodes:\n  1: {a: [[[[[[[1]]]]]]]}", "a policy has 6 levels at most"),
        ("nodes:\n  1: &a {a: *a}", "a policy has 6 levels at most"),
        ("nodes:\n  1: {a: [" + "1, " * 5000 + "1]}", "a policy has 4096 values at most"),
        ("nodes:\n  1: {a: " + "x" * LIMIT + "}", "take 16398 bytes, of 16384"),
        ("nodes: [", "this is no YAML"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read_policy(policy(text), (1,))
    assert "\n" not in str(caught.value)


def test_no_file() -> None:
    with pytest.raises(UsageError, match=r"cannot read policy.yaml: No such file"):
        local()


def test_a_rank_has_the_entry_of_its_size_and_cannot_change_it() -> None:
    text = read_policy(policy(GOOD), (1, 2, 4))
    found: Any = of_size(text, 2)
    assert found["lr"] == 0.0006
    assert (found["micro_batch"], found["warm"], found["name"]) == (8, True, "two")
    assert found["layers"] == (1, {"a": 2.5})
    with pytest.raises(TypeError):
        found["lr"] = 1
    with pytest.raises(TypeError):
        found["layers"][1]["a"] = 1
    assert of_size("", 3) == {}
    with pytest.raises(UsageError, match="has no entry for 3 nodes, but for 1, 2, 4"):
        of_size(text, 3)


def test_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.POLICY, raising=False)
    assert StandaloneRun().policy == {}
    monkeypatch.setenv(env.POLICY, json.dumps({"2": {"lr": 2}}))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert StandaloneRun().policy == {"lr": 2}
    monkeypatch.setenv(env.POLICY, "no JSON")
    with pytest.raises(UsageError, match="CKPTLESS_POLICY is no JSON"):
        assert StandaloneRun().policy
