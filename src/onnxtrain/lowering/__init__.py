"""Models for older opsets and smaller runtimes.

``lower.py`` is the entry point and lists the stages in order. ``replace.py`` expands nodes that
the target cannot express, in the working opset. ``opset_converters.py`` then writes every node in
the form that the target's opset has.
"""
