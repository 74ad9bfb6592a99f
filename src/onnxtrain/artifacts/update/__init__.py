"""The models of a step over vectors, emitted from the graphs that ``build`` has in its hands."""
