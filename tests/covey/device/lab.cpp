// A device of PyTorch for tests (PrivateUse1), in host memory that only its own kernels can reach.
//
// Memory is mapped twice: `data_ptr` lies where nothing can be read or written (PROT_NONE), and the device's threads use
// the other mapping. Each stream is a thread with a queue, so work and events end later than the call that made them;
// `lab_latency` slows down all work, and `lab_hold` stops one stream until `lab_release`. A copy from memory that is not
// pinned is taken at once, as CUDA does; a copy from or to pinned memory reads and writes that memory when its turn comes.
// Operators other than allocation, views and copies run on the CPU with copies of their arguments.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

constexpr auto LAB = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2, STREAMS = 16;
constexpr size_t ARENA_BYTES = size_t(1) << 32, ALIGN = 512;

// ---- memory ----

std::mutex& memory_lock = *new std::mutex;
char *shown = nullptr, *real = nullptr;  // the same memory: where tensors say that it is, and where it can be reached
size_t used = 0;
auto& free_blocks = *new std::multimap<size_t, size_t>;  // offset, by size
auto& pinned = *new std::map<char*, size_t>;
auto& free_pinned = *new std::multimap<size_t, char*>;
long pinned_made = 0, pinned_refused_above = -1, synchronized_devices = 0;

void make_arena() {
  if (shown != nullptr) return;
  int file = memfd_create("lab", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, ARENA_BYTES) == 0, "lab: no memory");
  void* hidden = mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  void* closed = mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  TORCH_CHECK(hidden != MAP_FAILED && closed != MAP_FAILED, "lab: no addresses");
  real = static_cast<char*>(hidden), shown = static_cast<char*>(closed);
}

size_t rounded(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

struct Block {
  size_t offset, bytes;
};

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard lock(memory_lock);
  free_blocks.emplace(block->bytes, block->offset);  // used again at once, as by a caching allocator
}

struct LabAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device here = c10::impl::getDeviceGuardImpl(LAB)->getDevice();
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, here};
    bytes = rounded(bytes);
    std::lock_guard lock(memory_lock);
    make_arena();
    size_t offset;
    if (auto found = free_blocks.find(bytes); found != free_blocks.end()) {
      offset = found->second;
      free_blocks.erase(found);
    } else {
      TORCH_CHECK(used + bytes <= ARENA_BYTES, "lab: out of memory");
      offset = used, used += bytes;
    }
    return {shown + offset, new Block{offset, bytes}, &free_block, here};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "lab: copy_data is not there"); }
};

