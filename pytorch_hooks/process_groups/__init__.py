"""Process groups that can be left at any moment and renewed under living models."""
