"""The agents' output on the launcher's console: whole lines, in the order of each file, nothing twice."""

from __future__ import annotations

import io
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptless.daemon.launch.console import MAX_READS, READ_NBYTES, Follower


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_whole_lines_only_until_the_last_time(tmp_path: Path) -> None:
    path, sink = tmp_path / "a", io.BytesIO()
    follower = Follower([path], sink)
    shown = []
    for data in (b"one\ntw", b"o", b"\nthree\nfo", b""):
        append(path, data)
        follower.pass_on()
        shown.append(sink.getvalue())
    assert shown == [b"one\n", b"one\n", b"one\ntwo\nthree\n", b"one\ntwo\nthree\n"]
    follower.pass_on(last=True)
    assert sink.getvalue() == b"one\ntwo\nthree\nfo"
    follower.pass_on(last=True)
    assert sink.getvalue() == b"one\ntwo\nthree\nfo"


def test_files_that_come_later_or_never(tmp_path: Path) -> None:
    sink = io.BytesIO()
    files = [tmp_path / "never", tmp_path / "later", tmp_path / "folder" / "in it"]
    follower = Follower(files, sink)
    follower.pass_on()
    assert sink.getvalue() == b""
    append(files[1], b"here\n")
    files[2].parent.mkdir()
    append(files[2], b"too\n")
    follower.pass_on()
    follower.pass_on(last=True)
    assert sink.getvalue() == b"here\ntoo\n"


def test_a_folder_in_the_place_of_a_file_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    sink = io.BytesIO()
    Follower([tmp_path / "a"], sink).pass_on(last=True)
    assert sink.getvalue() == b""


def test_two_files_do_not_mix_within_a_line(tmp_path: Path) -> None:
    files, sink = [tmp_path / "a", tmp_path / "b"], io.BytesIO()
    follower = Follower(files, sink)
    for number in range(50):
        for path in files:
            append(path, f"{path.name}{number} begins,".encode())
        follower.pass_on()
        for path in files:
            append(path, f" {path.name}{number} ends\n".encode())
        follower.pass_on()
    lines = sink.getvalue().decode().splitlines()
    assert len(lines) == 100
    for line in lines:
        begin, end = line.split(" begins, ")
        assert end == f"{begin} ends"


def test_hundreds_of_files(tmp_path: Path) -> None:
    files, sink = [tmp_path / f"{number:04}" for number in range(300)], io.BytesIO()
    follower = Follower(files, sink)
    for turn in range(3):
        for path in files:
            append(path, f"{path.name} {turn}\n".encode())
        follower.pass_on()
    lines = sink.getvalue().decode().splitlines()
    assert lines == [f"{path.name} {turn}" for turn in range(3) for path in files]


def test_a_flood_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    files, sink = [tmp_path / "flood", tmp_path / "quiet"], io.BytesIO()
    line = b"x" * 1023 + b"\n"
    append(files[0], line * (3 * MAX_READS * READ_NBYTES // len(line)))
    append(files[1], b"here\n")
    follower = Follower(files, sink)
    follower.pass_on()
    assert sink.getvalue().endswith(b"here\n")
    assert len(sink.getvalue()) <= MAX_READS * READ_NBYTES + 5
    for _ in range(3):
        follower.pass_on()
    assert len(sink.getvalue()) == files[0].stat().st_size + 5


def test_the_last_time_shows_all_that_is_left(tmp_path: Path) -> None:
    path, sink = tmp_path / "a", io.BytesIO()
    data = b"a line\n" * (2 * MAX_READS * READ_NBYTES // 7)
    append(path, data)
    Follower([path], sink).pass_on(last=True)
    assert sink.getvalue() == data


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.text("ab\n", max_size=8)), max_size=30))
def test_nothing_is_lost_doubled_or_reordered(tmp_path: Path, pieces: list[tuple[int, str]]) -> None:
    files = [tmp_path / str(number) for number in range(3)]
    for path in files:
        path.unlink(missing_ok=True)
    whole = ["", "", ""]
    sink = io.BytesIO()
    follower = Follower(files, sink)
    for number, text in pieces:
        marked = "".join(letter if letter == "\n" else f"{number}{letter}" for letter in text)
        append(files[number], marked.encode())
        whole[number] += marked
        follower.pass_on()
        assert sink.getvalue() == b"" or sink.getvalue().endswith(b"\n")
    for number, path in enumerate(files):
        append(path, b"\n")
        whole[number] += "\n"
    follower.pass_on(last=True)
    shown = sink.getvalue().decode()
    assert sorted(shown) == sorted("".join(whole))
    for number in range(3):
        mine = [line for line in shown.split("\n") if line.startswith(str(number))]
        assert "".join(mine) == whole[number].replace("\n", "")
