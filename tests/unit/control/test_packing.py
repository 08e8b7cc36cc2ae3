"""A decree arrives as it was, by the one before it, or is asked for; and of a large job it is small."""

from __future__ import annotations

import contextlib
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptless.daemon.ckptlessd.consensus.agreement import Agreement
from ckptless.daemon.ckptlessd.consensus.packing import MissingBaseError, digest_of, pack, unpack
from ckptless.daemon.ckptlessd.peering import Decrees
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.limits import MOST_SLOTS
from ckptless.daemon.protocol.messages import Assignment, NodeInfo, Outcome, Place
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.peers.agreement import NO_BALLOT, Ballot, Decided, Decree, Durable, Propose

NODES = range(12)
nodes = st.sampled_from(NODES)
some = st.lists(nodes, max_size=4).map(tuple)
slots = st.builds(lambda node, slot: Place(node=node, slot=slot), nodes, st.integers(0, 7))


@st.composite
def decrees(draw: st.DrawFn, index: int) -> Decree:
    if draw(st.integers(0, 4)) == 0:
        outcome = draw(st.none() | st.just(Outcome(state="done", exit_code=0, reason="x")))
        return Decree(index=index, voters=draw(some), outcome=outcome)
    world = draw(st.integers(0, 6))
    ranks = st.integers(0, max(0, world - 1))
    infos = [
        NodeInfo(node=node, name=f"n{node}", address="a", agent_port=draw(st.integers(1, 3)))
        for node in draw(st.lists(nodes, unique=True))
    ]
    held = draw(st.lists(some, min_size=world, max_size=world)) if draw(st.booleans()) else []
    assignment = Assignment(
        job="j",
        generation=index,
        term=draw(st.integers(0, 3)),
        leader=0,
        places=tuple(draw(st.lists(slots, min_size=world, max_size=world))),
        # Now and then not in their order.
        nodes=tuple(infos if draw(st.integers(0, 9)) == 0 else sorted(infos, key=lambda info: info.node)),
        restore_step=draw(st.none() | st.integers(0, 9)),
        shards=tuple(draw(st.lists(ranks, max_size=world))),
        tensor_nodes=tuple((draw(ranks), held_by) for held_by in held),
        record_nodes=tuple(held),
        bad=(Place(node=1, slot=1),) if draw(st.booleans()) else (),
    )
    return Decree(index=index, voters=draw(some), assignment=assignment)


def is_regular(decree: Decree) -> bool:
    numbers = [info.node for info in decree.assignment.nodes] if decree.assignment is not None else []
    return numbers == sorted(numbers)


@given(decrees(1), decrees(1), decrees(2))
@settings(deadline=None)
def test_it_is_the_same_by_the_one_before_and_never_another_by_a_wrong_one(
    base: Decree, other: Decree, decree: Decree
) -> None:
    body = pack(decree, base)
    assert (body is not None) == is_regular(decree)
    if body is None:
        return
    assert unpack(body, base, digest_of(decree), NODES) == decree
    try:
        assert unpack(body, other, digest_of(decree), NODES) == decree
    except MissingBaseError:
        assert other != base


DECREE = Decree(
    index=2,
    voters=(0,),
    assignment=Assignment(
        job="j",
        generation=2,
        term=1,
        leader=0,
        places=(Place(node=0, slot=0), Place(node=1, slot=0)),
        nodes=tuple(NodeInfo(node=n, name="n", address="a", agent_port=1) for n in (0, 1)),
        restore_step=1,
        shards=(0, 1),
        tensor_nodes=((0, (0, 1)), (1, (1, 0))),
        record_nodes=((0, 1), (1, 0)),
    ),
)
BASE = Decree(index=1, voters=(0,))


def damaged(at: int) -> bytes:
    body = bytearray(zlib.decompress(pack(DECREE, BASE) or b""))
    body[at % len(body)] ^= 1 << at % 8
    return zlib.compress(bytes(body))


