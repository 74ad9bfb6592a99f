// Training of onnxtrain artifacts on a stock ONNX Runtime. Header-only, C++17; needs nothing but
// onnxruntime_cxx_api.h of onnxruntime 1.20 or newer and its library.
#pragma once

#include "onnxtrain/error.hpp"
#include "onnxtrain/manifest.hpp"
#include "onnxtrain/safetensors.hpp"
#include "onnxtrain/schedules.hpp"
#include "onnxtrain/tensor.hpp"
#include "onnxtrain/trainer.hpp"
