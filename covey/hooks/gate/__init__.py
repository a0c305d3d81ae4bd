"""The native half of a rank's limits, in C++, and how it is built and called."""
