"""NCCL's ids in the store: computed, the same for all clients of a round, and nothing else is touched."""

import pytest

from ckptless.daemon.agent.kvstore import ids as store_ids
from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.ids import ClientIds
from ckptless.daemon.agent.kvstore.state import StoreState
from ckptless.daemon.agent.nccl.ids import NcclIds
from ckptless.daemon.agent.nccl.wire import Address
from ckptless.daemon.protocol.errors import ProtocolError

WORLD = b"default_pg/0//cuda//"
ROW = b"default_pg/0//3//cuda//"
HOMES = [Address("10.0.0.1", 1), Address("10.0.0.1", 1), Address("10.0.0.2", 2), Address("10.0.0.2", 2)]


def keys(group: bytes, count: int) -> tuple[bytes, ...]:
    return tuple(group + b"UniqueNCCLID:%d" % root for root in range(count))


class Rank:
    """What torch does when a communicator is made; `root` is None for a rank that is none."""

    def __init__(self, ids: NcclIds, state: StoreState, root: int | None) -> None:
        self.client, self.root = ClientIds(ids, state), root

    def asks(self, group: bytes, count: int) -> bytes:
        if self.root is not None:
            key = keys(group, count)[self.root]
            assert self.client.take(protocol.Set(key, b"an id of its own".ljust(128))) == b""
        assert self.client.take(protocol.Wait(keys(group, count))) == protocol.Wait(())
        answer = self.client.take(protocol.MultiGet(keys(group, count)))
        assert isinstance(answer, bytes)
        return answer


@pytest.fixture
def ids() -> NcclIds:
    return NcclIds(b"key", 5, HOMES)


@pytest.fixture
def state() -> StoreState:
    return StoreState()


def test_every_rank_gets_the_same_ids_and_nobody_waits(ids: NcclIds, state: StoreState) -> None:
    wanted = protocol.encode_values(ids.ids(WORLD, 0, 4))
    # The first asks before any other has said anything.
    assert [Rank(ids, state, root).asks(WORLD, 4) for root in (2, 0, 1, 3)] == [wanted] * 4
    assert state.num_keys() == 4, "as many as torch's server has"
    assert max(map(len, map(state.get, keys(WORLD, 4)))) == 1, "nobody's own id is kept"


def test_each_further_communicator_of_a_group_has_other_ids(ids: NcclIds, state: StoreState) -> None:
    ranks = [Rank(ids, state, root) for root in (0, 1, None)]
    for round_ in range(3):
        # One is always ahead of the others.
        assert {rank.asks(ROW, 2) for rank in ranks} == {protocol.encode_values(ids.ids(ROW, round_, 2))}


def test_groups_do_not_disturb_each_other(ids: NcclIds, state: StoreState) -> None:
    one, other = Rank(ids, state, 0), Rank(ids, state, 1)
    assert one.asks(ROW, 2) != one.asks(WORLD, 4)
    assert other.asks(WORLD, 4) == protocol.encode_values(ids.ids(WORLD, 0, 4))
    assert other.asks(ROW, 2) == protocol.encode_values(ids.ids(ROW, 0, 2))


def test_a_rank_that_has_connected_anew_goes_on_with_the_next_round(ids: NcclIds, state: StoreState) -> None:
    """`destroy_process_group` and `init_process_group` in the same generation."""
    for round_ in range(2):
        ranks = [Rank(ids, state, root) for root in range(4)]
        assert {r.asks(WORLD, 4) for r in ranks} == {protocol.encode_values(ids.ids(WORLD, round_, 4))}


def test_other_keys_pass_untouched(ids: NcclIds, state: StoreState) -> None:
    client = ClientIds(ids, state)
    for request in (
        protocol.Set(b"UniqueNCCLID", b"v"),
        protocol.Set(b"UniqueNCCLID:", b"v"),
        protocol.Set(b"UniqueNCCLID:01", b"v"),
        protocol.MultiGet((b"a", b"b")),
        protocol.Get(b"a"),
        protocol.Add(WORLD + b"UniqueNCCLID:0", 0),
        protocol.NumKeys(),
        protocol.MultiGet(()),
    ):
        assert client.take(request) == request
    mixed = (b"a", WORLD + b"UniqueNCCLID:0", b"b")
    assert client.take(protocol.Wait(mixed)) == protocol.Wait((b"a", b"b"))
    assert client.take(protocol.Check(mixed)) == protocol.Check((b"a", b"b"))
    items = protocol.MultiSet(tuple((key, b"1") for key in mixed))
    assert client.take(items) == protocol.MultiSet(((b"a", b"1"), (b"b", b"1")))


@pytest.mark.parametrize(
    "wanted",
    [
        (WORLD + b"UniqueNCCLID:1",),
        keys(WORLD, 2)[::-1],
        (*keys(WORLD, 1), ROW + b"UniqueNCCLID:1"),
        (b"a", *keys(WORLD, 1)),
        (*keys(WORLD, 1), b"a"),
        keys(WORLD, 5),
    ],
)
def test_what_cannot_be_computed_is_refused(
    ids: NcclIds, state: StoreState, wanted: tuple[bytes, ...]
) -> None:
    with pytest.raises(ProtocolError):
        ClientIds(ids, state).take(protocol.MultiGet(wanted))


def test_a_single_id_is_refused(ids: NcclIds, state: StoreState) -> None:
    with pytest.raises(ProtocolError, match="computed together"):
        ClientIds(ids, state).take(protocol.Get(keys(WORLD, 4)[0]))


def test_only_so_many_groups(ids: NcclIds, state: StoreState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_ids, "MAX_GROUPS", 3)
    rank = Rank(ids, state, None)
    for group in (b"1", b"2", b"3", b"1"):
        rank.asks(group, 1)
    with pytest.raises(ProtocolError, match="more than 3 groups"):
        rank.asks(b"4", 1)