@given(st.binary(max_size=40) | st.integers(0, 5000).map(damaged))
@settings(deadline=None, max_examples=300)
def test_what_is_damaged_is_refused(body: bytes) -> None:
    """Or says the same in another way, as with -0.0 for 0.0."""
    with contextlib.suppress(ProtocolError, MissingBaseError):
        assert unpack(body, BASE, digest_of(DECREE), NODES) == DECREE


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({"slots": (0,)}, id="a rank without a slot"),
        pytest.param({"slots": (0, 0, 0)}, id="a slot without a rank"),
        pytest.param({"tensors": {"counts": (2, 2, 0), "nodes": (0, 1, 0, -1)}}, id="holders of no shard"),
        pytest.param({"tensors": {"counts": (2,), "nodes": (0, 1)}}, id="a shard without holders"),
        pytest.param({"tensors": {"counts": (2, 2), "nodes": (0, 1, 0, -1, 0)}}, id="a node of no list"),
        pytest.param({"records": {"counts": (2, 2), "nodes": (0, 1, 0)}}, id="a list cut short"),
        pytest.param({"records": {"counts": (2, 2, 0), "nodes": (0, 1, 0, -1)}}, id="records of no rank"),
    ],
)
def test_columns_of_which_one_is_longer_than_another_are_refused(damage: dict[str, object]) -> None:
    columns = msgspec.msgpack.decode(zlib.decompress(pack(DECREE, BASE) or b""))
    assert columns.keys() > damage.keys()
    body = zlib.compress(msgspec.msgpack.encode(columns | damage))
    with pytest.raises(ProtocolError, match=r"zip\(\) argument|do not add up"):
        unpack(body, BASE, digest_of(DECREE), NODES)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_as_before_is_in_the_memory_once(ranks: int) -> None:
    old = DECREE.assignment
    assert old is not None
    places = tuple(Place(node=rank, slot=0) for rank in range(ranks))
    held = ((0, 1), (1, 0), (2, 0))[:ranks]
    new = replace(
        old, places=places, shards=tuple(range(ranks)), tensor_nodes=tuple(enumerate(held)), record_nodes=held
    )
    following = replace(DECREE, index=3, assignment=new)
    found = unpack(pack(following, DECREE) or b"", DECREE, digest_of(following), NODES).assignment
    assert found == new
    for before, after in (
        (old.places, found.places),
        (old.tensor_nodes, found.tensor_nodes),
        (old.record_nodes, found.record_nodes),
        (old.nodes, found.nodes),
    ):
        assert all(a is b for a, b in zip(before, after, strict=False))


def test_a_bomb_and_a_stranger_are_refused() -> None:
    with pytest.raises(ProtocolError, match="more than"):
        unpack(zlib.compress(bytes(65 << 20)), BASE, "", NODES)
    with pytest.raises(ProtocolError, match="node 1, which the job does not have"):
        unpack(pack(DECREE, BASE) or b"", BASE, digest_of(DECREE), (0,))


def test_a_spare_that_is_a_stranger_is_refused() -> None:
    assert DECREE.assignment is not None
    infos = (*DECREE.assignment.nodes, NodeInfo(node=9, name="n", address="a", agent_port=1))
    decree = replace(DECREE, assignment=replace(DECREE.assignment, nodes=infos))
    with pytest.raises(ProtocolError, match="node 9, which the job does not have"):
        unpack(pack(decree, BASE) or b"", BASE, digest_of(decree), (0, 1))


def test_a_shard_of_no_rank_goes_unpacked_and_a_slot_beyond_all_is_refused() -> None:
    assert DECREE.assignment is not None
    assert pack(replace(DECREE, assignment=replace(DECREE.assignment, shards=(0, 2))), BASE) is None
    for_none = ((0, (0, 1)), (2, (1, 0)))
    assert pack(replace(DECREE, assignment=replace(DECREE.assignment, tensor_nodes=for_none)), BASE) is None
    alone = replace(DECREE.assignment, places=DECREE.assignment.places[:1], tensor_nodes=(), record_nodes=())
    assert pack(replace(DECREE, assignment=replace(alone, shards=(0,))), BASE) is not None
    assert pack(replace(DECREE, assignment=replace(alone, shards=(1,))), BASE) is None
    assert pack(replace(DECREE, assignment=replace(alone, places=(), shards=(0,))), BASE) is None
    three = ((0, 1), (1, 0), (0, 1))
    assert pack(replace(DECREE, assignment=replace(DECREE.assignment, record_nodes=three)), BASE) is None
    places = (Place(node=0, slot=0), Place(node=1, slot=MOST_SLOTS))
    beyond = replace(DECREE, assignment=replace(DECREE.assignment, places=places))
    with pytest.raises(ProtocolError, match="a slot that there is not"):
        unpack(pack(beyond, BASE) or b"", BASE, digest_of(beyond), NODES)


