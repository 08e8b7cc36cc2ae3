"""The messages between nodes: daemon to daemon, agent to agent."""
