// Clocks of this process, what its threads do, and words that it sleeps on. Times are ns of CLOCK_MONOTONIC.
#pragma once
#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace process {
using ns = int64_t;
constexpr ns MS = 1000000;

inline ns at_clock(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return ns(t.tv_sec) * 1000000000 + t.tv_nsec;
}
inline ns now() { return at_clock(CLOCK_MONOTONIC); }
inline void sleep_ns(ns length) {
  timespec t{length / 1000000000, length % 1000000000};
  nanosleep(&t, nullptr);
}

inline int state_file(int tid) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
  return open(path, O_RDONLY | O_CLOEXEC);
}

inline bool runs(int file) {  // or would, if it had a core
  char text[256];
  ssize_t count = file < 0 ? 0 : pread(file, text, sizeof text - 1, 0);
  if (count <= 0) return false;
  text[count] = 0;
  const char* name_ends = std::strrchr(text, ')');
  return name_ends && name_ends[1] && name_ends[2] == 'R';
}

inline bool any_runs(int but) {
  DIR* tasks = opendir("/proc/self/task");
  if (!tasks) return true;
  bool found = false;
  while (dirent* entry = readdir(tasks)) {
    int tid = std::atoi(entry->d_name);
    if (tid <= 0 || tid == but) continue;
    int file = state_file(tid);
    found = runs(file);
    if (file >= 0) close(file);
    if (found) break;
  }
  closedir(tasks);
  return found;
}

// Until it is another number, or so long.
inline void rest(std::atomic<uint32_t>& word, uint32_t was, ns length) {
  timespec t{length / 1000000000, length % 1000000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, was, &t, nullptr, 0);
}
}  // namespace process
