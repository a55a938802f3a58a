// preference.cpp: reading and keeping what preference.h describes.
#include "preference.h"

#include <algorithm>
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
    if (text) result.error = parse_preference(text, result.preference);
    if (!result.error.empty()) result.error = "TORCH_ONNX_ATTN_KERNEL: " + result.error;
    return result;
  }();
  return read;
}

thread_local std::optional<Preference> thread_preference;

std::string without_spaces_around(const std::string& text) {
  const size_t first = text.find_first_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

// "decode, forward_short, ... and general", in the order in which they are asked.
std::string all_names() {
  std::string names;
  for (int kernel = 0; kernel < kKernels; ++kernel) {
    const std::string name = kernel_name(static_cast<Kernel>(kernel));
    if (kernel_named(name.c_str()) < 0) continue;  // nobody's choice
    if (!names.empty()) names += kernel + 1 < kKernels ? ", " : " and ";
    names += name;
  }
  return names;
}

}  // namespace

std::string parse_preference(const std::string& text, Preference& preference) {
  preference = Preference{};
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string choice = without_spaces_around(text.substr(begin, end - begin));
    begin = end + 1;
    if (choice.empty()) continue;
    const bool forbids = choice[0] == '-';
    const std::string name = choice.substr(forbids);
    const int kernel = kernel_named(name.c_str());
    if (kernel < 0) return "is '" + name + "'; there are " + all_names();
    if (forbids) {
      preference.forbidden |= 1u << kernel;
    } else if (preference.forced >= 0 && preference.forced != kernel) {
      return "forces '" + std::string(kernel_name(static_cast<Kernel>(preference.forced))) + "' and '" + name + "'; only one can be forced";
    } else {
      preference.forced = kernel;
    }
  }
  if (preference.forced >= 0 && preference.forbidden >> preference.forced & 1) {
    return "forces '" + std::string(kernel_name(static_cast<Kernel>(preference.forced))) + "', which it also forbids";
  }
  return "";
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
