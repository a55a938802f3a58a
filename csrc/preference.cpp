// preference.cpp: reading and keeping what preference.h describes.
#include "preference.h"

#include <cstdlib>
#include <optional>

namespace onnx_attn {

namespace {

struct Environment {
  Preference preference;
  std::string error;
};

const Environment& environment() {
  static const Environment read = [] {
    Environment result;
    const char* text = std::getenv("TORCH_ONNX_ATTN_KERNEL");
    std::string unknown;
    if (text && !parse_preference(text, result.preference, unknown)) {
      result.error = "TORCH_ONNX_ATTN_KERNEL: names the kernel '" + unknown + "', which does not exist";
    }
    return result;
  }();
  return read;
}

thread_local std::optional<Preference> thread_preference;

}  // namespace

bool parse_preference(const std::string& text, Preference& preference, std::string& unknown) {
  preference = Preference{};
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.find(',', begin);
    if (end == std::string::npos) end = text.size();
    const bool forbids = text[begin] == '-';
    unknown = text.substr(begin + forbids, end - begin - forbids);
    const int kernel = kernel_named(unknown.c_str());
    if (kernel < 0) return false;
    if (forbids) {
      preference.forbidden |= 1u << kernel;
    } else {
      preference.forced = kernel;
    }
    begin = end + 1;
  }
  return true;
}

const Preference& current_preference(std::string& error) {
  if (thread_preference) return *thread_preference;
  error = environment().error;
  return environment().preference;
}

void set_thread_preference(const Preference* preference) {
  thread_preference = preference ? std::optional<Preference>(*preference) : std::nullopt;
}

}  // namespace onnx_attn
