// onnxruntime sessions with preallocated inputs and outputs.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#include "error.hpp"
#include "manifest.hpp"
#include "tensor.hpp"

namespace onnxtrain {

/// A tensor of a batch, by the name of the model's input or target.
struct Feed {
  std::string name;
  TensorView value;
};
using Batch = std::vector<Feed>;

/// Result of a step or an evaluation.
struct StepResult {
  double loss = 0;
  int64_t step = 0;      ///< number of the update that this batch belongs to, from 1
  bool updated = false;  ///< whether the parameters were updated
  std::vector<std::pair<std::string, double>> metrics;
  std::vector<std::pair<std::string, Ort::Value>> outputs;

  double metric(const std::string& name) const {
    for (const auto& [key, value] : metrics)
      if (key == name) return value;
    throw ShapeError("unknown metric: '" + name + "'");
  }
};

namespace detail {

/// Flush denormals to zero in this thread during the lifetime of this object: vanishing gradients are slow otherwise.
class FlushDenormals {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  FlushDenormals() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ | 0x8040);
  }
  ~FlushDenormals() {
    _mm_setcsr(before_);
  }

 private:
  unsigned before_;
#elif defined(__aarch64__) && defined(__GNUC__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() {
    asm volatile("msr fpcr, %0" : : "r"(before_));
  }

 private:
  uint64_t before_ = 0;
#else
  FlushDenormals() {}  // on other CPUs, only onnxruntime's own setting applies
  ~FlushDenormals() {}
#endif
 public:
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

inline Ort::Env& environment() {
  static Ort::Env env(ORT_LOGGING_LEVEL_FATAL, "onnxtrain");
  return env;
}

/// Set session options for training.
inline void prepare(Ort::SessionOptions& options, int threads) {
  options.SetLogSeverityLevel(4);  // errors are thrown, so do not print them as well
  // Memory patterns of a dynamic batch size are rarely reused and double the memory of large models.
  options.DisableMemPattern();
  options.SetExecutionMode(ORT_SEQUENTIAL);
  options.SetGraphOptimizationLevel(ORT_ENABLE_ALL);
  options.AddConfigEntry("session.set_denormal_as_zero", "1");
  // Do not fold large constants: zeros to scatter into would take as much memory as a weight.
  options.AddConfigEntry("optimization.constant_folding_max_output_size_in_bytes", "1048576");
  if (threads > 0) options.SetIntraOpNumThreads(threads);
}

/// A session whose inputs and outputs match the manifest.
class Model {
 public:
  Model(const ModelSpec& spec, const std::filesystem::path& path, const Ort::SessionOptions& options) try
      : spec_(spec),
        session_(open(path, options)) {
    compare(spec.inputs, session_.GetInputCount(), true);
    compare(spec.outputs, session_.GetOutputCount(), false);
    for (const TensorSpec& t : spec.inputs) in_.push_back(t.name.c_str());
    for (const TensorSpec& t : spec.outputs) out_.push_back(t.name.c_str());
  } catch (const Ort::Exception& error) {
    throw RuntimeError(spec.file + ": onnxruntime cannot load the model: " + error.what());
  }

  const ModelSpec& spec() const { return spec_; }

  /// Run on all inputs and outputs, in the order of the manifest.
  void run(const std::vector<Ort::Value>& feeds, std::vector<Ort::Value>& results) try {
    const FlushDenormals mode;
    session_.Run(Ort::RunOptions{nullptr}, in_.data(), feeds.data(), in_.size(), out_.data(), results.data(),
                 out_.size());
  } catch (const Ort::Exception& error) {
    throw RuntimeError(spec_.file + ": onnxruntime: " + error.what());
  }

 private:
  static Ort::Session open(const std::filesystem::path& path, const Ort::SessionOptions& options) {
    const FlushDenormals mode;  // creating a session changes the mode of the calling thread
    return Ort::Session(environment(), path.c_str(), options);
  }

