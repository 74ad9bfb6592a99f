// A strict JSON parser with limits, and serialization identical to Python's json module.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <locale>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"

namespace onnxtrain {

/// A JSON value; views into the parsed text, which must outlive it. Serializing it again gives the same bytes.
struct Json {
  enum class Kind { null, boolean, number, string, array, object };

  Kind kind = Kind::null;
  std::string text, key;                    ///< the content of a string; the key of this entry in its object
  std::string_view source, key_source;      ///< source text of a scalar and of its key
  std::vector<Json> items;                  ///< elements of an array or entries of an object

  bool is(Kind k) const { return kind == k; }

  /// Return an entry of an object, or null.
  const Json* find(std::string_view name) const {
    for (const Json& item : items)
      if (is(Kind::object) && item.key == name) return &item;
    return nullptr;
  }

  /// Return whether this is an integer of at most 64 bits, and store it in `value`.
  bool whole(int64_t& value) const {
    const char* end = source.data() + source.size();
    const auto [stop, error] = std::from_chars(source.data(), end, value);
    return is(Kind::number) && error == std::errc() && stop == end;
  }

  /// Return whether this is a finite number, and store it in `value`.
  bool real(double& value) const {
    std::istringstream in{std::string(source)};
    in.imbue(std::locale::classic());
    return is(Kind::number) && in >> value && std::isfinite(value);
  }

  static Json parse(std::string_view source, const std::string& label);
};

namespace detail {

inline constexpr int kJsonDepth = 64;
inline constexpr size_t kJsonValues = size_t{1} << 22;

/// Parser for RFC 8259 text in UTF-8; also rejects duplicate keys.
class JsonReader {
 public:
  JsonReader(std::string_view source, const std::string& label) : source_(source), label_(label) {}

  Json document() {
    Json json = value(0);
    if (at_ != source_.size()) fail("text after the value");
    return json;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ManifestError(label_ + ": not JSON: " + what + " at byte " + std::to_string(at_));
  }
  unsigned char peek() const { return at_ < source_.size() ? static_cast<unsigned char>(source_[at_]) : 0; }
  bool accept(std::string_view text) {
    const bool matches = source_.substr(at_, text.size()) == text;
    at_ += matches ? text.size() : 0;
    return matches;
  }
  void expect(std::string_view text) {
    if (!accept(text)) fail("expected '" + std::string(text) + "'");
  }
  void skip() { at_ = std::min(source_.find_first_not_of(" \t\n\r", at_), source_.size()); }

  /// Parse a value with surrounding whitespace.
  Json value(int depth) {
    if (depth > kJsonDepth) fail("nested too deeply");
    if (++count_ > kJsonValues) fail("too many values");
    skip();
    Json json;
    const size_t start = at_;
    if (accept("{") || accept("[")) {
      json.kind = source_[start] == '{' ? Json::Kind::object : Json::Kind::array;
      list(json, depth + 1);
    } else {
      json.kind = scalar(json.text);
      json.source = source_.substr(start, at_ - start);
    }
    skip();
    return json;
  }

  void list(Json& json, int depth) {
    const bool object = json.is(Json::Kind::object);
    const std::string_view end = object ? "}" : "]";
    std::set<std::string> keys;
    skip();
    if (accept(end)) return;
    do {
      Json name;
      if (object) {
        name = value(depth);
        if (!name.is(Json::Kind::string)) fail("expected a string as key");
        if (!keys.insert(name.text).second) fail("duplicate key '" + name.text + "'");
        expect(":");
      }
      json.items.push_back(value(depth));
      json.items.back().key = std::move(name.text);
      json.items.back().key_source = name.source;
    } while (accept(","));
    expect(end);
  }

  Json::Kind scalar(std::string& text) {
    if (accept("null")) return Json::Kind::null;
    if (accept("true") || accept("false")) return Json::Kind::boolean;
    if (accept("\"")) {
      while (!accept("\"")) character(text);
      return Json::Kind::string;
    }
    if (!accept("-") && !is_digit()) fail("expected a value");
    if (!accept("0")) digits();
    if (accept(".")) digits();
    if (accept("e") || accept("E")) {
      if (!accept("+")) accept("-");
      digits();
    }
    return Json::Kind::number;
  }

  bool is_digit() const { return peek() >= '0' && peek() <= '9'; }
  void digits() {
    if (!is_digit()) fail("expected digits");
    while (is_digit()) ++at_;
  }

