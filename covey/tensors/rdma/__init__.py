"""Numbers of tensors between two hosts by RDMA, beside a TCP connection that carries everything else."""
