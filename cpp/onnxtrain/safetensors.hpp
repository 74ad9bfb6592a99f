// Checkpoints: safetensors files that any tool reads, with one metadata entry of our own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.hpp"
#include "json.hpp"
#include "sha256.hpp"
#include "tensor.hpp"

namespace onnxtrain {

/// A tensor in a checkpoint: its bytes lie in the file's, or in a trainer's memory.
struct Stored {
  const DType* dtype = nullptr;
  Shape shape;
  std::string_view bytes;
};

/// What a checkpoint holds. `meta` is JSON text by key; it is empty in files of other tools.
struct Checkpoint {
  std::map<std::string, Stored> tensors;
  std::map<std::string, std::string> meta;
};

/// Return the name under which optimizer state is stored.
inline std::string state_key(const std::string& parameter, const std::string& slot) {
  return "optim/" + slot + "/" + parameter;
}

namespace detail {

inline const std::string kNoDigest(64, '0');

inline std::string joined(const std::map<std::string, std::string>& meta) {
  std::string out;
  for (const auto& [key, text] : meta) out += (out.empty() ? "{" : ",") + json_text(key) + ":" + text;
  return (out.empty() ? "{" : out) + "}";
}

/// Return the length and header of a checkpoint file; the tensors' bytes follow in `order`.
inline std::string header_of(const Checkpoint& checkpoint, std::vector<std::string_view>& order) {
  std::vector<std::pair<std::string_view, const Stored*>> tensors;
  for (const auto& [name, t] : checkpoint.tensors) tensors.emplace_back(name, &t);
  // Wide types first, so that every tensor is aligned; then by name.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.second->dtype->size > b.second->dtype->size; });
  auto meta = checkpoint.meta;
  meta["sha256"] = json_text(kNoDigest);
  std::string head = "{\"__metadata__\":{\"onnxtrain\":" + json_text(joined(meta), false) + "}";
  size_t at = 0;
  for (const auto& [name, t] : tensors) {
    std::string sizes;
    for (const int64_t size : t->shape) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
    const size_t end = at + t->bytes.size();
    head += "," + json_text(name, false) + ":{\"dtype\":\"" + t->dtype->stored + "\",\"shape\":[" + sizes +
            "],\"data_offsets\":[" + std::to_string(at) + "," + std::to_string(end) + "]}";
    at = end;
    order.push_back(t->bytes);
  }
  head += "}";
  head.append((8 - head.size() % 8) % 8, ' ');
  Sha256 digest;
  digest.update(head);
  for (const std::string_view part : order) digest.update(part);
  head.replace(head.find(kNoDigest), 64, digest.hex());
  std::string length;
  for (int shift = 0; shift < 64; shift += 8) length += static_cast<char>(head.size() >> shift);
  return length + head;
}

/// Return an entry of the header as a tensor whose bytes lie in `data`; `begin` is where they start.
inline Stored read_stored(const Json& info, std::string_view data, size_t& begin, const std::string& label) {
  const auto wrong = [&](const std::string& what) {
    return CheckpointError(label + ": tensor '" + info.key + "' is described wrongly: " + what);
  };
  Stored t;
  const Json *type = info.find("dtype"), *shape = info.find("shape"), *offsets = info.find("data_offsets");
  if (!type || !shape || !offsets || info.items.size() != 3) throw wrong("not dtype, shape and data_offsets");
  t.dtype = type->is(Json::Kind::string) ? find_type(type->text) : nullptr;
  if (!t.dtype || type->text != t.dtype->stored) throw wrong("element type '" + type->text + "'");
  for (const Json& size : shape->items)
    if (int64_t value = 0; size.whole(value)) t.shape.push_back(value);
  int64_t first = -1, last = -1;
  const bool pair = offsets->items.size() == 2 && offsets->items[0].whole(first) && offsets->items[1].whole(last);
  size_t bytes = 0;
  if (!shape->is(Json::Kind::array) || t.shape.size() != shape->items.size() || !pair || first < 0 || last < first)
    throw wrong("sizes are no numbers");
  if (!size_of(t.shape, t.dtype->size, bytes)) throw wrong("no array has the shape [" + listing(t.shape) + "]");
  if (static_cast<uint64_t>(last - first) != bytes)
    throw CheckpointError(label + ": tensor '" + info.key + "' does not fill its place");
  if (static_cast<uint64_t>(last) > data.size())
    throw CheckpointError(label + ": truncated in tensor '" + info.key + "'");
  begin = static_cast<size_t>(first);
  t.bytes = data.substr(begin, bytes);
  return t;
}

inline std::map<std::string, std::string> read_meta(const Json* entry, const std::string& label) {
  std::map<std::string, std::string> meta;
  const Json* text = entry ? entry->find("onnxtrain") : nullptr;
  if (entry && !text)
    for (const Json& other : entry->items)
      if (other.text.find("\"sha256\":\"") != std::string::npos)
        throw CheckpointError(label + ": the metadata is damaged: there is no 'onnxtrain' in it");
  if (!text) return meta;  // a plain safetensors file: weights from elsewhere
  const Json json = Json::parse(text->text, label);
  if (!json.is(Json::Kind::object)) throw CheckpointError(label + ": the metadata is not an object");
  for (const Json& item : json.items) meta[item.key] = compact(item);
  return meta;
}

/// Refuse a checkpoint of ours whose content is not what was written.
inline void check_digest(std::string head, std::string_view data, std::map<std::string, std::string>& meta,
                         const std::string& label) {
  if (meta.empty()) return;
  const std::string digest = meta.count("sha256") ? meta["sha256"] : "";
  const size_t place = digest.size() == 66 ? head.find(digest.substr(1, 64)) : std::string::npos;
  if (place != std::string::npos) head.replace(place, 64, kNoDigest);
  if (json_text(Sha256().update(head).update(data).hex()) != digest)
    throw CheckpointError(label + ": damaged, its sha256 is not the recorded one\n" +
                          "hint: take an older checkpoint; its content cannot be trusted");
  meta.erase("sha256");
}

}  // namespace detail

/// Return what the bytes of a file hold; tensors are views of them. Damaged files are refused.
inline Checkpoint read_checkpoint(std::string_view file, const std::string& label = "checkpoint") try {
  uint64_t size = 0;
  for (size_t i = 8; i-- > 0 && file.size() >= 8;) size = size << 8 | static_cast<unsigned char>(file[i]);
  if (file.size() < 8 || size > 100000000 || size > file.size() - 8)
    throw CheckpointError(label + ": not a checkpoint, or truncated in its header");
  const std::string_view head = file.substr(8, size), data = file.substr(8 + size);
  const Json header = Json::parse(head, label);
  if (!header.is(Json::Kind::object)) throw CheckpointError(label + ": the header is not an object");
  Checkpoint checkpoint;
  std::vector<std::pair<size_t, size_t>> places;
  for (const Json& info : header.items) {
    if (info.key == "__metadata__") continue;
    size_t begin = 0;
    const Stored t = detail::read_stored(info, data, begin, label);
    places.emplace_back(begin, t.bytes.size());
    checkpoint.tensors[info.key] = t;
  }
  std::sort(places.begin(), places.end());
  size_t expected = 0;
  for (const auto& [begin, bytes] : places) {
    if (begin != expected) throw CheckpointError(label + ": tensors overlap, or leave gaps");
    expected += bytes;
  }
  if (expected != data.size())
    throw CheckpointError(label + ": " + std::to_string(data.size() - expected) + " bytes after the last tensor");
  checkpoint.meta = detail::read_meta(header.find("__metadata__"), label);
  detail::check_digest(std::string(head), data, checkpoint.meta, label);
  return checkpoint;
} catch (const ManifestError& error) {
  throw CheckpointError(std::string(error.what()));
}

}  // namespace onnxtrain
