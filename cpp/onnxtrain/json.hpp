// JSON: a strict and bounded reader, and text as Python's json module writes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"

namespace onnxtrain {

/// A JSON value. Numbers keep their spelling, so that what is read and written again has the same bytes.
struct Json {
  enum class Kind { null, boolean, number, string, array, object };

  Kind kind = Kind::null;
  std::string text;         ///< a string's content; a number or a boolean as it was written
  std::string key;          ///< its name in the object that it is in
  std::vector<Json> items;  ///< of an array or an object

  bool is(Kind k) const { return kind == k; }

  /// Return an entry of an object, or null.
  const Json* find(std::string_view name) const {
    for (const Json& item : items)
      if (is(Kind::object) && item.key == name) return &item;
    return nullptr;
  }

  /// Return whether this is a whole number that fits 64 bits, and put it into `value`.
  bool whole(int64_t& value) const {
    if (!is(Kind::number) || text.find_first_of(".eE") != std::string::npos) return false;
    std::istringstream in(text);
    in.imbue(std::locale::classic());
    return static_cast<bool>(in >> value);
  }

  /// Return whether this is a finite number, and put it into `value`.
  bool real(double& value) const {
    std::istringstream in(text);
    in.imbue(std::locale::classic());
    return is(Kind::number) && in >> value && std::isfinite(value);
  }

  static Json parse(std::string_view source, const std::string& label);
};

namespace detail {

inline constexpr int kJsonDepth = 64;
inline constexpr size_t kJsonValues = size_t{1} << 22;

/// Reads RFC 8259 text in UTF-8; refuses everything else, keys that come twice among it.
class JsonReader {
 public:
  JsonReader(std::string_view source, const std::string& label) : source_(source), label_(label) {}

  Json document() {
    Json json = value(0);
    skip();
    if (at_ != source_.size()) fail("text after the value");
    return json;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ManifestError(label_ + ": not JSON: " + what + " at byte " + std::to_string(at_));
  }
  char peek() const { return at_ < source_.size() ? source_[at_] : '\0'; }
  bool take(char c) { return peek() == c && at_ < source_.size() ? (++at_, true) : false; }
  void expect(char c) {
    if (!take(c)) fail(std::string("expected '") + c + "'");
  }
  void skip() {
    while (at_ < source_.size() && std::string_view(" \t\n\r").find(source_[at_]) != std::string_view::npos) ++at_;
  }

  Json value(int depth) {
    if (depth > kJsonDepth) fail("nested too deeply");
    if (++count_ > kJsonValues) fail("too many values");
    skip();
    Json json;
    const char c = peek();
    if (c == '{' || c == '[') {
      json.kind = c == '{' ? Json::Kind::object : Json::Kind::array;
      ++at_;
      list(json, c == '{' ? '}' : ']', depth);
    } else if (c == '"') {
      json.kind = Json::Kind::string;
      json.text = string();
    } else if (c == '-' || (c >= '0' && c <= '9')) {
      json.kind = Json::Kind::number;
      json.text = number();
    } else {
      word(json);
    }
    return json;
  }

  void list(Json& json, char end, int depth) {
    skip();
    if (take(end)) return;
    std::vector<std::string_view> keys;
    do {
      std::string key;
      if (end == '}') {
        skip();
        key = string();
        skip();
        expect(':');
      }
      json.items.push_back(value(depth + 1));
      json.items.back().key = std::move(key);
      skip();
    } while (take(','));
    expect(end);
    if (end != '}') return;
    for (const Json& item : json.items) keys.push_back(item.key);
    std::sort(keys.begin(), keys.end());
    const auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end()) fail("the key '" + std::string(*twice) + "' comes twice");
  }

  void word(Json& json) {
    for (const std::string_view text : {"true", "false", "null"}) {
      if (source_.substr(at_, text.size()) != text) continue;
      at_ += text.size();
      json.kind = text == "null" ? Json::Kind::null : Json::Kind::boolean;
      json.text = text;
      return;
    }
    fail("no value");
  }

  std::string number() {
    const size_t start = at_;
    const auto digits = [&] {
      const size_t first = at_;
      while (peek() >= '0' && peek() <= '9') ++at_;
      if (at_ == first) fail("a number without digits");
    };
    take('-');
    if (!take('0')) digits();
    if (take('.')) digits();
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      digits();
    }
    return std::string(source_.substr(start, at_ - start));
  }

  std::string string() {
    expect('"');
    std::string out;
    while (!take('"')) {
      if (at_ >= source_.size()) fail("a string without end");
      const auto c = static_cast<unsigned char>(source_[at_]);
      if (c < 0x20) fail("a control character in a string");
      if (c == '\\') {
        ++at_;
        escape(out);
      } else if (c < 0x80) {
        out += source_[at_++];
      } else {
        utf8(out, c);
      }
    }
    return out;
  }

