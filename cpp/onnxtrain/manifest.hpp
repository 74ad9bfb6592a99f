// The manifest: what a directory of artifacts promises to those who run it.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
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
  std::vector<std::variant<int64_t, std::string>> shape;  ///< sizes; a symbol is a size that the caller chooses
  std::string feeds;                                      ///< of an output: the input that it replaces, or empty

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
  std::vector<std::string> in_place;  ///< inputs whose memory may be given to the outputs that feed them
};

/// A parameter or buffer.
struct WeightSpec {
  struct Location {
    std::string file;
    uint64_t offset = 0, nbytes = 0;
    const DType* dtype = nullptr;  ///< of the bytes there; a file of 16 bits trains in float32
  };
  std::string name;
  const DType* dtype = nullptr;
  Shape shape;
  std::vector<std::string> aliases;
  std::vector<Location> locations;  ///< where its bytes lie in the inference model
};

/// One state tensor of the optimizer.
struct StateSpec {
  std::string name, parameter, slot;
  const DType* dtype = nullptr;
  Shape shape;
  double init = 0;  ///< what every element starts with; the slot ema starts as the parameter
};

/// All there is to know about a directory of artifacts.
struct Manifest {
  std::vector<ModelSpec> models;
  std::vector<WeightSpec> parameters, buffers;
  std::vector<StateSpec> state;
  std::string optimizer, loss;  ///< as JSON
  double lr = 0;
  int64_t accumulate = 1;
  std::vector<std::string> above_one;  ///< products of sizes, "a*b", that a training batch must have above 1
  std::string checkpoint, weights;  ///< file names; `weights` may be empty
  std::map<std::string, std::string> files;
  std::string text;  ///< as checkpoints keep it: without spaces and hashes

  /// Read and validate; the error names what is missing or wrong.
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
  /// Return a parameter or buffer, also by an alias.
  const WeightSpec& weight(std::string_view name) const {
    for (const auto* list : {&parameters, &buffers})
      for (const WeightSpec& w : *list) {
        if (w.name == name) return w;
        for (const std::string& alias : w.aliases)
          if (alias == name) return w;
      }
    throw ShapeError("no such parameter: '" + std::string(name) + "'");
  }
};

namespace detail {

/// An object of the manifest and where it is, for errors.
class Entry {
 public:
  Entry(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is(Json::Kind::object)) fail("expected an object");
  }

  [[noreturn]] void fail(const std::string& what) const { throw ManifestError(where_ + ": " + what); }

  /// Refuse entries that nobody knows; a file from the future may mean something else.
  const Entry& only(const std::set<std::string>& names) const {
    for (const Json& item : json_.items)
      if (!names.count(item.key)) fail("unknown entry '" + item.key + "'");
    return *this;
  }

  const Json& get(const std::string& name) const {
    const Json* json = json_.find(name);
    if (!json) fail("'" + name + "' is missing");
    return *json;
  }
  bool has(const std::string& name) const { return json_.find(name) != nullptr; }
  bool null(const std::string& name) const { return get(name).is(Json::Kind::null); }

