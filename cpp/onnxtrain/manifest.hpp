// The manifest of an artifact directory.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "error.hpp"
#include "json.hpp"
#include "tensor.hpp"

namespace onnxtrain {

/// An input or output of a model.
struct TensorSpec {
  std::string name, role;
  const DType* dtype = nullptr;
  std::vector<std::variant<int64_t, std::string>> shape;  ///< sizes; symbols are dynamic sizes
  std::string feeds;                                      ///< for outputs: the input that gets the value next, or empty

  /// Return the shape if all sizes are static.
  std::optional<Shape> fixed() const {
    Shape sizes;
    for (const auto& d : shape)
      if (d.index() == 0) sizes.push_back(std::get<int64_t>(d));
    return sizes.size() == shape.size() ? std::optional(sizes) : std::nullopt;
  }
  std::string text() const {
    std::vector<std::string> sizes;
    for (const auto& d : shape)
      sizes.push_back(d.index() ? std::get<std::string>(d) : std::to_string(std::get<int64_t>(d)));
    return "'" + name + "' is " + dtype->name + "[" + detail::listing(sizes) + "]";
  }
};

/// One model file.
struct ModelSpec {
  std::string role, target, file, sha256;
  int64_t steps_per_call = 1;
  std::vector<TensorSpec> inputs, outputs;
  std::vector<std::string> in_place;  ///< inputs whose memory the outputs that feed them may share
};

/// A tensor that persists between steps.
struct ValueSpec {
  std::string name, key;  ///< name in the models, and in checkpoints
  const DType* dtype = nullptr;
  Shape shape;
};

/// A parameter or buffer.
struct WeightSpec : ValueSpec {
  struct Location {
    std::string file;
    uint64_t offset = 0, nbytes = 0;
    const DType* dtype = nullptr;  ///< dtype of the stored bytes; models in 16 bits are trained in float32
  };
  std::vector<std::string> aliases;
  std::vector<Location> locations;  ///< locations of its bytes in the inference model
};

/// One state tensor of the optimizer.
struct StateSpec : ValueSpec {
  std::string parameter, slot;
  double init = 0;  ///< initial value of all elements; the slot ema starts with the parameter
};

/// The contents of manifest.json.
struct Manifest {
  std::vector<ModelSpec> models;
  std::vector<WeightSpec> parameters, buffers;
  std::vector<StateSpec> state;
  std::string optimizer, loss;  ///< as JSON
  double lr = 0;
  int64_t accumulate = 1;
  std::vector<std::string> above_one;  ///< products of sizes, "a*b", that must be above 1 in a training batch
  std::string checkpoint, weights;     ///< file names; `weights` may be empty
  std::map<std::string, std::string> files;
  std::string text;  ///< as stored in checkpoints: without whitespace and hashes

  /// Parse and validate; the error names the entry that is missing or invalid.
  static Manifest parse(std::string_view source, const std::string& label = "manifest.json");

  /// Return the model of a role, or null.
  const ModelSpec* find(std::string_view role) const {
    for (const ModelSpec& m : models)
      if (m.role == role && m.steps_per_call == 1) return &m;
    return nullptr;
  }
  const ModelSpec& model(std::string_view role) const {
    if (const ModelSpec* m = find(role)) return *m;
    throw ManifestError("these artifacts have no " + std::string(role) + " model\nhint: build them again");
  }
  /// Return all tensors that persist between steps.
  std::vector<ValueSpec> values() const {
    std::vector<ValueSpec> all(parameters.begin(), parameters.end());
    all.insert(all.end(), buffers.begin(), buffers.end());
    all.insert(all.end(), state.begin(), state.end());
    return all;
  }
  /// Return a parameter or buffer by name or alias.
  const WeightSpec& weight(const std::string& name) const {
    for (const auto* list : {&parameters, &buffers})
      for (const WeightSpec& w : *list)
        if (w.name == name || std::find(w.aliases.begin(), w.aliases.end(), name) != w.aliases.end()) return w;
    throw ShapeError("unknown parameter: '" + name + "'");
  }
};

namespace detail {

/// An object of the manifest and its path, for error messages.
class Entry {
 public:
  Entry(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is(Json::Kind::object)) fail("expected an object");
  }

  [[noreturn]] void fail(const std::string& what) const { throw ManifestError(where_ + ": " + what); }

  /// Reject unknown entries: the file may come from a newer version.
  void only(const std::set<std::string>& names) const {
    for (const Json& item : json_.items)
      if (!names.count(item.key)) fail("unknown entry '" + item.key + "'");
  }

