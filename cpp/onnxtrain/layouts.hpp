// Memory of parameters and state, and the models that a step runs.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "manifest.hpp"
#include "session.hpp"
#include "tensor.hpp"

namespace onnxtrain::detail {

/// Opens a model; `small` models run with one thread.
using Open = std::function<std::shared_ptr<Model>(const ModelSpec& spec, bool small)>;

/// The models of a step and the tensors that they change. Fused: one step model with double buffering. Separate: a
/// training model that accumulates gradients, and an optimizer model that updates in place where possible. Nothing
/// changes until commit().
class Layout {
 public:
  Layout(const Manifest& manifest, const Open& open, Controls& controls, bool fused) {
    const auto model = open(manifest.model(fused ? "step" : "train"), false);
    for (const ValueSpec& v : manifest.values()) {
      const bool changing = changes(model->spec(), v.name);
      // Double buffering: a call never reads and writes the same memory.
      for (Values& set : sets_)
        if (fused && changing) set.add(v.name, *v.dtype, v.shape);
      if (!fused || !changing) values_.add(v.name, *v.dtype, v.shape);
      if (!fused && changing) fresh_.add(v.name, *v.dtype, v.shape);
    }
    if (!fused) add_gradients(manifest, model->spec());
    for (const size_t turn : {0, 1}) {
      const Values &old = sets_[turn], &next = sets_[1 - turn];
      const auto source = [&](const TensorSpec& t) { return (old.has(t.name) ? old : values_)[t.name]; };
      const auto target = [&](const TensorSpec& t) { return (next.has(t.feeds) ? next : fresh_)[t.feeds]; };
      calls_.emplace_back(model, controls, source, target);
    }
    if (!fused) bind_update(manifest, open(manifest.model("optimizer"), true), controls);
  }

  /// Return the index of the current buffer.
  size_t turn() const { return turn_; }
  /// Return the model call for the next batch.
  BoundModel& call() { return calls_[turn_]; }
  /// Accept the results of the last call.
  void commit() {
    turn_ = 1 - turn_;
    values_.copy(fresh_);
  }
  /// Apply the gradients; only for the separate layout.
  void update() {
    updates_[turn_].run();
    values_.copy(spare_);
  }
  /// Return the current value of a parameter, buffer or state tensor.
  const TensorView& operator[](const std::string& name) const {
    return (values_.has(name) ? values_ : sets_[turn_])[name];
  }
  void write(const std::string& name, std::string_view bytes) {
    (values_.has(name) ? values_ : sets_[turn_]).write(name, bytes);
  }

 private:
  static bool changes(const ModelSpec& model, const std::string& name) {
    const auto feeds = [&](const TensorSpec& t) { return t.feeds == name; };
    return std::any_of(model.outputs.begin(), model.outputs.end(), feeds);
  }

  void add_gradients(const Manifest& manifest, const ModelSpec& train) {
    for (const TensorSpec& t : train.inputs) {
      if (t.role != "accumulator") continue;
      const size_t index = gradients_.size();
      if (index >= manifest.parameters.size() || t.fixed() != manifest.parameters[index].shape)
        throw ManifestError("manifest.json: " + t.text() + ", which is not the shape of the parameter at this index");
      for (Values& set : sets_) set.add(t.name, *t.dtype, *t.fixed());
      gradients_.push_back(t.name);
    }
  }

  void bind_update(const Manifest& manifest, const std::shared_ptr<Model>& optimizer, Controls& controls) {
    const ModelSpec& spec = optimizer->spec();
    // Gradients have other names in the optimizer model, but the same order.
    std::map<std::string, std::string> sums;
    for (const TensorSpec& t : spec.inputs) {
      const size_t index = sums.size();
      if (t.role == "gradient") sums[t.name] = index < gradients_.size() ? gradients_[index] : "";
    }
    if (sums.size() != gradients_.size())
      throw ManifestError("manifest.json: " + spec.file + " has other gradients than the training model");
    for (const ValueSpec& v : manifest.values())
      if (changes(spec, v.name) && std::find(spec.in_place.begin(), spec.in_place.end(), v.name) == spec.in_place.end())
        spare_.add(v.name, *v.dtype, v.shape);
    for (const Values& set : sets_) {
      const auto source = [&](const TensorSpec& t) { return sums.count(t.name) ? set[sums[t.name]] : values_[t.name]; };
      const auto target = [&](const TensorSpec& t) { return (spare_.has(t.feeds) ? spare_ : values_)[t.feeds]; };
      updates_.emplace_back(optimizer, controls, source, target);
    }
  }

  Values values_;   ///< constant tensors, and tensors that are updated in place
  Values sets_[2];  ///< double buffers: all values of a fused step, or the gradients
  Values fresh_;    ///< other outputs of the training model, until commit()
  Values spare_;    ///< outputs that the optimizer model cannot write in place
  std::vector<std::string> gradients_;
  std::vector<BoundModel> calls_, updates_;
  size_t turn_ = 0;
};

}  // namespace onnxtrain::detail