  std::string text(const std::string& name) const {
    const Json& json = get(name);
    if (!json.is(Json::Kind::string) || json.text.empty()) fail("'" + name + "' is not a name");
    if (json.text.find('\0') != std::string::npos) fail("'" + name + "' has a zero in it");
    return json.text;
  }
  std::string word(const std::string& name, const std::set<std::string>& known) const {
    const std::string word = text(name);
    if (!known.count(word)) fail("'" + name + "' is '" + word + "', which is not known");
    return word;
  }
  std::string file(const std::string& name) const { return plain(text(name)); }
  std::string plain(const std::string& name) const {
    constexpr std::string_view spaces = " \t\r\n\f\v";
    const bool trimmed = !name.empty() && spaces.find(name.front()) == std::string_view::npos &&
                         spaces.find(name.back()) == std::string_view::npos;
    if (!trimmed || name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos || name == "." ||
        name == "..")
      fail("file name '" + name + "' is not plain");
    return name;
  }
  std::string digest(const Json& json) const {
    const bool empty = json.is(Json::Kind::string) && json.text.empty();
    if (empty || (json.is(Json::Kind::string) && json.text.size() == 64 &&
                  json.text.find_first_not_of("0123456789abcdef") == std::string::npos))
      return json.text;
    fail("'" + json.key + "' is not a sha256");
  }
  int64_t size(const std::string& name, int64_t least = 0) const {
    int64_t value = 0;
    if (!get(name).whole(value) || value < least)
      fail("'" + name + "' is not a whole number from " + std::to_string(least) + " on");
    return value;
  }
  const DType* dtype() const {
    const DType* type = find_type(text("dtype"));
    if (!type || text("dtype") != type->name) fail("element type '" + text("dtype") + "' is not supported");
    return type;
  }
  Shape shape(const DType& type) const {
    Shape shape;
    for (const Json& size : list("shape")) {
      if (int64_t value = 0; size.whole(value)) shape.push_back(value);
      else fail("'shape' has something that is no size");
    }
    size_t bytes = 0;
    if (!size_of(shape, type.size, bytes)) fail("no array has the shape [" + listing(shape) + "]");
    return shape;
  }
  const std::vector<Json>& list(const std::string& name) const {
    const Json& json = get(name);
    if (!json.is(Json::Kind::array)) fail("'" + name + "' is not a list");
    return json.items;
  }
  std::vector<std::string> names(const std::string& name) const {
    std::vector<std::string> out;
    if (!has(name)) return out;
    for (const Json& item : list(name)) {
      if (!item.is(Json::Kind::string) || item.text.empty()) fail("'" + name + "' has something that is no name");
      out.push_back(item.text);
    }
    return out;
  }
  /// Read every object of a list.
  template <class Read>
  auto each(const std::string& name, Read read) const {
    std::vector<decltype(read(*this))> out;
    size_t i = 0;
    for (const Json& item : list(name))
      out.push_back(read(Entry(item, where_ + ": " + name + "[" + std::to_string(i++) + "]")));
    return out;
  }

 private:
  const Json& json_;
  std::string where_;
};

inline TensorSpec read_tensor(const Entry& e) {
  e.only({"name", "dtype", "shape", "role", "feeds"});
  TensorSpec t;
  t.name = e.text("name");
  t.dtype = e.dtype();
  t.role = e.word("role", {"input", "target", "parameter", "frozen", "buffer", "gradient", "accumulator", "state", "lr",
                           "step", "rng", "grad_scale", "reset", "scalar", "loss", "metric", "output"});
  for (const Json& d : e.list("shape")) {
    int64_t size = 0;
    if (d.whole(size) && size >= 0) t.shape.emplace_back(size);
    else if (d.is(Json::Kind::string) && !d.text.empty()) t.shape.emplace_back(d.text);
    else e.fail("'shape' has something that is no size and no symbol");
  }
  if (t.shape.size() > kMostDimensions) e.fail("too many dimensions");
  if (!e.null("feeds")) t.feeds = e.text("feeds");
  return t;
}

inline ModelSpec read_model(const Entry& e) {
  e.only({"role", "target", "steps_per_call", "file", "sha256", "inputs", "outputs", "members", "in_place"});
  ModelSpec m;
  m.role = e.word("role", {"train", "eval", "optimizer", "step", "infer", "gradients", "scalars", "update"});
  m.target = e.text("target");
  m.file = e.file("file");
  m.sha256 = e.digest(e.get("sha256"));
  m.steps_per_call = e.size("steps_per_call", 1);
  m.inputs = e.each("inputs", read_tensor);
  m.outputs = e.each("outputs", read_tensor);
  m.in_place = e.names("in_place");
  e.names("members");
  std::set<std::string> inputs, outputs;
  for (const TensorSpec& t : m.inputs)
    if (!inputs.insert(t.name).second) e.fail("two inputs are called '" + t.name + "'");
  for (const TensorSpec& t : m.outputs) {
    if (!outputs.insert(t.name).second) e.fail("two outputs are called '" + t.name + "'");
    if (!t.feeds.empty() && !inputs.count(t.feeds)) e.fail("'" + t.name + "' feeds '" + t.feeds + "', not an input");
  }
  const auto losses = std::count_if(m.outputs.begin(), m.outputs.end(), [](const auto& t) { return t.role == "loss"; });
  if ((m.role == "train" || m.role == "eval" || m.role == "step") != (losses == 1) && m.role != "gradients")
    e.fail("a model with " + std::to_string(losses) + " losses");
  for (const std::string& name : m.in_place)
    if (!inputs.count(name)) e.fail("'in_place' names '" + name + "', not an input");
  return m;
}