  bool has(const std::string& name) const { return json_.find(name) != nullptr; }
  const Json& get(const std::string& name) const {
    if (!has(name)) fail("'" + name + "' is missing");
    return *json_.find(name);
  }
  Entry object(const std::string& name) const { return Entry(get(name), where_ + ": " + name); }

  std::string text(const std::string& name) const {
    const Json& json = get(name);
    if (!json.is(Json::Kind::string) || json.text.empty()) fail("'" + name + "' must be a non-empty string");
    if (json.text.find('\0') != std::string::npos) fail("'" + name + "' contains a NUL character");
    return json.text;
  }
  /// Return a string, or an empty one for null.
  std::string text_or_null(const std::string& name) const { return get(name).is(Json::Kind::null) ? "" : text(name); }
  std::string word(const std::string& name, const std::set<std::string>& known) const {
    const std::string word = text(name);
    if (!known.count(word)) fail("'" + name + "' is '" + word + "', which is unknown");
    return word;
  }
  /// Return a file name without a directory.
  std::string plain(const std::string& name) const {
    constexpr std::string_view spaces = " \t\r\n\f\v", outside("/\\\0", 3);
    const bool trimmed = name.find_first_not_of(spaces) == 0 && name.find_last_not_of(spaces) == name.size() - 1;
    if (!trimmed || name.find_first_of(outside) != std::string::npos || name == "." || name == "..")
      fail("'" + name + "' is not a plain file name");
    return name;
  }
  std::string digest(const Json& json) const {
    const bool hex = json.text.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (!json.is(Json::Kind::string) || !hex || (json.text.size() != 64 && !json.text.empty()))
      fail("'" + json.key + "' is not a sha256");
    return json.text;
  }
  int64_t size(const std::string& name, int64_t least = 0) const {
    int64_t value = 0;
    if (!get(name).whole(value) || value < least)
      fail("'" + name + "' must be an integer >= " + std::to_string(least));
    return value;
  }
  double real(const std::string& name) const {
    double value = 0;
    if (!get(name).real(value)) fail("'" + name + "' is not a number");
    return value;
  }
  const DType* dtype() const {
    const std::string name = text("dtype");
    const DType* type = find_type(name);
    if (!type || name != type->name) fail("dtype '" + name + "' is not supported");
    return type;
  }
  const std::vector<Json>& list(const std::string& name) const {
    const Json& json = get(name);
    if (!json.is(Json::Kind::array)) fail("'" + name + "' is not a list");
    return json.items;
  }
  std::vector<std::string> names(const std::string& name) const {
    std::vector<std::string> out;
    for (const Json& item : list(name)) {
      if (!item.is(Json::Kind::string) || item.text.empty()) fail("'" + name + "' must be a list of non-empty strings");
      out.push_back(item.text);
    }
    return out;
  }
  /// Parse every object of a list.
  template <class Read>
  auto each(const std::string& name, Read read) const {
    std::vector<decltype(read(*this))> out;
    for (const Json& item : list(name))
      out.push_back(read(Entry(item, where_ + ": " + name + "[" + std::to_string(out.size()) + "]")));
    return out;
  }
  /// Return the names of tensors; rejects duplicates.
  template <class Specs>
  std::set<std::string> distinct(const Specs& specs, const std::string& what) const {
    std::set<std::string> names;
    for (const auto& s : specs)
      if (!names.insert(s.name).second) fail("duplicate name '" + s.name + "' in " + what);
    return names;
  }

