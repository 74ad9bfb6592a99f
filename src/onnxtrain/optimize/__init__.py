"""Graph passes: rewrites for speed or for what a runtime lacks, in the order of pipeline.py."""
