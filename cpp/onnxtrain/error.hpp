// Error classes.
#pragma once

#include <stdexcept>
#include <string>

namespace onnxtrain {

/// Base class of all errors. The message may have a second line that starts with "hint:".
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The manifest is invalid, or the artifacts do not match it.
struct ManifestError : Error {
  using Error::Error;
};

/// A checkpoint is damaged, or belongs to other artifacts.
struct CheckpointError : Error {
  using Error::Error;
};

/// A tensor has the wrong name, dtype or shape.
struct ShapeError : Error {
  using Error::Error;
};

/// A file cannot be read or written.
struct FileError : Error {
  using Error::Error;
};

/// onnxruntime cannot load or run a model.
struct RuntimeError : Error {
  using Error::Error;
};

}  // namespace onnxtrain
