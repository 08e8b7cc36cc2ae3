"""The daemon process: one on each node, which decides, records and watches for the jobs there."""
