"""The kinds of events: what each means, and what to do about it; for `ckptctl explain` and docs/events.md.

`docs/events.py` writes the page (`make events`). Tests that run jobs check that no ledger has another kind.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Meaning(NamedTuple):
    """A kind of event: what has happened, and what somebody is to do; "" where that is nothing."""

    means: str
    to_do: str = ""


_LOG = "See the rank's log for what it printed last"
_RELOAD = "Look for what damages memory or the network on that node: a second time on one node is no chance"

# By part, in the order of the page.
GROUPS: Mapping[str, Mapping[str, Meaning]] = {
    "The life of a job": {
        "agent-up": Meaning("The agent of a node has connected to its daemon"),
        "generation": Meaning("The daemons have agreed who has which rank from here on, and from which step"),
        "start": Meaning("What the first generation goes on from: memory that was kept, or a saved step"),
        "trains": Meaning("Every rank has made its first step, at a job's begin"),
        "recovered": Meaning(
            "Every rank has made a step again, so long after a fault's first sign, or after the last "
            "generation was stopped without one"
        ),
        "end": Meaning(
            "The job is over; the text has its state and the reason", "Where it failed, the reason says why"
        ),
        "leader": Meaning("Another daemon leads the job, since the one before is gone or out of reach"),
    },
    "Faults of a rank": {
        "raised": Meaning("A rank's training function raised. It is called again in the same process", _LOG),
        "refused": Meaning(
            "Before the first step a rank raised a sentence of ckptless's own. The job ends with it at once",
            "The sentence says what to change",
        ),
        "died": Meaning(
            "A rank's process has ended, by a signal or by itself. The rank gets a new one, then a spare",
            f"{_LOG}; SIGKILL without a cause is most often the kernel, for memory: see dmesg there",
        ),
        "hung": Meaning(
            "A rank does not get on while others wait for it: the text says where. It gets a new process",
            "Its log has the stacks of all threads, with py-spy native ones. What may take so long belongs "
            "into `with run.phase(...)`",
        ),
        "late": Meaning(
            "No step for much longer than any before, and nobody is surely to blame. Nothing is done yet",
            "See what it runs; if it stays in one place, or after `max_stall`, it gets a new process",
        ),
        "stall": Meaning(
            "No step for `max_stall`, and all ranks wait for each other: the generation begins again",
            "Look at the network between the ranks that are named",
        ),
        "broken": Meaning(
            "A collective failed, and no other fault is known that explains it: the generation begins again",
            "Where it comes back, look at the network, and at NCCL's own log",
        ),
        "corrupt": Meaning(
            "A rank's tensors are not those of its twins, bit for bit: it gets theirs",
            _RELOAD,
        ),
        "twins-differ": Meaning(
            "Ranks that should have the same tensors have not",
            "With `--twins warn` nothing is done: find out with `run.compare()` where they part",
        ),
        "no-state": Meaning(
            "A rank did not get its state from those that hold it", "See the events before it"
        ),
        "no-memory": Meaning(
            "A rank did not get its device's memory: a process before it may still have it",
            "See what else runs on that GPU",
        ),
        "no-room": Meaning(
            "A node's memory cannot hold the copies of the state; the job ends before its first step",
            "`ckptctl plan` says what is needed; fewer replicas, or more nodes, need less for each",
        ),
        "nccl-unknown": Meaning(
            "NCCL speaks a layout that is not known here: the next generation has roots of NCCL's own",
            "A recovery takes longer so. Say which NCCL it is",
        ),
        "device-lost": Meaning(
            "A rank's GPU takes no calls any more: its process is replaced",
            "See `ckptctl health` and dmesg on that node for an Xid",
        ),
        "device-memory": Meaning(
            "A rank's device has more memory taken after each recovery",
            "Something of the script holds on to tensors of generations before",
        ),
        "returned-early": Meaning(
            "Ranks have returned from the training function while others still train, and may wait for them",
            "The script gives ranks different numbers of steps: `drop_last`, an early `break`",
        ),
        "kill": Meaning("A process did not leave its training function in time, and is ended"),
        "killed": Meaning("At the job's end ranks did not end by SIGTERM in time, and were killed"),
        "unkillable": Meaning(
            "A process outlives SIGKILL: the kernel holds it, most often in a driver or a file system",
            "The node needs somebody to look at it, and perhaps a reboot",
        ),
        "group-lingers": Meaning("Children of a rank outlive SIGKILL", "As for unkillable"),
        "spawn-failed": Meaning(
            "A process for a rank could not be started", "The text says why: limits, memory"
        ),
        "process-status-lost": Meaning(
            "Somebody else in the agent's process has taken a rank's exit status",
            "A site's own code in the agent?",
        ),
    },
    "Drills": {
        "drill": Meaning(
            "Who wanted which fault by `ckptctl drill`, that it was done, or why not. The node is well"
        ),
    },
    "Slow ranks": {
        "straggler": Meaning(
            "A rank is slower than the others by its own work, for a while; with what, the text says",
            "`ckptctl stragglers`. A hot or shared processor or GPU; with `data`, its batches",
        ),
        "straggler-over": Meaning("It is not slower any more"),
        "commit-waited": Meaning(
            "A rank waited for the copies of its step before it could commit the next",
            "The network for copies is slow or busy: `replication.interface`, or a longer `commit_every`",
        ),
        "state-slow": Meaning(
            "Plain data in the State makes each commit slow", "Put many numbers into a tensor or an array"
        ),
        "overlap-off": Meaning(
            "Commits are made in order, not beside the training, for the reason in the text"
        ),
    },
    "Nodes": {
        "node-lost": Meaning(
            "A node is lost, by whose word the text says. Its ranks go to a spare, or the job shrinks",
            "See whether it is up, and its network. It gets no rank of this job any more",
        ),
        "node-returned": Meaning("A node that was given up is heard again. It stays out of this job"),
        "evicted": Meaning("A node was taken out, by `ckptctl evict` or by a health check"),
        "prepares": Meaning("Spares build for the ranks that are about to leave a node; the others train"),
        "not-prepared": Meaning(
            "A spare raised while it built ahead, or took longer than `max_stall`: as after a fault, then",
            "Its log says what it raised",
        ),
        "leaves": Meaning(
            "Ranks leave a node for a spare, with the newest step, since it is not well or is drained"
        ),
        "stays": Meaning(
            "A node is to be left, and its ranks stay, for the reason in the text", "It needs a spare"
        ),
        "health": Meaning(
            "A probe has found something on a node of the job", "`ckptctl health` on that node"
        ),
        "suspicion": Meaning("A node's neighbours do not hear it; others are asked before it counts as lost"),
        "fenced": Meaning(
            "A node was cut off from most of the job's voters, and has ended its own ranks",
            "The network to that node; or its daemon was stopped",
        ),
        "witness": Meaning(
            "Half of the voters are silent at once: Slurm is asked which of the nodes are dead"
        ),
        "agent-hung": Meaning(
            "An agent did not answer its daemon, or was stopped by a signal with all of its ranks while most "
            "other nodes went on, and was ended",
            "Its log, and that node's load; who sent SIGSTOP, or froze a cgroup",
        ),
        "interface-lost": Meaning(
            "Copies do not go over one of a node's interfaces any more; the others carry them", "Its link"
        ),
    },
    "Size": {
        "grow": Meaning("The job trains on more nodes from here on"),
        "shrink": Meaning(
            "The job trains on fewer nodes from here on, since no spare was left, or somebody wanted it"
        ),
        "draw-in": Meaning("The job would use more nodes; the launcher asks Slurm for idle ones"),
        "waits-for-node": Meaning(
            "The job cannot go on without another node, and waits for one, as long as the text says"
        ),
        "gives-way": Meaning(
            "The job becomes smaller so that one of higher priority can start, or larger again"
        ),
        "recut": Meaning("A rank has taken its part of a state that another number of ranks has committed"),
    },
    "Copies of the state": {
        "unprotected": Meaning(
            "A step is held by one node alone: with it, it would be lost",
            "A second node, or more `--replicas`",
        ),
        "holder-lost": Meaning("A node that held copies holds none any more; others get them"),
        "copies-remade": Meaning("There are as many copies again as are wanted"),
        "copies-not-remade": Meaning(
            "Copies could not be made again, and it is tried once more", "The network there"
        ),
        "copies-given-back": Meaning("A node has freed copies that nobody needs any more"),
        "commit-refused": Meaning(
            "A rank's commit was not what it said it was, and counts for nothing", _RELOAD
        ),
        "bad-version": Meaning("A copy in memory does not match its checksums, and is not used", _RELOAD),
        "refused-version": Meaning("A copy that another node sent does not match its checksums", _RELOAD),
        "source-failed": Meaning("A node did not give a copy, and another holder is asked"),
        "twins-not-compared": Meaning("Twins' tensors could not be compared at a step"),
        "twins-unlike": Meaning(
            "Twins have differed since their first step, and are compared no more",
            "Different hardware, or ranks that are no twins",
        ),
    },
    "What is refused": {
        "order-refused": Meaning(
            "An order of an older leader or generation came late. It is fenced off: all is well"
        ),
        "stale-message": Meaning("A rank's word was of an older generation"),
        "stale-record": Meaning("A copy or a comparison was of an older generation"),
        "stale-store": Meaning("A node asked the store of an older generation"),
        "store-peer-lost": Meaning(
            "A node's part of the store is out of reach; who needs it is hung up on, and begins anew"
        ),
        "peer-refused": Meaning(
            "Somebody connected to an agent who is not of this job, or of another version"
        ),
        "store-refused": Meaning(
            "Somebody connected to the job's store whose process is not the job's user's"
        ),
        "store-unguarded": Meaning(
            "The kernel does not say whose a connection is: the store takes any", "CONFIG_INET_DIAG"
        ),
        "nccl-refused": Meaning("Somebody spoke to NCCL's bootstrap who is not a rank of this job"),
        "nccl-stale": Meaning("A rank of an older generation spoke to NCCL's bootstrap"),
        "events-dropped": Meaning(
            "An agent told more events than are written", "The events before it say of what"
        ),
    },
    "Starting NCCL": {
        "nccl-incomplete": Meaning(
            "Ranks did not come to a communicator; those that did go on waiting for them"
        ),
        "nccl-unanswered": Meaning(
            "A rank could not be told of its communicator's others", "The network between them"
        ),
        "nccl-stock-roots": Meaning(
            "NCCL makes its roots itself from this generation on, through one rank of each"
        ),
        "nccl-comm-id": Meaning(
            "NCCL_COMM_ID was set, and is not passed on: it would tie the job to one node"
        ),
        "nccl-ranks-per-root": Meaning("TORCH_NCCL_RANKS_PER_ROOT is the user's own, and is kept"),
    },
    "Training data": {
        "data-skipped": Meaning(
            "Records could not be read, and were passed over", "The text has file and place"
        ),
        "data-producer-died": Meaning(
            "A process that makes batches died; another makes the same", "Its memory"
        ),
        "data-state": Meaning(
            "A source's own state is too large to be kept: after a fault it is read from the start"
        ),
        "data-cache-remade": Meaning("A cached file was not what it had been, and was made again"),
        "pin-memory-off": Meaning("Batches are not pinned, for the reason in the text"),
        "workers-anew": Meaning(
            "A DataLoader's `persistent_workers` is ignored: each epoch begins with new ones"
        ),
        "ring-off": Meaning("A rank makes its own batches, since its node's ring is gone"),
        "ring-limited": Meaning("A loader's ring has less memory than it asked for"),
        "ring-over-budget": Meaning("Batches need more memory than the ring has", "Give the loader more"),
        "ring-memory": Meaning("There was no memory for a batch", "/dev/shm and memory limits of the job"),
        "ring-position": Meaning("Batches that were made ahead are not used: the order went on elsewhere"),
        "ring-producer": Meaning(
            "The process that makes a node's batches died", "Its memory, the data set's code"
        ),
        "ring-broken": Meaning("A batch could not be made; the rank that needs it raises", _LOG),
        "ring-refused": Meaning("A process said it makes batches, and is not this job's"),
        "ring-stale": Meaning("Batches of another data set, kept from before, are not used"),
        "ring-resumed": Meaning("Batches that were made before a fault are used"),
        "ring-closed": Meaning("A loader is not used any more; how many batches it made"),
    },
    "The script and its processes": {
        "outside-state": Meaning(
            "Something beside the State changes from step to step, and would be lost with the process",
            "Put it into the State; `ckptless-run --rehearse` names more",
        ),
        "put-back": Meaning(
            "After a fault the script has changed the State between `run.keep` and its loop, as when it "
            "began, and that is taken back",
            "Change it in the function given to `run.keep`, in `run.on_recovery`, or where `run.step` is 0",
        ),
        "written-early": Meaning(
            "The script writes to parameters between `run.keep` and its first step: after a fault they would "
            "be written to again, and where `run.batches` goes on that ends the job",
            "Write to them in the function given to `run.keep`, or only where `run.step` is 0",
        ),
        "gloo-sums": Meaning(
            "FSDP2 trains on the CPU with torch 2.8, whose Gloo sums gradients that are to be averaged: a "
            "bug of torch, with ckptless or without",
            "Take torch 2.9 or newer, or call `set_force_sum_reduction_for_comms(True)` of the modules",
        ),
        "late-break": Meaning(
            "A loop of the script may end behind its `run.commit`: after a fault between the two one more "
            "step is trained",
            "Ask at the top of the loop whether there is a step to come",
        ),
        "loop-over": Meaning(
            "After a fault the script asked again for a loader whose loop was over, and got no batches of it",
        ),
        "finalize": Meaning(
            "The script's `finalize` was called after a fault; where it failed, its process is replaced",
        ),
        "health-check": Meaning(
            "The script's `health_check` was passed after a fault; where it was not, its process is replaced",
        ),
        "warm-up": Meaning("What a spare's warm-up did, or why it did not"),
        "environment": Meaning(
            "An environment variable of a rank is another than when its libraries were loaded",
            "Set it before `ckptless-run`, not in the script",
        ),
        "console-lost": Meaning("The launcher's console takes no more output; the log files have it"),
        "log-failed": Meaning("A rank's log cannot be written", "Room in `--log-dir`"),
        "zygote-died": Meaning("The process that ranks are forked from has ended; another is started"),
        "zygote-restarted": Meaning("Another process to fork ranks from is there"),
        "zygote-warning": Meaning(
            "Something is not prepared before ranks are forked, so each does it by itself"
        ),
    },
    "Disk, and memory that is kept": {
        "saved": Meaning("A step is on the disk (`--save-dir`)"),
        "save-failed": Meaning(
            "A step could not be saved; the next is tried", "Room and rights in `--save-dir`"
        ),
        "save-not-removed": Meaning("An older saved step could not be removed"),
        "memory-kept": Meaning("A node keeps the job's memory for its next start"),
        "memory-not-kept": Meaning("A node does not keep it, for the reason in the text", "`keep.memory`"),
        "memory-given": Meaning("Kept memory went to the job's next start"),
        "memory-dropped": Meaning("Kept memory was freed, for the reason in the text"),
        "memory-not-there": Meaning("A node had nothing kept for this job"),
        "memory-not-taken": Meaning("Kept memory could not be taken back; another node's is used"),
    },
    "Slurm, daemons, ledger": {
        "slurm-told": Meaning("Slurm was told something: a node down or drained, the job's comment"),
        "slurm-refused": Meaning("Slurm refused it", "The daemon must be root or SlurmUser"),
        "slurm-away": Meaning(
            "Slurm's controller does not answer, and is asked again", "See slurmctld and its log"
        ),
        "vote-lost": Meaning(
            "A node's daemon cannot vote: its disk takes nothing", "Room in `daemon.state_dir`"
        ),
        "vote-again": Meaning("It can vote again"),
        "no-vote": Meaning(
            "A daemon has lost what it promised in this job, and does not vote in it any more"
        ),
        "ledger-damaged": Meaning("A ledger was damaged, set aside, and begun anew", "That node's disk"),
    },
}
KINDS: Mapping[str, Meaning] = {kind: one for group in GROUPS.values() for kind, one in group.items()}
