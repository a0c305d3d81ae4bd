"""RDMA over pyverbs, which is loaded when a device is opened: for pages, and for tensors."""
