"""A real Slurm cluster on one machine, for tests and for trying things out; `cluster.api` is the way in.

Every machine of it is a tree of processes with network, mount, PID, IPC and UTS namespaces of its own:

    plan         what a cluster consists of (pure)
    files        the texts in its /etc (pure)
    api          bring it up, break it, mend it, take it down
    boot         fork the machines, plug them into the switch
    root         the file system that a machine sees
    init         PID 1 of a machine
    supervise    which of its services run (pure)
    control      how PID 1 is told to stop or start one
    slurm        ask and wait for Slurm's view of it
    nodes        the words of that view (pure)
    prepare      the cluster's directory, its /etc, what it shares
    requirements what the host lacks for all this
    cli          the same as `api`, as a command
"""
