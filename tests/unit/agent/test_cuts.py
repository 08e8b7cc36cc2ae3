"""State of two numbers of ranks in one agent: what is set aside, taken back and forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.agent.core.cuts import cut_moves
from ckptless.daemon.protocol import messages as m


def assignment(generation: int, cut: int, former: int | None) -> m.Assignment:
    return m.Assignment(
        job="j",
        generation=generation,
        term=1,
        leader=0,
        places=(),
        nodes=(),
        restore_step=5,
        cut=cut,
        former=None
        if former is None
        else m.Former(cut=former, shards=(0,), tensor_nodes=((0, (0,)),), record_nodes=((0,),)),
    )


class Held:
    """What an agent does by the moves: `here` and `former` say of which cut what is held is, "" nothing."""

    def __init__(self) -> None:
        self.cut, self.here = 1, "of 1"
        self.former_cut: int | None = None
        self.former = ""

    def follow(self, new: m.Assignment) -> None:
        for move in cut_moves(self.cut, self.former_cut, new):
            match move:
                case "forget-former":
                    self.former_cut, self.former = None, ""
                case "set-aside":
                    assert self.former_cut is None
                    self.former_cut, self.former, self.here = self.cut, self.here, ""
                case "take-back":
                    self.here, self.former_cut, self.former = self.former, None, ""
                case "forget-here":
                    self.here = ""
        self.cut = new.cut


@given(st.lists(st.sampled_from(("same", "resize", "again", "back", "commit", "done")), max_size=12))
def test_what_is_restored_is_there_as_long_as_it_may_be_asked_for(events: list[str]) -> None:
    """`line` is the cut that the newest whole step is of, as the control plane knows it."""
    held, generation, line, cut = Held(), 1, 1, 1
    former: int | None
    former = None
    for event in events:
        generation += 1
        if event == "resize":
            # The newest whole step is of `line`, whether or not the cut under way was finished.
            held.follow(assignment(generation, generation, line))
            cut, former = generation, line
        elif event == "again" and former == line:
            held.follow(assignment(generation, generation, former))
            cut = generation
        elif event == "back" and former == line:
            held.follow(assignment(generation, former, None))
            cut, line, former = former, former, None
        elif event == "commit":
            held.here, line = held.here or f"of {cut}", cut
        elif event == "done" and line == cut:
            held.former_cut, held.former, former = None, "", None
        else:
            held.follow(assignment(generation, cut, former))
        assert held.cut == cut
        if line == cut:
            assert held.here == f"of {line}"
        else:
            assert (held.former_cut, held.former) == (line, f"of {line}")
            assert held.here in ("", f"of {cut}")


def test_an_agent_that_never_had_the_cut_sets_nothing_aside() -> None:
    assert cut_moves(1, None, assignment(9, 9, 5)) == ["forget-here"]


def test_of_an_older_cut_nothing_is_kept_beside_the_one_that_is_restored() -> None:
    assert cut_moves(4, 2, assignment(6, 6, 4)) == ["forget-former", "set-aside"]