def test_a_node_twice_goes_unpacked_and_a_rank_on_no_node_is_refused() -> None:
    assert DECREE.assignment is not None
    twice = (*DECREE.assignment.nodes, DECREE.assignment.nodes[-1])
    assert pack(replace(DECREE, assignment=replace(DECREE.assignment, nodes=twice)), BASE) is None
    places = (Place(node=0, slot=0), Place(node=-1, slot=0))
    nowhere = replace(DECREE, assignment=replace(DECREE.assignment, places=places))
    with pytest.raises(ProtocolError, match="a node that there is not"):
        unpack(pack(nowhere, BASE) or b"", BASE, digest_of(nowhere), NODES)


def test_a_daemon_that_has_promised_nothing_can_write_that_down_and_read_it() -> None:
    durable = Durable(promised=NO_BALLOT, vote=None, known=BASE)
    assert msgspec.json.decode(msgspec.json.encode(durable), type=Durable) == durable


# ----------------------------------------------------------------------------- from daemon to daemon


def knowing(decree: Decree) -> Decrees:
    return Decrees(Agreement(0, Durable(promised=NO_BALLOT, vote=None, known=decree)), NODES)


def test_it_goes_packed_and_to_one_who_asks_again_whole() -> None:
    leader = knowing(BASE)
    propose = p.Agree(job="j", say=Propose(ballot=Ballot(number=1, node=0), decree=DECREE))
    decided = p.Agree(job="j", say=Decided(decree=DECREE))
    asked, told = leader.pack(propose, 1), leader.pack(decided, None)
    assert isinstance(asked, p.Packed)
    assert isinstance(told, p.Packed)
    assert leader.pack(decided, 1) == told
    assert leader.pack(decided, 1) == decided
    assert leader.pack(decided, 2) == told
    assert knowing(BASE).unpack(asked) == propose
    assert knowing(BASE).unpack(told) == decided
    # Who does not know the one before cannot tell.
    assert knowing(replace(BASE, index=0)).unpack(told) is None
    assert not knowing(replace(BASE, index=0)).is_old(told)
    assert knowing(DECREE).is_old(told)
    assert not knowing(DECREE).is_old(asked)


def test_what_a_daemon_has_just_learned_it_can_pack_and_unpack() -> None:
    """The leader knows a decree before it tells of it, and a voter may be asked once more."""
    agreement = Agreement(0, Durable(promised=NO_BALLOT, vote=None, known=BASE))
    here = Decrees(agreement, NODES)
    agreement.learn(DECREE)
    told = here.pack(p.Agree(job="j", say=Decided(decree=DECREE)), None)
    assert isinstance(told, p.Packed)
    assert here.unpack(told) == p.Agree(job="j", say=Decided(decree=DECREE))


def test_of_a_large_job_it_is_small_where_one_node_is_lost() -> None:
    ranks = range(256 * 8)
    places = [Place(node=rank // 8, slot=rank % 8) for rank in ranks]
    infos = [
        NodeInfo(node=n, name=f"node{n}", address=f"10.0.{n // 9}.{n}", agent_port=32768 + n * 7919 % 28232)
        for n in range(258)
    ]
    held = [tuple((place.node + back) % 258 for back in range(3)) for place in places]
    left = tuple(tuple(node for node in nodes if node != 99) for nodes in held)
    first = Assignment(
        job="j", generation=1, term=1, leader=0, places=tuple(places), nodes=tuple(infos), restore_step=None
    )
    second = replace(
        first,
        generation=2,
        places=tuple(Place(node=257, slot=p.slot) if p.node == 99 else p for p in places),
        nodes=tuple(info for info in infos if info.node != 99),
        restore_step=7,
        shards=tuple(ranks),
        tensor_nodes=tuple(enumerate(left)),
        record_nodes=left,
    )
    base, decree = (Decree(index=a.generation, voters=(0,), assignment=a) for a in (first, second))
    body = pack(decree, base)
    assert body is not None
    assert len(body) < 2000
    assert unpack(body, base, digest_of(decree), range(258)) == decree
