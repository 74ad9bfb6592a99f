"""Rewrites of graphs for speed or for what a runtime lacks, one file each."""
