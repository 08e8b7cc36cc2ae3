"""Daemon to daemon and agent to agent: authenticated connections over TCP."""
