"""Frameworks' own training loops under `ckptless.run`: a file each, imported where it is used."""
