"""Pure: the control plane of one job, a state machine: who leads, what is lost, every recovery to its end."""
