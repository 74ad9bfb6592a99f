// The training progress that is stored in checkpoints.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "error.hpp"
#include "json.hpp"
#include "manifest.hpp"
#include "safetensors.hpp"

namespace onnxtrain {

/// A user-defined number or string in a checkpoint.
using Property = std::variant<int64_t, double, std::string>;

namespace detail {

inline constexpr int64_t kSeeds = 1 << 24;  // float32 represents smaller integers exactly

/// The state of a training run besides tensors.
struct Progress {
  double lr = 0;
  int64_t step = 0;
  uint32_t seed = 0;
  std::map<std::string, std::string> properties, meta;  ///< JSON text by key

  /// Parse metadata, with this object as default; throws on invalid values.
  Progress read(const std::map<std::string, std::string>& entries, const std::string& label) const {
    Progress p;
    p.lr = lr;
    p.meta = entries;
    int64_t number = seed;
    for (const auto& [key, text] : entries) {
      const Json json = Json::parse(text, label);
      bool good = true;
      if (key == "lr") good = json.real(p.lr) && is_lr(p.lr);
      if (key == "step") good = json.whole(p.step) && p.step >= 0 && p.step < INT32_MAX;
      if (key == "seed") good = json.whole(number) && number >= 0 && number < kSeeds;
      if (key == "properties") {
        good = json.is(Json::Kind::object);
        for (const Json& item : json.items) {
          good = good && !item.is(Json::Kind::null) && item.items.empty();
          p.properties[item.key] = compact(item);
        }
      }
      if (!good) throw CheckpointError(label + ": invalid metadata: '" + key + "' is " + text.substr(0, 60));
    }
    p.seed = static_cast<uint32_t>(number);
    return p;
  }

  std::map<std::string, std::string> write(const Manifest& manifest) const {
    auto entries = meta;
    entries["lr"] = float_text(lr);
    entries["manifest"] = manifest.text;
    entries["properties"] = json_object(properties);
    entries["seed"] = std::to_string(seed);
    entries["step"] = std::to_string(step);
    return entries;
  }

  /// Drop metadata that is out of date after a step; digests of graphs and parameter names stay valid.
  void forget_run() {
    for (auto at = meta.begin(); at != meta.end();)
      at = at->first == "graphs" || at->first == "parameters" ? std::next(at) : meta.erase(at);
  }
};

inline std::string property_text(const Property& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return json_text(*text);
  if (const auto* number = std::get_if<double>(&value)) return float_text(*number);
  return std::to_string(std::get<int64_t>(value));
}

inline Property read_property(const std::string& text, const std::string& name) {
  const Json json = Json::parse(text, "'" + name + "'");
  int64_t whole = 0;
  double real = 0;
  if (json.is(Json::Kind::string)) return json.text;
  if (json.whole(whole)) return whole;
  if (json.is(Json::Kind::boolean)) return int64_t{json.source == "true"};
  json.real(real);
  return real;
}

/// Throw if a checkpoint was trained with another loss or optimizer.
inline void check_origin(const Manifest& own, const std::string& source, const std::string& label) {
  const Json other = Json::parse(source, label);
  const std::pair<const char*, std::string> entries[] = {
      {"optimizer", own.optimizer}, {"loss", own.loss}, {"accumulate", std::to_string(own.accumulate)}};
  for (const auto& [key, here] : entries) {
    const Json* entry = other.find(key);
    const std::string text = entry ? compact(*entry) : "nothing";
    if (text != here)
      throw CheckpointError(label + ": trained with another loss or optimizer\n  " + key + " is " + text +
                            " there and " + here + " here");
  }
}

/// Throw if tensors are missing or differ in shape or dtype; the error lists them.
inline void check_fits(const Manifest& manifest, const Checkpoint& checkpoint, const std::string& label) {
  size_t problems = 0;
  std::string list;
  for (const ValueSpec& v : manifest.values()) {
    const auto at = checkpoint.tensors.find(v.key);
    const bool exists = at != checkpoint.tensors.end();
    if (exists && at->second.shape == v.shape && at->second.dtype == v.dtype) continue;
    if (++problems > 5) continue;
    list += "\n  '" + v.key + "' is ";
    if (exists) list += at->second.text() + ", expected " + TensorView(*v.dtype, nullptr, 0, v.shape).text();
    else list += "missing";
  }
  if (problems > 5) list += "\n  ... and " + std::to_string(problems - 5) + " more";
  if (problems) throw CheckpointError(label + " does not match these artifacts:" + list);
}

}  // namespace detail
}  // namespace onnxtrain
