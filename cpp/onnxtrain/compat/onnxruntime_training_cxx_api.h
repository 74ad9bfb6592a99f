// The C++ training API of onnxruntime 1.19 and older, on stock onnxruntime.
//
// With this directory on the include path, programs that include "onnxruntime_training_cxx_api.h" compile
// unchanged. They train artifacts built with onnxtrain; checkpoints in the old format have to be converted.
#pragma once

#include <cmath>
#include <onnxtrain.hpp>
#include <utility>

namespace Ort {

using Property = std::variant<int64_t, float, std::string>;

namespace training_detail {

inline std::optional<uint32_t>& seed() {
  static std::optional<uint32_t> value;
  return value;
}

/// Convert onnxtrain::Error to Ort::Exception, which existing programs catch.
template <class Work>
auto guarded(const Work& work) {
  try {
    return work();
  } catch (const onnxtrain::Error& error) {
    throw Ort::Exception(error.what(), ORT_FAIL);
  }
}

/// Return a tensor that owns its memory.
inline Value tensor(const onnxtrain::DType& type, const onnxtrain::Shape& shape, const void* data, size_t bytes) {
  AllocatorWithDefaultOptions allocator;
  Value value = Value::CreateTensor(allocator, shape.data(), shape.size(), type.onnx);
  if (bytes) std::memcpy(value.GetTensorMutableRawData(), data, bytes);
  return value;
}

/// A checkpoint, and the trainer that was created from it.
struct State {
  std::string file;
  onnxtrain::Checkpoint checkpoint;
  std::map<std::string, std::string> fresh;  ///< initial optimizer state, if the file has none
  std::optional<onnxtrain::Manifest> manifest;
  std::unique_ptr<onnxtrain::Trainer> trainer;

  explicit State(std::string data, const std::string& label) : file(std::move(data)) {
    checkpoint = onnxtrain::read_checkpoint(file, label);
    const auto text = checkpoint.meta.find("manifest");
    if (text == checkpoint.meta.end())
      throw onnxtrain::CheckpointError(label + ": no manifest in the metadata\n" +
                                       "hint: load the checkpoint that was built with these models");
    manifest = onnxtrain::Manifest::parse(text->second, label);
    add_fresh_state();
  }

  onnxtrain::Trainer& running() {
    if (!trainer) throw onnxtrain::Error("this checkpoint state has no training session yet");
    return *trainer;
  }

 private:
  /// Initialize the optimizer state if the checkpoint has none.
  void add_fresh_state() {
    for (const onnxtrain::StateSpec& s : manifest->state) {
      if (checkpoint.tensors.count(s.key)) continue;
      const size_t bytes = onnxtrain::detail::size_of(s.shape, *s.dtype).value_or(0);
      std::string& data = fresh[s.key];
      const auto parameter = checkpoint.tensors.find(s.parameter);
      if (s.slot == "ema" && parameter != checkpoint.tensors.end()) {
        data = parameter->second.bytes();
      } else {
        data.assign(bytes, '\0');
        const auto init = static_cast<float>(s.init);
        if (init != 0 && s.dtype != &onnxtrain::dtype_of<float>())
          throw onnxtrain::CheckpointError("'" + s.key + "' is missing");
        for (size_t at = 0; init != 0 && at < bytes; at += sizeof init) std::memcpy(&data[at], &init, sizeof init);
      }
      checkpoint.tensors[s.key] = {*s.dtype, data.data(), data.size() / s.dtype->size, s.shape};
    }
  }
};

}  // namespace training_detail

/// Set the random seed of sessions that are created from now on.
inline void SetSeed(const int64_t seed) {
  training_detail::seed() = static_cast<uint32_t>(static_cast<uint64_t>(seed) % onnxtrain::detail::kSeeds);
}

/// Parameters, optimizer state and properties of a training session; must outlive the session.
class CheckpointState {
 public:
  CheckpointState() = delete;

  static CheckpointState LoadCheckpoint(const std::basic_string<ORTCHAR_T>& path_to_checkpoint) {
    return training_detail::guarded([&] {
      const std::filesystem::path path(path_to_checkpoint);
      return CheckpointState(onnxtrain::detail::read_file(path), "'" + path.string() + "'");
    });
  }

  static CheckpointState LoadCheckpointFromBuffer(const std::vector<uint8_t>& buffer) {
    return training_detail::guarded(
        [&] { return CheckpointState(std::string(buffer.begin(), buffer.end()), "checkpoint"); });
  }

  static void SaveCheckpoint(const CheckpointState& checkpoint_state,
                             const std::basic_string<ORTCHAR_T>& path_to_checkpoint,
                             const bool include_optimizer_state = false) {
    training_detail::guarded([&] {
      const training_detail::State& state = *checkpoint_state.state_;
      onnxtrain::Checkpoint saved = state.trainer ? state.trainer->snapshot(true) : state.checkpoint;
      for (const onnxtrain::StateSpec& s : state.manifest->state)
        if (!include_optimizer_state) saved.tensors.erase(s.key);
      if (!include_optimizer_state) saved.meta["step"] = "0";
      onnxtrain::write_checkpoint(path_to_checkpoint, saved);
    });
  }