  void compare(const std::vector<TensorSpec>& specs, size_t count, bool inputs) const {
    const auto fail = [&](const std::string& what) {
      throw ManifestError(spec_.file + ": " + (inputs ? "input " : "output ") + what + ", unlike in the manifest");
    };
    if (count != specs.size()) fail("count is " + std::to_string(count));
    std::map<std::string_view, const TensorSpec*> listed;
    for (const TensorSpec& t : specs) listed[t.name] = &t;
    Ort::AllocatorWithDefaultOptions allocator;
    for (size_t i = 0; i < count; ++i) {
      const auto name =
          inputs ? session_.GetInputNameAllocated(i, allocator) : session_.GetOutputNameAllocated(i, allocator);
      const std::string quoted = std::string("'") + name.get() + "'";
      if (!listed.count(name.get())) fail(quoted + " is unknown");
      const Ort::TypeInfo type = inputs ? session_.GetInputTypeInfo(i) : session_.GetOutputTypeInfo(i);
      if (type.GetONNXType() != ONNX_TYPE_TENSOR) fail(quoted + " is not a tensor");
      if (type.GetTensorTypeAndShapeInfo().GetElementType() != listed[name.get()]->dtype->onnx)
        fail(quoted + " has another dtype");
    }
  }

  const ModelSpec& spec_;
  Ort::Session session_;
  std::vector<const char*> in_, out_;
};

/// The scalar inputs that the trainer sets.
class Controls {
 public:
  float lr = 0, rng[2] = {0, 0}, scale = 1;
  bool reset = true;
  void set_step(int64_t number) {
    step_ = number;
    step32_ = static_cast<int32_t>(number);
  }

  /// Return the value of a control input, or a null value for other inputs.
  Ort::Value value(const TensorSpec& t) {
    if (t.role == "lr") return view(t, &lr, 1);
    if (t.role == "rng") return view(t, rng, 2);
    if (t.role == "grad_scale") return view(t, &scale, 1);
    if (t.role == "reset") return view(t, &reset, 1);
    if (t.role == "step") return t.dtype->size == 4 ? view(t, &step32_, 1) : view(t, &step_, 1);
    return Ort::Value{nullptr};
  }

 private:
  template <class T>
  static Ort::Value view(const TensorSpec& t, const T* data, int64_t count) {
    if (t.fixed() != Shape{count} || t.dtype != &dtype_of<T>())
      throw ManifestError("manifest.json: " + t.text() + ", which is invalid for role " + t.role);
    return as_value(TensorView(data, static_cast<size_t>(count), {count}));
  }

  int64_t step_ = 0;
  int32_t step32_ = 0;
};

/// Return the shape of a tensor of the batch; without a given shape, at most one size may be dynamic.
inline Shape shape_of(const TensorSpec& spec, const TensorView& given) {
  if (given.shaped) return given.shape;
  Shape shape;
  auto rest = static_cast<int64_t>(given.count);
  for (const auto& d : spec.shape) {
    shape.push_back(d.index() ? -1 : std::get<int64_t>(d));
    rest /= std::max<int64_t>(shape.back(), 1);
  }
  if (std::count(shape.begin(), shape.end(), -1) > 1)
    throw ShapeError(spec.text() + ": several sizes are unknown\nhint: pass the shape too");
  std::replace(shape.begin(), shape.end(), int64_t{-1}, rest);
  return shape;
}

/// Return a tensor of the batch with its shape; `sizes` are the values of symbols.
inline TensorView resolve(const TensorSpec& spec, const TensorView& given, std::map<std::string, int64_t>& sizes) {
  if (given.dtype != spec.dtype) throw ShapeError(spec.text() + ", got " + given.dtype->name);
  const Shape shape = shape_of(spec, given);
  bool fits = shape.size() == spec.shape.size() && size_of(shape, *spec.dtype) == given.count * spec.dtype->size;
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    if (const auto* size = std::get_if<int64_t>(&spec.shape[i])) {
      fits = *size == shape[i];
    } else if (const std::string& symbol = std::get<std::string>(spec.shape[i]); symbol != "?") {
      const int64_t other = sizes.emplace(symbol, shape[i]).first->second;
      if (other != shape[i])
        throw ShapeError(spec.text() + ", got " + symbol + " = " + std::to_string(shape[i]) + ", another tensor has " +
                         std::to_string(other));
    }
  }
  if (!fits)
    throw ShapeError(spec.text() + ", got shape [" + listing(shape) + "] and " + std::to_string(given.count) +
                     " elements");
  return TensorView(*given.dtype, given.data, given.count, shape);
}

