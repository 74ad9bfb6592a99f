"""One module per engine; each runs in its own process, from its own virtual environment.

Of this project, the modules import only :mod:`benchmarks.workers.serve`, so that an environment
needs only the engine's own dependencies.
"""
