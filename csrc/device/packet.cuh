// packet.cuh: up to 16 bytes of neighbouring elements, moved in one access where the address allows it.
#pragma once

#include <cstdint>

namespace onnx_attn::device {

template <class Element>
struct alignas(16) Packet {
  static constexpr int kCount = 16 / sizeof(Element);
  Element elements[kCount];
};

inline constexpr uintptr_t kPacketMask = 15;  // address bits that a 16-byte access wants clear

// The next `count` elements of a row, at most a packet; the rest is zero. Nothing is read when count <= 0.
template <class Element>
__device__ __forceinline__ Packet<Element> load_packet(const Element* source, int64_t count) {
  using Raw = Packet<Element>;
  uint4 zero = make_uint4(0, 0, 0, 0);
  Raw packet = reinterpret_cast<Raw&>(zero);
  if (count >= Raw::kCount && (reinterpret_cast<uintptr_t>(source) & kPacketMask) == 0) {
    packet = *reinterpret_cast<const Raw*>(source);
  } else {
#pragma unroll
    for (int e = 0; e < Raw::kCount; ++e) {
      if (e < count) packet.elements[e] = source[e];
    }
  }
  return packet;
}

template <class Element>
__device__ __forceinline__ void store_packet(Element* target, const Packet<Element>& packet, int64_t count) {
  using Raw = Packet<Element>;
  if (count >= Raw::kCount && (reinterpret_cast<uintptr_t>(target) & kPacketMask) == 0) {
    *reinterpret_cast<Raw*>(target) = packet;
  } else {
#pragma unroll
    for (int e = 0; e < Raw::kCount; ++e) {
      if (e < count) target[e] = packet.elements[e];
    }
  }
}

}  // namespace onnx_attn::device
