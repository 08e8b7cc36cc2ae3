"""Pure: which nodes are to hold what, what must be made again, what may go, and what could be lost."""
