// Host memory in which PyTorch's allocator may place what the limit of a GPU has no room for (covey/hooks/limits/cuda_memory.py):
// the two functions of a CUDAPluggableAllocator. They are called under the allocator's lock, with or without Python's:
// so they hand out what was prepared before, between two mini-batches, and call neither CUDA nor Python.
//
//   covey_spill_prepare   page-locked, mapped memory of the host       covey_spill_alloc   hands out a prepared piece
//   covey_spill_trim      gives back what nobody has                   covey_spill_free    it is prepared again
#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace {
constexpr unsigned PORTABLE_AND_MAPPED = 1 | 2;
struct Piece {
  void* memory;
  size_t size;
  bool out;
};
struct Calls {
  int (*host_alloc)(void**, size_t, unsigned);
  int (*host_free)(void*);
  int (*last_error)();
} calls{};
std::mutex lock;
std::vector<Piece> pieces;
}  // namespace

extern "C" {
// cudaHostAlloc, cudaFreeHost, cudaGetLastError of the libcudart that PyTorch has loaded.
void covey_spill_calls(void* const* told) {
  std::lock_guard<std::mutex> held(lock);
  calls = Calls{
      reinterpret_cast<int (*)(void**, size_t, unsigned)>(told[0]), reinterpret_cast<int (*)(void*)>(told[1]),
      reinterpret_cast<int (*)()>(told[2])};
}
// One more piece of this size that nobody has; the error of CUDA, 0 when it is there.
int covey_spill_prepare(size_t size) {
  if (!calls.host_alloc) return -1;
  void* memory = nullptr;
  int error = calls.host_alloc(&memory, size, PORTABLE_AND_MAPPED);
  if (error) return calls.last_error(), error;
  std::lock_guard<std::mutex> held(lock);
  pieces.push_back({memory, size, false});
  return 0;
}
void* covey_spill_alloc(ssize_t size, int, void*) {
  std::lock_guard<std::mutex> held(lock);
  for (Piece& piece : pieces)
    if (!piece.out && piece.size == size_t(size)) return piece.out = true, piece.memory;
  return nullptr;
}
void covey_spill_free(void* memory, size_t, int, void*) {
  std::lock_guard<std::mutex> held(lock);
  for (Piece& piece : pieces)
    if (piece.memory == memory) piece.out = false;
}
// To be called when the device is done with all of it.
void covey_spill_trim() {
  std::vector<Piece> kept, gone;
  {
    std::lock_guard<std::mutex> held(lock);
    for (const Piece& piece : pieces) (piece.out ? kept : gone).push_back(piece);
    pieces.swap(kept);
  }
  for (const Piece& piece : gone)
    if (calls.host_free(piece.memory)) calls.last_error();
}
int covey_spill_holds(const void* address) {
  std::lock_guard<std::mutex> held(lock);
  for (const Piece& piece : pieces) {
    const char* begins = static_cast<const char*>(piece.memory);
    if (piece.out && address >= begins && address < begins + piece.size) return 1;
  }
  return 0;
}
// bytes that PyTorch has, bytes that nobody has
void covey_spill_counters(int64_t* into) {
  std::lock_guard<std::mutex> held(lock);
  into[0] = into[1] = 0;
  for (const Piece& piece : pieces) into[piece.out ? 0 : 1] += int64_t(piece.size);
}
}
