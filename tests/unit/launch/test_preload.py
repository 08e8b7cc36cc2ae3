"""What is imported before the ranks are forked: nothing that a script has not asked for."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ckptless.daemon.agent.ranks.socket_folder import SocketFolder
from ckptless.daemon.launch.main import command, given
from ckptless.daemon.launch.options import local_run
from ckptless.daemon.launch.preload import ALWAYS, FOR_RUN, LOOKS, names_ckptless, preloads

PLAIN, OURS = "import torch\nimport xckptlessx\n", "import torch\n\nimport ckptless\n"


@pytest.mark.parametrize(("text", "more"), [(PLAIN, ()), (OURS, FOR_RUN)])
def test_a_script_a_folder_and_a_module(tmp_path: Path, text: str, more: tuple[str, ...]) -> None:
    (tmp_path / "my/train").mkdir(parents=True)
    for path in (tmp_path / "train.py", tmp_path / "my/fit.py", tmp_path / "my/train/__main__.py"):
        path.write_text(text)
    # What looks through all that is there comes last.
    wanted = (*ALWAYS, *more, "numpy", *([LOOKS] if more else []))
    for argv in (str(tmp_path / "train.py"), str(tmp_path / "my/train")):
        assert preloads((argv, "ckptless"), tmp_path, ("numpy",), module=False) == wanted
    for module in ("train", "my.fit", "my.train"):
        assert preloads((module,), tmp_path, ("numpy",), module=True) == wanted


ENVIRONMENT = [
    "os.environ['HF_HOME'] = 'x'",
    'os.environ["A"]="b"',
    "os.environ.setdefault('A', 'b')",
    "environ.update(A='b')",
    "os.environ |= {}",
    "os.putenv('A', 'b')",
    "sys.path.insert(0, 'x')",
]
READS = ["os.environ['A'] == 'b'", "x = os.environ.get('A')", "my_environ = {}", "# ckptless.lightning"]


@pytest.mark.parametrize(
    "how",
    ["import ckptless.{}", " from ckptless.{} import x", "from ckptless import {}", "import\tckptless.{}"],
)
def test_the_framework_of_an_adapter_that_the_script_imports(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    for name in ("transformers", "lightning", "accelerate", "torchtitan"):
        wanted = (*ALWAYS, *FOR_RUN, f"ckptless.{name}", LOOKS)
        imports = f"import torch\n{how.format(name)}\n"
        for line in READS:
            script.write_text(f"{imports}{line}\n")
            assert preloads((str(script),), tmp_path, (), module=False) == wanted, line
        # What comes before the script's import would come after ours.
        for line in ENVIRONMENT:
            script.write_text(f"{line}\n{imports}")
            assert preloads((str(script),), tmp_path, (), module=False) == (*ALWAYS, *FOR_RUN, LOOKS), line
        script.write_text(imports)
        # The script would get this one.
        (tmp_path / name).with_suffix(".py").touch()
        assert preloads((str(script),), tmp_path, (), module=False) == (*ALWAYS, *FOR_RUN, LOOKS)
        (tmp_path / name).with_suffix(".py").unlink()
        # Of a module it is the working directory that Python looks into first.
        module = tmp_path / "pkg" / "train.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text(imports)
        assert preloads(("pkg.train",), tmp_path, (), module=True) == wanted
        (tmp_path / name).mkdir()
        assert preloads(("pkg.train",), tmp_path, (), module=True) == (*ALWAYS, *FOR_RUN, LOOKS)
        (tmp_path / name).rmdir()
    script.write_text("import ckptless.data\nimport ckptless, lightning\n")
    assert preloads((str(script),), tmp_path, (), module=False) == (*ALWAYS, *FOR_RUN, LOOKS)


def test_a_module_of_ours_that_trains(tmp_path: Path) -> None:
    """Of one that is not there to be read."""
    wanted = (*ALWAYS, *FOR_RUN, "ckptless.torchtitan", "numpy", LOOKS)
    assert preloads(("ckptless.torchtitan", "--module", "x"), tmp_path, ("numpy",), module=True) == wanted
    assert names_ckptless("ckptless.torchtitan", tmp_path, module=True)
    assert not names_ckptless("ckptless.torchtitan", tmp_path, module=False)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert preloads((str(tmp_path / "no.py"),), tmp_path, (), module=False) == ALWAYS
    assert preloads(("torch.nothing",), tmp_path, (), module=True) == ALWAYS


@pytest.mark.parametrize("spares", ["0", "1", "2"])
def test_spares_change_nothing_that_a_rank_computes_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spares: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "train.py"
    script.write_text(OURS)
    words = ["--local", "--nodes=3", f"--spares={spares}", "--state-dir", str(tmp_path / "s"), str(script)]
    options = command.make_context("ckptless-run", words).params
    name, arguments = options.pop("script"), options.pop("script_args")
    run = local_run(name, arguments, given(options), {})
    run._sockets = SocketFolder("preload")
    with contextlib.closing(run._sockets):
        run._prepare()
        configs = [run._agent_config(node) for node in run._nodes]
    assert [config.env["OMP_NUM_THREADS"] for config in configs] == ["1"] * (3 + int(spares))


def test_a_long_command_is_shortened_for_people_and_run_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OURS)
    told = ["x" * 3000, "y" * 3000, "--last=1"]
    words = ["--local", "--nodes=1", "--state-dir", str(tmp_path / "s"), str(script), *told]
    options = command.make_context("ckptless-run", words).params
    name, arguments = options.pop("script"), options.pop("script_args")
    run = local_run(name, arguments, given(options), {})
    assert run._config.argv == (str(script), *told)
    assert run._config.spec.command[-1] == "[... 2 more]"
