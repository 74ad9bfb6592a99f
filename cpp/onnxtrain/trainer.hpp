// The trainer: steps, evaluation, checkpoints and export.
#pragma once

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "error.hpp"
#include "files.hpp"
#include "layouts.hpp"
#include "manifest.hpp"
#include "progress.hpp"
#include "safetensors.hpp"
#include "schedules.hpp"
#include "session.hpp"
#include "sha256.hpp"
#include "tensor.hpp"

namespace onnxtrain {

enum class LayoutKind { automatic, fused, separate };

struct Options {
  int threads = 0;                                      ///< size of onnxruntime's thread pool; 0 for its default
  std::optional<uint32_t> seed;                         ///< random seed for dropout; default: the checkpoint's, or 0
  std::optional<int64_t> accumulate;                    ///< gradient accumulation steps; default: the manifest's
  LayoutKind layout = LayoutKind::automatic;            ///< both layouts give the same results
  std::string prefix;                                   ///< prefix of every file name
  bool check_hashes = true;                             ///< verify the sha256 of every model
  std::function<void(Ort::SessionOptions&)> configure;  ///< may add execution providers
  std::shared_ptr<const Ort::SessionOptions> base;      ///< options to start from
};

/// The locations of artifact files.
struct Artifacts {
  Manifest manifest;
  std::filesystem::path folder;
  std::map<std::string, std::filesystem::path> files;  ///< files in other directories, by their manifest names

  std::filesystem::path path(const std::string& file) const {
    const auto at = files.find(file);
    return at == files.end() ? folder / file : at->second;
  }
};

/// Trains the model of an artifact directory. Not thread-safe; cannot be copied or moved.
class Trainer {
 public:
  explicit Trainer(const std::filesystem::path& folder, const Options& options = {})
      : Trainer(Opened(folder, options.prefix), options) {}

  /// Create a trainer from a checkpoint and model files in any location.
  Trainer(Artifacts artifacts, const Checkpoint& start, const Options& options)
      : artifacts_(std::move(artifacts)),
        options_(options),
        accumulate_(options.accumulate.value_or(manifest().accumulate)) {
    progress_.lr = manifest().lr;
    if (options.seed.value_or(0) >= detail::kSeeds)
      throw Error("seed must be in [0, 2^24), got " + std::to_string(*options.seed));
    if (accumulate_ < 1 || accumulate_ >= detail::kSeeds) throw Error("accumulate must be an integer in [1, 2^24)");
    // Validate first, so that an invalid manifest cannot cause large allocations.
    detail::check_fits(manifest(), start, manifest().checkpoint);
    layout_ = make_layout();
    restore(start, manifest().checkpoint);
    progress_.seed = options.seed.value_or(progress_.seed);
  }

  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  const Manifest& manifest() const { return artifacts_.manifest; }
  /// Return the number of optimizer updates.
  int64_t global_step() const { return progress_.step; }
  uint32_t seed() const { return progress_.seed; }
  bool fused() const { return fused_; }
  double lr() const { return progress_.lr; }
  void set_lr(double lr) {
    if (!detail::is_lr(lr)) throw Error("lr must be a finite number >= 0, got " + std::to_string(lr));
    progress_.lr = lr;
  }
  /// Set a learning rate schedule; an empty function removes it.
  void set_schedule(Schedule schedule) { schedule_ = std::move(schedule); }

  /// Return the names of the inputs and targets of a batch.
  std::vector<std::string> inputs(const std::string& role = "") const {
    std::vector<std::string> names;
    for (const TensorSpec& t : manifest().model(role.empty() ? (fused() ? "step" : "train") : role).inputs)
      if (t.role == "input" || t.role == "target") names.push_back(t.name);
    return names;
  }

  /// Train on one batch. If the loss is not finite, nothing changes and `updated` is false.
  StepResult step(const Batch& batch) {
    StepResult r = accumulate(batch);
    if (fused_) return r;
    r.updated = micro_ >= accumulate_ && flush();
    return r;
  }

  /// Run one batch and accumulate the gradients; a fused step also updates.
  StepResult accumulate(const Batch& batch) {
    control(progress_.step + 1, micro_);
    detail::BoundModel& call = layout_->call();
    call.run(batch, manifest().above_one);
    StepResult r = call.result();
    r.step = progress_.step + 1;
    if (!std::isfinite(r.loss)) return r;
    layout_->commit();
    progress_.forget_run();
    if (fused_) {
      ++progress_.step;
      r.updated = true;
    } else {
      ++micro_;
      fresh_ = false;
    }
    return r;
  }

  /// Apply the mean of the accumulated gradients; return false if there are none.
  bool flush() {
    if (micro_ == 0) return false;
    update(1.0 / static_cast<double>(micro_));
    reset_gradients();
    return true;
  }

  /// Apply the sum of the gradients times `scale`; the sum is kept until it is reset.
  void update(double scale) {
    if (fused_ || fresh_) throw Error("no accumulated gradients\nhint: call accumulate() first");
    control(progress_.step + 1, micro_);
    controls_.scale = static_cast<float>(scale);
    layout_->update();
    ++progress_.step;
  }
  void reset_gradients() {
    micro_ = 0;
    fresh_ = true;
  }

