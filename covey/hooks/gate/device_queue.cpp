// The queue of a GPU, for gate.cpp: how much is in it, and when it is empty. No header of CUDA is needed: the calls are
// those of the libcudart that PyTorch has loaded, told by covey/hooks/limits/cuda_calls.py.
//
//   while limits hold    one event for so many operators as take a quantum; before the next ones are launched, the part
//                        before the newest one must be done: at most two parts are queued, and finish when it is stopped
//   input is waited for  a host function at the end of the stream says that the device has no work of this rank
//
// A process is charged for all the time in which it had something queued, also where its kernels left gaps: what is
// wrong in that is to the good of its neighbour. Operators on other streams than the script's are not bounded.
#include "device_queue.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>

namespace {
using ns = int64_t;
constexpr ns QUANTUM = 2000000;     // of the device, between two events
constexpr ns DRAIN_MAX = 200000000; // one operator may take longer: then the next look finds it
constexpr int OPERATORS_MAX = 1024, OPERATORS_FIRST = 8;
constexpr int NOT_READY = 600;      // cudaErrorNotReady
constexpr unsigned BLOCKING_NO_TIMING = 1 | 2;

struct Calls {
  int (*create)(void**, unsigned);
  int (*record)(void*, void*);
  int (*query)(void*);
  int (*capturing)(void*, int*);
  int (*last_error)();
  int (*launch_host)(void*, void (*)(void*), void*);
};

ns now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return ns(t.tv_sec) * 1000000000 + t.tv_nsec;
}
void sleep_ns(ns length) {
  timespec t{0, length};
  nanosleep(&t, nullptr);
}

// Operators of the next part, so that it takes a quantum; the part before took `took` and had `operators`.
int operators_of(int operators, ns took, ns quantum) {
  double wanted = took <= 0 ? 2.0 * operators : double(operators) * quantum / took;
  return int(std::clamp(wanted, std::max(1.0, operators / 4.0), std::min<double>(OPERATORS_MAX, 2.0 * operators)));
}

struct Queue {
  std::mutex lock;
  Calls calls{};
  std::atomic<bool> on{false}, recording{false};
  std::atomic<void*> stream{nullptr};
  void* events[2] = {nullptr, nullptr};
  bool outstanding[2] = {false, false};
  int newest = 0, operators = OPERATORS_FIRST, launched = 0;
  bool in_flight = false, unmarked = false;  // something may be queued; something is, behind the newest event
  ns since = 0, counted = 0, done_at = 0;
  ns parts = 0, waits = 0, failures = 0;

  void count(ns t) {
    if (in_flight) counted += std::max<ns>(0, t - since);
    since = t;
  }
  bool failed(int error) {  // PyTorch raises what is left behind by others
    if (!error) return false;
    failures += error != NOT_READY;
    calls.last_error();
    return true;
  }
  bool done(int which) {
    if (!outstanding[which]) return true;
    if (recording) return false;  // asking would spoil the graph
    int error = calls.query(events[which]);
    if (error == NOT_READY) return calls.last_error(), false;
    failed(error);
    return outstanding[which] = false, true;
  }
  bool mark() {  // an event behind all that is queued; false: the stream is being recorded into a graph
    int recorded = 0;
    if (recording || failed(calls.capturing(stream, &recorded)) || recorded) return false;
    int next = 1 - newest;
    if (!events[next] && failed(calls.create(&events[next], BLOCKING_NO_TIMING))) return events[next] = nullptr, false;
    if (failed(calls.record(events[next], stream))) return false;
    newest = next, outstanding[next] = true, unmarked = false, parts++;
    return true;
  }
};

Queue queue;
std::mutex draining;
uint64_t token = 0;   // of the wait for input that goes on; 0 between them
bool told = false;    // that the device is idle

void drained(void* of) {  // in a thread of CUDA, which may not call CUDA
  std::lock_guard<std::mutex> held(draining);
  if (!token || told || uint64_t(reinterpret_cast<uintptr_t>(of)) != token) return;
  told = true;
  covey_wait(1);
}
}  // namespace

