#include <onnxtrain.h>
#include <stdio.h>

int main(void) {
  const float x[] = {0, 0, 0, 1, 1, 0, 1, 1}; /* four rows of two numbers */
  const int64_t labels[] = {0, 1, 1, 0};
  const onnxtrain_tensor batch[] = {{"x", "float32", x, sizeof x, NULL, -1},
                                    {"labels", "int64", labels, sizeof labels, NULL, -1}};
  onnxtrain_trainer* trainer;
  onnxtrain_result result = {0};
  int failed = onnxtrain_open("artifacts", 1, -1, &trainer);
  for (int i = 0; i < 500 && !failed; ++i) failed = onnxtrain_step(trainer, batch, 2, &result);
  failed = failed || onnxtrain_save(trainer, "checkpoint.safetensors") || onnxtrain_export(trainer, "trained.onnx");
  if (failed) fprintf(stderr, "%s\n", onnxtrain_error());
  else printf("loss %.9g\n", result.loss);
  onnxtrain_close(trainer);
  return failed;
}
