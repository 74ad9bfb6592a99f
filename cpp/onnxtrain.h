/* C API to train onnxtrain artifacts on stock ONNX Runtime.
 *
 * Functions that return int return 0 on success; otherwise onnxtrain_error() returns the message.
 * A trainer is not thread-safe. No function throws, prints or exits. */
#ifndef ONNXTRAIN_H_
#define ONNXTRAIN_H_

#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
#define ONNXTRAIN_API __declspec(dllexport)
#else
#define ONNXTRAIN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct onnxtrain_trainer onnxtrain_trainer;

/* A tensor of a batch. `dtype` is a numpy name: "float32", "int64" ... `size` is the size of `data` in bytes;
 * `data` is only read during the call. With `rank` < 0 the shape follows from the model if at most one size is
 * unknown. */
typedef struct {
  const char* name;
  const char* dtype;
  const void* data;
  size_t size;
  const int64_t* shape;
  int rank;
} onnxtrain_tensor;

/* Result of a step or an evaluation. */
typedef struct {
  double loss;
  int64_t step; /* number of the update that the batch belongs to, from 1 */
  int updated;  /* 0 if gradients were only accumulated, or the loss is not finite and nothing changed */
} onnxtrain_result;

/* Return the error message of this thread's last call, or an empty string. Valid until the next call. */
ONNXTRAIN_API const char* onnxtrain_error(void);

/* Open an artifact directory. `threads`: size of onnxruntime's thread pool, 0 for its default; `seed`: random seed
 * for dropout, -1 for the checkpoint's. */
ONNXTRAIN_API int onnxtrain_open(const char* directory, int threads, int64_t seed, onnxtrain_trainer** trainer);
ONNXTRAIN_API void onnxtrain_close(onnxtrain_trainer* trainer);

/* Train on one batch, or run it in evaluation mode. */
ONNXTRAIN_API int onnxtrain_step(onnxtrain_trainer* trainer, const onnxtrain_tensor* batch, size_t count,
                                 onnxtrain_result* result);
ONNXTRAIN_API int onnxtrain_eval(onnxtrain_trainer* trainer, const onnxtrain_tensor* batch, size_t count,
                                 onnxtrain_result* result);
/* Apply the gradients accumulated so far, if there are any. */
ONNXTRAIN_API int onnxtrain_flush(onnxtrain_trainer* trainer);
/* Store a metric of the last step or evaluation in `value`. */
ONNXTRAIN_API int onnxtrain_metric(onnxtrain_trainer* trainer, const char* name, double* value);

ONNXTRAIN_API int64_t onnxtrain_global_step(const onnxtrain_trainer* trainer);
ONNXTRAIN_API double onnxtrain_get_lr(const onnxtrain_trainer* trainer);
ONNXTRAIN_API int onnxtrain_set_lr(onnxtrain_trainer* trainer, double lr);

/* Access parameters by index, and the bytes of parameters and buffers by name. `size` is in bytes. */
ONNXTRAIN_API size_t onnxtrain_parameter_count(const onnxtrain_trainer* trainer);
ONNXTRAIN_API const char* onnxtrain_parameter_name(const onnxtrain_trainer* trainer, size_t index);
ONNXTRAIN_API int onnxtrain_parameter_size(const onnxtrain_trainer* trainer, const char* name, size_t* size);
ONNXTRAIN_API int onnxtrain_get_parameter(const onnxtrain_trainer* trainer, const char* name, void* data, size_t size);
ONNXTRAIN_API int onnxtrain_set_parameter(onnxtrain_trainer* trainer, const char* name, const void* data, size_t size);

/* Checkpoints are saved atomically. Loading one that does not match the artifacts changes nothing. */
ONNXTRAIN_API int onnxtrain_save(onnxtrain_trainer* trainer, const char* path);
ONNXTRAIN_API int onnxtrain_load(onnxtrain_trainer* trainer, const char* path);
/* Write the inference model with the current weights. */
ONNXTRAIN_API int onnxtrain_export(onnxtrain_trainer* trainer, const char* path);

#ifdef __cplusplus
}
#endif
#endif /* ONNXTRAIN_H_ */
