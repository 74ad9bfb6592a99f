"""One module per engine; each runs as a process of its own, from its own virtual environment.

The modules import nothing of this project but :mod:`benchmarks.workers.serve`, so that an engine
needs only what it needs itself.
"""
