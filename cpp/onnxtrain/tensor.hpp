// Dtypes, tensors and tensor storage.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "error.hpp"

namespace onnxtrain {

using Shape = std::vector<int64_t>;

/// A dtype with its names in numpy and safetensors and its onnxruntime enum value.
struct DType {
  const char* name;
  const char* stored;
  ONNXTensorElementDataType onnx;
  size_t size;
};

namespace detail {

inline constexpr DType kTypes[] = {
    {"float32", "F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},
    {"float64", "F64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},
    {"float16", "F16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
    {"bfloat16", "BF16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, 2},
    {"int64", "I64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
    {"int32", "I32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},
    {"int16", "I16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, 2},
    {"int8", "I8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1},
    {"uint64", "U64", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, 8},
    {"uint32", "U32", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, 4},
    {"uint16", "U16", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, 2},
    {"uint8", "U8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},
    {"bool", "BOOL", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1},
};
inline constexpr size_t kMostDimensions = 64;

/// Return a dtype by its numpy or safetensors name or its onnxruntime enum value, or null.
inline const DType* find_type(std::string_view name) {
  for (const DType& t : kTypes)
    if (name == t.name || name == t.stored) return &t;
  return nullptr;
}
inline const DType* find_type(ONNXTensorElementDataType onnx) {
  for (const DType& t : kTypes)
    if (onnx == t.onnx) return &t;
  return nullptr;
}

/// Return the size of an array in bytes, or nothing if the shape is invalid.
inline std::optional<size_t> size_of(const Shape& shape, const DType& type) {
  // Check for overflow even if another size is zero.
  int64_t room = INT64_MAX / static_cast<int64_t>(type.size), count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || size > room) return std::nullopt;
    room /= size > 0 ? size : 1;
    count *= size;
  }
  if (shape.size() > kMostDimensions) return std::nullopt;
  return static_cast<size_t>(count) * type.size;
}

/// Join strings or numbers with commas.
template <class Items>
std::string listing(const Items& items) {
  std::string out;
  for (const auto& item : items) {
    out += out.empty() ? "" : ", ";
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(item)>>) out += std::to_string(item);
    else out += item;
  }
  return out;
}

/// Read a floating-point number of any precision.
inline double number_at(const DType& type, const void* data) {
  if (type.onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return *static_cast<const float*>(data);
  if (type.onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) return *static_cast<const double*>(data);
  if (type.onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) return static_cast<const Ort::Float16_t*>(data)->ToFloat();
  if (type.onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16) return static_cast<const Ort::BFloat16_t*>(data)->ToFloat();
  throw ShapeError(std::string(type.name) + " is not a floating-point type");
}

}  // namespace detail

/// Return the dtype of the C++ type T.
template <class T>
const DType& dtype_of() {
  if constexpr (std::is_same_v<T, bool>) return *detail::find_type("bool");
  if constexpr (std::is_same_v<T, Ort::Float16_t>) return *detail::find_type("float16");
  if constexpr (std::is_same_v<T, Ort::BFloat16_t>) return *detail::find_type("bfloat16");
  if constexpr (std::is_floating_point_v<T>) return *detail::find_type(sizeof(T) == 4 ? "float32" : "float64");
  const std::string bits = std::to_string(8 * sizeof(T));
  return *detail::find_type((std::is_signed_v<T> ? "int" : "uint") + bits);
}

/// A tensor that does not own its memory. Without a shape, it gets the shape that the model expects.
struct TensorView {
  const DType* dtype = &detail::kTypes[0];
  const void* data = nullptr;
  size_t count = 0;
  Shape shape;
  bool shaped = false;

  TensorView() = default;
  TensorView(const DType& type, const void* elements, size_t number) : dtype(&type), data(elements), count(number) {}
  TensorView(const DType& type, const void* elements, size_t number, Shape sizes) : TensorView(type, elements, number) {
    shape = std::move(sizes);
    shaped = true;
  }
  template <class T>
  TensorView(const T* elements, size_t number) : TensorView(dtype_of<T>(), elements, number) {}
  template <class T>
  TensorView(const T* elements, size_t number, Shape sizes)
      : TensorView(dtype_of<T>(), elements, number, std::move(sizes)) {}
  template <class T>
  TensorView(const std::vector<T>& elements) : TensorView(elements.data(), elements.size()) {}
  template <class T>
  TensorView(const std::vector<T>& elements, Shape sizes)
      : TensorView(elements.data(), elements.size(), std::move(sizes)) {}
  TensorView(const Ort::Value& value) : shaped(true) {
    // The const overload was added after onnxruntime 1.20.
    data = const_cast<Ort::Value&>(value).GetTensorMutableRawData();
    const auto info = value.GetTensorTypeAndShapeInfo();
    dtype = detail::find_type(info.GetElementType());
    if (!dtype) throw ShapeError("unsupported dtype of a tensor");
    count = info.GetElementCount();
    shape = info.GetShape();
  }

  std::string_view bytes() const { return {static_cast<const char*>(data), count * dtype->size}; }
  std::string text() const { return std::string(dtype->name) + "[" + detail::listing(shape) + "]"; }
};

/// A tensor that owns its memory.
struct Tensor {
  const DType* dtype = nullptr;
  Shape shape;
  std::vector<unsigned char> bytes;

  size_t count() const { return dtype ? bytes.size() / dtype->size : 0; }
  TensorView view() const { return TensorView(*dtype, bytes.data(), count(), shape); }

  /// Return the elements; T must match the dtype.
  template <class T>
  std::vector<T> as() const {
    if (dtype != &dtype_of<T>())
      throw ShapeError(std::string("a tensor of ") + (dtype ? dtype->name : "nothing") + ", requested " +
                       dtype_of<T>().name);
    std::vector<T> out(count());
    if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
};

namespace detail {

/// Return an Ort::Value that shares the memory of a tensor.
inline Ort::Value as_value(const TensorView& t) {
  static const Ort::MemoryInfo cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  return Ort::Value::CreateTensor(cpu, const_cast<void*>(t.data), t.bytes().size(), t.shape.data(), t.shape.size(),
                                  t.dtype->onnx);
}

/// Cast float32 to a 16-bit float, rounded to nearest; other dtypes must be equal.
inline std::string cast(const DType& to, const TensorView& t) {
  if (&to == t.dtype) return std::string(t.bytes());
  const bool half = &to == &dtype_of<Ort::Float16_t>();
  if (t.dtype != &dtype_of<float>() || (!half && &to != &dtype_of<Ort::BFloat16_t>()))
    throw ManifestError(std::string("manifest.json: ") + t.dtype->name + " cannot be stored as " + to.name);
  std::string out(t.count * to.size, '\0');
  for (size_t i = 0; i < t.count; ++i) {
    const float number = static_cast<const float*>(t.data)[i];
    const uint16_t word = half ? Ort::Float16_t(number).val : Ort::BFloat16_t(number).val;
    std::memcpy(&out[i * to.size], &word, to.size);
  }
  return out;
}

/// Named tensors in memory that onnxruntime allocates (aligned), initialized with zeros.
class Values {
 public:
  void add(const std::string& name, const DType& type, const Shape& shape) {
    const auto bytes = size_of(shape, type);
    if (!bytes || *bytes > (size_t{1} << 46))
      throw ShapeError("'" + name + "': invalid shape [" + listing(shape) + "]");
    Ort::AllocatorWithDefaultOptions allocator;
    Ort::Value value = Ort::Value::CreateTensor(allocator, shape.data(), shape.size(), type.onnx);
    void* memory = value.GetTensorMutableRawData();
    if (*bytes) std::memset(memory, 0, *bytes);
    tensors_.emplace(name, TensorView(type, memory, *bytes / type.size, shape));
    memory_.push_back(std::move(value));
  }

  bool has(const std::string& name) const { return tensors_.count(name) > 0; }
  const TensorView& operator[](const std::string& name) const {
    const auto at = tensors_.find(name);
    if (at == tensors_.end()) throw ManifestError("manifest.json: '" + name + "' has no value");
    return at->second;
  }

  /// Copy bytes of the right size into a tensor.
  void write(const std::string& name, std::string_view bytes) {
    if (!bytes.empty()) std::memcpy(const_cast<void*>((*this)[name].data), bytes.data(), bytes.size());
  }
  /// Copy all tensors of another set.
  void copy(const Values& other) {
    for (const auto& [name, t] : other.tensors_) write(name, t.bytes());
  }

 private:
  std::map<std::string, TensorView> tensors_;
  std::vector<Ort::Value> memory_;
};

}  // namespace detail
}  // namespace onnxtrain
