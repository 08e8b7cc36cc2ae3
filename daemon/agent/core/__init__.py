"""The agent's decisions: state machines without sockets, clocks or processes; the simulator runs them."""
