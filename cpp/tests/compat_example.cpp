#include <cstdio>

#include "onnxruntime_training_cxx_api.h"

int main() {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "example");
  Ort::SessionOptions session_options;
  auto state = Ort::CheckpointState::LoadCheckpoint("artifacts/checkpoint");
  Ort::TrainingSession session(env, session_options, state, "artifacts/training_model.onnx",
                               "artifacts/eval_model.onnx", "artifacts/optimizer_model.onnx");
  std::vector<float> x = {0, 0, 0, 1, 1, 0, 1, 1};
  std::vector<int64_t> labels = {0, 1, 1, 0};
  const int64_t x_shape[] = {4, 2}, labels_shape[] = {4};
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<Ort::Value> batch;
  batch.push_back(Ort::Value::CreateTensor<float>(memory, x.data(), x.size(), x_shape, 2));
  batch.push_back(Ort::Value::CreateTensor<int64_t>(memory, labels.data(), labels.size(), labels_shape, 1));
  for (int i = 0; i < 500; ++i) {
    const float loss = *session.TrainStep(batch).front().GetTensorMutableData<float>();
    session.OptimizerStep();
    session.LazyResetGrad();
    if (i == 499) std::printf("loss %.9g\n", loss);
  }
  state.AddProperty("epoch", int64_t{500});
  Ort::CheckpointState::SaveCheckpoint(state, "checkpoint.safetensors", true);
  session.ExportModelForInferencing("trained.onnx", {"logits"});
}
