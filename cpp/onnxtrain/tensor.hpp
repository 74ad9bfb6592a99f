// Element types, tensors, and memory for many of them.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "error.hpp"

namespace onnxtrain {

using Shape = std::vector<int64_t>;

/// An element type: numpy's name, safetensors' name, onnxruntime's number.
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

/// Return the element type of a name of numpy or safetensors, or of a number of onnxruntime; or null.
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

/// Return elements in another type: float32 as 16 bits, rounded to the nearest; others as they are.
inline std::string in_type(const DType& to, const DType& from, const unsigned char* data, size_t bytes) {
  if (&to == &from) return {reinterpret_cast<const char*>(data), bytes};
  const bool half = to.onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  if (from.onnx != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || (!half && to.onnx != ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16))
    throw ManifestError(std::string("manifest.json: ") + from.name + " is not stored as " + to.name);
  std::string out(bytes / sizeof(float) * to.size, '\0');
  for (size_t i = 0; i < bytes / sizeof(float); ++i) {
    float number;
    std::memcpy(&number, data + i * sizeof(float), sizeof(float));
    const uint16_t word = half ? Ort::Float16_t(number).val : Ort::BFloat16_t(number).val;
    std::memcpy(&out[i * to.size], &word, to.size);
  }
  return out;
}

/// Return whether an array of a shape can be, and put its size in bytes into `bytes`.
inline bool size_of(const Shape& shape, size_t item, size_t& bytes) {
  // A zero does not make the other sizes possible.
  int64_t room = INT64_MAX / static_cast<int64_t>(item), count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || (size > 0 && size > room)) return false;
    room /= size > 0 ? size : 1;
    count *= size;
  }
  bytes = static_cast<size_t>(count) * item;
  return shape.size() <= kMostDimensions;
}

template <class Sizes>
std::string listing(const Sizes& sizes) {
  std::string out;
  for (const auto& size : sizes) {
    out += out.empty() ? "" : ", ";
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(size)>>) out += std::to_string(size);
    else out += size;
  }
  return out;
}

/// Return a float that is stored in 16 bits.
inline float half_to_float(uint16_t bits, bool brain) {
  uint32_t word = uint32_t{bits} << 16;
  if (!brain) {
    const uint32_t sign = word & 0x80000000u, mantissa = bits & 1023u;
    uint32_t exponent = (bits >> 10) & 31u;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(mantissa) / 16777216.0f;
    exponent = exponent == 31 ? 255 : exponent + 112;
    word = sign | exponent << 23 | mantissa << 13;
  }
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

/// Return a number of any floating type.
inline double number_at(const DType& type, const void* data) {
  if (type.onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return *static_cast<const float*>(data);
  if (type.onnx == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) return *static_cast<const double*>(data);
  if (type.size != 2) throw ShapeError(std::string(type.name) + " is no floating type");
  return half_to_float(*static_cast<const uint16_t*>(data), type.stored[0] == 'B');
}

}  // namespace detail

/// Return what is known about the element type of C++'s T.
template <class T>
const DType& dtype_of() {
  if constexpr (std::is_same_v<T, bool>) return *detail::find_type("bool");
  if constexpr (std::is_same_v<T, Ort::Float16_t>) return *detail::find_type("float16");
  if constexpr (std::is_same_v<T, Ort::BFloat16_t>) return *detail::find_type("bfloat16");
  if constexpr (std::is_floating_point_v<T>) return *detail::find_type(sizeof(T) == 4 ? "float32" : "float64");
  const std::string bits = std::to_string(8 * sizeof(T));
  return *detail::find_type((std::is_signed_v<T> ? "int" : "uint") + bits);
}

/// Elements that somebody else owns. A tensor without a shape is given the one that the model expects.
struct TensorView {
  const DType* dtype = nullptr;
  const void* data = nullptr;
  size_t count = 0;
  Shape shape;
  bool shaped = false;

  template <class T>
  TensorView(const T* elements, size_t number) : dtype(&dtype_of<T>()),
                                                 data(elements),
                                                 count(number) {}
  template <class T>
  TensorView(const T* elements, size_t number, Shape sizes) : TensorView(elements, number) {
    shape = std::move(sizes);
    shaped = true;
  }
  template <class T>
  TensorView(const std::vector<T>& elements) : TensorView(elements.data(), elements.size()) {}
  template <class T>
  TensorView(const std::vector<T>& elements, Shape sizes)
      : TensorView(elements.data(), elements.size(), std::move(sizes)) {}
  TensorView(const DType& type, const void* elements, size_t number, Shape sizes)
      : dtype(&type),
        data(elements),
        count(number),
        shape(std::move(sizes)),
        shaped(true) {}
  TensorView(const Ort::Value& value) : shaped(true) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    dtype = detail::find_type(info.GetElementType());
    if (!dtype) throw ShapeError("a tensor of an element type that is not supported");
    data = value.GetTensorRawData();
    count = info.GetElementCount();
    shape = info.GetShape();
  }
};

