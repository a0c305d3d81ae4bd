"""Blocks and tables: how a job's tensors are divided, so that several aggregators can sum them.

A *Block* is a run of a tensor's elements that one aggregator sums: a small tensor is one Block, a large one is cut into
several of nearly equal size. A *table* is all Blocks of a job that have one owner, under one epoch (AutoPS figure 4.5:
its Agents know which Aggregator has which part). A job has as many tables as hosts at its start, at most `TABLES_MAX`;
table n is offered to the n-th host first, so that no network card carries more than its share:

    tensor "g", 1 MB, 3 hosts      | Block 0: table 2 | Block 1: table 0 | Block 2: table 1 |
    tensor "b", 4 KB               | Block 0: table 0 |

Which Block is in which table follows from name, size and the number of tables alone, so all ranks agree without
messages. That number is fixed when the job starts, by the hosts that it has then (of an elastic job by its ranks): the
log keeps it (`tables` of a job), and a rank's successor gets the same number, on however many hosts the ranks are by
then. Each table has its own owner: it moves, is lost and is recovered alone. Table 0 exists from the start, another
table once a rank has a Block for it.
"""

from typing import NamedTuple

from covey.core.ids import ID_PATTERN, JobId

TABLES_MAX = 16
"""Most tables of one job."""
ELASTIC_TABLES = 4
"""Most tables of an elastic job, on however many hosts it runs. Each table that a rank uses costs it a connection, and
small tensors more messages: on one host 8 tables cost a job of 8 ranks with 80 KB of gradients a fifth more processor
time a step, 4 a twentieth; with megabytes, or on two hosts, neither cost any."""
TABLE_PATTERN = ID_PATTERN.removesuffix(r"\Z") + r"(/([1-9]|1[0-5]))?\Z"
"""Pattern of the names that `table_id` makes."""


class Sizes(NamedTuple):
    """Sizes by which tensors of a job with several tables are cut; simulations use smaller ones."""

    elsewhere_bytes: int = 64 << 10
    """Bytes below which a tensor is in table 0: a job of small tensors needs only one owner."""
    least_bytes: int = 128 << 10
    """Least bytes of a Block of a tensor that is cut: each Block costs a message, and smaller ones save nothing."""
    most_bytes: int = 512 << 10
    """Most bytes of a Block."""
    aligned: int = 16
    """Number of elements to which the beginning of a Block is aligned: Blocks begin at cache lines."""


class Block(NamedTuple):
    """Elements from `first` up to, and without, `end` of a flattened tensor; summed by the owner of `table`."""

    first: int
    end: int
    table: int


def tables_of(hosts: int) -> int:
    """Number of tables of a job that starts on so many hosts."""
    return max(1, min(hosts, TABLES_MAX))


def tables_of_ranks(ranks: int) -> int:
    """Number of tables of an elastic job of so many ranks: on however many hosts it starts, it may go on on more."""
    return max(1, min(ranks, ELASTIC_TABLES))


def table_id(job: JobId, table: int) -> JobId:
    """Name of a table among aggregators: `job/2`, or the job's own name for table 0."""
    return JobId(f"{job}/{table}") if table else job


def job_of(table: JobId) -> JobId:
    return JobId(table.partition("/")[0])


def number_of(table: JobId) -> int:
    return int(table.partition("/")[2] or 0)


def speaker(key: int, block: int, tables: int, ranks: int) -> int:
    """The number, from 0, of the rank of a host that speaks for a Block, so that each speaks for about equally many.
    `key`: the key of the tensor's name."""
    return (key // tables + block) % ranks


def keeper(key: int, block: int, table: int, tables: int, world_size: int) -> int:
    """The rank that has a copy of a Block's moments (`covey.tensors.numbers.updates`). It is on another host than the
    one to which the table is offered first, if all hosts have equally many ranks; each rank keeps about equally many
    Blocks."""
    alike = max(1, world_size // tables)
    return ((table + 1) % tables * alike + (key // tables + block) % alike) % world_size


def blocks_of(key: int, elements: int, element_bytes: int, tables: int, sizes: Sizes = Sizes()) -> tuple[Block, ...]:
    """The Blocks of a tensor, in order; at least one. `key`: of its name, which spreads small tensors over tables."""
    size = elements * element_bytes
    if tables == 1 or size < sizes.elsewhere_bytes:
        return (Block(0, elements, 0),)
    count = max(1, min(tables, size // sizes.least_bytes))
    if size > count * sizes.most_bytes:  # then there are `tables` of them, or a multiple, so that all carry the same
        count *= -(-size // (count * sizes.most_bytes))
    cuts = [elements * at // count // sizes.aligned * sizes.aligned for at in range(count)]
    ends = [*cuts[1:], elements]
    return tuple(Block(*span, (key + at) % tables) for at, span in enumerate(zip(cuts, ends, strict=True)))
