// Where parameters and state lie, and which models a step runs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "manifest.hpp"
#include "session.hpp"
#include "tensor.hpp"

namespace onnxtrain::detail {

/// Opens a model by its entry; `small` ones need only one thread.
using Open = std::function<std::shared_ptr<Model>(const ModelSpec& spec, bool small)>;

/// Return room for all parameters, buffers and state; `only` names of them, if it is given.
inline Values room_for(const Manifest& manifest, const std::function<bool(const std::string&)>& only = {}) {
  Values values;
  const auto add = [&](const auto& spec) {
    if (!only || only(spec.name)) values.add(spec.name, *spec.dtype, spec.shape);
  };
  for (const WeightSpec& w : manifest.parameters) add(w);
  for (const WeightSpec& w : manifest.buffers) add(w);
  for (const StateSpec& s : manifest.state) add(s);
  values.allocate();
  return values;
}

/// The models of a step and the tensors that they change.
class Layout {
 public:
  virtual ~Layout() = default;
  /// Return what the next batch runs; nothing that counts changes while it does.
  virtual BoundModel& call() = 0;
  /// Take over what the last call found.
  virtual void commit() = 0;
  /// Update parameters with the gradients; a fused step has done so.
  virtual void update() = 0;
  virtual bool fused() const = 0;
  /// Return the current values.
  virtual Values& values() = 0;
  /// Tell that a value was written from outside.
  virtual void written(const std::string& name) = 0;
};

/// One graph per step, two sets of values in turn; they are never the same memory.
class Fused : public Layout {
 public:
  Fused(const Manifest& manifest, const Open& open, Controls& controls)
      : sets_{room_for(manifest), room_for(manifest)} {
    const auto model = open(manifest.model("step"), false);
    for (const size_t now : {0, 1}) {
      const Values &old = sets_[now], &fresh = sets_[1 - now];
      calls_.push_back(std::make_unique<BoundModel>(
          model, controls, [&](const TensorSpec& t) { return old.value(t.name); },
          [&](const TensorSpec& t) { return fresh.value(t.feeds); }));
    }
  }
  BoundModel& call() override { return *calls_[now_]; }
  void commit() override { now_ = 1 - now_; }
  void update() override {}
  bool fused() const override { return true; }
  Values& values() override { return sets_[now_]; }
  // Both sets: no step replaces what is only read.
  void written(const std::string& name) override { sets_[1 - now_].copy_from(sets_[now_], name); }

 private:
  Values sets_[2];
  std::vector<std::unique_ptr<BoundModel>> calls_;
  size_t now_ = 0;
};

/// A graph that accumulates gradients, and one that updates, in place where it may.
class Separate : public Layout {
 public:
  Separate(const Manifest& manifest, const Open& open, Controls& controls)
      : Separate(manifest, open(manifest.model("train"), false), open(manifest.model("optimizer"), true), controls) {}

  BoundModel& call() override { return *train_[now_]; }
  void commit() override {
    now_ = 1 - now_;
    for (const auto& [name, slot] : fresh_.slots()) values_.copy_from(fresh_, name);
  }
  void update() override {
    update_[now_]->run();
    for (const auto& [name, slot] : spare_.slots()) values_.copy_from(spare_, name);
  }
  bool fused() const override { return false; }
  Values& values() override { return values_; }
  void written(const std::string&) override {}

 private:
  Separate(const Manifest& manifest, std::shared_ptr<Model> train, std::shared_ptr<Model> optimizer, Controls& controls)
      : values_(room_for(manifest)) {
    std::vector<std::string> sums, gradients;
    for (const TensorSpec& t : train->spec().inputs)
      if (t.role == "accumulator") {
        if (sums.size() >= manifest.parameters.size() || sizes(t) != manifest.parameters[sums.size()].shape)
          throw ManifestError("manifest.json: " + t.text() + ", which is the shape of no parameter in its place");
        sums.push_back(t.name);
        for (Values& g : gradients_) g.add(t.name, *t.dtype, sizes(t));
      }
    for (Values& g : gradients_) g.allocate();
    for (const TensorSpec& t : optimizer->spec().inputs)
      if (t.role == "gradient") gradients.push_back(t.name);
    if (gradients.size() != sums.size())
      throw ManifestError("manifest.json: " + optimizer->spec().file + " takes other gradients than there are");
    const auto feeds = [](const Model& m, const std::string& name) {
      const auto& outputs = m.spec().outputs;
      return std::any_of(outputs.begin(), outputs.end(), [&](const TensorSpec& t) { return t.feeds == name; });
    };
    const auto& in_place = optimizer->spec().in_place;
    fresh_ = room_for(manifest, [&](const std::string& n) { return feeds(*train, n); });
    spare_ = room_for(manifest, [&](const std::string& n) {
      return feeds(*optimizer, n) && std::find(in_place.begin(), in_place.end(), n) == in_place.end();
    });
    for (const size_t now : {0, 1}) {
      const Values &old = gradients_[now], &next = gradients_[1 - now];
      train_.push_back(std::make_unique<BoundModel>(
          train, controls, [&](const TensorSpec& t) { return (old.has(t.name) ? old : values_).value(t.name); },
          [&](const TensorSpec& t) { return (next.has(t.feeds) ? next : fresh_).value(t.feeds); }));
      // The same parameters in the same order, under the names of another graph.
      const auto source = [&](const TensorSpec& t) {
        const auto at = std::find(gradients.begin(), gradients.end(), t.name);
        if (at == gradients.end()) return values_.value(t.name);
        return old.value(sums[static_cast<size_t>(at - gradients.begin())]);
      };
      update_.push_back(std::make_unique<BoundModel>(optimizer, controls, source, [&](const TensorSpec& t) {
        return (spare_.has(t.feeds) ? spare_ : values_).value(t.feeds);
      }));
    }
  }

  static Shape sizes(const TensorSpec& t) {
    Shape shape;
    for (const auto& d : t.shape) {
      if (d.index()) throw ManifestError("manifest.json: " + t.text() + ", a gradient of no fixed size");
      shape.push_back(std::get<int64_t>(d));
    }
    return shape;
  }

  Values values_, gradients_[2], fresh_, spare_;
  std::vector<std::unique_ptr<BoundModel>> train_, update_;
  size_t now_ = 0;
};

}  // namespace onnxtrain::detail