namespace device_queue {
bool used() { return queue.on.load(std::memory_order_acquire); }

int64_t worked(int64_t t) {
  std::lock_guard<std::mutex> held(queue.lock);
  queue.count(t);
  return queue.counted;
}

bool full(int64_t t) {
  std::unique_lock<std::mutex> held(queue.lock, std::try_to_lock);
  if (!held.owns_lock()) return false;
  queue.count(t);
  queue.in_flight = queue.unmarked = true;
  if (queue.launched++ < queue.operators) return false;
  if (!queue.mark()) return false;
  queue.launched = 0;
  return true;
}

void drain(bool (*go_on)()) {
  ns began = now();
  int before;
  {
    std::lock_guard<std::mutex> held(queue.lock);
    before = 1 - queue.newest;
  }
  for (ns pause = 20000;; pause = std::min<ns>(pause * 2, 500000)) {
    ns t = now();
    {
      std::lock_guard<std::mutex> held(queue.lock);
      bool over = queue.done(before);
      if (over || queue.recording || t - began > DRAIN_MAX || !go_on()) {
        if (queue.done_at) queue.operators = operators_of(queue.operators, t - queue.done_at, QUANTUM);
        queue.done_at = t;
        return;
      }
      queue.waits++;
    }
    sleep_ns(pause);
  }
}

bool empty(int64_t t) {
  std::lock_guard<std::mutex> held(queue.lock);
  if (!queue.in_flight) return true;
  queue.count(t);
  if (queue.unmarked && !queue.mark()) return false;
  if (!queue.done(queue.newest)) return false;
  queue.outstanding[0] = queue.outstanding[1] = queue.in_flight = false;
  queue.done_at = 0;  // what it takes from here on is no time of the device
  return true;
}

void forget() {
  std::lock_guard<std::mutex> held(queue.lock);
  queue.outstanding[0] = queue.outstanding[1] = queue.in_flight = queue.unmarked = false;
  queue.operators = OPERATORS_FIRST, queue.launched = 0, queue.done_at = 0;
}

void forked() {  // CUDA does not outlive a fork
  new (&queue) Queue();
  new (&draining) std::mutex();
  token = 0, told = false;
}
}  // namespace device_queue

extern "C" {
// The device of this process is a GPU: six calls of libcudart, in the order of `Calls`; nullptr: it is none.
void covey_device(void* const* calls) {
  std::lock_guard<std::mutex> held(queue.lock);
  queue.on.store(false, std::memory_order_release);
  if (!calls) return;
  queue.calls = Calls{
      reinterpret_cast<int (*)(void**, unsigned)>(calls[0]), reinterpret_cast<int (*)(void*, void*)>(calls[1]),
      reinterpret_cast<int (*)(void*)>(calls[2]), reinterpret_cast<int (*)(void*, int*)>(calls[3]),
      reinterpret_cast<int (*)()>(calls[4]), reinterpret_cast<int (*)(void*, void (*)(void*), void*)>(calls[5])};
  queue.on.store(true, std::memory_order_release);
}
// The script's stream.
void covey_device_stream(void* stream) { queue.stream = stream; }
// Some thread records a graph: nothing of CUDA may be asked meanwhile.
void covey_device_recording(int on) { queue.recording = on != 0; }
// Its thread begins to wait for input: the flag says idle once all that is queued now is done. 0: nothing can be said.
int covey_queue_waits() {
  if (!device_queue::used() || queue.recording) return 0;
  void* stream = queue.stream;
  int recorded = 0;
  uint64_t mine;
  {
    std::lock_guard<std::mutex> held(queue.lock);
    if (queue.failed(queue.calls.capturing(stream, &recorded)) || recorded) return 0;
  }
  {
    std::lock_guard<std::mutex> held(draining);
    static uint64_t last = 0;
    mine = token = ++last;
  }
  int error = queue.calls.launch_host(stream, drained, reinterpret_cast<void*>(uintptr_t(mine)));
  if (!error) return 1;
  std::lock_guard<std::mutex> held(queue.lock);
  queue.failed(error);
  return 0;
}
// It has its input, or computes again.
void covey_queue_works() {
  std::lock_guard<std::mutex> held(draining);
  token = 0;
  if (!told) return;
  told = false;
  covey_wait(0);
}
// parts marked by an event, looks that found one not done, calls that failed, operators of a part, ns with a queue
void covey_device_counters(ns* into) {
  std::lock_guard<std::mutex> held(queue.lock);
  into[0] = queue.parts, into[1] = queue.waits, into[2] = queue.failures, into[3] = queue.operators;
  into[4] = queue.counted;
}
int covey_operators_of(int operators, ns took, ns quantum) { return operators_of(operators, took, quantum); }
}
