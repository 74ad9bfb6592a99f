// Every error that is thrown on purpose.
#pragma once

#include <stdexcept>
#include <string>

namespace onnxtrain {

/// Base of all errors. The message says what and where; a line that begins "hint:" says what to do.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A directory of artifacts is not what its manifest says, or the manifest is wrong.
struct ManifestError : Error {
  using Error::Error;
};

/// A checkpoint is damaged, or belongs to other artifacts.
struct CheckpointError : Error {
  using Error::Error;
};

/// A tensor has not the name, type or shape that is expected.
struct ShapeError : Error {
  using Error::Error;
};

/// A file cannot be read or written.
struct FileError : Error {
  using Error::Error;
};

/// onnxruntime refuses a model, or a run of it.
struct RuntimeError : Error {
  using Error::Error;
};

}  // namespace onnxtrain
