// Train onnxtrain artifacts on stock ONNX Runtime. Header-only, C++17; depends only on onnxruntime 1.20 or
// newer (onnxruntime_cxx_api.h and the library).
#pragma once

#include "onnxtrain/error.hpp"
#include "onnxtrain/manifest.hpp"
#include "onnxtrain/safetensors.hpp"
#include "onnxtrain/schedules.hpp"
#include "onnxtrain/tensor.hpp"
#include "onnxtrain/trainer.hpp"