inline WeightSpec read_weight(const Entry& e) {
  e.only({"name", "dtype", "shape", "aliases", "locations"});
  WeightSpec w;
  w.name = e.text("name");
  w.dtype = e.dtype();
  w.shape = e.shape(*w.dtype);
  e.get("aliases");
  w.aliases = e.names("aliases");
  w.locations = e.each("locations", [&](const Entry& l) {
    l.only({"file", "offset", "nbytes", "dtype"});
    return WeightSpec::Location{l.file("file"), static_cast<uint64_t>(l.size("offset")),
                                static_cast<uint64_t>(l.size("nbytes")), l.has("dtype") ? l.dtype() : w.dtype};
  });
  return w;
}

inline StateSpec read_state(const Entry& e) {
  e.only({"name", "parameter", "slot", "dtype", "shape", "init"});
  StateSpec s{e.text("name"), e.text("parameter"), e.text("slot"), e.dtype(), {}, 0};
  s.shape = e.shape(*s.dtype);
  if (!e.get("init").real(s.init)) e.fail("'init' is not a number");
  return s;
}

/// Return a learning rate that a step can take, in float32.
inline bool is_lr(double value) {
  return value >= 0 && value <= 3.4028234663852886e38;
}

}  // namespace detail

inline Manifest Manifest::parse(std::string_view source, const std::string& label) {
  const Json json = Json::parse(source, label);
  const detail::Entry e(json, label);
  if (int64_t format = 0; !e.get("format").whole(format) || format != 1)
    e.fail("format " + e.get("format").text + ", this version reads 1\nhint: build the artifacts again");
  e.only({"format", "models", "parameters", "buffers", "state", "optimizer", "loss", "accumulate", "options",
          "checkpoint", "weights", "files"});
  Manifest m;
  m.models = e.each("models", detail::read_model);
  m.parameters = e.each("parameters", detail::read_weight);
  m.buffers = e.each("buffers", detail::read_weight);
  m.state = e.each("state", detail::read_state);
  const detail::Entry optimizer(e.get("optimizer"), label + ": optimizer"), loss(e.get("loss"), label + ": loss");
  if (!optimizer.get("lr").real(m.lr) || !detail::is_lr(m.lr)) optimizer.fail("'lr' is not a learning rate");
  m.optimizer = detail::compact(e.get("optimizer"));
  loss.text("output");
  m.loss = detail::compact(e.get("loss"));
  m.accumulate = e.size("accumulate", 1);
  if (m.accumulate >= 1 << 24) e.fail("'accumulate' is too large");
  const detail::Entry options(e.get("options"), label + ": options");
  if (options.has("above_one")) m.above_one = options.names("above_one");
  m.checkpoint = e.file("checkpoint");
  if (!e.null("weights")) m.weights = e.file("weights");
  const detail::Entry files(e.get("files"), label + ": files");
  for (const Json& sum : e.get("files").items) m.files[files.plain(sum.key)] = files.digest(sum);
  std::set<std::string> names;
  for (const auto* list : {&m.parameters, &m.buffers})
    for (const WeightSpec& w : *list)
      if (!names.insert(w.name).second) e.fail("two weights are called '" + w.name + "'");
  for (const StateSpec& s : m.state)
    if (!names.insert(s.name).second) e.fail("two tensors are called '" + s.name + "'");
  m.text = detail::compact(json, false);
  return m;
}

}  // namespace onnxtrain