  void AddProperty(const std::string& property_name, const Property& property_value) {
    training_detail::guarded([&] {
      onnxtrain::Property value = std::visit([](const auto& v) { return onnxtrain::Property(v); }, property_value);
      state_->running().set_property(property_name, value);
    });
  }

  Property GetProperty(const std::string& property_name) {
    return training_detail::guarded([&]() -> Property {
      const onnxtrain::Property value = state_->running().property(property_name);
      if (const auto* number = std::get_if<double>(&value)) return static_cast<float>(*number);
      if (const auto* whole = std::get_if<int64_t>(&value)) return *whole;
      return std::get<std::string>(value);
    });
  }

  void UpdateParameter(const std::string& parameter_name, const Value& parameter) {
    training_detail::guarded([&] { state_->running().set_parameter(parameter_name, parameter); });
  }

  Value GetParameter(const std::string& parameter_name) {
    return training_detail::guarded([&] {
      const onnxtrain::Tensor t = state_->running().parameter(parameter_name);
      return training_detail::tensor(*t.dtype, t.shape, t.bytes.data(), t.bytes.size());
    });
  }

 private:
  friend class TrainingSession;
  CheckpointState(std::string file, const std::string& label)
      : state_(std::make_unique<training_detail::State>(std::move(file), label)) {}
  std::unique_ptr<training_detail::State> state_;
};

/// Runs the training, evaluation and optimizer models with the state of a checkpoint.
class TrainingSession {
 public:
  using Path = std::basic_string<ORTCHAR_T>;

  TrainingSession(const Env&, const SessionOptions& session_options, CheckpointState& checkpoint_state,
                  const Path& train_model_path, const std::optional<Path>& eval_model_path = std::nullopt,
                  const std::optional<Path>& optimizer_model_path = std::nullopt)
      : TrainingSession(session_options, checkpoint_state, train_model_path, eval_model_path, optimizer_model_path) {}

  TrainingSession(const SessionOptions& session_options, CheckpointState& checkpoint_state,
                  const Path& train_model_path, const std::optional<Path>& eval_model_path = std::nullopt,
                  const std::optional<Path>& optimizer_model_path = std::nullopt)
      : state_(checkpoint_state.state_.get()) {
    training_detail::guarded([&] {
      const std::filesystem::path train(train_model_path);
      onnxtrain::Artifacts artifacts{*state_->manifest, train.parent_path(), {}};
      artifacts.files[artifacts.manifest.model("train").file] = train;
      if (eval_model_path) artifacts.files[artifacts.manifest.model("eval").file] = *eval_model_path;
      if (optimizer_model_path) artifacts.files[artifacts.manifest.model("optimizer").file] = *optimizer_model_path;
      onnxtrain::Options options;
      options.layout = onnxtrain::LayoutKind::separate;
      options.seed = training_detail::seed();
      options.check_hashes = false;  // the manifest in a checkpoint has none
      options.base = std::make_shared<SessionOptions>(session_options.Clone());
      state_->trainer = std::make_unique<onnxtrain::Trainer>(std::move(artifacts), state_->checkpoint, options);
    });
  }

  std::vector<Value> TrainStep(const std::vector<Value>& input_values) {
    return training_detail::guarded([&] {
      const onnxtrain::Manifest& manifest = trainer().manifest();
      onnxtrain::StepResult result = trainer().accumulate(batch("train", input_values));
      accumulated_ = accumulated_ || std::isfinite(result.loss);
      discarded_ = !accumulated_;
      return values(manifest.model("train"), std::move(result));
    });
  }

  void LazyResetGrad() {
    trainer().reset_gradients();
    accumulated_ = false;
  }

  std::vector<Value> EvalStep(const std::vector<Value>& input_values) {
    return training_detail::guarded([&] {
      const onnxtrain::Manifest& manifest = trainer().manifest();
      return values(manifest.model("eval"), trainer().evaluate(batch("eval", input_values)));
    });
  }

  void SetLearningRate(float learning_rate) {
    training_detail::guarded([&] { trainer().set_lr(learning_rate); });
  }
  float GetLearningRate() const { return static_cast<float>(state_->trainer->lr()); }

  void RegisterLinearLRScheduler(int64_t warmup_step_count, int64_t total_step_count, float initial_lr) {
    const int64_t decay = total_step_count - warmup_step_count;
    schedule_ = onnxtrain::warmup(initial_lr, warmup_step_count,
                                  decay > 0 ? onnxtrain::linear(initial_lr, decay) : onnxtrain::constant(0));
    SchedulerStep();
  }
  void SchedulerStep() {
    training_detail::guarded([&] {
      if (!schedule_) throw onnxtrain::Error("no scheduler is registered");
      trainer().set_lr(schedule_(trainer().global_step() + 1));
    });
  }

  /// Update the parameters with the gradients; change nothing if the loss of all batches was not finite.
  void OptimizerStep() {
    if (discarded_) return;
    training_detail::guarded([&] { trainer().update(1.0); });
  }

