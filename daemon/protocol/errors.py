"""Every error that ckptless raises on purpose.

CkptlessError
 +- UsageError          the user can mend it: one sentence that says what to change
 |   +- StateDirError          a state directory that is somebody else's, or of another format
 |   +- NoRoomError            the state and its replicas do not fit into a node's memory
 +- ProtocolError       a message or file that breaks its format, version or limits
 |   +- MismatchError          the other end is a ckptless that speaks another protocol
 |   +- BadVersionError        a version of the state that does not verify
 +- DataError           a batch could not be made: what the loader's code raised, or its process's end
 +- LedgerError         the ledger cannot be opened or written: as a rule the disk's doing, and tried again
 |   +- DamagedLedgerError     the file is no database, or contradicts itself
 |   +- NewerLedgerError       only a later ckptless can read it
 |   +- BadRowError            one record cannot be written, whatever the disk does
 +- PeerError           another process cannot be reached, or is not who it should be
 +- DataError           training data that cannot be read or made into a batch; the text names file and record
 |   +- BadRecordError         one record is wrong and its neighbours may be sound: it can be skipped
 +- StartError          a daemon or agent could not start
 +- RecoveryError       a fault that ckptless cannot answer; the text names the reason
     +- StateUnavailableError   this rank got no sound copy of its state this time; it may try again
"""


class CkptlessError(Exception):
    """Root of the tree. `exit_code` is what a command ends with."""

    exit_code = 1


class UsageError(CkptlessError):
    """A mistake of the user's: the message is one sentence that says what to change."""

    exit_code = 2


class StateDirError(UsageError):
    """A state directory that must not be used until somebody has looked at it."""


class NoRoomError(UsageError):
    """A node has not the memory for what it is to hold of the state; trying again does not help."""


class ProtocolError(CkptlessError):
    """A frame, message or file that breaks its format, its version or its limits."""


class MismatchError(ProtocolError):
    """The other end speaks another protocol: two versions of ckptless have met."""


class BadVersionError(ProtocolError):
    """A version that does not verify, or is of something else; `chunk` is the wrong one, if one is."""

    def __init__(self, text: str, chunk: int | None = None) -> None:
        super().__init__(text)
        self.chunk = chunk


class LedgerError(CkptlessError):
    """The ledger cannot be opened, migrated or written."""

    exit_code = 3


class DamagedLedgerError(LedgerError):
    """The file is no database, or what is in it contradicts itself."""


class NewerLedgerError(LedgerError):
    """The file was written by a later ckptless."""


class BadRowError(LedgerError):
    """A record that cannot be written, whatever the disk does."""


class PeerError(CkptlessError):
    """Another process cannot be reached in time, or failed to prove who it is."""

    exit_code = 3


class DataError(CkptlessError):
    """Training data that cannot be read, or that a user's function cannot make a batch of."""


class BadRecordError(DataError):
    """One record that cannot be used; those before and after it may be sound."""


class StartError(CkptlessError):
    """A daemon or agent could not start."""

    exit_code = 3


class RecoveryError(CkptlessError):
    """A fault without an answer: no spare, no step that every rank can give, a budget used up."""

    exit_code = 4


class StateUnavailableError(RecoveryError):
    """Nobody could give this rank its state, or what came is not what was committed."""
