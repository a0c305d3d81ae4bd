// Turns to compute (COMP, covey/tensors/turns) of a script that only has hooks: asked for before an operator of its
// thread, and given once that thread waits for something.
//
//   operator begins   COMP is ours, by the word on the page?  yes: go on   no: ask, which is Python's part, and waits there
//   a thread          while COMP is ours: does the script wait?  then Python's part gives it
//
// A signal that comes while the script waits for its turn (Ctrl-C) runs its handler there. What that raises must not go
// through PyTorch: it is kept until the interpreter is back in the script. Until then operators go on without a turn.
#include <ATen/record_function.h>

#include "process.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <mutex>

namespace {
using namespace process;
constexpr uint64_t HOLDS = 3, DOES = 3;                 // of covey/tensors/turns/rules.py
constexpr ns LOOK = 2 * MS, LONG_LOOK = 8 * MS;         // between two looks whether the script waits
constexpr ns OTHER_LOOK = 50 * MS;                      // while there is nothing to see
constexpr const char* COLLECTIVE = "c10d::";            // begins a collective: it waits for others, and computes nothing

std::atomic<const uint64_t*> state{nullptr};  // of COMP in our slot on the page; null: no turns are taken
std::atomic<int> script{0};                   // tid of the script's thread
std::atomic<uint32_t> asked{0};               // times that it has asked
std::mutex changing;
bool in = false;                              // the callback, under `changing`
at::CallbackHandle handle = 0;

struct Python {
  using Object = void;
  int (*ensure)() = nullptr;
  void (*release)(int) = nullptr;
  Object* (*call)(Object*, Object*) = nullptr;
  void (*drop)(Object*) = nullptr;
  void (*fetch)(Object**, Object**, Object**) = nullptr;
  void (*restore)(Object*, Object*, Object*) = nullptr;
  int (*later)(int (*)(void*), void*) = nullptr;
  template <class F>
  static bool find(F& into, const char* name) {
    return (into = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name))) != nullptr;
  }
  bool found() {
    return find(ensure, "PyGILState_Ensure") && find(release, "PyGILState_Release") && find(call, "PyObject_CallObject") &&
           find(drop, "Py_DecRef") && find(fetch, "PyErr_Fetch") && find(restore, "PyErr_Restore") &&
           find(later, "Py_AddPendingCall");
  }
};
Python python;
std::atomic<void*> ask{nullptr};  // Python's part

struct Raised {  // in the script's thread, while it asked
  void *type = nullptr, *value = nullptr, *trace = nullptr;
};
Raised raised;
std::atomic<bool> is_raised{false};

int raise_now(void*) {  // in the script, with Python's lock
  if (!is_raised.exchange(false)) return 0;
  python.restore(raised.type, raised.value, raised.trace);
  return -1;
}

thread_local int known_tid = 0;

int own_tid() { return known_tid ? known_tid : known_tid = int(syscall(SYS_gettid)); }

void ask_for_it() {
  thread_local bool within = false;  // a signal's handler may use operators
  void* function = ask.load(std::memory_order_acquire);
  if (within || !function) return;
  within = true;
  int lock = python.ensure();
  Raised before;
  python.fetch(&before.type, &before.value, &before.trace);
  if (void* answer = python.call(function, nullptr)) {
    python.drop(answer);
  } else {
    python.fetch(&raised.type, &raised.value, &raised.trace);
    is_raised = true;
    while (python.later(raise_now, nullptr)) {  // the queue is full: others' calls are run soon
      python.release(lock);
      sleep_ns(MS);
      lock = python.ensure();
    }
  }
  if (before.type) python.restore(before.type, before.value, before.trace);
  python.release(lock);
  within = false;
  asked++;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&asked), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

bool is_ours(const uint64_t* at) { return (__atomic_load_n(at, __ATOMIC_ACQUIRE) & DOES) == HOLDS; }

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& operation) {
  const uint64_t* at = state.load(std::memory_order_acquire);
  if (!at || is_ours(at) || is_raised.load() || own_tid() != script.load()) return nullptr;
  if (std::strncmp(operation.name(), COLLECTIVE, std::strlen(COLLECTIVE)) != 0) ask_for_it();
  return nullptr;
}

// The script waits when its thread sleeps, the process used less than a fifth of a core since the last look, and no
// other thread of it computes. What this thread uses does not count.
struct Waiting {
  int own = own_tid(), of = 0, file = -1;
  ns last = 0, last_cpu = 0;
  ~Waiting() {
    if (file >= 0) close(file);
  }
  static ns cpu() { return at_clock(CLOCK_PROCESS_CPUTIME_ID) - at_clock(CLOCK_THREAD_CPUTIME_ID); }
  void begin() { last = now(), last_cpu = cpu(); }
  bool script_runs() {
    if (of != script.load()) {
      if (file >= 0) close(file);
      file = state_file(of = script.load());
    }
    return runs(file);
  }
  bool look() {
    ns took = now() - last, used = cpu() - last_cpu;
    begin();
    return used * 5 < took && !script_runs() && !any_runs(own);
  }
};

void forked() { state = nullptr, ask = nullptr, known_tid = 0; }  // the slot is the parent's, and so is the number

void put(bool wanted) {
  if (wanted == in) return;
  in = wanted;
  if (wanted)
    handle = at::addGlobalCallback(at::RecordFunctionCallback(before).scopes({at::RecordScope::FUNCTION}));
  else
    at::removeCallback(handle);
}
}  // namespace

extern "C" {
// From now on `function()` is called before operators of this thread while the word does not say that COMP is ours;
// null: no turns are taken. Whether it can be called. Word and function stay for the life of the process.
int covey_turns(const void* word, void* function, int script_tid) {
  static bool ready = python.found() && pthread_atfork(nullptr, nullptr, forked) == 0;
  if (!ready) return 0;
  std::lock_guard<std::mutex> held(changing);
  script = script_tid, ask = function;
  state.store(static_cast<const uint64_t*>(word), std::memory_order_release);
  put(word != nullptr);
  return 1;
}
// Waits until COMP is ours and the script waits for something, or so long: whether it waits.
int covey_turns_wait(ns most) {
  Waiting its;
  ns ends = now() + most, since = 0;
  for (ns t; (t = now()) < ends;) {
    uint32_t times = asked.load();
    const uint64_t* at = state.load(std::memory_order_acquire);
    if (!at || !is_ours(at)) {
      since = 0;
      rest(asked, times, std::min(OTHER_LOOK, ends - t));
      continue;
    }
    if (!since) since = t, its.begin();
    sleep_ns(std::clamp((t - since) / 16, LOOK, LONG_LOOK));
    if (its.look()) return 1;
  }
  return 0;
}
}
