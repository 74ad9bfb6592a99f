"""scikit-learn's own checks of estimators."""

import warnings
from unittest import SkipTest

import pytest
from sklearn.exceptions import SkipTestWarning
from sklearn.utils.estimator_checks import estimator_checks_generator

from onnxtrain.sklearn import OnnxClassifier, OnnxRegressor

ROUNDING = "nets compute in float32: equal to 1e-4, the check wants 1e-7"
SLOW = "1,000 steps of 1e-3 do not move an intercept across data of deviation 20"
ESTIMATORS = {
    "regressor": (OnnxRegressor(), {}),
    "classifier": (OnnxClassifier(), {"check_class_weight_classifiers": SLOW}),
    "perceptron": (OnnxClassifier(hidden_layer_sizes=(4,), learning_rate=0.01, max_iter=30), {}),
}
EXPECTED = {"check_sample_weight_equivalence_on_dense_data": ROUNDING}
# They look for libraries that are not there, or for a setting of scipy.
ABSENT = (
    "check_array_api_input",
    "check_sample_weights_pandas_series",
    "check_regressor_data_not_an_array",
    "check_classifier_data_not_an_array",
)


def _cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        for label, (estimator, expected) in ESTIMATORS.items():
            reasons = {**EXPECTED, **expected}
            for instance, check in estimator_checks_generator(estimator):
                name = getattr(check, "func", check).__name__
                marks = ()
                if name in reasons:
                    marks = pytest.mark.xfail(reason=reasons[name], strict=reasons[name] is SLOW)
                yield pytest.param(instance, check, id=f"{label}-{name}", marks=marks)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize(("estimator", "check"), list(_cases()))
def test_check_estimator(estimator, check):
    name = getattr(check, "func", check).__name__
    try:
        check(estimator)
    except SkipTest as reason:
        if name not in ABSENT:
            raise
        pytest.skip(str(reason))
