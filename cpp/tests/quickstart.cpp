#include <cstdio>
#include <onnxtrain.hpp>

int main() {
  onnxtrain::Trainer trainer("artifacts");
  std::vector<float> x = {0, 0, 0, 1, 1, 0, 1, 1};  // four rows of two numbers
  std::vector<int64_t> labels = {0, 1, 1, 0};
  double loss = 0;
  for (int i = 0; i < 500; ++i) loss = trainer.step({{"x", x}, {"labels", labels}}).loss;
  std::printf("loss %.9g\n", loss);
  trainer.save("checkpoint.safetensors");
  trainer.export_model("trained.onnx");
}
