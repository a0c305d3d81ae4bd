"""Datagrams, control links, streams and RDMA."""
