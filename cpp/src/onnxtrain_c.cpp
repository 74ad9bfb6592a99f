// The C API: converts exceptions to error codes and messages.
#define ORT_API_MANUAL_INIT
#include <onnxtrain.hpp>

#include "onnxtrain.h"

struct onnxtrain_trainer {
  onnxtrain::Trainer trainer;
  onnxtrain::StepResult last = {};
};

namespace {

constexpr uint32_t kOldestRuntime = 20;  // onnxruntime 1.20 has all the functions used here

thread_local std::string last_error;

template <class Work>
int guarded(const Work& work) {
  try {
    last_error.clear();
    work();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown error";
  }
  return 1;
}

void need(bool condition, const char* what) {
  if (!condition) throw onnxtrain::Error(std::string(what) + " is null");
}

/// Request an API version that older runtimes have too.
void init() {
  static const OrtApi* const api = OrtGetApiBase()->GetApi(kOldestRuntime);
  if (!api)
    throw onnxtrain::RuntimeError("this onnxruntime is older than 1.20: " +
                                  std::string(OrtGetApiBase()->GetVersionString()));
  Ort::InitApi(api);
}

onnxtrain::Batch batch_of(const onnxtrain_tensor* tensors, size_t count) {
  need(tensors || count == 0, "batch");
  onnxtrain::Batch batch;
  for (size_t i = 0; i < count; ++i) {
    const onnxtrain_tensor& t = tensors[i];
    need(t.name && t.dtype && (t.data || t.size == 0) && (t.shape || t.rank <= 0), "a field of a tensor");
    const onnxtrain::DType* type = onnxtrain::detail::find_type(t.dtype);
    if (!type || t.size % type->size)
      throw onnxtrain::ShapeError(std::string("'") + t.name + "': " + std::to_string(t.size) + " bytes of " + t.dtype);
    const size_t rank = t.rank > 0 ? static_cast<size_t>(t.rank) : 0;
    onnxtrain::TensorView view(*type, t.data, t.size / type->size, onnxtrain::Shape(t.shape, t.shape + rank));
    view.shaped = t.rank >= 0;
    batch.push_back({t.name, view});
  }
  return batch;
}

void report(onnxtrain_trainer& t, onnxtrain::StepResult result, onnxtrain_result* out) {
  t.last = std::move(result);
  if (out) *out = {t.last.loss, t.last.step, t.last.updated};
}

}  // namespace

const char* onnxtrain_error(void) {
  return last_error.c_str();
}

int onnxtrain_open(const char* directory, int threads, int64_t seed, onnxtrain_trainer** trainer) {
  return guarded([&] {
    need(directory && trainer, "directory or trainer");
    *trainer = nullptr;
    init();
    onnxtrain::Options options;
    options.threads = threads;
    if (seed >= UINT32_MAX) throw onnxtrain::Error("seed must be in [0, 2^24), got " + std::to_string(seed));
    if (seed >= 0) options.seed = static_cast<uint32_t>(seed);
    *trainer = new onnxtrain_trainer{onnxtrain::Trainer(directory, options)};
  });
}

void onnxtrain_close(onnxtrain_trainer* trainer) {
  delete trainer;
}

int onnxtrain_step(onnxtrain_trainer* t, const onnxtrain_tensor* batch, size_t count, onnxtrain_result* result) {
  return guarded([&] { need(t, "trainer"), report(*t, t->trainer.step(batch_of(batch, count)), result); });
}

int onnxtrain_eval(onnxtrain_trainer* t, const onnxtrain_tensor* batch, size_t count, onnxtrain_result* result) {
  return guarded([&] { need(t, "trainer"), report(*t, t->trainer.evaluate(batch_of(batch, count)), result); });
}

int onnxtrain_flush(onnxtrain_trainer* t) {
  return guarded([&] { need(t, "trainer"), t->trainer.flush(); });
}

int onnxtrain_metric(onnxtrain_trainer* t, const char* name, double* value) {
  return guarded([&] { need(t && name && value, "an argument"), *value = t->last.metric(name); });
}

int64_t onnxtrain_global_step(const onnxtrain_trainer* t) {
  return t ? t->trainer.global_step() : 0;
}

double onnxtrain_get_lr(const onnxtrain_trainer* t) {
  return t ? t->trainer.lr() : 0;
}

int onnxtrain_set_lr(onnxtrain_trainer* t, double lr) {
  return guarded([&] { need(t, "trainer"), t->trainer.set_lr(lr); });
}

size_t onnxtrain_parameter_count(const onnxtrain_trainer* t) {
  return t ? t->trainer.manifest().parameters.size() : 0;
}

const char* onnxtrain_parameter_name(const onnxtrain_trainer* t, size_t index) {
  return index < onnxtrain_parameter_count(t) ? t->trainer.manifest().parameters[index].name.c_str() : nullptr;
}

int onnxtrain_parameter_size(const onnxtrain_trainer* t, const char* name, size_t* size) {
  return guarded([&] { need(t && name && size, "an argument"), *size = t->trainer.parameter(name).bytes.size(); });
}

int onnxtrain_get_parameter(const onnxtrain_trainer* t, const char* name, void* data, size_t size) {
  return guarded([&] {
    need(t && name && data, "an argument");
    const onnxtrain::Tensor tensor = t->trainer.parameter(name);
    if (tensor.bytes.size() != size)
      throw onnxtrain::ShapeError(std::string("'") + name + "' has " + std::to_string(tensor.bytes.size()) +
                                  " bytes, got " + std::to_string(size));
    std::memcpy(data, tensor.bytes.data(), size);
  });
}

int onnxtrain_set_parameter(onnxtrain_trainer* t, const char* name, const void* data, size_t size) {
  return guarded([&] {
    need(t && name && data, "an argument");
    const onnxtrain::WeightSpec& w = t->trainer.manifest().weight(name);
    if (size % w.dtype->size)
      throw onnxtrain::ShapeError(std::string("'") + name + "': " + std::to_string(size) + " bytes of " +
                                  w.dtype->name);
    t->trainer.set_parameter(name, {*w.dtype, data, size / w.dtype->size});
  });
}

int onnxtrain_save(onnxtrain_trainer* t, const char* path) {
  return guarded([&] { need(t && path, "an argument"), t->trainer.save(path); });
}

int onnxtrain_load(onnxtrain_trainer* t, const char* path) {
  return guarded([&] { need(t && path, "an argument"), t->trainer.load(path); });
}

int onnxtrain_export(onnxtrain_trainer* t, const char* path) {
  return guarded([&] { need(t && path, "an argument"), t->trainer.export_model(path); });
}