 private:
  const Json& json_;
  std::string where_;
};

inline TensorSpec read_tensor(const Entry& e) {
  e.only({"name", "dtype", "shape", "role", "feeds"});
  TensorSpec t{e.text("name"), {}, e.dtype(), {}, e.text_or_null("feeds")};
  t.role = e.word("role", {"input", "target", "parameter", "frozen", "buffer", "gradient", "accumulator", "state", "lr",
                           "step", "rng", "grad_scale", "reset", "scalar", "loss", "metric", "output"});
  for (const Json& d : e.list("shape")) {
    int64_t size = 0;
    if (d.whole(size) && size >= 0) t.shape.emplace_back(size);
    else if (d.is(Json::Kind::string) && !d.text.empty()) t.shape.emplace_back(d.text);
    else e.fail("'shape' must contain sizes and symbols only");
  }
  if (t.shape.size() > kMostDimensions) e.fail("too many dimensions");
  return t;
}

inline ModelSpec read_model(const Entry& e) {
  e.only({"role", "target", "steps_per_call", "file", "sha256", "inputs", "outputs", "members", "in_place"});
  ModelSpec m;
  m.role = e.word("role", {"train", "eval", "optimizer", "step", "infer", "gradients", "scalars", "update"});
  m.target = e.text("target");
  m.file = e.plain(e.text("file"));
  m.sha256 = e.digest(e.get("sha256"));
  m.steps_per_call = e.size("steps_per_call", 1);
  m.inputs = e.each("inputs", read_tensor);
  m.outputs = e.each("outputs", read_tensor);
  if (e.has("in_place")) m.in_place = e.names("in_place");
  if (e.has("members")) e.names("members");
  const auto inputs = e.distinct(m.inputs, "inputs");
  e.distinct(m.outputs, "outputs");
  for (const TensorSpec& t : m.outputs)
    if (!t.feeds.empty() && !inputs.count(t.feeds))
      e.fail("'" + t.name + "' feeds '" + t.feeds + "', which is not an input");
  for (const std::string& name : m.in_place)
    if (!inputs.count(name)) e.fail("'in_place' names '" + name + "', which is not an input");
  const auto losses = std::count_if(m.outputs.begin(), m.outputs.end(), [](const auto& t) { return t.role == "loss"; });
  if ((m.role == "train" || m.role == "eval" || m.role == "step") != (losses == 1) && m.role != "gradients")
    e.fail("expected one loss output, got " + std::to_string(losses));
  return m;
}

inline ValueSpec read_value(const Entry& e) {
  ValueSpec v{e.text("name"), e.text("name"), e.dtype(), {}};
  for (const Json& d : e.list("shape")) {
    if (int64_t size = 0; d.whole(size)) v.shape.push_back(size);
    else e.fail("'shape' must contain sizes only");
  }
  if (!size_of(v.shape, *v.dtype)) e.fail("invalid shape [" + listing(v.shape) + "]");
  return v;
}

inline WeightSpec read_weight(const Entry& e) {
  e.only({"name", "dtype", "shape", "aliases", "locations"});
  const ValueSpec value = read_value(e);
  const auto location = [&](const Entry& l) {
    l.only({"file", "offset", "nbytes", "dtype"});
    return WeightSpec::Location{l.plain(l.text("file")), static_cast<uint64_t>(l.size("offset")),
                                static_cast<uint64_t>(l.size("nbytes")), l.has("dtype") ? l.dtype() : value.dtype};
  };
  return {value, e.names("aliases"), e.each("locations", location)};
}

inline StateSpec read_state(const Entry& e) {
  e.only({"name", "parameter", "slot", "dtype", "shape", "init"});
  StateSpec s{read_value(e), e.text("parameter"), e.text("slot"), e.real("init")};
  s.key = "optim/" + s.slot + "/" + s.parameter;
  return s;
}

/// Return whether a value is a valid learning rate in float32.
inline bool is_lr(double value) {
  return value >= 0 && value <= 3.4028234663852886e38;
}

}  // namespace detail

inline Manifest Manifest::parse(std::string_view source, const std::string& label) {
  const Json json = Json::parse(source, label);
  const detail::Entry e(json, label);
  if (int64_t format = 0; !e.get("format").whole(format) || format != 1)
    e.fail("format " + detail::compact(e.get("format")) +
           ", but this version reads format 1\nhint: build the artifacts again");
  e.only({"format", "models", "parameters", "buffers", "state", "optimizer", "loss", "accumulate", "options",
          "checkpoint", "weights", "files"});
  Manifest m;
  m.models = e.each("models", detail::read_model);
  m.parameters = e.each("parameters", detail::read_weight);
  m.buffers = e.each("buffers", detail::read_weight);
  m.state = e.each("state", detail::read_state);
  e.distinct(m.values(), "tensors");
  m.optimizer = detail::compact(e.get("optimizer"));
  m.lr = e.object("optimizer").real("lr");
  if (!detail::is_lr(m.lr)) e.object("optimizer").fail("'lr' is not a learning rate");
  m.loss = detail::compact(e.get("loss"));
  e.object("loss").text("output");
  m.accumulate = e.size("accumulate", 1);
  if (m.accumulate >= 1 << 24) e.fail("'accumulate' is too large");
  if (e.object("options").has("above_one")) m.above_one = e.object("options").names("above_one");
  m.checkpoint = e.plain(e.text("checkpoint"));
  if (!e.text_or_null("weights").empty()) m.weights = e.plain(e.text("weights"));
  const detail::Entry files = e.object("files");
  for (const Json& sum : e.get("files").items) m.files[files.plain(sum.key)] = files.digest(sum);
  m.text = detail::compact(json, false);
  return m;
}

}  // namespace onnxtrain
