"""Bytes between processes: frames and handshakes, and one file for each protocol."""