  /// Return loss, metrics and outputs of one batch in evaluation mode.
  StepResult evaluate(const Batch& batch) {
    control(0, 0);
    if (!eval_) eval_ = open_model(manifest().model("eval"), false);
    auto& call = evaluators_[layout_->turn()];
    if (!call) {
      const auto source = [&](const TensorSpec& t) { return (*layout_)[t.name]; };
      const auto none = [](const TensorSpec& t) -> TensorView {
        throw ManifestError("manifest.json: '" + t.name + "' is not a valid output of an eval model");
      };
      call = std::make_unique<detail::BoundModel>(eval_, controls_, source, none);
    }
    call->run(batch);
    StepResult r = call->result();
    r.step = progress_.step;
    return r;
  }

  /// Return a copy of a parameter or buffer.
  Tensor parameter(const std::string& name) const {
    const std::string_view bytes = value(name).bytes();
    return {value(name).dtype, value(name).shape, std::vector<unsigned char>(bytes.begin(), bytes.end())};
  }

  void set_parameter(const std::string& name, const TensorView& given) {
    const TensorView& now = value(name);
    if (given.dtype != now.dtype || (given.shaped && given.shape != now.shape) || given.count != now.count)
      throw ShapeError("'" + manifest().weight(name).name + "' is " + now.text() + ", got " + given.text());
    layout_->write(manifest().weight(name).name, given.bytes());
  }

  void set_property(const std::string& name, const Property& value) {
    progress_.properties[name] = detail::property_text(value);
  }
  Property property(const std::string& name) const {
    const auto at = progress_.properties.find(name);
    if (at == progress_.properties.end()) throw CheckpointError("unknown property: '" + name + "'");
    return detail::read_property(at->second, name);
  }

  /// Save a checkpoint atomically.
  void save(const std::filesystem::path& path) const { write_checkpoint(path, snapshot()); }

  /// Resume from a checkpoint; nothing changes if it does not match the artifacts.
  void load(const std::filesystem::path& path) {
    const std::string file = detail::read_file(path);
    load_bytes(file, "'" + path.string() + "'");
  }
  void load_bytes(std::string_view file, const std::string& label = "checkpoint") {
    const Checkpoint checkpoint = read_checkpoint(file, label);
    const auto text = checkpoint.meta.find("manifest");
    if (!checkpoint.meta.count("step") || text == checkpoint.meta.end())
      throw CheckpointError(label + ": a safetensors file without training progress\n" +
                            "hint: use set_parameter() to load plain weights");
    detail::check_origin(manifest(), text->second, label);
    restore(checkpoint, label);
  }

  /// Return the contents of a checkpoint, as views that are valid until the next step. Accumulated gradients are not
  /// part of a checkpoint: this throws if there are any, unless `drop_gradients` is set.
  Checkpoint snapshot(bool drop_gradients = false) const {
    if (micro_ > 0 && !drop_gradients)
      throw Error("gradients are accumulated but not applied\nhint: call flush() first");
    check_finite();
    Checkpoint c{{}, progress_.write(manifest())};
    for (const ValueSpec& v : manifest().values()) c.tensors[v.key] = (*layout_)[v.name];
    return c;
  }

  /// Export the inference model with the current weights, or with their moving averages.
  void export_model(const std::filesystem::path& path, bool ema = false) const {
    check_finite();
    const ModelSpec& spec = manifest().model("infer");
    std::string model = checked(spec.file, spec.sha256);
    std::map<std::string, std::string> averages;
    for (const StateSpec& s : manifest().state)
      if (ema && s.slot == "ema") averages[s.parameter] = s.name;
    if (ema && averages.empty())
      throw Error("these artifacts have no moving averages\nhint: build them with ema=0.999 in Python");
    for (const auto* list : {&manifest().parameters, &manifest().buffers})
      for (const WeightSpec& w : *list) {
        const TensorView& now = (*layout_)[averages.count(w.name) ? averages[w.name] : w.name];
        for (const WeightSpec::Location& place : w.locations) {
          const std::string bytes = detail::cast(*place.dtype, now);
          const bool inside = place.offset <= model.size() && place.nbytes <= model.size() - place.offset;
          if (place.file != spec.file || place.nbytes != bytes.size() || !inside)
            throw ManifestError("'" + w.name + "': location in " + place.file + " does not match its " +
                                std::to_string(bytes.size()) + " bytes in " + spec.file);
          model.replace(place.offset, bytes.size(), bytes);
        }
      }
    detail::write_file(path, {model});
  }

 private:
  static constexpr size_t kSecondCopy = size_t{64} << 20;

  /// An artifact directory whose manifest and checkpoint come from the same build.
  struct Opened {
    Opened(const std::filesystem::path& folder, const std::string& prefix) {
      const std::string name = prefix + "manifest.json";
      artifacts = {Manifest::parse(detail::read_file(folder / name), name), folder, {}};
      const std::string& label = artifacts.manifest.checkpoint;
      file = detail::read_file(folder / label);
      start = read_checkpoint(file, label);
      const auto belongs = start.meta.find("manifest");
      if (belongs == start.meta.end() || belongs->second != artifacts.manifest.text)
        throw CheckpointError(name + " and " + label + " come from different builds\n" +
                              "hint: build the artifacts again");
    }
    Artifacts artifacts;
    std::string file;
    Checkpoint start;
  };

