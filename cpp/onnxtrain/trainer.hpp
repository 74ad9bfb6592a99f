// The trainer: steps, evaluation, checkpoints and export of one directory of artifacts.
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
  int threads = 0;                                      ///< of onnxruntime's pool; 0 leaves the choice to it
  std::optional<uint32_t> seed;                         ///< of dropout masks; by default the checkpoint's, or 0
  std::optional<int64_t> accumulate;                    ///< batches per update; by default the manifest's number
  LayoutKind layout = LayoutKind::automatic;            ///< both give the same numbers
  std::string prefix;                                   ///< in front of every file name
  bool check_hashes = true;                             ///< compare every model with its sha256
  std::function<void(Ort::SessionOptions&)> configure;  ///< may add execution providers
  std::shared_ptr<const Ort::SessionOptions> base;      ///< options to start from
};

/// Where the files of artifacts are.
struct Artifacts {
  Manifest manifest;
  std::filesystem::path folder;
  std::map<std::string, std::filesystem::path> files;  ///< those that are elsewhere, by the manifest's names

  std::filesystem::path path(const std::string& file) const {
    const auto at = files.find(file);
    return at == files.end() ? folder / file : at->second;
  }
};

/// Trains one directory of artifacts. Not for several threads at once; it cannot be copied or moved.
class Trainer {
 public:
  explicit Trainer(const std::filesystem::path& folder, const Options& options = {})
      : Trainer(Opened(folder, options.prefix), options) {}

  /// Start from a checkpoint that knows its manifest, with model files that may be anywhere.
  Trainer(Artifacts artifacts, const Checkpoint& start, const Options& options)
      : artifacts_(std::move(artifacts)),
        options_(options),
        accumulate_(options.accumulate.value_or(manifest().accumulate)) {
    progress_.lr = manifest().lr;
    if (options.seed.value_or(0) >= detail::kSeeds)
      throw Error("seed must lie in [0, 2^24): " + std::to_string(*options.seed));
    if (accumulate_ < 1 || accumulate_ >= detail::kSeeds) throw Error("accumulate must be a positive number");
    // First of all: no memory is asked for that the checkpoint does not fill.
    detail::check_fits(manifest(), start, manifest().checkpoint);
    layout_ = make_layout();
    take(start, manifest().checkpoint);
    progress_.seed = options.seed.value_or(progress_.seed);
  }

  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  const Manifest& manifest() const { return artifacts_.manifest; }
  /// Return how many updates there were.
  int64_t global_step() const { return progress_.step; }
  uint32_t seed() const { return progress_.seed; }
  bool fused() const { return fused_; }
  double lr() const { return progress_.lr; }
  void set_lr(double lr) {
    if (!detail::is_lr(lr)) throw Error("lr must be a finite number from 0 on: " + std::to_string(lr));
    progress_.lr = lr;
  }
  /// Let a function of the step set the learning rate of each update; an empty one stops that.
  void set_schedule(Schedule schedule) { schedule_ = std::move(schedule); }

  /// Return the names of the inputs and targets of a batch.
  std::vector<std::string> inputs(const std::string& role = "") const {
    std::vector<std::string> names;
    for (const TensorSpec& t : manifest().model(role.empty() ? (fused() ? "step" : "train") : role).inputs)
      if (t.role == "input" || t.role == "target") names.push_back(t.name);
    return names;
  }

  /// Train on one batch. Where the loss is not finite nothing changes, and `updated` is false.
  StepResult step(const Batch& batch) {
    StepResult r = accumulate(batch);
    if (fused_) return r;
    r.updated = micro_ >= accumulate_ && flush();
    return r;
  }

  /// Run one batch and add to the gradients; a fused step updates at once.
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

  /// Update with the mean of the gradients accumulated so far; false if there are none.
  bool flush() {
    if (micro_ == 0) return false;
    update(1.0 / static_cast<double>(micro_));
    reset_gradients();
    return true;
  }

  /// Update with the sum of the gradients times `scale`; the sum goes on until it is reset.
  void update(double scale) {
    if (fused_ || fresh_) throw Error("there are no gradients to update with\nhint: call accumulate() first");
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
        throw ManifestError("manifest.json: '" + t.name + "' is no result of an evaluation");
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
    if (at == progress_.properties.end()) throw CheckpointError("no such property: '" + name + "'");
    return detail::read_property(at->second, name);
  }

  /// Write a checkpoint: whole, or the old file stays.
  void save(const std::filesystem::path& path) const { write_checkpoint(path, snapshot()); }

  /// Go on from a checkpoint; nothing changes if it does not fit.
  void load(const std::filesystem::path& path) {
    const std::string file = detail::read_file(path);
    load_bytes(file, "'" + path.string() + "'");
  }
  void load_bytes(std::string_view file, const std::string& label = "checkpoint") {
    const Checkpoint checkpoint = read_checkpoint(file, label);
    const auto text = checkpoint.meta.find("manifest");
    if (!checkpoint.meta.count("step") || text == checkpoint.meta.end())
      throw CheckpointError(label + ": no progress of a training run in it\nhint: set_parameter() takes plain weights");
    detail::check_origin(manifest(), text->second, label);
    take(checkpoint, label);
  }

