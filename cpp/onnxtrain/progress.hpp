// How far training has come, as checkpoints say it.
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

/// A number or a text of the user's own in a checkpoint.
using Property = std::variant<int64_t, double, std::string>;

namespace detail {

inline constexpr int64_t kSeeds = 1 << 24;  // float32 holds whole numbers below exactly

/// What a checkpoint records besides tensors.
struct Progress {
  double lr = 0;
  int64_t step = 0;
  uint32_t seed = 0;
  std::map<std::string, std::string> properties, meta;  ///< JSON text by key

  /// Return what metadata says, and this where it says nothing; refuse what cannot be.
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
      if (!good) throw CheckpointError(label + ": the metadata is wrong: '" + key + "' is " + text.substr(0, 60));
    }
    p.seed = static_cast<uint32_t>(number);
    return p;
  }

  std::map<std::string, std::string> write(const Manifest& manifest) const {
    auto entries = meta;
    entries["lr"] = float_text(lr);
    entries["manifest"] = manifest.text;
    entries["properties"] = joined(properties);
    entries["seed"] = std::to_string(seed);
    entries["step"] = std::to_string(step);
    return entries;
  }

  /// A run's position is over with the next step; which graphs and parameters the weights belong to is not.
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
  if (json.is(Json::Kind::boolean)) return int64_t{json.spelling == "true"};
  json.real(real);
  return real;
}

/// Refuse a checkpoint of another loss or optimizer.
inline void check_origin(const Manifest& own, const std::string& source, const std::string& label) {
  const Json there = Json::parse(source, label);
  const std::pair<const char*, std::string> entries[] = {
      {"optimizer", own.optimizer}, {"loss", own.loss}, {"accumulate", std::to_string(own.accumulate)}};
  for (const auto& [key, here] : entries) {
    const Json* entry = there.find(key);
    const std::string text = entry ? compact(*entry) : "nothing";
    if (text != here)
      throw CheckpointError(label + ": made by another loss or optimizer\n  " + key + " is " + text + " there and " +
                            here + " here");
  }
}

/// Refuse a checkpoint that lacks a tensor or has it in another form; the error lists what does not fit.
inline void check_fits(const Manifest& manifest, const Checkpoint& checkpoint, const std::string& label) {
  size_t problems = 0;
  std::string list;
  for (const ValueSpec& v : manifest.values()) {
    const auto at = checkpoint.tensors.find(v.key);
    const bool there = at != checkpoint.tensors.end();
    if (there && at->second.shape == v.shape && at->second.dtype == v.dtype) continue;
    if (++problems > 5) continue;
    list += "\n  '" + v.key + "' is ";
    if (there) list += at->second.text() + ", expected " + TensorView(*v.dtype, nullptr, 0, v.shape).text();
    else list += "missing";
  }
  if (problems > 5) list += "\n  ... and " + std::to_string(problems - 5) + " more";
  if (problems) throw CheckpointError(label + " does not fit these artifacts:" + list);
}

}  // namespace detail
}  // namespace onnxtrain
