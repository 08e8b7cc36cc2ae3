"""Versions of the state: what a node holds, gives to its holders, and gets back from them."""
