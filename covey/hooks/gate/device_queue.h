// What gate.cpp asks of device_queue.cpp. All of it does nothing until a GPU is told of (covey_device).
#pragma once
#include <cstdint>

namespace device_queue {
bool used();                 // the device of this process is a GPU: what it worked is read here, not from the processor
int64_t worked(int64_t t);   // ns in which something of this process was queued on the device, until t
bool full(int64_t t);        // before an operator: whether so much is queued that it has to wait first
void drain(bool (*go_on)()); // wait until the part before the newest one is done, or `go_on` says no
bool empty(int64_t t);       // of one that is stopped: whether all that it queued is done
void forget();               // the gate is out: no event is outstanding any more
void forked();
}  // namespace device_queue

extern "C" void covey_wait(int begins);  // of gate.cpp