void free_host(void* at) {
  std::lock_guard lock(memory_lock);
  if (auto found = pinned.find(static_cast<char*>(at)); found != pinned.end())
    free_pinned.emplace(found->second, found->first);  // stays pinned, for the next one
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(memory_lock);
    bytes = rounded(bytes ? bytes : 1);
    TORCH_CHECK(pinned_refused_above < 0 || long(bytes) <= pinned_refused_above, "lab: cannot pin ", bytes, " bytes");
    char* at;
    pinned_made++;
    if (auto found = free_pinned.find(bytes); found != free_pinned.end()) {
      at = found->second;
      free_pinned.erase(found);
    } else {
      at = static_cast<char*>(aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
      pinned.emplace(at, bytes);
    }
    return {at, at, &free_host, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_host; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

bool is_pinned(const void* data) {
  std::lock_guard lock(memory_lock);
  auto after = pinned.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  if (after == pinned.begin()) return false;
  --after;
  return data < after->first + after->second;
}

auto& allocator = *new LabAllocator;
auto& pinned_allocator = *new PinnedAllocator;

// ---- streams and events ----

struct Task {
  std::function<bool()> ready;  // asked under the lock
  std::function<void()> work;
};

struct Queue {
  std::deque<Task> tasks;
  long begun = 0, done = 0;
  bool held = false, has_thread = false;
};

std::mutex& lock_ = *new std::mutex;  // threads of streams outlive main
std::condition_variable& changed = *new std::condition_variable;
auto& queues = *new std::array<std::array<Queue, STREAMS>, DEVICES>;
int made[DEVICES];
long latency_us = 0;
thread_local c10::DeviceIndex device_now = 0;
thread_local c10::StreamId stream_now[DEVICES];

void run(Queue* queue) {
  at::NoGradGuard none;
  std::unique_lock lock(lock_);
  for (;;) {
    changed.wait(lock, [&] {
      return !queue->tasks.empty() && !queue->held && (!queue->tasks.front().ready || queue->tasks.front().ready());
    });
    Task task = std::move(queue->tasks.front());
    queue->tasks.pop_front();
    if (task.work) {
      long sleeps = latency_us;
      lock.unlock();
      if (sleeps) usleep(sleeps);
      task.work();
      task.work = nullptr;
      lock.lock();
    }
    queue->done++;
    changed.notify_all();
  }
}

Queue& queue_of(c10::Stream stream) { return queues[stream.device_index()][stream.id()]; }

void put(c10::Stream stream, std::function<bool()> ready, std::function<void()> work) {
  std::lock_guard lock(lock_);
  Queue& queue = queue_of(stream);
  if (!queue.has_thread) {
    queue.has_thread = true;
    std::thread(run, &queue).detach();
  }
  queue.begun++;
  queue.tasks.push_back({std::move(ready), std::move(work)});
  changed.notify_all();
}

void finish(c10::Stream stream) {
  std::unique_lock lock(lock_);
  Queue& queue = queue_of(stream);
  long until = queue.begun;
  changed.wait(lock, [&] { return queue.done >= until; });
}

struct Event {
  long recorded = 0, done = 0;
};
using Shared = std::shared_ptr<Event>;

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(LAB, device), id);
}

c10::Stream current(c10::Device device) {
  c10::DeviceIndex at = device.index() < 0 ? device_now : device.index();
  return stream_of(at, stream_now[at]);
}

struct LabGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return LAB; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {LAB, device_now}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "lab: there is no device ", device);
    if (device.index() >= 0) device_now = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index() < 0 ? device_now : device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard lock(lock_);
    c10::DeviceIndex at = device.index() < 0 ? device_now : device.index();
    return stream_of(at, 1 + made[at]++ % (STREAMS - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = current(stream.device());
    stream_now[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Shared(std::make_shared<Event>());
    Shared one = *static_cast<Shared*>(*event);
    long at;
    {
      std::lock_guard lock(lock_);
      at = ++one->recorded;
    }
    put(stream, [one, at] { return one->done = std::max(one->done, at), true; }, nullptr);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Shared one = *static_cast<Shared*>(event);
    long at;
    {
      std::lock_guard lock(lock_);
      at = one->recorded;
    }
    put(stream, [one, at] { return one->done >= at; }, nullptr);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    std::lock_guard lock(lock_);
    Shared& one = *static_cast<Shared*>(event);
    return one->done >= one->recorded;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Shared one = *static_cast<Shared*>(event);
    std::unique_lock lock(lock_);
    long at = one->recorded;
    changed.wait(lock, [&] { return one->done >= at; });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Shared*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard lock(lock_);
    return queue_of(stream).done == queue_of(stream).begun;
  }
  void synchronizeStream(const c10::Stream& stream) const override { finish(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronized_devices++;
    for (int id = 0; id < STREAMS; id++) finish(stream_of(device, id));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, LabGuard);

struct LabHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return shown != nullptr; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(device_now, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

// ---- operators ----

at::Tensor within(const at::Tensor& tensor) {  // the tensor's memory, as its device's kernels see it
  void* data = tensor.storage().mutable_data();
  if (tensor.device().type() == LAB && data != nullptr) data = real + (static_cast<char*>(data) - shown);
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  auto offset = tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(static_cast<char*>(data) + offset, tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  bool comes = to.device().type() == LAB, goes = from.device().type() == LAB;
  c10::Stream stream = current((comes ? to : from).device());
  bool between = comes && goes && to.device() != from.device();
  if (between) finish(current(from.device()));
  at::Tensor source = goes || (non_blocking && is_pinned(from.data_ptr())) ? within(from) : from.clone();
  at::Tensor target = within(to);
  put(stream, nullptr, [source, target]() mutable { target.copy_(source.expand_as(target)); });
  if (between || (!comes && !(non_blocking && is_pinned(to.data_ptr())))) finish(stream);
  return to;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(LAB, device_now)));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(LAB, device_now)));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(type));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    c10::Storage storage = self.storage();
    c10::DataPtr fresh = allocator.allocate(bytes);
    size_t kept = storage.nbytes();
    if (kept) {
      char *source = real + (static_cast<char*>(storage.mutable_data()) - shown);
      char *target = real + (static_cast<char*>(fresh.get()) - shown);
      put(current(self.device()), nullptr, [=] { memcpy(target, source, kept); });
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return self.cpu().item(); }

void record_stream(at::Tensor&, c10::Stream) {}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, of) { of.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, of) {
  of.impl("empty.memory_format", &empty);
  of.impl("empty_strided", &empty_strided);
  of.impl("as_strided", &at::native::as_strided_tensorimpl);
  of.impl("view", &at::native::view);
  of.impl("_reshape_alias", &at::native::_reshape_alias);
  of.impl("resize_", &resize_);
  of.impl("_copy_from", &copy_from);
  of.impl("_copy_from_and_resize", &copy_from_and_resize);
  of.impl("_local_scalar_dense", &local_scalar);
  of.impl("record_stream", &record_stream);
  of.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

}  // namespace

extern "C" {
void lab_register() { at::RegisterPrivateUse1HooksInterface(new LabHooks); }
void lab_latency(long us) { latency_us = us; }
void lab_hold(int device, long stream, int held) {
  std::lock_guard lock(lock_);
  queues[device][stream].held = held;
  changed.notify_all();
}
long lab_waiting(int device, long stream) {
  std::lock_guard lock(lock_);
  return queues[device][stream].begun - queues[device][stream].done;
}
long lab_pinned_made() { return pinned_made; }
long lab_synchronized_devices() { return synchronized_devices; }
void lab_refuse_pinned(long above) { pinned_refused_above = above; }
int lab_device() { return device_now; }
void lab_set_device(int device) { device_now = device; }
}

static auto registered_allocator = (c10::SetAllocator(LAB, &allocator), 0);
