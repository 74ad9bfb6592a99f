"""Models rewritten for older opsets and smaller runtimes.

The stages, in order: ``engine`` replaces nodes that the target cannot express, by the rules of
``rules``, all in the working opset; ``forms`` then spells every node as the target's opset does.
"""
