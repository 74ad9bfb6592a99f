"""ONNX models of fitted scikit-learn estimators, their last step in operators that can be trained.

A pipeline is converted in two parts. What comes before the last step is pre-processing: it is kept
as it is, under names that start with ``pre/``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import compose
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from onnxtrain.errors import MissingExtraError, PrepareError

PREFIX = "pre/"
PRODUCER = "skl2onnx"
_OPSET = {"": 20, "ai.onnx.ml": 3}
# skl2onnx has operators of its own for these; without them it writes plain matrix products.
_PLAIN = {"LinearRegressor", "LinearClassifier", "Scaler", "Normalizer"}


def convert(estimator: Any, X: Any) -> onnx.ModelProto:
    """Return a fitted estimator or pipeline as an ONNX model.

    Args:
        estimator: fitted; what skl2onnx can convert.
        X: some rows of data, which tell names and types of the inputs.

    Raises:
        PrepareError: it is not fitted, or cannot be converted.
    """
    try:
        check_is_fitted(estimator)
    except NotFittedError as error:
        raise PrepareError(
            f"{type(estimator).__name__} is not fitted\nhint: fit it first, then pass it as model"
        ) from error
    some = X[:1]
    if not hasattr(X, "columns"):  # a data frame's columns have types of their own
        some = np.asarray(some, np.float32)
    estimator = getattr(estimator, "estimator", estimator) if _frozen(estimator) else estimator
    if not isinstance(estimator, Pipeline) or len(estimator.steps) < 2:
        last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
        return _to_onnx(last, some, black_op=_PLAIN)
    before, last = estimator[:-1], estimator.steps[-1][1]
    first = _to_onnx(before, some)
    width = before.transform(X[:1]).shape[1]
    from skl2onnx.common.data_types import FloatTensorType

    features = [("features", FloatTensorType([None, width]))]
    tail = _to_onnx(last, initial_types=features, black_op=_PLAIN)
    first.ir_version = tail.ir_version = min(first.ir_version, tail.ir_version)
    same = {d.domain: d.version for m in (first, tail) for d in m.opset_import}
    for model in (first, tail):
        del model.opset_import[:]
        for domain, version in same.items():
            model.opset_import.add(domain=domain, version=version)
    whole = compose.merge_models(
        compose.add_prefix(first, PREFIX, rename_inputs=False),
        tail,
        io_map=[(PREFIX + first.graph.output[0].name, "features")],
    )
    whole.producer_name = PRODUCER
    return whole


def _frozen(estimator: Any) -> bool:
    return type(estimator).__name__ == "FrozenEstimator"


def _to_onnx(estimator: Any, *data: Any, **options: Any) -> onnx.ModelProto:
    try:
        from skl2onnx import to_onnx
    except ImportError as error:
        raise MissingExtraError(
            'skl2onnx is not installed\nhint: pip install "onnxtrain[sklearn]"'
        ) from error
    if hasattr(estimator, "predict_proba"):
        options["options"] = {id(estimator): {"zipmap": False}}
    try:
        model: Any = to_onnx(estimator, *data, target_opset=_OPSET, **options)
    except Exception as error:  # skl2onnx's errors share no base class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PrepareError(
            f"skl2onnx cannot convert {type(estimator).__name__}: {reason}\n"
            "hint: pass an ONNX model instead"
        ) from error
    return model
