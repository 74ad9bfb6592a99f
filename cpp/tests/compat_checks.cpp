// Checks of the compatibility classes: calls every method.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "onnxruntime_training_cxx_api.h"

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "check failed: %s\n", what);
  std::exit(1);
}

template <class Work>
bool throws(const Work& work) {
  try {
    work();
    return false;
  } catch (const Ort::Exception&) {
    return true;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "artifacts";
  Ort::SetSeed(7);
  Ort::Env env;
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(1);
  std::ifstream in(folder + "/checkpoint", std::ios::binary);
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(in), {}};
  auto state = Ort::CheckpointState::LoadCheckpointFromBuffer(bytes);
  check(throws([&] { state.GetParameter("fc1.weight"); }), "a state without a session has no parameters");
  Ort::TrainingSession session(env, options, state, folder + "/training_model.onnx", folder + "/eval_model.onnx",
                               folder + "/optimizer_model.onnx");
  check(session.InputNames(true) == std::vector<std::string>{"x", "labels"}, "names of inputs");
  check(session.OutputNames(false).front() == "loss", "the loss comes first");

  std::vector<float> x(8 * 10);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  std::vector<int32_t> labels = {0, 1, 2, 3, 0, 1, 2, 3};  // int32, as in existing programs
  const int64_t sizes[] = {8, 10};
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<Ort::Value> batch;
  batch.push_back(Ort::Value::CreateTensor<float>(memory, x.data(), x.size(), sizes, 2));
  check(throws([&] { session.TrainStep(batch); }), "a batch without labels is rejected");
  batch.push_back(Ort::Value::CreateTensor<int32_t>(memory, labels.data(), labels.size(), sizes, 1));
  const auto loss_of = [](std::vector<Ort::Value> outputs) { return *outputs.front().GetTensorMutableData<float>(); };

  check(throws([&] { session.OptimizerStep(); }), "no gradients before the first step");
  check(throws([&] { session.SchedulerStep(); }), "no scheduler is registered");
  session.RegisterLinearLRScheduler(2, 10, 0.1f);
  check(session.GetLearningRate() == 0.0f, "warm-up starts at 0");
  session.SetLearningRate(0.05f);
  check(session.GetLearningRate() == 0.05f, "the learning rate is set");

  const float before = loss_of(session.EvalStep(batch));
  x[0] = std::nanf("");
  check(std::isnan(loss_of(session.TrainStep(batch))), "the loss of a batch with NaN");
  session.OptimizerStep();
  session.LazyResetGrad();
  x[0] = 0;
  check(loss_of(session.EvalStep(batch)) == before, "a batch with NaN changes no parameter");
  Ort::Value start = session.ToBuffer(true);
  check(start.GetTensorTypeAndShapeInfo().GetElementCount() == session.GetParametersSize(true), "all elements");
  for (int i = 0; i < 20; ++i) {
    session.TrainStep(batch);
    session.TrainStep(batch);  // gradients accumulate
    session.OptimizerStep();
    session.LazyResetGrad();
  }
  const float after = loss_of(session.EvalStep(batch));
  check(after < before, "training reduces the loss");
  session.SchedulerStep();
  check(session.GetLearningRate() == 0.0f, "the schedule ends after 10 steps");

  state.AddProperty("epoch", int64_t{3});
  state.AddProperty("best", 0.25f);
  state.AddProperty("note", std::string("fine"));
  Ort::CheckpointState::SaveCheckpoint(state, "with_state", true);
  Ort::CheckpointState::SaveCheckpoint(state, "without_state");
  for (const char* name : {"with_state", "without_state"}) {
    auto other = Ort::CheckpointState::LoadCheckpoint(name);
    Ort::TrainingSession again(env, options, other, folder + "/training_model.onnx", folder + "/eval_model.onnx",
                               folder + "/optimizer_model.onnx");
    check(loss_of(again.EvalStep(batch)) == after, "the same loss after loading");
    check(std::get<int64_t>(other.GetProperty("epoch")) == 3, "an integer");
    check(std::get<float>(other.GetProperty("best")) == 0.25f, "a number");
    check(std::get<std::string>(other.GetProperty("note")) == "fine", "a string");
  }
  check(throws([&] { state.GetProperty("nothing"); }), "an unknown property");

  Ort::Value weight = state.GetParameter("fc1.bias");
  weight.GetTensorMutableData<float>()[0] = 42.0f;
  state.UpdateParameter("fc1.bias", weight);
  check(state.GetParameter("fc1.bias").GetTensorMutableData<float>()[0] == 42.0f, "the parameter is set");
  session.FromBuffer(start);
  check(loss_of(session.EvalStep(batch)) == before, "the initial parameters");
  Ort::Value all = session.ToBuffer(false);
  session.FromBuffer(all);
  check(loss_of(session.EvalStep(batch)) == before, "all parameters");
  std::puts("all checks passed");
}
