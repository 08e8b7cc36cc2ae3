"""A state cut anew, for another number of ranks: which part of which tensor comes from where."""
