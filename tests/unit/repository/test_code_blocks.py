"""What pages show in code: commands and options that there are, settings that load, Python that parses."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

import ckptless
from ckptless.daemon.ckptctl.main import ckptctl
from ckptless.daemon.ckptlessd.main import command as ckptlessd
from ckptless.daemon.launch.main import command as ckptless_run
from ckptless.daemon.settings.options import KEYS
from ckptless.daemon.settings.site import load_settings
from ckptless.doctor.__main__ import command as ckptless_doctor
from tests import reading
from tests.blocks import TABLE, By, Not

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
PROGRAMS: dict[str, click.Command] = {
    "ckptctl": ckptctl,
    "ckptlessd": ckptlessd,
    "ckptless-run": ckptless_run,
    "ckptless-doctor": ckptless_doctor,
}
# A line of an sbatch script or of a shell that begins one of our programs.
LINE = re.compile(rf"(?:^|[\s\"'/])({'|'.join(PROGRAMS)})(?=\s|$)(.*)")
SECTIONS = {key.partition(".")[0] for key in KEYS}


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, (_indent, language, text) in enumerate(BLOCK.findall(page.read_text())):
            if language in languages:
                yield f"{page.relative_to(ROOT)}, block {number + 1}", textwrap.dedent(text)


def helped(command: click.Command) -> Iterator[str]:
    """The examples that a command's help has, and those of the commands below it."""
    yield from (line for line in (command.help or "").splitlines() if re.match(r" {4}ckpt", line))
    for below in below_of(command).values():
        yield from helped(below)


def below_of(command: click.Command) -> dict[str, click.Command]:
    """The commands of a group; nothing of one that is none."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    found = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return {name: one for name, one in found.items() if one is not None}


def commands() -> Iterator[tuple[str, str, list[str]]]:
    """Every command line of ours that a page shows: where, which program, its words."""
    lines = [
        (where, line) for where, text in blocks("bash", "console", "sh", "") for line in text.splitlines()
    ]
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text())
        lines += [(str(page.relative_to(ROOT)), code) for code in INLINE.findall(prose)]
    lines += [(f"{name} --help", line) for name, one in PROGRAMS.items() for line in helped(one)]
    for where, line in lines:
        found = LINE.search(line)
        # What a program prints is no command; its name stands there, too.
        if found is None or re.match(r"\d\d:\d\d:\d\d", line):
            continue
        try:
            words = shlex.split(found[2], comments=True)
        except ValueError:
            # The rest of it is on the next line, or in another's quotes.
            words = found[2].replace('"', " ").replace("'", " ").split()
        yield where, found[1], words


def unknown(program: str, words: list[str]) -> str | None:
    """What of a command line there is not; options after a script are the script's."""
    command = PROGRAMS[program]
    known = _options(command)
    while words and words[0] in _taking(command):
        words = words[2:]
    while isinstance(command, click.Group) and words and not words[0].startswith(("-", "|", "<", ">", "[")):
        if words[0] not in (below := below_of(command)):
            return words[0]
        command, words = below[words[0]], words[1:]
        known |= _options(command)
    for word in words:
        if program == "ckptless-run" and word.endswith((".py", "...")):
            break
        if word in ("|", "&&", ";", "||", ">", "&"):
            break
        # Of alternatives each begins with hyphens.
        if (
            "|" not in word
            and re.match(r"--?[a-z]", word)
            and word.partition("=")[0].rstrip(",.;") not in known
        ):
            return word
    return None


def _taking(command: click.Command) -> set[str]:
    """The options of a group that take a word, and may stand before the name of a command."""
    if not isinstance(command, click.Group):
        return set()
    options = [one for one in command.params if isinstance(one, click.Option) and not one.is_flag]
    return {name for one in options for name in one.opts}


def _options(command: click.Command) -> set[str]:
    found = {name for one in command.params if isinstance(one, click.Option) for name in one.opts}
    found |= {name for one in command.params if isinstance(one, click.Option) for name in one.secondary_opts}
    return found | {"--help"}


def test_every_command_line_has_commands_and_options_that_there_are() -> None:
    lines = [*commands()]
    assert len(lines) > 100
    wrong = {
        f"{where}: {program} {' '.join(words)}": bad
        for where, program, words in lines
        if (bad := unknown(program, words))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("ckptctl goodput 4711 --price 2", None),
        ("ckptctl goodput 4711 --prize 2", "--prize"),
        ("ckptctl godput", "godput"),
        ("ckptctl --state-dir try godput", "godput"),
        ("ckptctl --state-dir try resize el --nodes 2", None),
        ("ckptless-run --local --nodez 4 train.py", "--nodez"),
        ("ckptless-run --local train.py --lr 3", None),
    ],
)
def test_a_stale_line_is_found(line: str, bad: str | None) -> None:
    found = LINE.search(line)
    assert found is not None
    assert unknown(found[1], shlex.split(found[2])) == bad