  /// Parse one character of a string: ASCII, an escape, or a UTF-8 sequence.
  void character(std::string& out) {
    const size_t start = at_;
    const unsigned char first = peek();
    if (at_ >= source_.size()) fail("unterminated string");
    if (first < 0x20) fail("control character in a string");
    if (accept("\\")) return escape(out);
    const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : first >= 0x80 ? 1 : 0;
    uint32_t point = first & (more ? 0x3Fu >> more : 0x7Fu);
    for (int i = 0; i < more; ++i) {
      ++at_;
      if ((peek() & 0xC0) != 0x80) fail("not UTF-8");
      point = (point << 6) | (peek() & 0x3Fu);
    }
    ++at_;
    constexpr uint32_t minimum[] = {0, 0x80, 0x800, 0x10000};
    const bool continuation = first >= 0x80 && first < 0xC0, surrogate = point >= 0xD800 && point < 0xE000;
    if (continuation || surrogate || first > 0xF4 || point < minimum[more] || point > 0x10FFFF) fail("not UTF-8");
    out += source_.substr(start, at_ - start);
  }

  void escape(std::string& out) {
    constexpr std::string_view names = "\"\\/bfnrt", values = "\"\\/\b\f\n\r\t";
    if (const size_t i = names.find(static_cast<char>(peek())); i != std::string_view::npos) {
      out += values[i];
      ++at_;
      return;
    }
    if (!accept("u")) fail("unknown escape");
    uint32_t point = hex();
    if (point >= 0xD800 && point < 0xDC00 && accept("\\u")) {
      const uint32_t low = hex();
      point = low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00) : 0xD800;
    }
    if (point >= 0xD800 && point < 0xE000) fail("unpaired surrogate");
    int more = point < 0x80 ? 0 : point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    constexpr uint32_t lead[] = {0, 0xC0, 0xE0, 0xF0};
    out += static_cast<char>(lead[more] | (point >> 6 * more));
    while (more-- > 0) out += static_cast<char>(0x80 | ((point >> 6 * more) & 0x3F));
  }

  uint32_t hex() {
    uint32_t value = 0;
    const std::string_view four = source_.substr(at_, 4);
    const auto [stop, error] = std::from_chars(four.data(), four.data() + four.size(), value, 16);
    if (error != std::errc() || stop != four.data() + 4) fail("expected four hex digits");
    at_ += 4;
    return value;
  }

  std::string_view source_;
  const std::string& label_;
  size_t at_ = 0;
  size_t count_ = 0;
};

/// Serialize a string.
inline std::string json_text(std::string_view text) {
  constexpr std::string_view special = "\"\\\b\f\n\r\t", names = "\"\\bfnrt", digits = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const size_t s = special.find(c);
    if (s != std::string_view::npos) out += {'\\', names[s]};
    else if (static_cast<unsigned char>(c) < 0x20) out += {'\\', 'u', '0', '0', digits[c >> 4], digits[c & 15]};
    else out += c;
  }
  return '"' + out + '"';
}

/// Serialize a value without whitespace; without `hashes`, as manifests are stored in checkpoints.
inline std::string compact(const Json& json, bool hashes = true, int depth = 0) {
  const bool object = json.is(Json::Kind::object);
  if (json.is(Json::Kind::string) && json.key == "sha256" && !hashes) return "\"\"";
  if (!object && !json.is(Json::Kind::array)) return std::string(json.source);
  std::string out(1, object ? '{' : '[');
  for (const Json& item : json.items) {
    if (json.key == "files" && depth == 1 && !hashes) break;
    if (out.size() > 1) out += ',';
    if (object) out.append(item.key_source) += ':';
    out += compact(item, hashes, depth + 1);
  }
  return out + (object ? '}' : ']');
}

/// Format a float as Python does: the shortest text with the same value, such as 1.0 or 1e-05.
inline std::string float_text(double value) {
  if (!std::isfinite(value)) throw Error("not a finite number: " + std::to_string(value));
  const auto text = [&](auto format, int places) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out << format << std::setprecision(places) << value;
    return out.str();
  };
  int places = 0;
  std::string shortest = text(std::scientific, places);
  for (double back = 0; places < 16; shortest = text(std::scientific, ++places))
    if (Json::parse(shortest, "a number").real(back) && back == value) break;
  const int exponent = std::stoi(shortest.substr(shortest.find('e') + 1));
  return exponent < -4 || exponent >= 16 ? shortest : text(std::fixed, std::max(places - exponent, 1));
}

}  // namespace detail

inline Json Json::parse(std::string_view source, const std::string& label) {
  return detail::JsonReader(source, label).document();
}

}  // namespace onnxtrain