  void escape(std::string& out) {
    constexpr std::string_view names = "\"\\/bfnrt", values = "\"\\/\b\f\n\r\t";
    const char c = peek();
    ++at_;
    if (const size_t i = names.find(c); i != std::string_view::npos) {
      out += values[i];
      return;
    }
    if (c != 'u') fail("an unknown escape");
    uint32_t point = hex();
    if (point >= 0xD800 && point < 0xDC00 && take('\\') && take('u')) {
      const uint32_t low = hex();
      point = low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00) : 0xD800;
    }
    if (point >= 0xD800 && point < 0xE000) fail("half a surrogate pair");
    encode(out, point);
  }

  uint32_t hex() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const size_t digit = std::string_view("0123456789abcdef").find(static_cast<char>(peek() | 0x20));
      if (digit == std::string_view::npos || peek() < '0') fail("not four hexadecimal digits");
      value = value * 16 + static_cast<uint32_t>(digit);
      ++at_;
    }
    return value;
  }

  static void encode(std::string& out, uint32_t point) {
    const auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
    if (point < 0x80) return put(point);
    if (point < 0x800) {
      put(0xC0 | (point >> 6));
    } else {
      if (point < 0x10000) {
        put(0xE0 | (point >> 12));
      } else {
        put(0xF0 | (point >> 18));
        put(0x80 | ((point >> 12) & 0x3F));
      }
      put(0x80 | ((point >> 6) & 0x3F));
    }
    put(0x80 | (point & 0x3F));
  }

  void utf8(std::string& out, unsigned char first) {
    const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    uint32_t point = first & (0x3Fu >> more);
    for (int i = 1; i <= more; ++i) {
      const unsigned c = at_ + i < source_.size() ? static_cast<unsigned char>(source_[at_ + i]) : 0u;
      if ((c & 0xC0) != 0x80) fail("not UTF-8");
      point = (point << 6) | (c & 0x3F);
    }
    constexpr uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    const bool surrogate = point >= 0xD800 && point < 0xE000;
    if (first < 0xC0 || first > 0xF4 || point < least[more] || point > 0x10FFFF || surrogate) fail("not UTF-8");
    out += source_.substr(at_, more + 1);
    at_ += more + 1;
  }

  std::string_view source_;
  const std::string& label_;
  size_t at_ = 0;
  size_t count_ = 0;
};

/// Return a string's text; with `ascii`, everything else is escaped, as json.dumps does.
inline std::string json_text(std::string_view text, bool ascii = true) {
  static const char* digits = "0123456789abcdef";
  std::string out = "\"";
  const auto unit = [&](uint32_t u) {
    out += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out += digits[(u >> shift) & 15];
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    constexpr std::string_view special = "\"\\\b\f\n\r\t", names = "\"\\bfnrt";
    if (const size_t s = special.find(text[i]); s != std::string_view::npos) {
      out += '\\';
      out += names[s];
    } else if (c < 0x20 || (ascii && c == 0x7F)) {
      unit(c);
    } else if (c < 0x80 || !ascii) {
      out += text[i];
    } else {
      const int more = c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : 1;
      uint32_t point = c & (0x3Fu >> more);
      for (int k = 0; k < more && i + 1 < text.size(); ++k)
        point = (point << 6) | (static_cast<unsigned char>(text[++i]) & 0x3F);
      if (point >= 0x10000) unit(0xD800 + ((point - 0x10000) >> 10));
      unit(point >= 0x10000 ? 0xDC00 + ((point - 0x10000) & 0x3FF) : point);
    }
  }
  return out + '"';
}

/// Return the text of a value without spaces; without `hashes`, as checkpoints keep a manifest.
inline std::string compact(const Json& json, bool hashes = true, int depth = 0) {
  if (json.is(Json::Kind::null)) return "null";
  if (json.is(Json::Kind::string)) return !hashes && json.key == "sha256" ? "\"\"" : json_text(json.text);
  if (json.items.empty() && !json.is(Json::Kind::array) && !json.is(Json::Kind::object)) return json.text;
  const bool object = json.is(Json::Kind::object);
  std::string out(1, object ? '{' : '[');
  const bool skipped = !hashes && depth == 1 && json.key == "files";
  for (const Json& item : json.items) {
    if (skipped) break;
    if (out.size() > 1) out += ',';
    if (object) out += json_text(item.key) + ':';
    out += compact(item, hashes, depth + 1);
  }
  return out + (object ? '}' : ']');
}

/// Return a number's text as Python writes a float: the shortest that reads the same, 1.0 or 1e-05.
inline std::string float_text(double value) {
  std::string text;
  for (int precision = 0; precision < 17; ++precision) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out << std::scientific;
    out.precision(precision);
    out << value;
    text = out.str();
    Json json;
    json.kind = Json::Kind::number;
    json.text = text;
    double back = 0;
    if (json.real(back) && back == value) break;
  }
  const size_t e = text.find('e');
  if (e == std::string::npos) throw Error("no finite number: " + text);
  const int exponent = std::stoi(text.substr(e + 1));
  const bool negative = text[0] == '-';
  std::string digits;
  for (const char c : text.substr(0, e))
    if (c >= '0' && c <= '9') digits += c;
  std::string out = negative ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    const std::string power = std::to_string(std::abs(exponent));
    out += digits.substr(0, 1) + (digits.size() > 1 ? "." + digits.substr(1) : "");
    return out + (exponent < 0 ? "e-" : "e+") + (power.size() < 2 ? "0" : "") + power;
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto before = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= before) return out + digits + std::string(before - digits.size(), '0') + ".0";
  return out + digits.substr(0, before) + "." + digits.substr(before);
}

}  // namespace detail

inline Json Json::parse(std::string_view source, const std::string& label) {
  return detail::JsonReader(source, label).document();
}

}  // namespace onnxtrain
