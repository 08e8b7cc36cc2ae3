"""Steps that are saved to a directory: when, by which node, and the last one at the end of a job."""
