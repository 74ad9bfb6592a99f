// Checkpoints: safetensors files with one additional metadata entry.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.hpp"
#include "files.hpp"
#include "json.hpp"
#include "sha256.hpp"
#include "tensor.hpp"

namespace onnxtrain {

/// The contents of a checkpoint. Tensors are views of the bytes of a file or of a trainer's memory.
struct Checkpoint {
  std::map<std::string, TensorView> tensors;
  std::map<std::string, std::string> meta;  ///< JSON text by key; empty in files of other tools
};

namespace detail {

inline const std::string kNoDigest(64, '0');

inline std::string json_object(const std::map<std::string, std::string>& meta) {
  std::string out;
  for (const auto& [key, text] : meta) out += (out.empty() ? "" : ",") + json_text(key) + ":" + text;
  return "{" + out + "}";
}

/// Parse an entry of the header; the tensor is a view of `data`.
inline TensorView read_stored(const Json& info, std::string_view data, const std::string& label) {
  const std::string name = label + ": tensor '" + info.key + "' ";
  const auto wrong = [&](const std::string& what) { return CheckpointError(name + "has an invalid entry: " + what); };
  const Json *type = info.find("dtype"), *shape = info.find("shape"), *offsets = info.find("data_offsets");
  if (!type || !shape || !offsets || info.items.size() != 3) throw wrong("expected dtype, shape and data_offsets");
  const DType* dtype = find_type(type->text);
  if (!dtype || type->text != dtype->stored) throw wrong("dtype '" + type->text + "'");
  Shape sizes, range;
  for (const auto& [json, list] : {std::pair(shape, &sizes), std::pair(offsets, &range)})
    for (const Json& item : json->items)
      if (int64_t size = 0; item.whole(size)) list->push_back(size);
  if (!shape->is(Json::Kind::array) || sizes.size() != shape->items.size() || range.size() != 2 ||
      offsets->items.size() != 2 || range[0] < 0 || range[1] < range[0])
    throw wrong("shape or data_offsets are not lists of integers");
  const auto begin = static_cast<size_t>(range[0]), end = static_cast<size_t>(range[1]);
  const auto bytes = size_of(sizes, *dtype);
  if (!bytes) throw wrong("invalid shape [" + listing(sizes) + "]");
  if (end - begin != *bytes) throw CheckpointError(name + "does not match its data_offsets");
  if (end > data.size()) throw CheckpointError(label + ": truncated in tensor '" + info.key + "'");
  return TensorView(*dtype, data.data() + begin, *bytes / dtype->size, sizes);
}

/// Throw if the tensors do not cover the data exactly.
inline void check_coverage(const std::map<std::string, TensorView>& tensors, std::string_view data,
                         const std::string& label) {
  std::vector<std::string_view> ranges;
  for (const auto& [name, t] : tensors) ranges.push_back(t.bytes());
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return std::pair(a.data(), a.size()) < std::pair(b.data(), b.size()); });
  const char* expected = data.data();
  for (const std::string_view range : ranges) {
    if (range.data() != expected) throw CheckpointError(label + ": tensors overlap, or leave gaps");
    expected += range.size();
  }
  if (const auto rest = data.data() + data.size() - expected)
    throw CheckpointError(label + ": " + std::to_string(rest) + " bytes after the last tensor");
}

inline std::map<std::string, std::string> read_meta(const Json* entry, const std::string& label) {
  std::map<std::string, std::string> meta;
  const Json* text = entry ? entry->find("onnxtrain") : nullptr;
  if (entry && !text)
    for (const Json& other : entry->items)
      if (other.text.find("\"sha256\":\"") != std::string::npos)
        throw CheckpointError(label + ": the metadata is damaged: 'onnxtrain' is missing");
  if (!text) return meta;  // a plain safetensors file of another tool
  const Json json = Json::parse(text->text, label);
  if (!json.is(Json::Kind::object)) throw CheckpointError(label + ": the metadata is not an object");
  for (const Json& item : json.items) meta[item.key] = compact(item);
  return meta;
}

/// Throw if the sha256 of a checkpoint does not match.
inline void check_digest(std::string head, std::string_view data, std::map<std::string, std::string>& meta,
                         const std::string& label) {
  if (meta.empty()) return;
  const std::string digest = meta["sha256"];
  const size_t range = digest.size() == 66 ? head.find(digest.substr(1, 64)) : std::string::npos;
  if (range != std::string::npos) head.replace(range, 64, kNoDigest);
  if (json_text(Sha256().update(head).update(data).hex()) != digest)
    throw CheckpointError(label + ": damaged, the sha256 does not match\n" +
                          "hint: load an older checkpoint");
  meta.erase("sha256");
}

}  // namespace detail

/// Parse a checkpoint; tensors are views of `file`. Throws if it is damaged.
inline Checkpoint read_checkpoint(std::string_view file, const std::string& label = "checkpoint") try {
  uint64_t size = 0;
  for (size_t i = 8; i-- > 0 && file.size() >= 8;) size = size << 8 | static_cast<unsigned char>(file[i]);
  if (file.size() < 8 || size > 100000000 || size > file.size() - 8)
    throw CheckpointError(label + ": not a checkpoint, or truncated in the header");
  const std::string_view head = file.substr(8, size), data = file.substr(8 + size);
  const Json header = Json::parse(head, label);
  if (!header.is(Json::Kind::object)) throw CheckpointError(label + ": the header is not an object");
  Checkpoint checkpoint;
  for (const Json& info : header.items)
    if (info.key != "__metadata__") checkpoint.tensors[info.key] = detail::read_stored(info, data, label);
  detail::check_coverage(checkpoint.tensors, data, label);
  checkpoint.meta = detail::read_meta(header.find("__metadata__"), label);
  detail::check_digest(std::string(head), data, checkpoint.meta, label);
  return checkpoint;
} catch (const ManifestError& error) {
  throw CheckpointError(std::string(error.what()));
}

/// Write a checkpoint file atomically.
inline void write_checkpoint(const std::filesystem::path& path, const Checkpoint& checkpoint) {
  std::vector<std::pair<std::string, TensorView>> tensors(checkpoint.tensors.begin(), checkpoint.tensors.end());
  // Wide dtypes first, so that every tensor is aligned; then by name.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.second.dtype->size > b.second.dtype->size; });
  auto meta = checkpoint.meta;
  meta["sha256"] = detail::json_text(detail::kNoDigest);
  std::string head = "{\"__metadata__\":{\"onnxtrain\":" + detail::json_text(detail::json_object(meta)) + "}";
  std::vector<std::string_view> parts{"", ""};
  size_t at = 0;
  for (const auto& [name, t] : tensors) {
    std::string sizes;
    for (const int64_t size : t.shape) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
    parts.push_back(t.bytes());
    const size_t begin = std::exchange(at, at + t.bytes().size());
    head += "," + detail::json_text(name) + ":{\"dtype\":\"" + t.dtype->stored + "\",\"shape\":[" + sizes +
            "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(at) + "]}";
  }
  head += "}";
  head.append((8 - head.size() % 8) % 8, ' ');
  parts[1] = head;
  detail::Sha256 digest;
  for (const std::string_view part : parts) digest.update(part);
  head.replace(head.find(detail::kNoDigest), 64, digest.hex());
  std::string length;
  for (int shift = 0; shift < 64; shift += 8) length += static_cast<char>(head.size() >> shift);
  parts[0] = length;
  detail::write_file(path, parts);
}

}  // namespace onnxtrain