  /// Export the inference model, which has to be in the directory of the training model.
  void ExportModelForInferencing(const Path& inference_model_path, const std::vector<std::string>& graph_output_names) {
    training_detail::guarded([&] {
      const auto& outputs = trainer().manifest().model("infer").outputs;
      for (const std::string& name : graph_output_names)
        if (std::none_of(outputs.begin(), outputs.end(), [&](const auto& t) { return t.name == name; }))
          throw onnxtrain::Error("unknown output of the inference model: '" + name + "'");
      trainer().export_model(inference_model_path);
    });
  }

  std::vector<std::string> InputNames(const bool training) { return trainer().inputs(training ? "train" : "eval"); }

  std::vector<std::string> OutputNames(const bool training) {
    std::vector<std::string> names;
    for (const auto& t : trainer().manifest().model(training ? "train" : "eval").outputs)
      if (reported(t)) names.push_back(t.name);
    return names;
  }

  /// Return the total number of elements of the parameters.
  size_t GetParametersSize(const bool only_trainable) {
    size_t count = 0;
    for (const std::string& name : parameters(only_trainable)) count += trainer().parameter(name).count();
    return count;
  }

  /// Return the parameters concatenated to one vector.
  Value ToBuffer(const bool only_trainable) {
    return training_detail::guarded([&] {
      std::vector<float> all;
      for (const std::string& name : parameters(only_trainable)) {
        const std::vector<float> part = trainer().parameter(name).as<float>();
        all.insert(all.end(), part.begin(), part.end());
      }
      const auto count = static_cast<int64_t>(all.size());
      return training_detail::tensor(onnxtrain::dtype_of<float>(), {count}, all.data(), all.size() * sizeof(float));
    });
  }

  /// Set all parameters or all trainable parameters, depending on the length.
  void FromBuffer(Value& buffer) {
    training_detail::guarded([&] {
      const onnxtrain::TensorView given(buffer);
      const bool trainable = given.count == GetParametersSize(true);
      if (given.dtype != &onnxtrain::dtype_of<float>() || (!trainable && given.count != GetParametersSize(false)))
        throw onnxtrain::ShapeError("unexpected number of elements: " + std::to_string(given.count));
      const auto* data = static_cast<const float*>(given.data);
      for (const std::string& name : parameters(trainable)) {
        const size_t count = trainer().parameter(name).count();
        trainer().set_parameter(name, {data, count});
        data += count;
      }
    });
  }

 private:
  onnxtrain::Trainer& trainer() { return *state_->trainer; }

  static bool reported(const onnxtrain::TensorSpec& t) {
    return t.role == "loss" || t.role == "metric" || t.role == "output";
  }

  std::vector<std::string> parameters(bool only_trainable) {
    std::vector<std::string> names;
    for (const auto& t : trainer().manifest().model("train").inputs)
      if (t.role == "parameter" || (!only_trainable && (t.role == "frozen" || t.role == "buffer")))
        names.push_back(t.name);
    return names;
  }

  /// Name the inputs by their order; convert int32 labels to int64, as existing programs expect.
  onnxtrain::Batch batch(const std::string& role, const std::vector<Value>& inputs) {
    onnxtrain::Batch batch;
    wide_.clear();
    for (const auto& t : trainer().manifest().model(role).inputs) {
      if (t.role != "input" && t.role != "target") continue;
      if (batch.size() >= inputs.size()) throw onnxtrain::ShapeError("missing from the batch: '" + t.name + "'");
      onnxtrain::TensorView given(inputs[batch.size()]);
      if (given.dtype == &onnxtrain::dtype_of<int32_t>() && t.dtype == &onnxtrain::dtype_of<int64_t>()) {
        const auto* data = static_cast<const int32_t*>(given.data);
        wide_.emplace_back(data, data + given.count);
        given = onnxtrain::TensorView(wide_.back(), given.shape);
      }
      batch.push_back({t.name, given});
    }
    if (batch.size() != inputs.size()) throw onnxtrain::ShapeError("too many inputs: " + std::to_string(inputs.size()));
    return batch;
  }

  static std::vector<Value> values(const onnxtrain::ModelSpec& spec, onnxtrain::StepResult result) {
    std::vector<Value> out;
    size_t outputs = 0;
    for (const auto& t : spec.outputs) {
      if (!reported(t)) continue;
      if (t.role == "output") {
        out.push_back(std::move(result.outputs[outputs++].second));
        continue;
      }
      const auto number = static_cast<float>(t.role == "loss" ? result.loss : result.metric(t.name));
      out.push_back(training_detail::tensor(onnxtrain::dtype_of<float>(), {}, &number, sizeof number));
    }
    return out;
  }

  training_detail::State* state_;
  bool accumulated_ = false;  ///< there are gradients
  bool discarded_ = false;    ///< there are none because the loss of the last batch was not finite
  onnxtrain::Schedule schedule_;
  std::vector<std::vector<int64_t>> wide_;
};

}  // namespace Ort
