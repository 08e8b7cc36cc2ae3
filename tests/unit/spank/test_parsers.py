"""What the plugin makes of SPEC, of command lines and of batch scripts."""

import os
from pathlib import Path

import pytest

from .native import Parsers

SIXTEEN = ":".join(str(65521 + n) for n in range(16))
LONGEST = (
    "spares=1024,min-nodes=65536,max-nodes=65536,step=65536,scale-up-after=86400,"
    "scale-timeout=86400,graceful=86400,draw-in=1024,"
    "draw-in-patience=86400,replicas=64,max-stall=86400,"
    f"sizes={SIXTEEN},bandwidth=000000000000500.0MiB/s,interface={'i' * 159}"
)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("NULL", "auto"),
        ("", "auto"),
        ("(null)", "auto"),
        ("auto", "auto"),
        ("off", "off"),
        ("spares=1", "spares=1"),
        ("spares=0", "spares=0"),
        ("spares=1024,replicas=64", "spares=1024,replicas=64"),
        ("replicas=3,spares=2", "spares=2,replicas=3"),
        ("max-stall=90", "max-stall=90"),
        ("max-stall=90s", "max-stall=90"),
        ("max-stall=2m", "max-stall=120"),
        ("spares=007", "spares=7"),
        ("interface=ib0,bandwidth=1.5GiB/s", "bandwidth=1.5GiB/s,interface=ib0"),
        ("interface=ib0+10.1.0.0/16", "interface=ib0+10.1.0.0/16"),
        ("bandwidth=none,interface=10.1.0.0/16", "bandwidth=none,interface=10.1.0.0/16"),
        ("bandwidth=1000GB/s,interface=fd00::/8", "bandwidth=1000GB/s,interface=fd00::/8"),
        ("step=2,max-nodes=8,min-nodes=4", "min-nodes=4,max-nodes=8,step=2"),
        ("sizes=4:8:12,spares=4", "spares=4,sizes=4:8:12"),
        ("scale-up-after=2m,min-nodes=65536", "min-nodes=65536,scale-up-after=120"),
        ("scale-up-after=0s", "scale-up-after=0"),
        ("graceful=90s,scale-timeout=2m", "scale-timeout=120,graceful=90"),
        ("draw-in=0", "draw-in=0"),
        ("draw-in-patience=5m,max-nodes=8,draw-in=4", "max-nodes=8,draw-in=4,draw-in-patience=300"),
        ("draw-in-patience=0", "draw-in-patience=0"),  # ckptless-run's own options may say the rest
        (LONGEST, LONGEST),
    ],
)
def test_spec_is_brought_into_one_form(parsers: Parsers, given: str, written: str) -> None:
    assert parsers.ask("spec", given) == ["ok", written]


