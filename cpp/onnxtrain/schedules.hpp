// Learning rate schedules, as functions of the step (from 1); the same values as in Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>

namespace onnxtrain {

/// Returns the learning rate of a step.
using Schedule = std::function<double(int64_t step)>;

inline Schedule constant(double lr) {
  return [=](int64_t) { return lr; };
}

/// Linear decay from `lr` to `end * lr` in `total` steps, then constant.
inline Schedule linear(double lr, int64_t total, double end = 0.0) {
  return [=](int64_t step) {
    const auto t = static_cast<double>(std::min(step - 1, total));
    return lr * (1.0 + (end - 1.0) * t / static_cast<double>(total));
  };
}

/// Cosine decay from `lr` to `end` in `total` steps, then constant.
inline Schedule cosine(double lr, int64_t total, double end = 0.0) {
  return [=](int64_t step) {
    const double part = static_cast<double>(std::min(step - 1, total)) / static_cast<double>(total);
    return end + (lr - end) * (1.0 + std::cos(3.141592653589793 * part)) / 2.0;
  };
}

/// Multiply the learning rate by `gamma` every `every` steps.
inline Schedule stepwise(double lr, int64_t every, double gamma = 0.1) {
  return [=](int64_t step) { return lr * std::pow(gamma, static_cast<double>((step - 1) / every)); };
}

/// Linear warmup from 0 to `lr` in `steps` steps, then another schedule that starts at step 1.
inline Schedule warmup(double lr, int64_t steps, Schedule then) {
  return [=, then = std::move(then)](int64_t step) {
    return step <= steps ? lr * (static_cast<double>(step - 1) / static_cast<double>(steps)) : then(step - steps);
  };
}

}  // namespace onnxtrain