def test_settings_load(tmp_path: Path) -> None:
    ours = [(where, text) for where, text in blocks("yaml") if text.partition(":")[0] in SECTIONS]
    assert len(ours) >= 3
    for where, text in ours:
        file = tmp_path / "ckptless.yaml"
        file.write_text(f"version: 1\n{text}" if "version:" not in text else text)
        assert load_settings(file).given, where


def test_python_parses_and_names_what_there_is() -> None:
    found = [*blocks("python")]
    assert found
    for where, text in found:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "ckptless":
                    assert hasattr(ckptless, node.attr), f"{where}: ckptless.{node.attr}"
                if node.value.id == "run":
                    assert hasattr(ckptless.Run, node.attr), f"{where}: run.{node.attr}"


# ------------------------------------------------------------------------------ which test runs what


def test_every_block_has_a_row() -> None:
    """Whoever adds a block says in tests/blocks.py which test runs it."""
    names = {str(page.relative_to(ROOT)): reading.blocks(str(page.relative_to(ROOT))) for page in PAGES}
    there = {name: texts for name, texts in names.items() if texts}
    assert there.keys() == TABLE.keys()
    for name, texts in there.items():
        assert len(texts) == len(TABLE[name]), f"{name}: {len(texts)} blocks, {len(TABLE[name])} rows"
        for number, (text, (begin, _)) in enumerate(zip(texts, TABLE[name], strict=True), 1):
            assert text.lstrip().startswith(begin), f"{name}, block {number} is another one"


def test_every_row_names_a_test_or_a_reason() -> None:
    gate = (ROOT / ".ci/run").read_text()
    for name, rows in TABLE.items():
        for number, (_, how) in enumerate(rows, 1):
            where = f"{name}, block {number}"
            if isinstance(how, Not):
                assert how.reason, where
                continue
            file, _, test = how.test.partition("::")
            if file.startswith(".ci/run: "):
                assert file.removeprefix(".ci/run: ") in gate, where
                continue
            text = (ROOT / file).read_text()
            assert f"\ndef {test}(" in text or f"\nasync def {test}(" in text, f"{where}: no {how.test}"
            assert isinstance(how, By) or "Reading(" in text, f"{where}: {how.test} types no blocks"


def test_what_pages_install_is_installed_by_setup() -> None:
    """`pip install 'ckptless[lightning]'`: what that asks for is here, in the versions that it asks for."""
    found = [
        extra for _, text in blocks("bash", "console") for extra in re.findall(r"'ckptless\[(\w+)\]'", text)
    ]
    assert len(found) == 4
    for extra in found:
        (needed, *more) = wants(extra)
        for one in (needed, *more):
            assert one.specifier.contains(metadata.version(one.name)), one


def wants(extra: str) -> list[Requirement]:
    """What an extra adds to the package itself."""
    all_of = map(Requirement, metadata.requires("ckptless") or [])
    return [one for one in all_of if one.marker is not None and one.marker.evaluate({"extra": extra})]


def test_diffs_name_what_there_is() -> None:
    """Adapters are read and not imported, which takes seconds."""
    found = [
        (where, *name.split("."))
        for where, text in blocks("diff")
        for name in re.findall(r"ckptless\.([\w.]+)", text)
    ]
    assert len(found) > 10
    for where, name, *below in found:
        adapter = ROOT / "pytorch_hooks" / "adapters" / f"{name}.py"
        assert hasattr(ckptless, name) or adapter.exists(), f"{where}: ckptless.{name}"
        for one in below:
            assert re.search(rf"^def {one}\(", adapter.read_text(), re.MULTILINE), f"{where}: {name}.{one}"


@pytest.mark.parametrize(
    ("shown", "said", "missing"),
    [
        ("job el: running, step 12", "job el: running, step 7", False),
        ("job el: running, step 12", "job el: done, step 7", True),
        ("generation 2 trains, 0.5 s", "generation 2 trains, 30 ms", False),
        ("generation 2 trains, 0.5 s", "generation 3 trains, 0.5 s", True),
        ("started 12 nodes, of ...", "started 7 nodes, of which one waits", False),
        ("...", "", False),
        (
            "held: step 5 can be restored, the newest",
            "held: step 9 can be restored, 1 behind the newest",
            False,
        ),
        ("Take it? [y/N]: y\nit is taken", "Take it? [y/N]: it is taken", False),
    ],
)
def test_what_a_page_shows_is_looked_for(shown: str, said: str, *, missing: bool) -> None:
    assert bool(reading.lacks(shown, said)) == missing


def test_a_command_goes_on_over_lines() -> None:
    assert reading.commands('$ one "\ntwo"\nsaid\n# three \\\nfour\n') == [
        ('one "\ntwo"', "said"),
        ("three \\\nfour", ""),
    ]