NO_SIZES = (
    *("", ":", "4:", ":4", "4::8", "0", "8:4", "4:65537", "000001", "4-8", "x"),
    f"1:{SIXTEEN}",
    ":".join(map(str, range(1, 18))),
)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("on", '"on" is not known; say auto, off, or a list'),
        ("1", '"1" is not known'),
        ("AUTO", "not known"),
        ("auto,spares=1", '"auto" is not known'),
        ("spare=1", '"spare=1" is not known'),
        ("spares", '"spares" is not valid; spares wants a number from 0 to 1024'),
        ("spares=", "not valid"),
        ("spares=-1", "not valid"),
        ("spares=1025", "not valid"),
        ("spares=99999999999999999999", "not valid"),
        ("spares=1x", "not valid"),
        ("spares= 1", "not valid"),
        ("spares=1,", '"" is not known'),
        (",", '"" is not known'),
        ("spares=1,spares=2", "spares is given twice; say it once"),
        ("spares=0,spares=0", "given twice"),
        ("replicas=0", "replicas wants a number from 1 to 64"),
        ("max-stall=4", "max-stall wants 5s to 86400s, or minutes as in 2m"),
        ("max-stall=86401", "not valid"),
        ("max-stall=9999999m", "not valid"),
        ("max-stall=2h", "not valid"),
        ("max-stall=s", "not valid"),
        ("bandwidth=500", "bandwidth wants 1MB/s to 1000GB/s, as in 500MB/s, or none"),
        ("bandwidth=", "not valid"),
        ("bandwidth=MB/s", "not valid"),
        ("bandwidth=1.MB/s", "not valid"),
        ("bandwidth=500mb/s", "not valid"),
        ("bandwidth=500MB/sx", "not valid"),
        ("bandwidth=999kB/s", "not valid"),
        ("bandwidth=1001GB/s", "not valid"),
        ("bandwidth=1MB/s,bandwidth=1MB/s", "bandwidth is given twice"),
        ("interface=", "interface wants interfaces or networks"),
        ("interface=-x", "not valid"),
        ("interface=ib0;ls", "not valid"),
        (f"interface={'i' * 160}", "not valid"),
        ("interface=a,interface=a", "interface is given twice"),
        ("min-nodes=0", "min-nodes wants a number from 1 to 65536"),
        ("max-nodes=65537", "max-nodes wants a number from 1 to 65536"),
        ("step=0", "step wants a number from 1 to 65536"),
        ("step=", "not valid"),
        ("min-nodes=1,min-nodes=1", "min-nodes is given twice"),
        ("scale-timeout=0", "scale-timeout wants 1s to 86400s, or minutes as in 2m"),
        ("graceful=x", "graceful wants 1s to 86400s, or minutes as in 2m"),
        ("scale-up-after=86401", "scale-up-after wants 0s to 86400s, or minutes as in 2m"),
        ("draw-in=1025", "draw-in wants a number from 0 to 1024"),
        ("draw-in=", "not valid"),
        ("draw-in=1,draw-in=1", "draw-in is given twice"),
        ("draw-in-patience=86401", "draw-in-patience wants 0s to 86400s, or minutes as in 2m"),
        ("draw-in-patience=1,draw-in-patience=1", "draw-in-patience is given twice"),
        ("draw=1", '"draw=1" is not known'),
        ("sizes=4:4", "sizes wants up to 16 numbers from 1 to 65536 that ascend, such as 4:8:12"),
        *((f"sizes={text}", "not valid") for text in NO_SIZES),
        ("sizes=4,sizes=4", "sizes is given twice"),
        ("profile=a", '"profile=a" is not known'),
        ("\x1b[31mred", '"?[31mred" is not known'),
        ("x" * 5000, f'"{"x" * 48}" is not known'),
    ],
)
def test_a_bad_spec_is_refused_with_one_sentence(parsers: Parsers, given: str, says: str) -> None:
    verdict, sentence = parsers.ask("spec", given)
    assert verdict == "refused"
    assert says in sentence


@pytest.mark.parametrize(
    ("spec", "nodes", "says"),
    [
        ("auto", 1, ""),
        ("off", 1, ""),
        ("spares=1", 2, ""),
        ("spares=9", 0, ""),  # the number of nodes is not known
        ("spares=1", -1, ""),
        ("spares=1", 1, "with 1 spare, a job of 1 node has none left to train on"),
        ("spares=4", 3, "with 4 spares, a job of 3 nodes has none left"),
    ],
)
def test_a_node_is_left_to_train_on(parsers: Parsers, spec: str, nodes: int, says: str) -> None:
    verdict, *sentence = parsers.ask("fits", spec, str(nodes))
    assert verdict == ("refused" if says else "ok")
    assert says in "".join(sentence)


@pytest.mark.parametrize(
    ("spec", "nodes", "says"),
    [
        ("sizes=2:3", 4, ""),  # it may get 3
        ("min-nodes=9", 4, ""),
        ("sizes=2:3,spares=4", 4, "has none left to train on"),
        ("sizes=2:3,step=1", 4, "say it in one of these ways"),
        ("min-nodes=3,max-nodes=2", 0, "min-nodes=3 is more than max-nodes=2"),
        ("max-nodes=99,draw-in=1", 4, ""),
    ],
)
def test_sizes_where_only_the_most_nodes_are_known(
    parsers: Parsers, spec: str, nodes: int, says: str
) -> None:
    verdict, *sentence = parsers.ask("fits", spec, str(nodes), "at most")
    assert verdict == ("refused" if says else "ok")
    assert says in "".join(sentence)


