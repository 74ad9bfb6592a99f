// Checks of the trainer besides its numerical results: trainer_checks <artifacts of an MLP>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <onnxtrain.hpp>

namespace {

void check(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "check failed: %s\n", what.c_str());
  std::exit(1);
}

/// Check that `work` throws an error of a type whose message starts with `message`.
template <class Kind, class Work>
void rejects(const std::string& message, const Work& work) {
  try {
    work();
  } catch (const Kind& error) {
    return check(std::string(error.what()).rfind(message, 0) == 0, message + ", got: " + error.what());
  }
  check(false, "rejected: " + message);
}

using onnxtrain::LayoutKind;
using onnxtrain::ShapeError;
using onnxtrain::Trainer;

std::vector<float> rows(size_t count) {
  std::vector<float> x(count * 10);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  return x;
}

onnxtrain::Options options(LayoutKind layout) {
  onnxtrain::Options o;
  o.threads = 1;
  o.layout = layout;
  return o;
}

void batches(Trainer& trainer) {
  const std::vector<float> x = rows(4);
  const std::vector<int64_t> labels = {0, 1, 2, 3}, few = {0, 1};
  rejects<ShapeError>("unknown input: 'y'", [&] { trainer.step({{"x", x}, {"labels", labels}, {"y", x}}); });
  rejects<ShapeError>("missing from the batch: 'labels'", [&] { trainer.step({{"x", x}}); });
  rejects<ShapeError>("duplicate input", [&] { trainer.step({{"x", x}, {"x", x}, {"labels", labels}}); });
  rejects<ShapeError>("'x' is float32[batch, 10], got int64", [&] {
    trainer.step({{"x", labels}, {"labels", labels}});
  });
  rejects<ShapeError>("'labels' is int64[batch], got batch = 2", [&] { trainer.step({{"x", x}, {"labels", few}}); });
  rejects<ShapeError>("'x' is float32[batch, 10], got shape [5, 8]", [&] {
    trainer.step({{"x", {x, {5, 8}}}, {"labels", labels}});
  });
  rejects<ShapeError>("'x' is float32[batch, 10], got shape [3, 10] and 40 elements", [&] {
    trainer.step({{"x", {x, {3, 10}}}, {"labels", labels}});
  });
  const std::vector<float> odd(37);
  rejects<ShapeError>("'x' is float32[batch, 10], got shape [3, 10] and 37", [&] {
    trainer.step({{"x", odd}, {"labels", labels}});
  });
  rejects<ShapeError>("'labels' is int64[batch], got float32", [&] { trainer.step({{"x", x}, {"labels", {}}}); });
  const std::vector<int64_t> outside = {0, 1, 2, 99};
  rejects<onnxtrain::RuntimeError>(trainer.fused() ? "step_model.onnx" : "training_model.onnx", [&] {
    trainer.step({{"x", x}, {"labels", outside}});
  });
  check(trainer.global_step() == 0, "nothing was trained");
}

void bad_losses(Trainer& trainer) {
  std::vector<float> x = rows(4);
  const std::vector<int64_t> labels = {0, 1, 2, 3};
  const auto before = trainer.parameter("fc1.weight");
  const double loss = trainer.evaluate({{"x", x}, {"labels", labels}}).loss;
  x[0] = std::numeric_limits<float>::quiet_NaN();
  const auto result = trainer.step({{"x", x}, {"labels", labels}});
  check(std::isnan(result.loss) && !result.updated && trainer.global_step() == 0,
        "a loss that is not finite is discarded");
  check(trainer.parameter("fc1.weight").bytes == before.bytes, "parameters are unchanged");
  x = rows(4);
  check(trainer.evaluate({{"x", x}, {"labels", labels}}).loss == loss, "the loss is unchanged");
  const std::vector<float> infinite(before.count(), std::numeric_limits<float>::infinity());
  trainer.set_parameter("fc1.weight", infinite);
  rejects<onnxtrain::CheckpointError>("'fc1.weight' is not finite", [&] { trainer.save("not_finite"); });
  rejects<onnxtrain::CheckpointError>("'fc1.weight' is not finite",
                                      [&] { trainer.export_model("not_finite"); });
  check(!std::filesystem::exists("not_finite"), "nothing is written");
  trainer.set_parameter("fc1.weight", before.view());
}

