"""Pure: how the daemons of a job agree, and for how long a node may go on by itself."""
