"""Loss and plain gradients of one batch, for an update that follows every batch.

The training model adds to sums that may go over several batches, ``Where(reset, g, old + g)``: two
passes over all gradients that one batch per update has no use for.
"""

from __future__ import annotations

from onnxtrain.artifacts.graphs import Backward, Finished
from onnxtrain.artifacts.options import GRAD_NORM, BuildOptions
from onnxtrain.artifacts.update.descent import absorb_descent


def gradient_graph(origin: Backward, options: BuildOptions) -> Finished:
    """Return the model; where a target prefers it, plain descent gives new parameters."""
    copy = origin.copy("gradients", options.target)
    signature = copy.signature
    signature.declare(copy.front, "input")
    signature.declare(copy.targets, "target")
    signature.declare(list(copy.parameters.values()), "parameter")
    signature.declare(list(copy.buffers.values()), "buffer")
    signature.declare(copy.rng, "rng")
    copy.report(copy.gradients if GRAD_NORM in options.metrics else None)
    for name, g in copy.gradients.items():
        signature.output(f"{name}_grad", "gradient", g)
    copy.declare_new_buffers()
    signature.optimize(options.target)
    if options.target.prefers("descent-in-products"):
        gradients = dict(zip(copy.parameters, signature.outputs_of("gradient"), strict=True))
        absorb_descent(signature, options, copy.parameters, gradients)
    return signature.finish(options.target)