/// A tensor with memory of its own.
struct Tensor {
  const DType* dtype = nullptr;
  Shape shape;
  std::vector<unsigned char> bytes;

  size_t count() const { return dtype ? bytes.size() / dtype->size : 0; }

  /// Return the elements; T must be the tensor's own type.
  template <class T>
  std::vector<T> as() const {
    if (dtype != &dtype_of<T>())
      throw ShapeError(std::string("a tensor of ") + (dtype ? dtype->name : "nothing") + ", asked for " +
                       dtype_of<T>().name);
    std::vector<T> out(count());
    if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }

  TensorView view() const { return TensorView(*dtype, bytes.data(), count(), shape); }
};

namespace detail {

inline const Ort::MemoryInfo& cpu_memory() {
  static const Ort::MemoryInfo memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  return memory;
}

/// Tensors in one allocation, each aligned to 64 bytes; zeros at first.
class Values {
 public:
  struct Slot {
    const DType* dtype;
    Shape shape;
    size_t bytes;
    size_t offset;
  };

  void add(const std::string& name, const DType& type, const Shape& shape) {
    size_t bytes = 0;
    if (!size_of(shape, type.size, bytes) || bytes > (size_t{1} << 46))
      throw ShapeError("'" + name + "': no array has the shape [" + listing(shape) + "]");
    if (slots_.emplace(name, Slot{&type, shape, bytes, total_}).second) total_ += (bytes + 63) / 64 * 64 + 64;
  }

  /// Make the memory; nothing can be added any more.
  void allocate() {
    void* memory = ::operator new(total_ + 64, std::align_val_t(64), std::nothrow);
    if (!memory) throw Error("no memory for " + std::to_string(total_) + " bytes of weights and state");
    memory_.reset(static_cast<unsigned char*>(memory));
    std::memset(memory, 0, total_);
  }

  bool has(const std::string& name) const { return slots_.count(name) > 0; }
  const Slot& slot(const std::string& name) const {
    const auto at = slots_.find(name);
    if (at == slots_.end()) throw ManifestError("manifest.json: '" + name + "' has no value");
    return at->second;
  }
  unsigned char* data(const std::string& name) const { return memory_.get() + slot(name).offset; }
  const std::map<std::string, Slot>& slots() const { return slots_; }
  size_t bytes() const { return total_; }

  void copy_from(const Values& other, const std::string& name) {
    std::memcpy(data(name), other.data(name), slot(name).bytes);
  }

  /// Return what the runtime takes for a tensor: the same memory, seen by it.
  Ort::Value value(const std::string& name) const {
    const Slot& s = slot(name);
    return Ort::Value::CreateTensor(cpu_memory(), data(name), s.bytes, s.shape.data(), s.shape.size(), s.dtype->onnx);
  }

 private:
  struct Free {
    void operator()(unsigned char* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::map<std::string, Slot> slots_;
  std::unique_ptr<unsigned char, Free> memory_;
  size_t total_ = 0;
};

}  // namespace detail
}  // namespace onnxtrain