void settings(Trainer& trainer) {
  const std::vector<float> x = rows(4);
  const std::vector<int64_t> labels = {0, 1, 2, 3};
  rejects<onnxtrain::Error>("lr must be a finite number >= 0", [&] { trainer.set_lr(-1); });
  rejects<onnxtrain::Error>("lr must be a finite number >= 0", [&] { trainer.set_lr(std::nan("")); });
  rejects<ShapeError>("unknown parameter: 'nothing'", [&] { trainer.parameter("nothing"); });
  rejects<ShapeError>("'fc2.bias' is float32[4], got float32[]", [&] { trainer.set_parameter("fc2.bias", x); });
  rejects<onnxtrain::CheckpointError>("unknown property: 'nothing'", [&] { trainer.property("nothing"); });
  trainer.set_schedule(onnxtrain::linear(0.1, 4));
  for (int i = 0; i < 3; ++i) trainer.step({{"x", x}, {"labels", labels}});
  check(trainer.lr() == 0.1 * (1.0 - 1.0 * 2 / 4), "the learning rate of step 3");
  trainer.set_schedule({});
  trainer.set_lr(0.25);
  trainer.step({{"x", x}, {"labels", labels}});
  check(trainer.lr() == 0.25, "the learning rate is set");
  trainer.set_property("ratio", 0.1);
  trainer.set_property("count", int64_t{1} << 60);
  trainer.set_property("name", std::string("K\xC3\xA4se \xF0\x9F\x99\x82"));
  trainer.save("settings");
  rejects<onnxtrain::FileError>("'none/settings': cannot be written: No such file",
                                [&] { trainer.save("none/settings"); });
  std::filesystem::create_directories("taken/inside");
  rejects<onnxtrain::FileError>("'taken': cannot be written: ", [&] { trainer.save("taken"); });
  trainer.set_property("ratio", std::string("other"));
  trainer.load("settings");
  check(std::get<double>(trainer.property("ratio")) == 0.1, "a number");
  check(std::get<int64_t>(trainer.property("count")) == int64_t{1} << 60, "an integer");
  check(std::get<std::string>(trainer.property("name")) == "K\xC3\xA4se \xF0\x9F\x99\x82", "a string");
}

/// Internals without a public API: booleans from Python, huge sizes, float formatting.
void details() {
  using namespace onnxtrain::detail;
  check(std::get<int64_t>(read_property("true", "flag")) == 1, "true is 1");
  check(std::get<int64_t>(read_property("false", "flag")) == 0, "false is 0");
  const onnxtrain::TensorSpec huge{"x", "input", find_type("float32"), {INT64_MAX, INT64_MAX, "n"}, ""};
  const std::vector<float> x = rows(1);
  check(shape_of(huge, x) == onnxtrain::Shape({INT64_MAX, INT64_MAX, 0}), "the remaining size is 0");
  for (const char* text : {"0.0", "-0.0", "1.0", "0.1", "1e-05", "0.0001", "123456.789", "1e+16", "9300000000000000.0",
                           "1.7976931348623157e+308", "5e-324", "-2.5e-07", "0.30000000000000004"}) {
    double number = 1;
    check(onnxtrain::Json::parse(text, "").real(number) && float_text(number) == text, text);
  }
}

/// Accumulating two batches gives the same update as one batch of both.
void accumulation(const std::string& folder) {
  const std::vector<float> x = rows(8);
  const std::vector<int64_t> labels = {0, 1, 2, 3, 3, 2, 1, 0};
  Trainer whole(folder, options(LayoutKind::separate));
  onnxtrain::Options two = options(LayoutKind::automatic);
  two.accumulate = 2;
  Trainer halves(folder, two);
  check(!halves.fused(), "gradient accumulation uses the separate layout");
  whole.step({{"x", x}, {"labels", labels}});
  const auto half = [&](size_t i) {
    return halves.step({{"x", {x.data() + 40 * i, 40}}, {"labels", {labels.data() + 4 * i, 4}}});
  };
  check(!half(0).updated, "one batch of two");
  rejects<onnxtrain::Error>("gradients are accumulated but not applied", [&] { halves.save("half"); });
  check(half(1).updated && halves.global_step() == 1, "two batches of two");
  const auto a = whole.parameter("fc1.weight").as<float>(), b = halves.parameter("fc1.weight").as<float>();
  for (size_t i = 0; i < a.size(); ++i) check(std::abs(a[i] - b[i]) < 1e-4, "the same update");
  half(0);
  check(halves.flush() && !halves.flush() && halves.global_step() == 2, "the rest is flushed, once");
  onnxtrain::Options wrong = options(LayoutKind::fused);
  wrong.accumulate = 2;
  rejects<onnxtrain::Error>("gradient accumulation needs the separate layout", [&] { Trainer t(folder, wrong); });
  Trainer fused(folder, options(LayoutKind::fused));
  rejects<onnxtrain::Error>("no accumulated gradients", [&] { fused.update(1); });
}

/// The caller can set session options and add execution providers.
void sessions(const std::string& folder) {
  for (const LayoutKind layout : {LayoutKind::fused, LayoutKind::separate}) {
    int made = 0;
    onnxtrain::Options o = options(layout);
    o.configure = [&](Ort::SessionOptions& session) {
      session.AddConfigEntry("session.intra_op.allow_spinning", "0"), ++made;
    };
    Trainer trainer(folder, o);
    check(made == (layout == LayoutKind::fused ? 1 : 2), "one session per model of a step");
    o.configure = [](Ort::SessionOptions& session) { session.AppendExecutionProvider("NoSuchProvider", {}); };
    rejects<onnxtrain::RuntimeError>("onnxruntime: ", [&] { Trainer t(folder, o); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "artifacts";
  for (const LayoutKind layout : {LayoutKind::fused, LayoutKind::separate}) {
    Trainer trainer(folder, options(layout));
    batches(trainer);
    bad_losses(trainer);
    settings(trainer);
  }
  accumulation(folder);
  sessions(folder);
  details();
  std::puts("all checks passed");
}