def said(parsers: Parsers, *words: str) -> dict[str, str]:
    names = ("spec", "no_kill", "program", "nodes", "het", "fewer", "partition", "array")
    return dict(zip(names, parsers.ask(*words), strict=True))


NOTHING = {
    "spec": "-",
    "no_kill": "-",
    "program": "-",
    "nodes": "0",
    "het": "0",
    "fewer": "0",
    "partition": "-",
    "array": "0",
}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sbatch", {}),
        ("sbatch job.sh --ckptless", {"program": "job.sh"}),
        ("sbatch --ckptless job.sh", {"spec": "", "program": "job.sh"}),
        ("sbatch --ckptless=spares=1 -N4 job.sh", {"spec": "spares=1", "nodes": "4", "program": "job.sh"}),
        ("sbatch --ckptless=off --ckptless=auto job.sh", {"spec": "auto", "program": "job.sh"}),
        ("sbatch -N 4 job.sh --ckptless", {"nodes": "4", "program": "job.sh"}),
        ("sbatch -HQN 4 job.sh --ckptless", {"nodes": "4", "program": "job.sh"}),
        (
            "sbatch --nodes 2-4 --ckptless job.sh",
            {"nodes": "4", "fewer": "1", "spec": "", "program": "job.sh"},
        ),
        ("sbatch --nodes=2-4 job.sh", {"nodes": "4", "fewer": "1", "program": "job.sh"}),
        ("sbatch --nodes=2-4 -N5 job.sh", {"nodes": "5", "program": "job.sh"}),
        ("sbatch -N4-4 job.sh", {"nodes": "4", "program": "job.sh"}),
        ("sbatch -N2- job.sh", {"nodes": "-1", "program": "job.sh"}),
        ("sbatch -p gpu job.sh", {"partition": "gpu", "program": "job.sh"}),
        ("sbatch -HpA,B job.sh", {"partition": "A,B", "program": "job.sh"}),
        ("sbatch --part=a --partition b job.sh", {"partition": "b", "program": "job.sh"}),
        ("sbatch -a 1-3 job.sh -p", {"array": "1", "program": "job.sh"}),
        ("sbatch -Ha1-3%2 job.sh", {"array": "1", "program": "job.sh"}),
        ("sbatch --array=1,2 job.sh", {"array": "1", "program": "job.sh"}),
        ("sbatch --ar 1 job.sh", {"array": "1", "program": "job.sh"}),
        ("sbatch --account a job.sh --array=1", {"program": "job.sh"}),
        ("sbatch --parsable job.sh", {"program": "job.sh"}),
        ("sbatch -N 1k job.sh", {"nodes": "-1", "program": "job.sh"}),
        ("sbatch -N 1,4 job.sh", {"nodes": "-1", "program": "job.sh"}),
        ("sbatch --exclusive job.sh --ckptless", {"program": "job.sh"}),
        ("sbatch --requ job.sh --ckptless", {"program": "job.sh"}),
        ("sbatch -W job.sh --ckptless", {"program": "job.sh"}),
        ("sbatch --wait job.sh --ckptless", {"program": "job.sh"}),
        ("srun -W 30 prog --ckptless", {"program": "prog"}),
        ("srun --wait 30 prog --ckptless", {"program": "prog"}),
        ("srun -n8 -- prog --ckptless", {"program": "prog"}),
        ("srun -lu -w node01 --pty bash -c --ckptless", {"program": "bash"}),
        ("srun -I30 prog", {"program": "prog"}),
        ("srun --others-flag --ckptless prog", {"spec": "", "program": "prog"}),
        ("salloc -N2 --ckptless=spares=1", {"nodes": "2", "spec": "spares=1"}),
        ("sbatch -k job.sh", {"no_kill": "", "program": "job.sh"}),
        ("sbatch -koff job.sh", {"no_kill": "off", "program": "job.sh"}),
        ("sbatch --no-kill=off job.sh", {"no_kill": "off", "program": "job.sh"}),
        ("sbatch --no-kill job.sh", {"no_kill": "", "program": "job.sh"}),
        ("sbatch --ckptless -N2 : -N1 job.sh", {"spec": "", "nodes": "1", "het": "1", "program": "job.sh"}),
        ("sbatch -N2 job.sh : x", {"nodes": "2", "program": "job.sh"}),
        ("sbatch hetjob", {"program": "hetjob"}),
        ("srun -N1 a b : -N1 c", {"nodes": "1", "het": "1", "program": "a"}),
    ],
)
def test_options_end_where_the_program_begins(parsers: Parsers, line: str, expected: dict[str, str]) -> None:
    assert said(parsers, "cmdline", *line.split()) == NOTHING | expected


