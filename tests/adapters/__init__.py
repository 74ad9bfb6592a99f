"""Adapters on graphs, and the files that they come from and go to."""
