"""`ckptless-run --rehearse` names what a script has forgotten, and has nothing to say of sound ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .localrun import HERE, LAUNCHER

DEADLINE_S = 200.0
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

FORGETS = HERE / "forgets.py"
# What is forgotten, and how it is named; what no later step depends on changes no loss.
NAMED = {
    "counter": "the global counter of forgets.py: 5 instead of 3, from step 3 on, on ranks 0, 1",
    "dict": "the global cache of forgets.py['3']",
    "closure": "the local before of train() in forgets.py.losses[1]",
    "file": "the local before of train() in forgets.py.words: position 1 instead of position 3",
    "generator": "the local before of train() in forgets.py.own: another value",
    "numpy": "the local before of train() in forgets.py.__self__: another value",
    "random": "the local before of train() in forgets.py.__self__: another value",
    "sampler": "sampler.generator: another value",
    "optimizer": "the global Decaying of forgets.py.shared['scale']",
    "ema": "the local average of train() in forgets.py[0]: another value",
    "local": "the local total of train() in forgets.py",
}
NO_LOSS = ("ema", "local")
# One of each way; the others are `slow`.
FEW = ("counter", "ema")
SOUND: dict[str, tuple[str, ...]] = {
    "grouped": ("unseen.py", "grouped", "40", "OUT"),
    "fsdp": ("unseen.py", "fsdp-container", "40", "OUT"),
    "handwritten": ("unseen.py", "handwritten", "40", "OUT"),
    "container": ("unseen.py", "container", "40", "OUT"),
    "moving average": ("unseen.py", "ema", "40", "OUT"),
    "extra state": ("unseen.py", "extra", "40", "OUT"),
    "lightning": ("lightning_script.py", "OUT", "40", ""),
    "trainer": ("trainer_script.py", "OUT", "40", ""),
    "accelerate": ("accelerate_script.py", "OUT", "9", ""),
    "gpt": ("../../docs/demo/train_gpt.py", "--steps", "40"),
    "protected": ("protected_script.py", "OUT", "40", ""),
    "compiled": ("compiled_script.py", "OUT", "40", "99"),
}


def rehearse(home: Path, *words: object) -> tuple[int, str]:
    """Return how it ends, and what it says; it leaves no process."""
    command = [sys.executable, *LAUNCHER, "--rehearse", "--state-dir", home / "rehearsal", *words]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TOY_", "CKPTLESS_"))}
    mark = f"CKPTLESS_TEST_REHEARSAL={home}"
    done = subprocess.run(
        list(map(str, command)),
        env={**inherited, "CKPTLESS_TEST_REHEARSAL": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    limit = time.monotonic() + 10
    while (left := _with(mark)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left, f"processes are left: {left}"
    return done.returncode, done.stdout + done.stderr


def _with(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(mark) in (process / "environ").read_bytes():
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return found


@pytest.mark.parametrize("what", [w if w in FEW else pytest.param(w, marks=pytest.mark.slow) for w in NAMED])
def test_what_is_forgotten_is_named(tmp_path: Path, what: str) -> None:
    code, said = rehearse(tmp_path, FORGETS, what)
    assert code == 1, said
    assert NAMED[what] in said
    assert ("rehearsal:   the loss: " in said) is (what not in NO_LOSS), said


def test_a_sound_script_passes(tmp_path: Path) -> None:
    code, said = rehearse(tmp_path, FORGETS, "nothing")
    assert code == 0, said
    assert "all of it is the same, bit for bit" in said
    (tensors, beside) = map(int, re.findall(r"(\d+) (?:tensors and values|of the script)", said))
    assert tensors > 8
    assert beside > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_sound_scripts_pass(tmp_path: Path, name: str) -> None:
    script, *words = (str(tmp_path / "out") if word == "OUT" else word for word in SOUND[name])
    code, said = rehearse(tmp_path, HERE / script, *words)
    assert code == 0, said


@pytest.mark.slow
def test_a_script_that_is_never_the_same_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FORGETS.read_text().replace("torch.manual_seed(1)", "torch.seed()"))
    code, said = rehearse(tmp_path, script, "nothing")
    assert code == 1
    assert "two runs without a fault differ already" in said
    assert "seed everything" in said
    assert "NOT the same" not in said


def test_a_script_that_fails_is_not_rehearsed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import ckptless\n\ndef train(run):\n    raise ValueError('no')\n\nckptless.run(train)\n"
    )
    code, said = rehearse(tmp_path, script)
    assert code == 1
    assert "rehearsal: the run without faults has ended with 1" in said


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rehearsal" / "first").mkdir(parents=True)
    code, said = rehearse(tmp_path, FORGETS, "nothing")
    assert code == 2
    assert "name another --state-dir" in said


@pytest.mark.parametrize("words", [("--nodes", 1), ("--spares", 0), ("--min-nodes", 1), ("--tier", 1)])
def test_what_cannot_be_rehearsed(tmp_path: Path, words: tuple[object, ...]) -> None:
    code, said = rehearse(tmp_path, *words, FORGETS, "nothing")
    assert code == 2
    assert said.count("error:") == 1