def test_sbatch_lines_of_a_script(parsers: Parsers, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        "#SBATCH -N4   # --ckptless=off\n"
        "\n"
        "   \t\n"
        "# a comment\n"
        "#SBATCH\t--job-name=\"a b\" --ckptless='spares=1'\n"
        "##SBATCH --nodes=9\n"
        "#SBATCHX --nodes=9\n"
        "#SBATCH --no-kill=o\\ff --array=0-3\r\n"
        "echo hello\n"
        "#SBATCH --nodes=9\n"
    )
    assert said(parsers, "script", str(script)) == NOTHING | {
        "spec": "spares=1",
        "nodes": "4",
        "no_kill": "off",
        "array": "1",
    }


@pytest.mark.parametrize(("word", "het"), [("hetjob", "1"), ("packjob", "1"), ("--comment=hetjob", "0")])
def test_components_in_a_script(parsers: Parsers, tmp_path: Path, word: str, het: str) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -N2\n#SBATCH {word}\n#SBATCH --ckptless\ntrue\n")
    assert said(parsers, "script", str(script)) == NOTHING | {"spec": "", "nodes": "2", "het": het}


def test_what_can_be_read_only_once_is_left_alone(parsers: Parsers, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, tmp_path / "none", Path("/dev/stdin")):
        assert parsers.ask("script", str(path)) == ["unreadable"]


def test_variables_are_those_that_were_given(parsers: Parsers) -> None:
    assert parsers.ask("variables", "auto") == ["CKPTLESS=auto", "CKPTLESS_SPEC=auto", ""]
    spec = "spares=1,replicas=2,max-stall=120,bandwidth=2GB/s,interface=ib0"
    given = "interface=ib0,max-stall=2m,replicas=2,bandwidth=2GB/s,spares=1"
    assert parsers.ask("variables", given) == [
        f"CKPTLESS={spec}",
        f"CKPTLESS_SPEC={spec}",
        "CKPTLESS_SPARES=1",
        "CKPTLESS_REPLICAS=2",
        "CKPTLESS_MAX_STALL=120",
        "CKPTLESS_BANDWIDTH=2GB/s",
        "CKPTLESS_INTERFACE=ib0",
        "",
    ]
    spec = "min-nodes=2,max-nodes=8,step=2,scale-up-after=60,scale-timeout=30,graceful=5"
    assert parsers.ask("variables", spec) == [
        f"CKPTLESS={spec}",
        f"CKPTLESS_SPEC={spec}",
        "CKPTLESS_MIN_NODES=2",
        "CKPTLESS_MAX_NODES=8",
        "CKPTLESS_STEP=2",
        "CKPTLESS_SCALE_UP_AFTER=60",
        "CKPTLESS_SCALE_TIMEOUT=30",
        "CKPTLESS_GRACEFUL=5",
        "",
    ]
    assert parsers.ask("variables", "draw-in-patience=1m,draw-in=2")[2:] == [
        "CKPTLESS_DRAW_IN=2",
        "CKPTLESS_DRAW_IN_PATIENCE=60",
        "",
    ]
    assert parsers.ask("variables", "sizes=4:8")[2:] == ["CKPTLESS_SIZES=4:8", ""]


def test_arguments_in_plugstack_conf(parsers: Parsers) -> None:
    assert parsers.ask("config") == ["ok", "/run/ckptless/ckptlessd.sock", "ckptless-run", "-"]
    assert parsers.ask("config", "launcher=/opt/run", "socket=/x") == ["ok", "/x", "/opt/run", "-"]
    assert parsers.ask("config", "elastic=a,b", "socket=/x") == ["ok", "/x", "ckptless-run", "a,b"]
    assert parsers.ask("config", "socket=/x", "sockets=/y") == ["refused", "sockets=/y"]
    assert parsers.ask("config", "socket=") == ["refused", "socket="]
