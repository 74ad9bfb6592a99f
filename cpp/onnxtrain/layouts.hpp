// Where parameters and state lie, and which models a step runs.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "manifest.hpp"
#include "session.hpp"
#include "tensor.hpp"

namespace onnxtrain::detail {

/// Opens a model by its entry; `small` ones need only one thread.
using Open = std::function<std::shared_ptr<Model>(const ModelSpec& spec, bool small)>;

/// Return room for parameters, buffers and state; `only` names of them, if it is given.
inline Values room_for(const Manifest& manifest, const std::function<bool(const std::string&)>& only = {}) {
  Values values;
  for (const ValueSpec& v : manifest.values())
    if (!only || only(v.name)) values.add(v.name, *v.dtype, v.shape);
  return values;
}

/// The models of a step and the tensors that they change.
class Layout {
 public:
  virtual ~Layout() = default;
  /// Return what the next batch runs; nothing that counts changes while it does.
  virtual BoundModel& call() = 0;
  /// Take over what the last call has computed.
  virtual void commit() = 0;
  /// Update parameters with the gradients; a fused step has done so.
  virtual void update() {}
  /// Return the current values.
  virtual const Values& values() const = 0;
  /// Set a value from outside.
  virtual void write(const std::string& name, std::string_view bytes) = 0;
};

/// One graph per step, two sets of values in turn; they are never the same memory.
class Fused : public Layout {
 public:
  Fused(const Manifest& manifest, const Open& open, Controls& controls)
      : sets_{room_for(manifest), room_for(manifest)} {
    const auto model = open(manifest.model("step"), false);
    for (const size_t now : {0, 1}) {
      const auto source = [&](const TensorSpec& t) { return sets_[now][t.name]; };
      const auto target = [&](const TensorSpec& t) { return sets_[1 - now][t.feeds]; };
      calls_.emplace_back(model, controls, source, target);
    }
  }
  BoundModel& call() override { return calls_[now_]; }
  void commit() override { now_ = 1 - now_; }
  const Values& values() const override { return sets_[now_]; }
  // Both sets: no step replaces what is only read.
  void write(const std::string& name, std::string_view bytes) override {
    for (Values& set : sets_) set.write(name, bytes);
  }

 private:
  Values sets_[2];
  std::vector<BoundModel> calls_;
  size_t now_ = 0;
};

/// A graph that accumulates gradients, and one that updates, in place where it may.
class Separate : public Layout {
 public:
  Separate(const Manifest& manifest, const Open& open, Controls& controls) : values_(room_for(manifest)) {
    const auto train = open(manifest.model("train"), false), optimizer = open(manifest.model("optimizer"), true);
    const auto sums = add_gradients(manifest, train->spec());
    std::vector<std::string> gradients;
    for (const TensorSpec& t : optimizer->spec().inputs)
      if (t.role == "gradient") gradients.push_back(t.name);
    if (gradients.size() != sums.size())
      throw ManifestError("manifest.json: " + optimizer->spec().file + " takes other gradients than there are");
    const auto& in_place = optimizer->spec().in_place;
    fresh_ = room_for(manifest, [&](const std::string& name) { return changes(train->spec(), name); });
    spare_ = room_for(manifest, [&](const std::string& name) {
      return changes(optimizer->spec(), name) && std::find(in_place.begin(), in_place.end(), name) == in_place.end();
    });
    for (const size_t now : {0, 1}) {
      const Values &old = gradients_[now], &next = gradients_[1 - now];
      train_.emplace_back(
          train, controls, [&](const TensorSpec& t) { return (old.has(t.name) ? old : values_)[t.name]; },
          [&](const TensorSpec& t) { return (next.has(t.feeds) ? next : fresh_)[t.feeds]; });
      // The same parameters in the same order, under the names of another graph.
      const auto source = [&](const TensorSpec& t) {
        const auto at = std::find(gradients.begin(), gradients.end(), t.name);
        return at == gradients.end() ? values_[t.name] : old[sums[static_cast<size_t>(at - gradients.begin())]];
      };
      update_.emplace_back(optimizer, controls, source,
                           [&](const TensorSpec& t) { return (spare_.has(t.feeds) ? spare_ : values_)[t.feeds]; });
    }
  }

  BoundModel& call() override { return train_[now_]; }
  void commit() override {
    now_ = 1 - now_;
    values_.copy(fresh_);
  }
  void update() override {
    update_[now_].run();
    values_.copy(spare_);
  }
  const Values& values() const override { return values_; }
  void write(const std::string& name, std::string_view bytes) override { values_.write(name, bytes); }

 private:
  static bool changes(const ModelSpec& model, const std::string& name) {
    const auto feeds = [&](const TensorSpec& t) { return t.feeds == name; };
    return std::any_of(model.outputs.begin(), model.outputs.end(), feeds);
  }

  /// Make room for two sets of gradients; return their names in the order of the parameters.
  std::vector<std::string> add_gradients(const Manifest& manifest, const ModelSpec& train) {
    std::vector<std::string> names;
    for (const TensorSpec& t : train.inputs) {
      if (t.role != "accumulator") continue;
      if (names.size() >= manifest.parameters.size() || t.fixed() != manifest.parameters[names.size()].shape)
        throw ManifestError("manifest.json: " + t.text() + ", which is the shape of no parameter in its place");
      for (Values& set : gradients_) set.add(t.name, *t.dtype, *t.fixed());
      names.push_back(t.name);
    }
    return names;
  }

  Values values_, gradients_[2], fresh_, spare_;
  std::vector<BoundModel> train_, update_;
  size_t now_ = 0;
};

}  // namespace onnxtrain::detail
