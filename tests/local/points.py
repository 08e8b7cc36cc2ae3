"""Every point of the replication protocol and of the store's at which a node may be lost, in their order."""

from enum import Enum


class Point(Enum):
    """`value`: who is lost, and what has just happened. In a step that is committed:"""

    COMMIT_TAKEN = "home: it holds a rank's commit, and has told nobody"
    RECORD_SENT = "home: the record is on its way"
    RECORD_CAME = "holder: it has the record, and does not hold it yet"
    RECORD_HELD = "holder: it has said that it holds the record"
    OFFER_SENT = "home: the tensors are offered"
    OFFER_HEARD = "holder: it has been offered them"
    WANTED_HEARD = "home: they are wanted"
    BEGIN_SENT = "home: the first bytes have left"
    HALF_SENT = "home: in the middle of a chunk"
    ALL_SENT = "home: all of it has left"
    BEGIN_CAME = "holder: the first bytes are there"
    HALF_CAME = "holder: in the middle of a chunk"
    ALL_CAME = "holder: all of it is there, unverified"
    VERIFIED = "holder: it is verified, and not held yet"
    DISCARDED = "holder: it is held, and the oldest is not any more; nobody has been told"
    ACK_SENT = "holder: it has said that it holds it"
    ACK_HEARD = "home: one holder has it"
    ALL_ACKED = "home: all have what they were to have, and the rank has not been told"
    # In the recovery from the loss of another node:
    REMAKE_BEGUN = "giver: it is about to offer what another node has lost"
    REMADE = "giver: one copy has been made again"
    RECORD_ASKED = "newcomer: it has asked for its record"
    FETCH_ASKED = "newcomer: it has asked for a chunk"
    GIVING_ASKED = "source: it has been asked for a chunk"
    GIVING_HALF = "source: it has given half of a chunk"
    FETCH_HALF = "newcomer: half of a chunk is there"
    FETCH_CAME = "newcomer: the chunk is there, unverified"
    FETCH_VERIFIED = "newcomer: all are verified, the header is not written"
    # In the same recovery, while process groups come together by the key-value store:
    STORE_OPENED = "home of the keys: another agent has connected to use them"
    STORE_ASKED = "home of the keys: another agent asks for one"
    STORE_WAITED = "home of the keys: it has been asked, and has not answered"
    STORE_TOLD = "asker: the answer is there, and nobody has been told"


RECOVERY = frozenset(list(Point)[list(Point).index(Point.REMAKE_BEGUN) :])
"""Those that are passed only when a node has been lost."""