  /// Return everything that a checkpoint holds; the bytes are the trainer's own, valid until the next step.
  /// Gradients that wait for an update are in no checkpoint: they are an error, or are left out.
  Checkpoint snapshot(bool drop_gradients = false) const {
    if (micro_ > 0 && !drop_gradients)
      throw Error("gradients are accumulated but not applied\nhint: call flush() first");
    check_finite();
    Checkpoint c{{}, progress_.write(manifest())};
    for (const ValueSpec& v : manifest().values()) c.tensors[v.key] = (*layout_)[v.name];
    return c;
  }

  /// Write the inference model with the current weights, or with their moving averages.
  void export_model(const std::filesystem::path& path, bool ema = false) const {
    check_finite();
    const ModelSpec& spec = manifest().model("infer");
    std::string model = checked(spec.file, spec.sha256);
    std::map<std::string, std::string> averages;
    for (const StateSpec& s : manifest().state)
      if (ema && s.slot == "ema") averages[s.parameter] = s.name;
    if (ema && averages.empty()) throw Error("no moving average was kept\nhint: build(..., ema=0.999)");
    for (const auto* list : {&manifest().parameters, &manifest().buffers})
      for (const WeightSpec& w : *list) {
        const TensorView& now = (*layout_)[averages.count(w.name) ? averages[w.name] : w.name];
        for (const WeightSpec::Location& place : w.locations) {
          const std::string bytes = detail::in_type(*place.dtype, now);
          const bool inside = place.offset <= model.size() && place.nbytes <= model.size() - place.offset;
          if (place.file != spec.file || place.nbytes != bytes.size() || !inside)
            throw ManifestError("'" + w.name + "': its place in " + place.file + " is not " +
                                std::to_string(bytes.size()) + " bytes of " + spec.file);
          model.replace(place.offset, bytes.size(), bytes);
        }
      }
    detail::write_file(path, {model});
  }

 private:
  static constexpr size_t kSecondCopy = size_t{64} << 20;

  /// A directory whose manifest and checkpoint belong together.
  struct Opened {
    Opened(const std::filesystem::path& folder, const std::string& prefix) {
      const std::string name = prefix + "manifest.json";
      artifacts = {Manifest::parse(detail::read_file(folder / name), name), folder, {}};
      const std::string& label = artifacts.manifest.checkpoint;
      file = detail::read_file(folder / label);
      start = read_checkpoint(file, label);
      const auto belongs = start.meta.find("manifest");
      if (belongs == start.meta.end() || belongs->second != artifacts.manifest.text)
        throw CheckpointError(name + " and " + label + " do not belong together\n" +
                              "hint: one of them was damaged or comes from other artifacts");
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
    if (options_.layout == LayoutKind::fused && !fused_) throw Error("accumulated gradients need the separate layout");
    if (!manifest().find(fused_ ? "step" : "train") && manifest().find("gradients"))
      throw ManifestError(
          "manifest.json: a step over vectors only (gradients, scalars, update), a layout that C++ does not run\n"
          "hint: build the artifacts again; step_model.onnx, or training and optimizer model, are missing");
    const auto open = [this](const ModelSpec& spec, bool small) { return open_model(spec, small); };
    try {
      return std::make_unique<detail::Layout>(manifest(), open, controls_, fused_);
    } catch (const Ort::Exception& error) {
      throw RuntimeError(std::string("onnxruntime: ") + error.what());
    }
  }

  /// Return a file's bytes, once its sha256 is found right.
  std::string checked(const std::string& file, const std::string& sha256) const {
    std::string data = detail::read_file(artifacts_.path(file));
    if (!options_.check_hashes || artifacts_.files.count(file)) return data;
    if (detail::Sha256().update(data).hex() != sha256)
      throw ManifestError(file + ": not the file that the manifest names (sha256 differs)\n" +
                          "hint: it was damaged or changed; build the artifacts again");
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
    // Two pools that spin on the same cores cost more than the update can gain.
    detail::prepare(options, small ? 1 : options_.threads);
    if (options_.configure) options_.configure(options);
    return std::make_shared<detail::Model>(spec, artifacts_.path(spec.file), options);
  }

  void control(int64_t number, int64_t micro) {
    if (schedule_ && number > 0) set_lr(schedule_(number));
    // Every batch has a draw of its own, counted so that float32 holds it exactly.
    const int64_t draw = (((number - 1) * accumulate_ + micro + 1) % detail::kSeeds + detail::kSeeds) % detail::kSeeds;
    controls_.lr = static_cast<float>(progress_.lr);
    controls_.set_step(number);
    controls_.rng[0] = static_cast<float>(progress_.seed);
    controls_.rng[1] = static_cast<float>(draw);
    controls_.scale = 1;
    controls_.reset = fresh_;
  }

  const TensorView& value(const std::string& name) const { return (*layout_)[manifest().weight(name).name]; }

  /// Take over values and progress of a checkpoint that fits; else nothing changes.
  void take(const Checkpoint& checkpoint, const std::string& label) {
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
              "'" + w.name + "' is not finite any more\nhint: load an older checkpoint, and lower the learning rate");
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
