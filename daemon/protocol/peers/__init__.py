"""What nodes say to each other: daemon to daemon, agent to agent."""
