"""How long an epoch takes (Cruise §3.2, equations 3.1 to 3.5).

Bandwidth has two forms. As printed, each worker and server have their own, `b[i][j]`. The search uses one rate per
host, its network card: the serving side of a server with model share m answers w workers in `m w / b_server`, and the
receiving side of a worker takes the model in `M / b_worker`. Then the best shares for given roles are known:

    m_j = M b_j / sum of b over servers          no server is later than another
    d_i = D (1/T_i) / sum of 1/T over workers    no worker is later than another
    T_i = c_i + max(M / b_i, M w / sum of b over servers) / B
    epoch = D / sum of 1/T_i

since any other m has a server that is later, and any other d a worker that is later.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from covey.core.ids import HostId

Floats = npt.NDArray[np.float64]


class HostCosts(msgspec.Struct, frozen=True):
    """One host as the model sees it."""

    host: HostId
    sample_s: float
    """Seconds of computing for one sample, c_i (the paper's C_w.proc), > 0."""
    nic_bytes_per_s: float
    """b_i: bytes per second of its network card, > 0."""


class Load(msgspec.Struct, frozen=True):
    """One job as the model sees it."""

    samples: float
    """D: samples in an epoch."""
    model_bytes: float
    """M: bytes of the model."""
    batch: float
    """B: samples in a mini-batch of one worker."""


def computation_s(sample_s: float, samples: float) -> float:
    """Seconds a worker computes in an epoch (Cruise, equation 3.3)."""
    return sample_s * samples


def communication_s(samples: float, batch: float, shares: Sequence[float], rates: Sequence[float], w: int) -> float:
    """Seconds a worker waits for the network in an epoch: the later of the slowest server, which serves `w` workers,
    and of its own card (Cruise, equation 3.4). `shares` bytes of the model at `rates` bytes/s, one of each per
    server."""
    held = [(share, rate) for share, rate in zip(shares, rates, strict=True) if share > 0]
    if not held:
        return 0.0
    serving = max(share * w / rate for share, rate in held)
    receiving = sum(share / rate for share, rate in held)
    return math.ceil(samples / batch) * max(serving, receiving)


def epoch_as_printed(
    workers: Sequence[int],
    model: Sequence[float],
    data: Sequence[float],
    sample_s: Sequence[float],
    pairwise: Sequence[Sequence[float]],
    batch: float,
) -> tuple[float, dict[int, tuple[float, float]]]:
    """(epoch, {worker: (computation, communication)}), seconds, for any shares (Cruise, equations 3.1 to 3.4 as
    printed, with whole mini-batches). `workers` holds 1 for a worker and 0 for a server; `pairwise[i][j]` is
    bytes/s."""
    w = sum(workers)
    servers = [j for j, works in enumerate(workers) if not works]
    per: dict[int, tuple[float, float]] = {}
    for i, works in enumerate(workers):
        if works:
            rates = [pairwise[i][j] for j in servers]
            communication = communication_s(data[i], batch, [model[j] for j in servers], rates, w)
            per[i] = (computation_s(sample_s[i], data[i]), communication)
    return max((sum(each) for each in per.values()), default=0.0), per


def epoch_of_shares(
    load: Load,
    workers: Sequence[HostCosts],
    servers: Sequence[HostCosts],
    data: Sequence[float],
    model: Sequence[float],
) -> float:
    """Seconds of an epoch with these shares, whatever they are: samples per worker, model bytes per server;
    mini-batches counted as fractions. The worst worker decides (Cruise, equation 3.1); inf when a host must work and
    cannot."""
    if not workers or not servers:
        return math.inf
    w = sum(1 for share in data if share > 0)
    serving = max(share * w / host.nic_bytes_per_s for share, host in zip(model, servers, strict=True))
    return max(
        share * (host.sample_s + max(load.model_bytes / host.nic_bytes_per_s, serving) / load.batch)
        for share, host in zip(data, workers, strict=True)
    )


def rates(load: Load, sample_s: Floats, nic: Floats, workers: npt.NDArray[np.bool_]) -> Floats:
    """1/T_i, samples per second, of every host in each of many role assignments; 0 for a server. Shapes: hosts, hosts,
    (assignments, hosts) -> (assignments, hosts). An assignment without worker or server has only zeros."""
    w = workers.sum(axis=1)
    served = (~workers) @ nic
    usable = (w > 0) & (served > 0)
    serving = load.model_bytes * w / np.where(usable, served, 1.0)
    waiting = np.maximum(load.model_bytes / nic, serving[:, None]) / load.batch
    return np.where(workers & usable[:, None], 1.0 / (sample_s + waiting), 0.0)


def epochs(load: Load, sample_s: Floats, nic: Floats, workers: npt.NDArray[np.bool_]) -> Floats:
    """Seconds of an epoch with the best shares, for each of many role assignments; inf where no host works or none
    serves. Shapes as in `rates` -> (assignments,)."""
    total = rates(load, sample_s, nic, workers).sum(axis=1)
    with np.errstate(divide="ignore"):
        epoch: Floats = load.samples / total
    return epoch


def epoch_equal(load: Load, sample_s: float, nic_bytes_per_s: float, n: int, w: int) -> float:
    """Seconds of an epoch of `n` equal hosts with `w` workers (Cruise, equation 3.5)."""
    wait = load.model_bytes / nic_bytes_per_s * max(1.0, w / (n - w)) / load.batch
    return load.samples / w * (sample_s + wait)
