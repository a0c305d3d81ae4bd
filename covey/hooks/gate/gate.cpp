// The native half of covey.hooks: stops operators while limits hold, and knows when this process has no work.
//
//   gate    before each operator of PyTorch (RecordFunction), while limits hold and not otherwise
//   watch   one thread: reads the page of limits, puts the gate in and takes it out, keeps the flag that neighbours read
//
// What a rank used is processor time of its process, which is the time on the device where that is a set of cores. On a
// GPU it is the time in which it had something queued, and the queue is bounded (device_queue.cpp).
//
// Pages are those of covey/kernel/pages.py; all times are CLOCK_MONOTONIC, ns. Nothing here allocates, throws or waits for a
// lock that is held while somebody sleeps. After a fork the child has no gate and writes no page.
#include <ATen/record_function.h>

#include "device_queue.h"
#include "process.h"

#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

namespace {
using namespace process;
constexpr ns QUANTUM = 1 * MS;           // worked at a stretch where a share below 1 holds
constexpr ns POLL_MIN = MS / 5, POLL_MAX = 4 * MS;  // between two looks of who is stopped: each costs some 15 us
constexpr ns LEASE_MAX = 60000 * MS;     // whatever a page says
constexpr ns DEBT_S = 1000 * MS;         // of failsafe: the longest stop
// Between two looks: each costs some 30 us of processor time, most of it the timer's.
constexpr ns BUSY_LOOK = 2 * MS, IDLE_LOOK = MS, UNSURE_LOOK = MS / 2;
constexpr ns LONG_LOOK = 8 * MS;         // where hooks tell what comes, or where it was busy for long
constexpr ns ALONE_LOOK = 50 * MS;       // where nobody reads the flag and nothing is gated
constexpr ns FETCH_LOOK = 3 * MS / 10;   // after the script began to fetch input in its own thread: does it sleep?
constexpr int PAGE = 8192, COPY = PAGE / 2, COVERED = 16, BODY = 24, LIMITS = 58;

ns worked(ns t) { return device_queue::used() ? device_queue::worked(t) : at_clock(CLOCK_PROCESS_CPUTIME_ID); }
template <class T>
T word(const uint8_t* page, int at) {
  T value;
  std::memcpy(&value, page + at, sizeof value);
  return value;
}
uint32_t crc32(const uint8_t* bytes, int count) {
  uint32_t crc = ~0u;
  for (int i = 0; i < count; i++) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

// ---- limits: what the page says ----

struct Rates {
  double share[2] = {1, 1};  // while the neighbour is idle, while it is busy
  ns head = -1, lease = 0;
  double failsafe = 1;
  bool guaranteed = false, alone = false;
  bool free() const { return share[0] >= 1 && share[1] >= 1 && head < 0; }
};

bool is_share(double x) { return std::isfinite(x) && x >= 0 && x <= 1; }

bool possible(const Rates& r, ns epoch, ns memory) {
  bool shares = is_share(r.share[0]) && is_share(r.share[1]) && is_share(r.failsafe) && r.failsafe >= 0.01;
  bool stopped = r.share[0] < 1 || r.share[1] < 1;
  return shares && (!stopped || r.lease > 0) && epoch >= 0 && r.head >= -1 && memory >= 0 && r.lease >= 0;
}

// The newer copy that adds up, if its number is not `seen`.
bool read_page(const uint8_t* page, uint64_t& seen, Rates& into, ns& garbage) {
  if (std::max(word<uint64_t>(page, 16), word<uint64_t>(page, COPY + 16)) == seen) return false;
  uint8_t copy[BODY + LIMITS], best[BODY + LIMITS];
  uint64_t newest = 0;
  for (int at : {0, COPY}) {
    std::memcpy(copy, page + at, sizeof copy);
    if (std::memcmp(copy, "COVEYlim", 8) || word<uint32_t>(copy, 8) != 1) continue;
    if (crc32(copy + COVERED, sizeof copy - COVERED) != word<uint32_t>(copy, 12)) continue;
    if (word<uint64_t>(copy, 16) > newest) newest = word<uint64_t>(copy, 16), std::memcpy(best, copy, sizeof best);
  }
  if (!newest || newest == seen) return garbage++, false;
  seen = newest;
  const uint8_t* b = best + BODY;
  Rates found{{word<double>(b, 8), word<double>(b, 24)}, word<ns>(b, 16), word<ns>(b, 48), word<double>(b, 40), b[56] != 0, b[57] != 0};
  if (!possible(found, word<ns>(b, 0), word<ns>(b, 32))) return garbage++, false;
  into = found;
  return true;
}

// ---- the gate: who may go on ----

struct Gate {
  std::mutex lock;
  Rates rates;  // that hold now, lease and failsafe considered
  double credit[2] = {0, 0};
  bool held[2] = {false, false};
  bool leased = true;
  ns last = 0, last_cpu = 0;
  ns stopped_since = 0, gated = 0, stops = 0;
  int stopped = 0;

  void set(const Rates& r, bool by_lease, ns t) {
    bool same = r.share[0] == rates.share[0] && r.share[1] == rates.share[1] && leased == by_lease;
    rates = r, leased = by_lease;
    if (same) return;
    for (int p : {0, 1}) credit[p] = 0, held[p] = false;
    last = t, last_cpu = worked(t);
  }
  // Time since the last look, and what of it this process worked, go to the phases of the neighbour in which they were.
  void account(ns t, bool busy, ns since) {
    ns took = t - last;
    if (took <= 0) return;
    ns cpu = worked(t);
    double used = double(std::clamp<ns>(cpu - last_cpu, 0, took)) / took;
    ns now_phase = t - std::clamp(since, last, t);
    ns part[2] = {busy ? took - now_phase : now_phase, busy ? now_phase : took - now_phase};
    for (int p : {0, 1}) {
      // Of the smallest share too it takes more than a quantum: else nobody would ever be stopped by it.
      double least = std::min(-rates.share[p] * (leased ? 10 * DEBT_S : DEBT_S), -2.0 * QUANTUM);
      credit[p] = std::clamp(credit[p] + (rates.share[p] - used) * part[p], least, double(QUANTUM));
    }
    last = t, last_cpu = cpu;
  }
  bool may(ns t, bool busy, ns since) {
    int p = busy;
    if (!busy && rates.head >= 0 && t - since >= rates.head) return false;
    if (rates.share[p] >= 1) return true;
    if (rates.share[p] <= 0) return false;
    held[p] = held[p] ? credit[p] < 0 : credit[p] < -double(QUANTUM);
    return !held[p];
  }
  // How long who may not go on can sleep, unless the neighbour's flag changes.
  ns pause(bool busy) const {
    double share = rates.share[busy];
    if (share <= 0) return POLL_MAX;
    return std::clamp<ns>(ns(std::max(0.0, -credit[busy]) / share), POLL_MIN, POLL_MAX);
  }
};

// ---- what there is of it in this process ----

Gate gate;
std::mutex looking, flagging;
std::atomic<bool> on{false}, alive{true}, ended{true};
std::atomic<const uint8_t*> limits{nullptr}, neighbour{nullptr};
std::atomic<uint8_t*> flag{nullptr};
std::atomic<int> waits{0};     // of the script's thread, told by hooks
std::atomic<uint32_t> fetches{0};  // times that the script's thread began to fetch input by itself
std::atomic<int> script{0};    // tid of the script's thread
std::atomic<bool> meters{false};
bool running = false;
uint32_t changes = 1;          // of the flag and of stops, so that who counts need not ask each time; odd: busy
at::CallbackHandle handle = 0;
Rates asked;                   // newest of the page
uint64_t seen = 0;
ns seen_at = 0, garbage = 0;
std::atomic<uint32_t> reads{0};  // of limits that were new
// of the flag, under `flagging`
bool is_busy = true;
ns since = 0, idle = 0;

bool neighbour_busy(ns& its_since) {
  const uint8_t* page = neighbour.load(std::memory_order_acquire);
  its_since = 0;
  if (!page || std::memcmp(page, "COVEYflg", 8) || word<uint32_t>(page, 8) != 1) return true;
  uint32_t said = __atomic_load_n(reinterpret_cast<const uint32_t*>(page + 12), __ATOMIC_ACQUIRE);
  if (said > 1) return true;
  its_since = __atomic_load_n(reinterpret_cast<const ns*>(page + 16), __ATOMIC_ACQUIRE);
  return said != 0;
}

void changed(bool busy, bool stopped) {
  uint32_t was = __atomic_load_n(&changes, __ATOMIC_RELAXED), is;
  do is = ((was & ~1u) + 2) | (stopped ? was & 1 : busy);
  while (!__atomic_compare_exchange_n(&changes, &was, is, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

// Whether an operator may begin now. Time is accounted every 100 us: the clock of the process costs a system call.
bool passes(ns t, bool all) {
  ns its_since;
  bool busy = neighbour_busy(its_since);
  std::lock_guard<std::mutex> held(gate.lock);
  if (all || t - gate.last > MS / 10 || its_since > gate.last) gate.account(t, busy, its_since);
  return gate.may(t, busy, its_since);
}

// Until the neighbour's flag changes, or so long: its writer wakes who sleeps on the word.
void doze() {
  const uint8_t* page = neighbour.load(std::memory_order_acquire);
  ns its_since, length;
  bool busy = neighbour_busy(its_since);
  {
    std::lock_guard<std::mutex> held(gate.lock);
    length = gate.pause(busy);
  }
  if (!page) return sleep_ns(length);
  timespec t{0, length};
  syscall(SYS_futex, page + 12, FUTEX_WAIT, uint32_t(busy), &t, nullptr, 0);
}

struct Gil {  // let go of while stopped, if this thread has it: the other threads of the script are not stopped
  using Check = int (*)();
  using Save = void* (*)();
  using Restore = void (*)(void*);
  void* state = nullptr;
  Gil() {
    static auto ready = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    static auto check = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static auto save = reinterpret_cast<Save>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (ready && check && save && ready() && check()) state = save();
  }
  ~Gil() {
    static auto restore = reinterpret_cast<Restore>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state) restore(state);
  }
};

void stop() {
  Gil released;
  {
    std::lock_guard<std::mutex> held(gate.lock);
    gate.stops++;
    if (gate.stopped++ == 0) gate.stopped_since = now();
  }
  do {
    doze();
    if (device_queue::used()) device_queue::empty(now());
  } while (on.load(std::memory_order_acquire) && !passes(now(), true));
  std::lock_guard<std::mutex> held(gate.lock);
  if (--gate.stopped == 0) gate.gated += now() - gate.stopped_since;
  changed(false, true);
}

bool is_on() { return on.load(std::memory_order_acquire); }

void pass() {  // who is about to launch something; it comes back when that may be
  if (!is_on()) return;
  if (!passes(now(), false)) stop();
  if (!device_queue::used() || !device_queue::full(now())) return;
  Gil released;
  device_queue::drain(is_on);
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction&) {
  pass();
  return nullptr;
}

// Reads the page, puts the gate in, takes it out. Under `looking`.
void look(ns t) {
  const uint8_t* page = limits.load(std::memory_order_acquire);
  if (page && read_page(page, seen, asked, garbage)) {
    seen_at = t, reads++;
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&reads), FUTEX_WAKE_PRIVATE, 1 << 20, nullptr, nullptr, 0);
  }
  Rates holds = asked;
  ns ends = std::min(asked.lease, seen_at + LEASE_MAX);
  bool leased = !asked.lease || t < ends;
  if (!leased) holds.share[0] = holds.share[1] = asked.guaranteed ? 1 : std::max(0.01, asked.failsafe), holds.head = -1;
  {
    std::lock_guard<std::mutex> held(gate.lock);
    gate.set(holds, leased, t);
  }
  bool wanted = page && !holds.free();
  if (wanted == on.load()) return;
  on.store(wanted, std::memory_order_release);
  if (wanted)
    handle = at::addGlobalCallback(at::RecordFunctionCallback(before).scopes({at::RecordScope::FUNCTION}));
  else
    at::removeCallback(handle), device_queue::forget();
}

// ---- the flag: does this process work? ----

// To write it, and wake who sleeps on it once the lock is free: whoever wakes may take the core from this thread, and the
// script's thread, which says that it works again, would wait for the lock until that one has had its time.
class Flagging {
  std::unique_lock<std::mutex> held{flagging};
  uint8_t* wakes = nullptr;

 public:
  void say(bool busy, ns t, ns began) {  // `began`: when it began in truth, for the sum of idle time
    uint8_t* page = flag.load(std::memory_order_acquire);
    if (busy == is_busy || !page) return;
    if (busy) idle += std::max<ns>(0, began - since);
    since = busy ? t : began, is_busy = busy;
    changed(busy, false);
    __atomic_store_n(reinterpret_cast<ns*>(page + 16), t, __ATOMIC_RELEASE);
    __atomic_store_n(reinterpret_cast<uint32_t*>(page + 12), uint32_t(busy), __ATOMIC_RELEASE);
    wakes = page;
  }
  ~Flagging() {
    held.unlock();
    if (wakes) syscall(SYS_futex, wakes + 12, FUTEX_WAKE, 1 << 20, nullptr, nullptr, 0);
  }
};

// A process works while it gets processor time, or one of its threads waits for a core. What this thread uses itself
// does not count. Returns when to look again.
struct Meter {
  int own = int(syscall(SYS_gettid)), of = 0, file = -1;
  ns last = now(), last_cpu = 0;
  ~Meter() {
    if (file >= 0) close(file);
  }
  bool script_runs() {
    if (of != script.load()) {
      if (file >= 0) close(file);
      file = state_file(of = script.load());
    }
    return runs(file);
  }
  // What the process did before does not count at the next look.
  void begin(ns t) { last = t, last_cpu = at_clock(CLOCK_PROCESS_CPUTIME_ID) - at_clock(CLOCK_THREAD_CPUTIME_ID); }
  // An idle phase that no hook tells of is seen so much later: a sixteenth of the busy phase before it, of 2 to 8 ms.
  // Where hooks tell of fetches, 8 ms: only other waits are left to be seen.
  static ns while_busy(ns length) { return fetches.load() ? LONG_LOOK : std::clamp(length / 16, BUSY_LOOK, LONG_LOOK); }
  ns look(ns t) {
    ns cpu = at_clock(CLOCK_PROCESS_CPUTIME_ID) - at_clock(CLOCK_THREAD_CPUTIME_ID);
    ns took = t - last, used = std::min(cpu - last_cpu, took);
    last = t, last_cpu = cpu;
    bool stopped;
    {
      std::lock_guard<std::mutex> held(gate.lock);
      stopped = gate.stopped > 0;
    }
    if (waits.load() > 0) return LONG_LOOK;  // the hook that says so ends it too
    bool sure = stopped || used * 10 >= took * 9 || script_runs();
    bool works = sure || used * 5 >= took;
    if (!works && is_busy) works = any_runs(own);  // a thread that the script's waits for
    Flagging its;
    if (waits.load() > 0) return LONG_LOOK;
    its.say(works, t, works ? t - used : t - (took - used));
    if (uint8_t* page = flag.load()) __atomic_store_n(reinterpret_cast<ns*>(page + 24), t, __ATOMIC_RELEASE);
    return sure ? while_busy(t - since) : works ? UNSURE_LOOK : IDLE_LOOK;
  }
};

// While the script computes, this thread must not take the core from it, and let a neighbour have it after that: there is
// nothing new to see then. While it waits, every look counts. A script that is under real-time rules keeps them.
void hurry(bool urgent) {
  thread_local bool is = true;
  if (is == urgent) return;
  int rules = sched_getscheduler(0);
  if (rules != SCHED_OTHER && rules != SCHED_BATCH) return;
  is = urgent;
  sched_param none{0};
  sched_setscheduler(0, urgent ? SCHED_OTHER : SCHED_BATCH, &none);
}

void watch() {
  pthread_setname_np(pthread_self(), "covey-watch");
  Meter meter;
  ns pause = BUSY_LOOK;
  uint32_t seen_fetches = 0;
  while (alive.load()) {
    rest(fetches, seen_fetches, pause);  // or until the script fetches input
    if (fetches.load() != seen_fetches) {
      seen_fetches = fetches.load();
      meter.begin(now());
      sleep_ns(FETCH_LOOK);
    }
    ns t = now();
    bool read;  // by a neighbour: the flag
    {
      std::lock_guard<std::mutex> held(looking);
      look(t);
      read = asked.guaranteed && !asked.alone && meters.load() && flag.load();
    }
    if (read) {
      pause = meter.look(t);
    } else {
      pause = on.load() ? BUSY_LOOK : ALONE_LOOK;
      Flagging its;
      if (!waits.load()) its.say(true, t, t);
    }
    hurry(read && pause < BUSY_LOOK);
  }
  ended = true;
}

void forked() {  // in the child: its memory is a copy, but the pages are the parent's
  on = false, flag = nullptr, limits = nullptr, neighbour = nullptr, meters = false, waits = 0, running = false, ended = true;
  asked = Rates();
  device_queue::forked();
  new (&gate) Gate();
  new (&looking) std::mutex();
  new (&flagging) std::mutex();
}
}  // namespace

extern "C" {
// Pages of this process, which stay mapped for its life; `meter`: keep the flag by what its threads do.
int covey_start(const void* limits_page, void* flag_page, int script_tid, int meter) {
  std::lock_guard<std::mutex> held(looking);
  {
    Flagging its;
    flag = static_cast<uint8_t*>(flag_page), script = script_tid, meters = meter != 0;
    is_busy = false, its.say(true, now(), since);
  }
  limits = static_cast<const uint8_t*>(limits_page), seen = 0;
  look(now());
  if (running) return 1;
  static int once = pthread_atfork(nullptr, nullptr, forked);
  sigset_t all, before_it;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_it);  // signals are the script's
  try {
    alive = true, ended = false;
    std::thread(watch).detach();
    running = true;
  } catch (const std::exception&) {
    ended = true;
  }
  pthread_sigmask(SIG_SETMASK, &before_it, nullptr);
  return running && once == 0;
}
// Before the process ends, and in tests: no gate, no thread, the flag says idle.
void covey_stop() {
  alive = false;
  for (int i = 0; i < 100 && !ended.load(); i++) sleep_ns(MS);
  std::lock_guard<std::mutex> held(looking);
  limits = nullptr, asked = Rates(), running = false;
  look(now());
  Flagging its;
  ns t = now();
  its.say(false, t, t);
  flag = nullptr, meters = false;
}
void covey_neighbour(const void* page) { neighbour = static_cast<const uint8_t*>(page); }
void covey_meter(int on_cores) {
  Flagging its;
  meters = on_cores != 0;
  ns t = now();
  if (!on_cores && !waits.load()) its.say(true, t, t);
}
void covey_script(int tid) { script = tid; }
// The script is about to launch what no operator tells of: a recorded graph.
void covey_pass() { pass(); }
void covey_look() {
  std::lock_guard<std::mutex> held(looking);
  look(now());
}
// The script's thread begins (1) or ends (0) to wait for what others do: input, other ranks.
void covey_wait(int begins) {
  Flagging its;
  int left = waits += begins ? 1 : -1;
  ns t = now();
  if (left == (begins ? 1 : 0)) its.say(!begins, t, t);
}
// The script's thread begins (1) to fetch input by itself, which may be a sleep, or has it (0), and computes from now on.
void covey_fetch(int begins) {
  if (begins) {
    fetches++;
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&fetches), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    return;
  }
  Flagging its;
  ns t = now();
  if (meters.load() && !waits.load()) its.say(true, t, t);
}
// Waits until other limits than the `was`-th were read, or so long: how many were.
uint32_t covey_await(uint32_t was, ns length) {
  rest(reads, was, length);
  return reads.load();
}
const uint32_t* covey_changes() { return &changes; }
// idle ns, gated ns, stops, garbage, whether the gate is in
void covey_counters(ns* into) {
  ns t = now();
  {
    std::lock_guard<std::mutex> held(flagging);
    into[0] = idle + (is_busy ? 0 : std::max<ns>(0, t - since));
  }
  std::lock_guard<std::mutex> held(gate.lock);
  into[1] = gate.gated + (gate.stopped ? t - gate.stopped_since : 0);
  into[2] = gate.stops, into[3] = garbage, into[4] = on.load();
}
}
