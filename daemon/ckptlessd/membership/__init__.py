"""Finds out who lives: each daemon watches a few others, and asks others before it accuses one. All pure."""