  Trainer(Opened opened, const Options& options) : Trainer(std::move(opened.artifacts), opened.start, options) {}

  std::unique_ptr<detail::Layout> make_layout() {
    size_t second_copy = 0;
    for (const ValueSpec& v : manifest().values()) second_copy += detail::size_of(v.shape, *v.dtype).value_or(0);
    fused_ = accumulate_ == 1 && options_.layout != LayoutKind::separate;
    if (options_.layout == LayoutKind::automatic)
      fused_ = fused_ && manifest().find("step") && second_copy <= kSecondCopy;
    if (options_.layout == LayoutKind::fused && !fused_) throw Error("gradient accumulation needs the separate layout");
    if (!manifest().find(fused_ ? "step" : "train") && manifest().find("gradients"))
      throw ManifestError(
          "manifest.json: only models of the vector layout (gradients, scalars, update), which C++ does not support\n"
          "hint: build the artifacts again; step_model.onnx, or training and optimizer model, are missing");
    const auto open = [this](const ModelSpec& spec, bool small) { return open_model(spec, small); };
    try {
      return std::make_unique<detail::Layout>(manifest(), open, controls_, fused_);
    } catch (const Ort::Exception& error) {
      throw RuntimeError(std::string("onnxruntime: ") + error.what());
    }
  }

  /// Read a file and verify its sha256.
  std::string checked(const std::string& file, const std::string& sha256) const {
    std::string data = detail::read_file(artifacts_.path(file));
    if (!options_.check_hashes || artifacts_.files.count(file)) return data;
    if (detail::Sha256().update(data).hex() != sha256)
      throw ManifestError(file + ": sha256 does not match the manifest\n" +
                          "hint: the file is damaged or comes from another build; copy or build the artifacts again");
    return data;
  }

  std::shared_ptr<detail::Model> open_model(const ModelSpec& spec, bool small) {
    checked(spec.file, spec.sha256);
    const std::string& weights = manifest().weights;
    if (!weights.empty() && checked_.insert(weights).second) {
      const auto sum = manifest().files.find(weights);
      checked(weights, sum == manifest().files.end() ? "" : sum->second);
    }
    Ort::SessionOptions options = options_.base ? options_.base->Clone() : Ort::SessionOptions();
    // A second thread pool that spins on the same cores costs more than the update gains.
    detail::prepare(options, small ? 1 : options_.threads);
    if (options_.configure) options_.configure(options);
    return std::make_shared<detail::Model>(spec, artifacts_.path(spec.file), options);
  }

  void control(int64_t number, int64_t micro) {
    if (schedule_ && number > 0) set_lr(schedule_(number));
    // Every batch has its own draw number, modulo 2^24 so that float32 represents it exactly.
    const int64_t draw = (((number - 1) * accumulate_ + micro + 1) % detail::kSeeds + detail::kSeeds) % detail::kSeeds;
    controls_.lr = static_cast<float>(progress_.lr);
    controls_.set_step(number);
    controls_.rng[0] = static_cast<float>(progress_.seed);
    controls_.rng[1] = static_cast<float>(draw);
    controls_.scale = 1;
    controls_.reset = fresh_;
  }

  const TensorView& value(const std::string& name) const { return (*layout_)[manifest().weight(name).name]; }

  /// Load tensors and progress from a checkpoint; nothing changes if it does not match.
  void restore(const Checkpoint& checkpoint, const std::string& label) {
    detail::check_fits(manifest(), checkpoint, label);
    progress_ = progress_.read(checkpoint.meta, label);
    for (const ValueSpec& v : manifest().values()) layout_->write(v.name, checkpoint.tensors.at(v.key).bytes());
    reset_gradients();
  }

  void check_finite() const {
    for (const WeightSpec& w : manifest().parameters) {
      const std::string_view bytes = (*layout_)[w.name].bytes();
      const bool floats = std::string_view(w.dtype->name).find("float") != std::string_view::npos;
      for (size_t at = 0; floats && at < bytes.size(); at += w.dtype->size)
        if (!std::isfinite(detail::number_at(*w.dtype, bytes.data() + at)))
          throw CheckpointError(
              "'" + w.name + "' is not finite\nhint: load an older checkpoint and lower the learning rate");
    }
  }

  Artifacts artifacts_;
  Options options_;
  int64_t accumulate_, micro_ = 0;
  bool fused_ = false, fresh_ = true;
  detail::Progress progress_;
  Schedule schedule_;
  std::set<std::string> checked_;
  detail::Controls controls_;
  std::shared_ptr<detail::Model> eval_;
  std::unique_ptr<detail::Layout> layout_;
  std::unique_ptr<detail::BoundModel> evaluators_[2];
};

}  // namespace onnxtrain
