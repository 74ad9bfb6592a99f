"""Models rewritten for older opsets and smaller runtimes.

The stages, in order: ``replace`` replaces nodes that the target cannot express, by the rules of
``rules``, all in the working opset; ``forms`` then writes every node as the target's opset has it.
"""
