/* Training of onnxtrain artifacts on a stock ONNX Runtime, for C and everything that can call C.
 *
 * Functions that can fail return 0, or another number; onnxtrain_error() then says what and where.
 * A trainer is for one thread at a time. Nothing here throws, prints or ends the program. */
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

/* A tensor of a batch. `dtype` is numpy's word: "float32", "int64" ... `size` counts bytes of `data`, which
 * is read during the call only. With `rank` < 0 the shape follows from the model, where one size is open. */
typedef struct {
  const char* name;
  const char* dtype;
  const void* data;
  size_t size;
  const int64_t* shape;
  int rank;
} onnxtrain_tensor;

/* What a step or an evaluation found. */
typedef struct {
  double loss;
  int64_t step; /* the update that the batch belongs to, counted from 1 */
  int updated;  /* 0 if gradients were only accumulated, or the loss is not finite: nothing has changed then */
} onnxtrain_result;

/* Return what went wrong in this thread's last call; empty if nothing did. Valid until the next call. */
ONNXTRAIN_API const char* onnxtrain_error(void);

/* Open a directory of artifacts. `threads`: of onnxruntime's pool, 0 leaves the choice to it; `seed`: of dropout
 * masks, -1 takes the checkpoint's. */
ONNXTRAIN_API int onnxtrain_open(const char* directory, int threads, int64_t seed, onnxtrain_trainer** trainer);
ONNXTRAIN_API void onnxtrain_close(onnxtrain_trainer* trainer);

/* Train on one batch, or run it in evaluation mode. */
ONNXTRAIN_API int onnxtrain_step(onnxtrain_trainer* trainer, const onnxtrain_tensor* batch, size_t count,
                                 onnxtrain_result* result);
ONNXTRAIN_API int onnxtrain_eval(onnxtrain_trainer* trainer, const onnxtrain_tensor* batch, size_t count,
                                 onnxtrain_result* result);
/* Update with the gradients accumulated so far, if there are any. */
ONNXTRAIN_API int onnxtrain_flush(onnxtrain_trainer* trainer);
/* Put a metric of the last step or evaluation into `value`. */
ONNXTRAIN_API int onnxtrain_metric(onnxtrain_trainer* trainer, const char* name, double* value);

ONNXTRAIN_API int64_t onnxtrain_global_step(const onnxtrain_trainer* trainer);
ONNXTRAIN_API double onnxtrain_get_lr(const onnxtrain_trainer* trainer);
ONNXTRAIN_API int onnxtrain_set_lr(onnxtrain_trainer* trainer, double lr);

/* Parameters by number, and their bytes by name (also of buffers). `size` must be the size in bytes. */
ONNXTRAIN_API size_t onnxtrain_parameter_count(const onnxtrain_trainer* trainer);
ONNXTRAIN_API const char* onnxtrain_parameter_name(const onnxtrain_trainer* trainer, size_t index);
ONNXTRAIN_API int onnxtrain_parameter_size(const onnxtrain_trainer* trainer, const char* name, size_t* size);
ONNXTRAIN_API int onnxtrain_get_parameter(const onnxtrain_trainer* trainer, const char* name, void* data, size_t size);
ONNXTRAIN_API int onnxtrain_set_parameter(onnxtrain_trainer* trainer, const char* name, const void* data, size_t size);

/* Checkpoints are written whole or not at all; one that does not fit changes nothing. */
ONNXTRAIN_API int onnxtrain_save(onnxtrain_trainer* trainer, const char* path);
ONNXTRAIN_API int onnxtrain_load(onnxtrain_trainer* trainer, const char* path);
/* Write the inference model with the current weights. */
ONNXTRAIN_API int onnxtrain_export(onnxtrain_trainer* trainer, const char* path);

#ifdef __cplusplus
}
#endif
#endif /* ONNXTRAIN_H_ */
