// Reading files, and writing them atomically.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#ifdef _WIN32
#include <io.h>
#else
#include <fcntl.h>
#include <unistd.h>
#endif

#include "error.hpp"

namespace onnxtrain::detail {

namespace fs = std::filesystem;

/// Return the content of a regular file.
inline std::string read_file(const fs::path& path) {
  const std::string label = path.filename().string();
  std::error_code error;
  const auto kind = fs::status(path, error).type();
  if (kind == fs::file_type::not_found)
    throw FileError(label + ": not found\nhint: pass the directory that contains manifest.json");
  // Reading a pipe or a device might never end.
  if (kind != fs::file_type::regular) throw FileError(label + ": not a regular file");
  const uintmax_t size = fs::file_size(path, error);
  std::FILE* file = error ? nullptr : std::fopen(path.string().c_str(), "rb");
  if (!file) throw FileError(label + ": cannot be read: " + std::strerror(errno));
  std::string data(static_cast<size_t>(size), '\0');
  const size_t read = std::fread(data.data(), 1, data.size(), file);
  std::fclose(file);
  if (read != data.size()) throw FileError(label + ": truncated while reading");
  return data;
}

/// Flush a file to disk.
inline bool flush(std::FILE* file) {
#ifdef _WIN32
  return std::fflush(file) == 0 && _commit(_fileno(file)) == 0;
#else
  return std::fflush(file) == 0 && fsync(fileno(file)) == 0;
#endif
}

/// Write a file of several parts atomically: into a temporary file, which then replaces the old one.
inline void write_file(const fs::path& path, const std::vector<std::string_view>& parts) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::random_device random;
  const std::string suffix = "." + std::to_string(random()) + std::to_string(random()) + ".tmp";
  const fs::path temporary = folder / ("." + path.filename().string().substr(0, 48) + suffix);
  // x: fail if the file exists, so that a planted symlink is not followed.
  std::FILE* file = std::fopen(temporary.string().c_str(), "wbx");
  bool good = file != nullptr;
  for (const std::string_view part : parts)
    good = good && std::fwrite(part.data(), 1, part.size(), file) == part.size();
  good = good && flush(file);
  std::error_code error(errno, std::generic_category()), ignored;
  good = file && std::fclose(file) == 0 && good;
  if (good) fs::rename(temporary, path, error);
  if (!good || error) {
    if (file) fs::remove(temporary, ignored);
    throw FileError("'" + path.string() + "': cannot be written: " + error.message());
  }
#ifndef _WIN32
  if (const int descriptor = open(folder.c_str(), O_RDONLY); descriptor >= 0) {
    fsync(descriptor);
    close(descriptor);
  }
#endif
}

}  // namespace onnxtrain::detail
