// Command line driver of the tests; tensors are passed in safetensors files.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>
#include <onnxtrain.hpp>

namespace {

using onnxtrain::Batch;
using onnxtrain::Trainer;

/// A safetensors file with tensors called "<number>/<input>".
struct Batches {
  explicit Batches(const std::string& path) : file(onnxtrain::detail::read_file(path)) {
    for (const auto& [name, t] : onnxtrain::read_checkpoint(file, path).tensors) {
      const size_t slash = name.find('/');
      const auto number = static_cast<size_t>(std::stoul(name.substr(0, slash)));
      if (all.size() <= number) all.resize(number + 1);
      all[number].push_back({name.substr(slash + 1), t});
    }
  }
  std::string file;
  std::vector<Batch> all;
};

onnxtrain::Options options() {
  const auto number = [](const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
  };
  onnxtrain::Options o;
  o.threads = number("THREADS", 1);
  if (std::getenv("SEED")) o.seed = static_cast<uint32_t>(number("SEED", 0));
  if (number("SEPARATE", 0)) o.layout = onnxtrain::LayoutKind::separate;
  return o;
}

/// train <artifacts> <batches> <steps> <losses> <checkpoint out> [checkpoint in]
void train(int argc, char** argv) {
  Trainer trainer(argv[2], options());
  if (argc > 7) trainer.load(argv[7]);
  const Batches batches(argv[3]);
  std::ofstream losses(argv[5], std::ios::binary);
  for (long i = 0, steps = std::atol(argv[4]); i < steps; ++i) {
    const auto loss = static_cast<float>(trainer.step(batches.all[static_cast<size_t>(i) % batches.all.size()]).loss);
    losses.write(reinterpret_cast<const char*>(&loss), sizeof loss);
  }
  trainer.flush();
  trainer.save(argv[6]);
}

/// report <artifacts> <batches>: print the results of a step and of evaluations
void report(char** argv) {
  Trainer trainer(argv[2], options());
  const Batches batches(argv[3]);
  const auto print = [](const char* what, const onnxtrain::StepResult& r) {
    std::printf("%s loss %.9g step %lld updated %d\n", what, r.loss, static_cast<long long>(r.step), r.updated);
    for (const auto& [name, value] : r.metrics) std::printf("%s metric %s %.9g\n", what, name.c_str(), value);
    for (const auto& [name, value] : r.outputs)
      std::printf("%s output %s %zu\n", what, name.c_str(), value.GetTensorTypeAndShapeInfo().GetElementCount());
  };
  print("eval", trainer.evaluate(batches.all[0]));
  print("step", trainer.step(batches.all[0]));
  print("eval", trainer.evaluate(batches.all[0]));
}

/// export <artifacts> <checkpoint> <model> [ema]
void export_model(int argc, char** argv) {
  Trainer trainer(argv[2], options());
  trainer.load(argv[3]);
  trainer.export_model(argv[4], argc > 5);
}

/// copy <artifacts> <checkpoint in> <checkpoint out>: load and save a checkpoint
void copy(char** argv) {
  Trainer trainer(argv[2], options());
  trainer.load(argv[3]);
  trainer.save(argv[4]);
}

/// schedule <name> <lr> <total> <steps>
void schedule(char** argv) {
  const std::string name = argv[2];
  const double lr = std::atof(argv[3]);
  const long total = std::atol(argv[4]), steps = std::atol(argv[5]);
  const std::map<std::string, onnxtrain::Schedule> known = {
      {"constant", onnxtrain::constant(lr)},
      {"linear", onnxtrain::linear(lr, total)},
      {"cosine", onnxtrain::cosine(lr, total)},
      {"step", onnxtrain::stepwise(lr, total)},
      {"warmup", onnxtrain::warmup(lr, total, onnxtrain::cosine(lr, total))}};
  for (long i = 1; i <= steps; ++i) std::printf("%.17g\n", known.at(name)(i));
}

/// hostile <artifacts> <good checkpoint> <directory> <batches>: train in <directory>/*/, load <directory>/*.ckpt
void hostile(char** argv) {
  const Batches batches(argv[5]);
  for (const auto& entry : std::filesystem::directory_iterator(argv[4])) {
    const std::string name = entry.path().filename().string();
    std::string outcome = "accepted";
    try {
      if (entry.is_directory()) {
        Trainer trainer(entry.path(), options());
        trainer.step(batches.all[0]);
        trainer.evaluate(batches.all[0]);
        trainer.export_model(entry.path() / "exported");
      } else {
        Trainer trainer(argv[2], options());
        trainer.load(argv[3]);
        const auto before = trainer.snapshot();
        const std::string state = onnxtrain::detail::json_object(before.meta);
        try {
          trainer.load(entry.path());
        } catch (const onnxtrain::Error&) {
          if (onnxtrain::detail::json_object(trainer.snapshot().meta) != state) outcome = "changed";
          throw;
        }
      }
    } catch (const onnxtrain::Error& error) {
      outcome = outcome == "changed" ? outcome : std::string("rejected: ") + error.what();
    }
    std::cout << name << "\t" << outcome.substr(0, outcome.find('\n')) << "\n";
  }
}

/// bench <artifacts> <batches> <steps>: compare the time of steps with plain calls of the same session
void bench(char** argv) {
  Trainer trainer(argv[2], options());
  const Batches batches(argv[3]);
  const long steps = std::atol(argv[4]);
  // CPU time, so that other processes do not matter.
  const auto micros = [&](const auto& work) {
    const std::clock_t start = std::clock();
    for (long i = 0; i < steps; ++i) work();
    return 1e6 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC / static_cast<double>(steps);
  };
  // The same model, memory and options without the trainer, as a baseline.
  onnxtrain::detail::Controls controls;
  controls.set_step(1);
  Ort::SessionOptions session_options;
  onnxtrain::detail::prepare(session_options, options().threads);
  const auto& spec = trainer.manifest().model("step");
  Ort::Session session(onnxtrain::detail::environment(), (std::filesystem::path(argv[2]) / spec.file).c_str(),
                       session_options);
  onnxtrain::detail::Values old, fresh;
  for (auto* values : {&old, &fresh})
    for (const auto& v : trainer.manifest().values()) values->add(v.name, *v.dtype, v.shape);
  const auto start = trainer.snapshot();
  for (const auto& [key, t] : start.tensors)
    if (old.has(key)) old.write(key, t.bytes());
  std::vector<const char*> in, out;
  std::vector<Ort::Value> feeds, results;
  for (const auto& t : spec.inputs) {
    in.push_back(t.name.c_str());
    feeds.push_back(controls.value(t));
    if (t.role == "input" || t.role == "target") {
      for (const auto& feed : batches.all[0])
        if (feed.name == t.name) feeds.back() = onnxtrain::detail::as_value(feed.value);
    } else if (!feeds.back()) {
      feeds.back() = onnxtrain::detail::as_value(old[t.name]);
    }
  }
  for (const auto& t : spec.outputs) {
    out.push_back(t.name.c_str());
    results.push_back(t.feeds.empty() ? Ort::Value{nullptr} : onnxtrain::detail::as_value(fresh[t.feeds]));
  }
  const auto raw = [&] {
    const onnxtrain::detail::FlushDenormals mode;
    session.Run(Ort::RunOptions{nullptr}, in.data(), feeds.data(), in.size(), out.data(), results.data(), out.size());
    for (size_t i = 0; i < results.size(); ++i)
      if (spec.outputs[i].feeds.empty()) results[i] = Ort::Value{nullptr};
  };
  const auto ours = [&] { trainer.step(batches.all[0]); };
  double best_raw = 1e30, best_ours = 1e30;
  for (int round = 0; round < 40; ++round) {
    best_raw = std::min(best_raw, micros(raw));
    best_ours = std::min(best_ours, micros(ours));
  }
  std::printf("raw %.2f us, step %.2f us, overhead %.2f %%\n", best_raw, best_ours, 100 * (best_ours / best_raw - 1));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  try {
    if (command == "train") train(argc, argv);
    else if (command == "report") report(argv);
    else if (command == "export") export_model(argc, argv);
    else if (command == "copy") copy(argv);
    else if (command == "schedule") schedule(argv);
    else if (command == "hostile") hostile(argv);
    else if (command == "bench") bench(argv);
    else return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