/// Throw if a product of sizes is 1 (see Manifest::above_one).
inline void check_above_one(const std::string& product, const std::map<std::string, int64_t>& sizes) {
  std::istringstream names(product);
  for (std::string name; std::getline(names, name, '*');) {
    const auto at = sizes.find(name);
    if (at == sizes.end() || at->second != 1) return;
  }
  throw ShapeError("BatchNormalization needs more than one value per channel in training, got " + product + " = 1\n" +
                   "hint: use a larger batch, or build with mode='as-is' in Python");
}

/// A model with preallocated memory for everything except the batch.
class BoundModel {
 public:
  using Memory = std::function<TensorView(const TensorSpec&)>;

  /// `input` and `output` return the memory of tensors that are not part of the batch or the result.
  BoundModel(std::shared_ptr<Model> model, Controls& controls, const Memory& input, const Memory& output)
      : model_(std::move(model)) {
    for (const TensorSpec& t : model_->spec().inputs) {
      const bool given = t.role == "input" || t.role == "target";
      if (given) batch_.push_back(feeds_.size());
      Ort::Value value = given ? Ort::Value{nullptr} : controls.value(t);
      feeds_.push_back(given || value ? std::move(value) : as_value(input(t)));
    }
    for (const TensorSpec& t : model_->spec().outputs) {
      if (is_scalar(t) && t.fixed() != Shape(t.shape.size(), 1))
        throw ManifestError("manifest.json: " + t.text() + ", expected a scalar");
      if (is_scalar(t)) scalars_.add(t.name, *t.dtype, *t.fixed());
      if (t.role == "output") results_.emplace_back(nullptr);
      else results_.push_back(as_value(is_scalar(t) ? scalars_[t.name] : output(t)));
    }
  }

  /// Run on a batch; validates it first and names the tensor that does not match.
  void run(const Batch& batch = {}, const std::vector<std::string>& above_one = {}) {
    const auto& inputs = model_->spec().inputs;
    const auto fail = [&](const std::string& what) {
      std::vector<std::string> names;
      for (const size_t i : batch_) names.push_back(inputs[i].name);
      throw ShapeError(what + "\nhint: the inputs are " + listing(names));
    };
    std::map<std::string_view, const TensorView*> given;
    for (const Feed& feed : batch) {
      const auto known = [&](size_t i) { return inputs[i].name == feed.name; };
      if (std::none_of(batch_.begin(), batch_.end(), known)) fail("unknown input: '" + feed.name + "'");
      if (!given.emplace(feed.name, &feed.value).second) fail("duplicate input");
    }
    std::map<std::string, int64_t> sizes;
    for (const size_t i : batch_) {
      const auto at = given.find(inputs[i].name);
      if (at == given.end()) fail("missing from the batch: '" + inputs[i].name + "'");
      feeds_[i] = as_value(resolve(inputs[i], *at->second, sizes));
    }
    for (const std::string& product : above_one) check_above_one(product, sizes);
    for (size_t i = 0; i < results_.size(); ++i)
      if (model_->spec().outputs[i].role == "output") results_[i] = Ort::Value{nullptr};
    model_->run(feeds_, results_);
  }

  /// Return the result of the last run; outputs are moved.
  StepResult result() {
    StepResult r;
    for (size_t i = 0; i < results_.size(); ++i) {
      const TensorSpec& t = model_->spec().outputs[i];
      if (t.role == "output") r.outputs.emplace_back(t.name, std::move(results_[i]));
      if (!is_scalar(t)) continue;
      const double number = number_at(*t.dtype, scalars_[t.name].data);
      if (t.role == "loss") r.loss = number;
      else r.metrics.emplace_back(t.name, number);
    }
    return r;
  }

 private:
  static bool is_scalar(const TensorSpec& t) { return t.role == "loss" || t.role == "metric"; }

  std::shared_ptr<Model> model_;
  Values scalars_;
  std::vector<Ort::Value> feeds_, results_;
  std::vector<size_t> batch_;  ///< indices of the inputs of the batch
};

}  // namespace detail
}  // namespace onnxtrain
